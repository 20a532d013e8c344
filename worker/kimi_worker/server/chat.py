"""K3's chat format: a conversation to the prompt's token ids, an answer's token ids to its channels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

from kimi_worker.protocol.openai import NO_TOOLS, ApiError, Message, echo
from kimi_worker.server.effort import DEFAULT_EFFORT, EffortMessage, EncoderError, read_effort_message
from kimi_worker.server.text import Detokenizer, Tokenizer, TokenizerError, read_json

Segment: TypeAlias = int | str
"""A control token's id, or plain text that is encoded on its own."""

_OF_TOOLS = frozenset({"tool_calls", "tool_call_id", "function_call"})
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Encodes conversations with one checkpoint's tokens."""

    tokenizer: Tokenizer
    thinking: bool
    """Whether the assistant thinks where a request does not say."""
    effort: EffortMessage | str
    """What begins a conversation with thinking; text: why it is not known, so that nobody can be asked to think."""

    @classmethod
    def load(cls, checkpoint: Path, tokenizer: Tokenizer) -> "ChatFormat":
        """Thinking is on unless `tokenizer_config.json` holds `"chat_template_kwargs": {"thinking": false}`.

        Raises TokenizerError.
        """
        effort: EffortMessage | str
        try:
            effort = read_effort_message(checkpoint)
        except EncoderError as error:
            effort = str(error)
        path = checkpoint / "tokenizer_config.json"
        defaults = read_json(path).get("chat_template_kwargs", {})
        thinking = defaults.get("thinking", True) if isinstance(defaults, dict) else None
        if not isinstance(thinking, bool):
            raise TokenizerError(f'{path}: chat_template_kwargs: want {{"thinking": true|false}}, got {defaults!r}')
        return cls(tokenizer, thinking, effort)

    def encode(self, messages: Sequence[Message], *, thinking: bool, effort: str | None = None) -> list[int]:
        """The prompt's ids, up to where the assistant's answer begins. Raises ApiError that names the field.

        `effort`: how much to think, with thinking; None: as much as the release does where nothing is said.
        """
        segments: list[Segment] = self._effort(effort or DEFAULT_EFFORT) if thinking else []
        for index, message in enumerate(messages):
            segments += self._message(message, f"messages.{index}", thinking)
        segments += [*self._open("message", role="assistant"), *self._open("think" if thinking else "response")]
        ids: list[int] = []
        for segment in segments:
            ids += [segment] if isinstance(segment, int) else self.tokenizer.encode(segment)
        return ids

    def _message(self, message: Message, where: str, thinking: bool) -> list[Segment]:
        role = _ROLES.get(message.role)
        if role is None:
            why = f"; {NO_TOOLS}" if message.role in ("tool", "function") else ""
            raise ApiError.bad(
                f"{where}.role", f"got {echo(message.role)}{why}; want system, developer, user or assistant"
            )
        _refuse_extras(message, where)
        text = _text(message.content, f"{where}.content", is_optional=role == "assistant")
        body: list[Segment] = [text]
        if role == "assistant":
            thought = self._tag("think", _reasoning(message, where))
            body = [*(thought if thinking else []), *self._tag("response", text)]
        attributes = {"role": role, "name": message.name} if message.name else {"role": role}
        end = self.tokenizer.controls.end_of_msg
        return [*self._open("message", **attributes), *body, *self._close("message"), end]

    def _effort(self, effort: str) -> list[Segment]:
        if isinstance(self.effort, str):
            # without its message the model would be asked in a way that it was never trained on
            raise ApiError.bad(
                "chat_template_kwargs.thinking",
                "thinking, which is on unless a request or the checkpoint turns it off, needs a message in the words "
                f'of the release, and {self.effort}; send "reasoning_effort": "none"',
                code="thinking_unavailable",
            )
        if effort not in self.effort.efforts:
            raise ApiError.bad(
                "reasoning_effort", f"got {echo(effort)}; this model knows {', '.join(self.effort.efforts)}, and none"
            )
        end = self.tokenizer.controls.end_of_msg
        opened = self._open("message", role="system", type="thinking-effort")
        return [*opened, self.effort.body(effort), *self._close("message"), end]

    def _tag(self, name: str, text: str) -> list[Segment]:
        return [*self._open(name), text, *self._close(name)]

    def _open(self, name: str, /, **attributes: str) -> list[Segment]:
        spelt = "".join(f' {key}="{_escape(value)}"' for key, value in attributes.items())
        return [self.tokenizer.controls.open, name + spelt, self.tokenizer.controls.sep]

    def _close(self, name: str) -> list[Segment]:
        return [self.tokenizer.controls.close, name, self.tokenizer.controls.sep]


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _refuse_extras(message: Message, where: str) -> None:
    """Clients send an earlier answer back whole, with empty fields that mean nothing."""
    known = {"reasoning_content", "reasoning"} if message.role == "assistant" else set()
    for name, value in (message.model_extra or {}).items():
        if name not in known and value not in (None, [], {}):
            if name in _OF_TOOLS:
                raise ApiError.unsupported(f"{where}.{name}", value, NO_TOOLS)
            raise ApiError.unknown_field(f"{where}.{name}")


def _reasoning(message: Message, where: str) -> str:
    extra = message.model_extra or {}
    text = extra.get("reasoning_content") or extra.get("reasoning") or ""
    if not isinstance(text, str):
        raise ApiError.bad(f"{where}.reasoning_content", f"got {_kind(text)}; want a string")
    return text if text.strip() else ""


def _text(content: object, where: str, *, is_optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}.{index}") for index, part in enumerate(content))
    raise ApiError.bad(where, f"got {_kind(content)}; want a string or a list of text parts")


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ApiError.bad(where, f'got {_kind(part)}; want {{"type": "text", "text": "..."}}')
    if part.get("type") != "text":
        _refuse_part(part.get("type"), where)
    if not isinstance(text := part.get("text"), str):
        raise ApiError.bad(f"{where}.text", f"got {_kind(text)}; want a string")
    return text


def _refuse_part(kind: object, where: str) -> NoReturn:
    raise ApiError.bad(
        f"{where}.type",
        f"got {echo(kind)}; this server reads text only: send parts of type 'text'",
        code="unsupported_content",
    )


def _kind(value: object) -> str:
    return "a string" if isinstance(value, str) else echo(value)


class ChatText(NamedTuple):
    """New text of an answer, by channel."""

    content: str
    reasoning: str


class ChannelParser:
    """Splits an answer into what was thought and what is said, and drops the tags around them.

    Text in other channels, between channels and in a tag that never ends is left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self._controls = tokenizer.controls
        self._tokenizer = tokenizer
        self._open = ["message", "think" if thinking else "response"]
        self._tag: list[int] | None = None
        self._is_closing = False
        self._detokenizer = Detokenizer(tokenizer)
        self._texts = {"response": "", "think": ""}

    def feed(self, token_ids: Iterable[int]) -> ChatText:
        """Text that these tokens add."""
        for token in token_ids:
            if token in (self._controls.open, self._controls.close):
                self._say(self._detokenizer.finish())
                self._tag, self._is_closing = [], token == self._controls.close
            elif self._tag is None:
                self._say(self._detokenizer.feed([token]))
            elif token == self._controls.sep:
                self._apply(self._tokenizer.decode(self._tag).split(" ")[0])
                self._tag = None
            else:
                self._tag.append(token)
        return self._take()

    def finish(self) -> ChatText:
        """What an unfinished character leaves."""
        self._say(self._detokenizer.finish())
        return self._take()

    def _say(self, text: str) -> None:
        if text and self._open and self._open[-1] in self._texts:
            self._texts[self._open[-1]] += text

    def _apply(self, name: str) -> None:
        if not self._is_closing:
            self._open.append(name)
        elif name in self._open:
            while self._open.pop() != name:
                pass

    def _take(self) -> ChatText:
        text = ChatText(self._texts["response"], self._texts["think"])
        self._texts = {"response": "", "think": ""}
        return text
