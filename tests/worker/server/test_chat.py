"""The chat format: what a conversation becomes, and what is left of an answer without its tags."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_worker.protocol.openai import ApiError, Message
from kimi_worker.server.chat import ChannelParser, ChatFormat
from kimi_worker.server.effort import read_effort_message
from kimi_worker.server.text import Tokenizer, TokenizerError
from replay_fixtures import write_tokenizer


@pytest.fixture(scope="module")
def chat(checkpoint: Path, tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat.load(checkpoint, tokenizer)


def rendered(
    chat: ChatFormat, messages: list[dict[str, object]], *, thinking: bool = False, effort: str | None = None
) -> str:
    """The prompt with its control tokens spelt out."""
    read = [Message.model_validate(message) for message in messages]
    ids = chat.encode(read, thinking=thinking, effort=effort)
    return b"".join(chat.tokenizer.token_bytes(token) for token in ids).decode()


def test_a_conversation(chat: ChatFormat) -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "the answer"},
        {
            "role": "user",
            "name": 'Tom & "Ann"',
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "hello", "reasoning_content": "world"},
        {"role": "user", "content": "again"},
    ]
    body = (
        '<|open|>message role="system"<|sep|>the answer<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user" name="Tom &amp; &quot;Ann&quot;"<|sep|>ab<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>{think}<|open|>response<|sep|>hello<|close|>response<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user"<|sep|>again<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>{channel}<|sep|>'
    )
    think = "<|open|>think<|sep|>world<|close|>think<|sep|>"
    assert rendered(chat, messages) == body.format(think="", channel="response")
    for effort, said in ((None, "max"), ("low", "low")):
        begin = (
            '<|open|>message role="system" type="thinking-effort"<|sep|>Set `thinking_effort`: `low`, `high`, `max`. '
            f"Now it is `thinking_effort={said}`.<|close|>message<|sep|><|end_of_msg|>"
        )
        prompt = rendered(chat, messages, thinking=True, effort=effort)
        assert prompt == begin + body.format(think=think, channel="think")


ENCODERS = {
    "f-string": 'def f(e):\n    return f"""Efforts `low` and `max`.\nNow `thinking_effort={e}`.\n"""',
    "format": 'T = "Efforts `low` and `max`.\\nNow `thinking_effort={e}`."\ndef f(e):\n    return T.format(e=e)',
    "percent": 'def f(e):\n    return "Efforts `low` and `max`.\\nNow `thinking_effort=%s`." % e',
    "sum": 'A = "Efforts `low` and `max`.\\n"\ndef f(e):\n    return A + "Now `thinking_effort=" + str(e) + "`."',
    "join": 'def f(e):\n    return "\\n".join(["Efforts `low` and `max`.", f"Now `thinking_effort={e}`."]).strip()',
}


@pytest.mark.parametrize("code", ENCODERS.values(), ids=ENCODERS)
def test_the_effort_message_is_read_however_the_encoder_spells_it(tmp_path: Path, code: str) -> None:
    noise = 'import nothing_there\nraise ValueError(f"Unsupported thinking_effort={1}")\n'
    (tmp_path / "encoding_k3.py").write_text(noise + code)
    message = read_effort_message(tmp_path)
    assert message.body("max") == "Efforts `low` and `max`.\nNow `thinking_effort=max`."
    assert message.efforts == ("low", "max")


@pytest.mark.parametrize(
    "code", [None, "def f(:", "\0", "x = 5", 'f"one `thinking_effort={a}`"\nf"two `thinking_effort={a}`"']
)
def test_nobody_thinks_without_the_releases_message(tmp_path: Path, code: str | None) -> None:
    """The request is refused: without the message the model would be asked in a way that it was not trained on."""
    write_tokenizer(tmp_path)
    encoder = tmp_path / "encoding_k3.py"
    encoder.unlink() if code is None else encoder.write_text(code)
    chat = ChatFormat.load(tmp_path, Tokenizer.load(tmp_path))
    assert rendered(chat, [{"role": "user", "content": "a"}])
    with pytest.raises(ApiError, match=r"encoding_k3\.py") as caught:
        rendered(chat, [{"role": "user", "content": "a"}], thinking=True)
    assert (caught.value.param, caught.value.code) == ("chat_template_kwargs.thinking", "thinking_unavailable")


def test_an_effort_that_the_model_does_not_know_is_named(chat: ChatFormat) -> None:
    with pytest.raises(ApiError, match="low, high, max") as caught:
        rendered(chat, [{"role": "user", "content": "a"}], thinking=True, effort="medium")
    assert caught.value.param == "reasoning_effort"


@given(
    text=st.lists(st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "a", " "])).map(
        "".join
    )
)
def test_user_text_adds_no_control_token(chat: ChatFormat, text: str) -> None:
    special = set(chat.tokenizer.special.values())
    empty = chat.encode([Message(role="user", content="")], thinking=False)
    ids = chat.encode([Message(role="user", content=text)], thinking=False)
    assert [token for token in ids if token in special] == [token for token in empty if token in special]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": {"type": "text"}}, "messages.0.content"),
        ({"role": "user", "content": ["x"]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0.type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.0.content.0.type"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages.0.colour"),
        ({"role": "assistant", "content": "x", "reasoning_content": 7}, "messages.0.reasoning_content"),
    ],
)
def test_what_is_not_supported_is_named(chat: ChatFormat, message: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(chat, [message])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_answer_can_be_sent_back_with_its_empty_fields(chat: ChatFormat) -> None:
    reply = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "audio": None, "annotations": []}
    assert "response" in rendered(chat, [reply])


def answer_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of an answer whose control tokens are spelt out as `{name}`."""
    ids = []
    for part in text.replace("{", "\0{").replace("}", "}\0").split("\0"):
        name = f"<|{part[1:-1]}|>"
        ids += [tokenizer.special[name]] if part.startswith("{") else tokenizer.encode(part)
    return ids


ANSWERS = [
    ("hi{close}response{sep}{close}message{sep}{end_of_msg}", False, "hi", ""),
    ("why{close}think{sep}{open}response{sep}hi{close}response{sep}{end_of_msg}", True, "hi", "why"),
    ("no tags at all", False, "no tags at all", ""),
    ("only thought", True, "", "only thought"),
    ("hi{close}response{sep}{open}tools{sep}call{close}tools{sep}{close}message{sep}more", False, "hi", ""),
    ("a{close}think{sep}b{open}response{sep}c", True, "c", "a"),
    ("cut {close}respon", False, "cut ", ""),
    ("{close}nothing{sep}hi", False, "hi", ""),
    ('{open}response kind="x"{sep}hi{close}response{sep} there', False, "hi there", ""),
]


@pytest.mark.parametrize(("text", "thinking", "content", "reasoning"), ANSWERS)
def test_channels(tokenizer: Tokenizer, text: str, thinking: bool, content: str, reasoning: str) -> None:
    ids = answer_ids(tokenizer, text)
    for size in (1, 3, len(ids)):
        parser = ChannelParser(tokenizer, thinking=thinking)
        parts = [parser.feed(ids[at : at + size]) for at in range(0, len(ids), size)] + [parser.finish()]
        assert "".join(part.content for part in parts) == content
        assert "".join(part.reasoning for part in parts) == reasoning


@given(ids=st.lists(st.integers(250, 282), max_size=40), thinking=st.booleans())
def test_no_answer_breaks_the_parser(tokenizer: Tokenizer, ids: list[int], thinking: bool) -> None:
    parser = ChannelParser(tokenizer, thinking=thinking)
    whole = ChannelParser(tokenizer, thinking=thinking)
    parts = [parser.feed([token]) for token in ids] + [parser.finish()]
    together = [whole.feed(ids), whole.finish()]
    for channel in (0, 1):
        assert "".join(part[channel] for part in parts) == "".join(part[channel] for part in together)


@pytest.mark.parametrize(("kwargs", "thinking"), [({}, True), ({"thinking": False}, False), ({"thinking": True}, True)])
def test_the_checkpoint_says_whether_to_think(tmp_path: Path, kwargs: dict[str, bool], thinking: bool) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template_kwargs": kwargs}))
    assert ChatFormat.load(tmp_path, Tokenizer.load(tmp_path)).thinking is thinking


def test_a_wrong_default_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template_kwargs": {"thinking": "no"}}))
    with pytest.raises(TokenizerError, match="chat_template_kwargs"):
        ChatFormat.load(tmp_path, Tokenizer.load(tmp_path))
