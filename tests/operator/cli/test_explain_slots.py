"""`--explain numStateSlots`: how many slots handoffs hold at once, beside the quarter that is kept for them."""

from __future__ import annotations

import json
import re

import pytest
from kimi_operator.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["plan", "--chip", "mi325x", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "prompt", "output", "said"),
    [
        ("1", "2048", "1024", r"\d+ suffice"),
        ("1", "200000", "16", r"\d+ suffice"),
        ("6", "20000", "64", r"more than \d+: such lanes do not stay full"),
    ],
)
def test_slots_of_handoffs_follow_from_littles_law(
    capsys: pytest.CaptureFixture[str], groups: str, prompt: str, output: str, said: str
) -> None:
    """With one group of each role at most a prompt a lane is computed; six of prefill compute six for each."""
    workload = ("--prompt-tokens", prompt, "--output-tokens", output, "--prefill-groups", groups)
    workload += ("--max-num-seqs", "8")
    document = json.loads(run(capsys, *workload, "-o", "json"))
    speed, decode = document["speed"], document["decode"]
    explained = run(capsys, *workload, "--explain", "decode.numStateSlots")
    extra = decode["num_state_slots"] - decode["max_num_seqs"]
    assert f"values   {decode['max_num_seqs']} + {extra}; " in explained
    # requests that a lane ends a second, times the seconds that each has held a slot before
    ended = speed["throughput"]["value"] / int(output) / document["outlook"]["decode"]["lanes"]
    held = ended * (speed["prefill_busy"]["value"] + speed["handoff"]["value"]) / 1e3
    found = re.search(rf"= ([\d.,]+) at once, queues left out: {said}", explained)
    assert found, explained
    assert float(found[1].replace(",", "")) == pytest.approx(held, rel=0.01)
    assert (held > extra) == said.startswith("more")
    assert "Assumed: the quarter" in explained


def test_prompts_keep_theirs_while_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    explained = run(capsys, "--explain", "prefill.numStateSlots")
    assert "Assumed: the quarter; a prompt keeps its slot until all of it is written" in explained
    assert re.search(r"one prompt each [\d,.]+ ms x [\d,.]+ ms to write it = 0\.\d+ at once", explained)


def test_without_predicted_times_the_quarter_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--chip", "mi308x", "--explain", "decode.numStateSlots"])
    out = capsys.readouterr().out
    assert re.search(r"values +\d+ \+ \d+\n", out)
    assert "Assumed: the quarter" in out
