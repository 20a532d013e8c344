"""`kimictl needle` against router and pods whose lanes recall by reading the prompt."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kimi_operator.cli import main
from kimi_worker.protocol.engine import Submit
from kimi_worker.server.text import Tokenizer
from replay_engine import Script
from replay_fixtures import MODEL, Pod, PodFactory, router_settings, routing, said

LEVELS = ["--concurrency", "1,4,8", "--min-tokens", "100", "--max-tokens", "120", "--needles", "3", "--seed", "5"]


class Recaller:
    """Answers with the value of the key that the prompt asks for."""

    def __init__(self, tokenizer: Tokenizer, wrong: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._wrong = wrong
        """Number of the request that gets another needle's value."""
        self._count = 0

    def __call__(self, submit: Submit) -> Script:
        text = self._tokenizer.decode(submit.token_ids)
        values = dict(re.findall(r"The key of (\w+ \w+) is (\d{6})", text))
        [asked] = re.findall(r"What is the key of (\w+ \w+)\?", text)
        answer = values.pop(asked)
        if self._count == self._wrong:
            answer = next(iter(values.values()))
        self._count += 1
        return Script(said(self._tokenizer, answer))


@pytest.fixture
async def service(start_pod: PodFactory) -> AsyncIterator[tuple[str, Pod]]:
    # text of this small vocabulary is long: most words are spelt in bytes
    prefill, decode = await start_pod(role="prefill"), await start_pod(num_lanes=2, max_model_len=4096)
    async with routing(router_settings([prefill], [decode])) as url:
        yield url, decode


async def kimictl(*arguments: str) -> int:
    """The command as a user runs it, in a thread because the service lives in this one."""
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, ["needle", *arguments])
    return int(str(ended.value.code))


async def test_all_found(
    service: tuple[str, Pod], tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, decode = service
    decode.play(Recaller(tokenizer))
    assert await kimictl("--url", f"{url}/v1", "--reference-url", url, *LEVELS) == 0
    page = capsys.readouterr()
    assert "13 of 13 needles found, 13 of 13 equal to the reference" in page.out
    assert "4 KiB" in page.out
    assert "reference: 13 of 13" in page.err
    prompts = [tuple(submit.token_ids) for engine in decode.engines for submit in engine.submits]
    assert len(prompts) == 26
    assert len(set(prompts)) == 13
    assert not any(engine.cancels for engine in decode.engines)


async def test_one_wrong_value_fails_the_run(
    service: tuple[str, Pod], tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    url, decode = service
    decode.play(Recaller(tokenizer, wrong=7))
    assert await kimictl("--url", url, *LEVELS, "-o", "json") == 1
    result = json.loads(capsys.readouterr().out[-20_000:].partition("\n{")[2].join(["{", ""]))
    assert (result["asked"], result["found"], result["right"]) == (13, 12, False)
    assert [level["asked"] for level in result["levels"]] == [1, 4, 8]
    assert len(result["problems"]) == 1


async def test_an_answer_unlike_the_reference_fails_the_run(
    service: tuple[str, Pod], start_pod: PodFactory, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    url, decode = service
    decode.play(Recaller(tokenizer))
    other: Pod = await start_pod(role="both", max_model_len=4096)
    right = Recaller(tokenizer)
    other.play(lambda submit: Script([*tokenizer.encode(" "), *right(submit).token_ids]))
    assert await kimictl("--url", url, "--reference-url", other.url, *LEVELS) == 1
    page = capsys.readouterr().out
    assert "13 of 13 needles found, 0 of 13 equal" in page
    assert "token 0 differs" in page


async def test_failures_are_shown(service: tuple[str, Pod], capsys: pytest.CaptureFixture[str]) -> None:
    url, decode = service
    decode.play(Script(refusal=("queue_full", True)))
    assert await kimictl("--url", url, *LEVELS) == 1
    page = capsys.readouterr().out
    assert "0 of 13 needles found" in page
    assert "429: scripted queue_full" in page


@pytest.mark.parametrize(
    ("arguments", "status", "said_"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 cannot be reached"),
        (["--url", "127.0.0.1"], 2, "--url: got '127.0.0.1', expected an address with http:// or https://"),
        (["--url", "{url}", "--model", "gpt"], 2, f"one that {{url}} serves: {MODEL}"),
        (["--url", "{url}", "--reference-url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 cannot be reached"),
    ],
)
async def test_what_is_wrong_is_said(
    service: tuple[str, Pod], capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said_: str
) -> None:
    url, _ = service
    assert await kimictl(*(argument.format(url=url) for argument in arguments)) == status
    assert said_.format(url=url) in capsys.readouterr().err
