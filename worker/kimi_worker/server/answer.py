"""Sampled tokens to OpenAI's answers: text, channels, stop strings, log-probabilities, usage."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kimi_worker.protocol.engine import Output, SampledToken, TokenLogprob
from kimi_worker.server.chat import ChannelParser, ChatText
from kimi_worker.server.text import Detokenizer, StopStrings, Tokenizer
from kimi_worker.server.work import Kind, Work

_LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens add to an answer."""

    content: str = ""
    reasoning: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None


class AnswerReader:
    """Reads one request's outputs token by token, so that the answer does not depend on how they were grouped."""

    def __init__(self, work: Work, tokenizer: Tokenizer) -> None:
        self._channels = ChannelParser(tokenizer, thinking=work.thinking) if work.kind is Kind.CHAT else None
        self._plain = Detokenizer(tokenizer)
        self._stops = StopStrings(work.stops)
        self._stop_ids = frozenset(work.sampling.stop_token_ids)
        self.num_tokens = 0

    def feed(self, outputs: Sequence[Output]) -> Piece:
        """The piece has a `finish_reason` when the answer is complete, by the lane's word or by a stop string."""
        content, reasoning, taken = "", "", []
        finish_reason = outputs[-1].finish_reason
        tokens = [token for output in outputs for token in output.tokens]
        for index, token in enumerate(tokens):
            taken.append(token)
            is_stop = finish_reason == "stop" and index == len(tokens) - 1 and token.token_id in self._stop_ids
            text = ChatText("", "") if is_stop else self._text([token.token_id])
            content += self._stops.feed(text.content)
            reasoning += text.reasoning
            if self._stops.is_matched:
                finish_reason = "stop"
                break
        if finish_reason and not self._stops.is_matched:
            rest = self._finish()
            content += self._stops.feed(rest.content)
            content += self._stops.finish()
            reasoning += rest.reasoning
        self.num_tokens += len(taken)
        return Piece(content, reasoning, taken, finish_reason)

    def _text(self, token_ids: list[int]) -> ChatText:
        return self._channels.feed(token_ids) if self._channels else ChatText(self._plain.feed(token_ids), "")

    def _finish(self) -> ChatText:
        return self._channels.finish() if self._channels else ChatText(self._plain.finish(), "")


class AnswerWriter:
    """Writes the answers of one request as JSON."""

    def __init__(self, work: Work, tokenizer: Tokenizer) -> None:
        self._work = work
        self._tokenizer = tokenizer
        self._is_first = True
        self._text_offset = 0

    def chunk(self, piece: Piece, stats: dict[str, object] | None) -> bytes:
        """One chunk of a stream. Empty when there is nothing to say."""
        work = self._work
        if not (piece.content or piece.reasoning or piece.finish_reason or self._is_first or self._has_token_fields):
            return b""
        said: dict[str, object] = {"text": piece.content}
        if work.kind is Kind.CHAT:
            delta: dict[str, object] = {"role": "assistant", "content": ""} if self._is_first else {}
            if piece.content:
                delta["content"] = piece.content
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            said = {"delta": delta}
        chunk = self._envelope(said, piece, stats, name=work.kind.value[1], with_prompt=self._is_first)
        if work.with_usage:
            chunk["usage"] = None
        self._is_first = False
        return msgspec.json.encode(chunk)

    def usage_chunk(self, num_tokens: int) -> bytes:
        """The last chunk, where the client asked for usage."""
        return msgspec.json.encode(
            {**self._head(self._work.kind.value[1]), "choices": [], "usage": self._usage(num_tokens)}
        )

    def whole(self, pieces: Sequence[Piece], stats: dict[str, object] | None) -> bytes:
        """The answer of a request that does not stream."""
        piece = replace(
            pieces[-1],
            content="".join(piece.content for piece in pieces),
            reasoning="".join(piece.reasoning for piece in pieces),
            tokens=[token for piece in pieces for token in piece.tokens],
        )
        said: dict[str, object] = {"text": piece.content}
        if self._work.kind is Kind.CHAT:
            message: dict[str, object] = {"role": "assistant", "content": piece.content, "refusal": None}
            if piece.reasoning:
                message["reasoning_content"] = piece.reasoning
            said = {"message": message}
        answer = self._envelope(said, piece, stats, name=self._work.kind.value[0], with_prompt=True)
        answer["usage"] = self._usage(len(piece.tokens))
        return msgspec.json.encode(answer)

    @property
    def _has_token_fields(self) -> bool:
        return self._work.with_token_ids or self._work.sampling.logprobs is not None

    def _head(self, name: str) -> dict[str, object]:
        work = self._work
        return {"id": work.request_id, "object": name, "created": work.created_s, "model": work.model}

    def _envelope(
        self, said: dict[str, object], piece: Piece, stats: dict[str, object] | None, *, name: str, with_prompt: bool
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            **said,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish_reason,
        }
        envelope: dict[str, object] = {**self._head(name), "choices": [choice]}
        if self._work.with_token_ids:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
            if with_prompt:
                # where vLLM puts them
                place = envelope if self._work.kind is Kind.CHAT else choice
                place["prompt_token_ids"] = self._work.token_ids
        if stats is not None:
            envelope["kimi"] = stats
        return envelope

    def _usage(self, num_tokens: int) -> dict[str, int]:
        num_prompt = len(self._work.token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }

    def _logprobs(self, tokens: list[SampledToken]) -> dict[str, object] | None:
        if self._work.sampling.logprobs is None:
            return None
        return self._chat_logprobs(tokens) if self._work.kind is Kind.CHAT else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: list[SampledToken]) -> dict[str, object]:
        return {
            "content": [
                {
                    **self._entry(TokenLogprob(token.token_id, _logprob(token))),
                    "top_logprobs": [self._entry(top) for top in token.top],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: TokenLogprob) -> dict[str, object]:
        return {
            "token": self._tokenizer.token_text(token.token_id),
            "logprob": max(token.logprob, _LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token.token_id)),
        }

    def _completion_logprobs(self, tokens: list[SampledToken]) -> dict[str, object]:
        texts = [self._tokenizer.token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._text_offset)
            self._text_offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_logprob(token) for token in tokens],
            "top_logprobs": [
                {self._tokenizer.token_text(top.token_id): max(top.logprob, _LOWEST_LOGPROB) for top in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _logprob(token: SampledToken) -> float:
    return _LOWEST_LOGPROB if token.logprob is None else max(token.logprob, _LOWEST_LOGPROB)
