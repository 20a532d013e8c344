"""A request body to work for a lane: validated, tokenised, with every default filled in."""

import time
import uuid
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kimi_worker.protocol.engine import Sampling
from kimi_worker.protocol.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    echo,
    read_request,
)
from kimi_worker.server.chat import ChatFormat
from kimi_worker.server.text import Tokenizer

_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may use all the room there is."""


class Kind(Enum):
    """The two endpoints: the answer's name, its name in chunks, and what its ids begin with."""

    CHAT = ("chat.completion", "chat.completion.chunk", "chatcmpl")
    COMPLETION = ("text_completion", "text_completion", "cmpl")


@dataclass(frozen=True, slots=True)
class Work:
    """One request, ready to be submitted."""

    kind: Kind
    request_id: str
    created_s: int
    model: str
    token_ids: list[int]
    sampling: Sampling
    stops: list[str]
    thinking: bool
    is_stream: bool
    with_usage: bool
    with_token_ids: bool


@dataclass(frozen=True, slots=True)
class Intake:
    """What a model needs to take requests."""

    served_name: str
    max_model_len: int
    tokenizer: Tokenizer
    chat: ChatFormat

    @classmethod
    def load(cls, checkpoint: Path, served_name: str, max_model_len: int) -> "Intake":
        """Read the checkpoint's tokenizer. Raises TokenizerError."""
        tokenizer = Tokenizer.load(checkpoint)
        return cls(served_name, max_model_len, tokenizer, ChatFormat.load(checkpoint, tokenizer))

    @property
    def max_body_bytes(self) -> int:
        """More than any spelling of a prompt that the model takes."""
        return 2**20 + 64 * self.max_model_len

    def chat_work(self, body: bytes) -> Work:
        """Raises ApiError that names the field."""
        request = read_request(body, ChatRequest)
        self._check_model(request)
        thinking = self.chat.thinking if request.thinking is None else request.thinking
        effort = None if request.reasoning_effort == "none" else request.reasoning_effort
        token_ids = self.chat.encode(request.messages, thinking=thinking, effort=effort)
        room = self._room(token_ids, "messages")
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = request.max_completion_tokens or request.max_tokens or room
        _check_room(name, max_tokens, room, len(token_ids))
        sampling = self._sampling(request, max_tokens, request.num_logprobs)
        return self._work(Kind.CHAT, request, token_ids, sampling, thinking=thinking)

    def completion_work(self, body: bytes) -> Work:
        """Raises ApiError that names the field."""
        request = read_request(body, CompletionRequest)
        self._check_model(request)
        prompt = request.single_prompt
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise ApiError.bad("prompt", "is empty; send at least one token")
        if strange := next((token for token in token_ids if token >= self.tokenizer.vocab_size), None):
            raise ApiError.bad(
                "prompt", f"token id {strange} is not below the vocabulary's {self.tokenizer.vocab_size}"
            )
        for at, token in enumerate(token_ids):
            if token in self.tokenizer.media_ids:
                text = self.tokenizer.token_text(token)
                raise ApiError.bad(
                    "prompt", f"token id {token} at {at} is {text}, the place of an image; send text only"
                )
        room = self._room(token_ids, "prompt")
        max_tokens = request.max_tokens or min(_COMPLETION_MAX_TOKENS, room)
        _check_room("max_tokens", max_tokens, room, len(token_ids))
        sampling = self._sampling(request, max_tokens, request.logprobs)
        return self._work(Kind.COMPLETION, request, token_ids, sampling, thinking=False)

    def _check_model(self, request: GenerationRequest) -> None:
        if request.model not in (None, self.served_name):
            raise unknown_model(str(request.model), self.served_name)

    def _room(self, token_ids: list[int], param: str) -> int:
        """Output tokens that still fit."""
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ApiError.bad(
                param,
                f"{len(token_ids)} tokens, but prompt and answer together may have {self.max_model_len}; shorten it",
                code="context_length_exceeded",
            )
        return room

    def _sampling(self, request: GenerationRequest, max_tokens: int, logprobs: int | None) -> Sampling:
        stop_ids = set(request.stop_token_ids or [])
        if not request.ignore_eos:
            stop_ids |= self.tokenizer.stop_ids
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            logprobs=logprobs,
            stop_token_ids=tuple(sorted(stop_ids)),
            ignore_eos=bool(request.ignore_eos),
        )

    def _work(
        self, kind: Kind, request: GenerationRequest, token_ids: list[int], sampling: Sampling, *, thinking: bool
    ) -> Work:
        return Work(
            kind=kind,
            request_id=f"{kind.value[2]}-{uuid.uuid4().hex}",
            created_s=int(time.time()),
            model=self.served_name,
            token_ids=token_ids,
            sampling=sampling,
            stops=request.stops,
            thinking=thinking,
            is_stream=bool(request.stream),
            with_usage=bool(request.stream_options and request.stream_options.include_usage),
            with_token_ids=bool(request.return_token_ids),
        )


def _check_room(name: str, max_tokens: int, room: int, num_prompt: int) -> None:
    if max_tokens > room:
        raise ApiError.bad(
            name,
            f"{max_tokens} is more than the {room} tokens that the context leaves after a prompt of {num_prompt}",
            code="context_length_exceeded",
        )


def unknown_model(name: str, served_name: str) -> ApiError:
    """The 404 for a model that is not served here."""
    message = f"model: {echo(name)} is not served here; this server has {served_name!r}"
    return ApiError(404, message, param="model", code="model_not_found")
