"""OpenAI's requests as this server reads them: what is not understood is refused by name, never ignored."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from kimi_worker.protocol.engine import MAX_LOGPROBS

_INT64 = 2**63
_MAX_ECHO = 60
"""Characters of what a client sent that an error repeats at most: enough to recognise it."""


def echo(value: object) -> str:
    """What a client sent, for an error's message, in JSON's words: text is quoted and cut, a list is counted.

    All such values pass here.
    """
    match value:
        case str():
            # cut before it is quoted, too: it may have a million characters
            return _cut(repr(value[: _MAX_ECHO + 1]))
        case None | bool():
            return "null" if value is None else str(value).lower()
        case list():
            return f"a list of {len(value)}"
        case int() if abs(value) >= 10**_MAX_ECHO:
            return f"a number of over {_MAX_ECHO} digits"
        case int() | float():
            return repr(value)
    return "an object"


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
    def unknown_field(cls, param: str) -> "ApiError":
        return cls.bad(param, "unknown field; leave it out or mend its spelling", code="unknown_parameter")

    @classmethod
    def unsupported(cls, param: str, value: object, why: str) -> "ApiError":
        """The field is known and asks for what `why` says is not done here."""
        return cls.bad(param, f"got {echo(value)}; {why}; leave the field out", code="unsupported_parameter")

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


class Unsupported(NamedTuple):
    """A known field that asks for what this server does not do."""

    why: str
    neutral: tuple[object, ...] = ()
    """Values that ask for nothing."""


NO_TOOLS = "this server does not call tools"
_NO_PENALTIES = "this server samples without penalties"
_ONE_ANSWER = "one request gets one answer, so send one for each"
_TEXT_ONLY = "this server answers in text only"
_TWO_FILTERS = "this server samples by temperature and top_p alone"

_UNSUPPORTED: dict[str, Unsupported] = {
    "n": Unsupported(_ONE_ANSWER, (1,)),
    "best_of": Unsupported(_ONE_ANSWER, (1,)),
    "echo": Unsupported("an answer does not repeat its prompt", (False,)),
    "suffix": Unsupported("this server does not fill in text before a suffix", ("",)),
    "presence_penalty": Unsupported(_NO_PENALTIES, (0,)),
    "frequency_penalty": Unsupported(_NO_PENALTIES, (0,)),
    "repetition_penalty": Unsupported(_NO_PENALTIES, (1,)),
    "length_penalty": Unsupported(_NO_PENALTIES, (1,)),
    "top_k": Unsupported(_TWO_FILTERS, (-1, 0)),
    "min_p": Unsupported(_TWO_FILTERS, (0,)),
    "min_tokens": Unsupported("answers have no least length", (0,)),
    "logit_bias": Unsupported("this server does not bias tokens", ({},)),
    "store": Unsupported("this server keeps no answers", (False,)),
    "priority": Unsupported("requests are answered in the order in which they come", (0,)),
    "use_beam_search": Unsupported("this server does no beam search", (False,)),
    "skip_special_tokens": Unsupported("special tokens are never part of an answer", (True,)),
    "spaces_between_special_tokens": Unsupported("special tokens are never part of an answer", (True, False)),
    "add_generation_prompt": Unsupported("a prompt always ends where the assistant's answer begins", (True,)),
    "continue_final_message": Unsupported("an answer is always a new message", (False,)),
    "add_special_tokens": Unsupported("nothing is added to a prompt", (False,)),
    "include_stop_str_in_output": Unsupported("stop strings are never part of an answer", (False,)),
    "modalities": Unsupported(_TEXT_ONLY, (["text"],)),
    "response_format": Unsupported("answers are free text and held to no format", ({"type": "text"},)),
    "tools": Unsupported(NO_TOOLS, ([],)),
    "functions": Unsupported(NO_TOOLS, ([],)),
    "tool_choice": Unsupported(NO_TOOLS, ("none", "auto")),
    "function_call": Unsupported(NO_TOOLS, ("none", "auto")),
    "audio": Unsupported(_TEXT_ONLY),
    "prediction": Unsupported("this server takes no predicted text"),
    "web_search_options": Unsupported("this server does not search the web"),
    "verbosity": Unsupported("how long an answer shall be is said in the prompt"),
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
    if name in _HARMLESS or (name in _UNSUPPORTED and value is None):
        return
    if name not in _UNSUPPORTED:
        raise ApiError.unknown_field(name)
    why, neutral = _UNSUPPORTED[name]
    # True equals 1 in Python, not in JSON
    if any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in neutral):
        return
    raise ApiError.unsupported(name, value, why)


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def read_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """Parse and validate a body. Raises ApiError (400) that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        if errors[0]["type"] == "json_invalid":
            raise ApiError(400, f"body: {errors[0]['msg']}", param="body", code="invalid_json") from None
        # of the branches of a union the one that came furthest says most: to an item, else past the kind of the value
        worst = max(
            (each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]),
            key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
        )
        raise _invalid(worst) from None


def _invalid(error: ErrorDetails) -> ApiError:
    param = ".".join(str(part) for part in error["loc"] if not _is_branch(part)) or "body"
    match error["type"]:
        case "missing":
            return ApiError.bad(param, "is missing; send it", code="missing_parameter")
        case "extra_forbidden":
            return ApiError.unknown_field(param)
    want = error["msg"].partition(" after validation")[0]
    for subject, ours in _SUBJECTS.items():
        want = want.replace(subject, ours)
    return ApiError.bad(param, f"got {_shown(error['input'])}; {want}")


_SUBJECTS = {
    "Input should be": "want",
    "List should have": "want a list of",
    "String should have": "want a string of",
    "a valid array": "a list",
    "a valid ": "a ",
    "a integer": "an integer",
    "boolean": "true or false",
    "a true": "true",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
"""Pydantic's words and ours, in this order."""


def _is_branch(part: int | str) -> bool:
    """Pydantic names the branches of a union after their types; clients know only fields."""
    return isinstance(part, str) and (part in {"str", "int", "constrained-str"} or "[" in part)


def _shown(value: object) -> str:
    """A rejected value for the message: its kind where it is text, which may be a prompt."""
    return "a string" if isinstance(value, str) else echo(value)
