"""OpenAI's requests as this server reads them: what is not understood is refused by name, never ignored."""

from dataclasses import dataclass
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_LOGPROBS = 20
_INT64 = 2**63
_MAX_ECHO = 60
"""Characters of what a client sent that an error repeats at most: enough to recognise it."""


def echo(value: object) -> str:
    """What a client sent, for an error's message: text is quoted and cut, a list or object is named by its kind.

    All such values pass here.
    """
    if isinstance(value, str):
        # cut before it is quoted, too: it may have a million characters
        return _cut(repr(value[: _MAX_ECHO + 1]))
    if isinstance(value, bool | float) or value is None or (isinstance(value, int) and abs(value) < 10**_MAX_ECHO):
        return repr(value)
    return type(value).__name__


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}..."


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    is_retryable: bool = False
    """Whether another pod may answer the same request."""
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        return self.message

    @classmethod
    def bad(cls, param: str, message: str, *, code: str = "invalid_value") -> "ApiError":
        """The request is wrong in this field, whose name may be the client's own too."""
        param = _cut(param)
        return cls(400, f"{param}: {message}", param=param, code=code)

    @classmethod
    def not_now(cls, code: str, message: str, *, status: int = 503) -> "ApiError":
        """Another pod may answer the same request, or this one in a second."""
        return cls(status, message, code=code, is_retryable=True, retry_after_s=1.0)

    def body(self) -> dict[str, object]:
        """The JSON object of the answer."""
        kind = {429: "rate_limit_error", 404: "not_found_error", 503: "service_unavailable_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """`x-kimi-retryable` is for the router, which also reads the code from `x-kimi-error`."""
        headers = {"x-kimi-error": self.code} if self.code else {}
        if self.is_retryable:
            headers["x-kimi-retryable"] = "true"
        if self.retry_after_s > 0:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 408:
            # the rest of the request may still come, and would be waited for again
            headers["connection"] = "close"
        return headers


# Known fields whose value changes nothing here.
_HARMLESS = {
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt",
    "parallel_tool_calls", "include_reasoning", "separate_reasoning",
}  # fmt: skip

# Known fields that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "priority": (0,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
}


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Part):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted; nothing is obfuscated."""


class ChatOptions(Part):
    thinking: bool | None = None


class Message(BaseModel):
    """One turn. What `content` may hold is checked where it is encoded."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: object = None
    name: str | None = None


StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[StopString], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0, lt=_INT64)]


class GenerationRequest(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: StopString | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _understand_every_field(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            _check_extra(name, value)
        if self.stream_options is not None and not self.stream:
            raise ApiError.bad("stream_options", "allowed only with stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: ChatOptions = ChatOptions()
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError.bad("top_logprobs", "allowed only with logprobs: true")
        effort, wanted = self.reasoning_effort, self.chat_template_kwargs.thinking
        if effort is not None and wanted is not None and wanted == (effort == "none"):
            contradiction = f"{echo(effort)} contradicts chat_template_kwargs.thinking: {str(wanted).lower()}"
            raise ApiError.bad("reasoning_effort", contradiction)
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            both = f"{self.max_completion_tokens} contradicts max_tokens: {self.max_tokens}; send one of them"
            raise ApiError.bad("max_completion_tokens", both)
        return self

    @property
    def thinking(self) -> bool | None:
        """Whether the assistant shall think; None: as the checkpoint says."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return self.chat_template_kwargs.thinking

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def single_prompt(self) -> str | list[int]:
        """The one prompt, text or token ids. Raises ApiError for several."""
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt:
            return prompt if isinstance(prompt, str) else []
        if isinstance(prompt[0], int):
            return prompt
        if len(prompt) > 1:
            raise ApiError.bad("prompt", f"got {len(prompt)} prompts; send one a request")
        return prompt[0]


def _check_extra(name: str, value: object) -> None:
    if name in _HARMLESS or (name in _NEUTRAL and value is None):
        return
    if name not in _NEUTRAL:
        raise ApiError.bad(name, "unknown field; leave it out", code="unknown_parameter")
    allowed = _NEUTRAL[name]
    # True equals 1 in Python, not in JSON
    if any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in allowed):
        return
    choice = f"only {' or '.join(map(repr, allowed))} is" if allowed else "this field is not"
    raise ApiError.bad(name, f"{choice} supported; leave it out", code="unsupported_parameter")


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def read_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """Parse and validate a body. Raises ApiError (400) that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        if errors[0]["type"] == "json_invalid":
            raise ApiError(400, f"body: {errors[0]['msg']}", param="body", code="invalid_json") from None
        # of the branches of a union the one that came furthest says most
        worst = max(
            (each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=lambda each: len(each["loc"])
        )
        param = ".".join(str(part) for part in worst["loc"] if not _is_branch(part)) or "body"
        raise ApiError.bad(param, f"{worst['msg']} (got {_shown(worst['input'])})") from None


def _is_branch(part: int | str) -> bool:
    """Pydantic names the branches of a union after their types; clients know only fields."""
    return isinstance(part, str) and (part in {"str", "int", "constrained-str"} or "[" in part)


def _shown(value: object) -> str:
    """A rejected value for the message: its kind where it is text, which may be a prompt."""
    return type(value).__name__ if isinstance(value, str) else echo(value)
