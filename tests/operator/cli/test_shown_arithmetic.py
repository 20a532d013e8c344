"""Arithmetic that is shown beside a figure gives that figure: of `--explain`, of memory lines, of the two designs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml
from kimi_operator.cli.asking import asked_for, make_plan, outlook_of
from kimi_operator.cli.cost import Cost, cost_of
from kimi_operator.cli.explain import explanation_document
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags
from kimi_operator.cli.glossary import explained_figures
from kimi_operator.cli.outlook import Outlook
from kimi_operator.planner.units import bytes_text

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Run = Callable[..., tuple[int, str, str]]

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB/s": 1e9, "s": 1, "ms": 1e-3}
FUNCTIONS = {"min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "sqrt": math.sqrt}
SIGNS = {"x": "*", "^": "**", "+": "+", "-": "-", "/": "/", "(": "(", ")": ")", ",": ","}
TOKEN = re.compile(
    r"(?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?)|(?P<word>[A-Za-z][\w/'.-]*)|(?P<sign>[-+/^(),])|\s"
)
ROUNDED = 0.01
"""Figures are shown with three digits or more, and some of their values too."""


def evaluate(text: str) -> float:
    """What is shown as arithmetic: up to a colon or semicolon, without notes in parentheses and without words."""
    found, at, code = re.split("[:;]", text)[0].strip(), 0, ""
    while at < len(found):
        token = TOKEN.match(found, at)
        assert token, f"{found[at:]!r} in {found!r}"
        at, is_value, word = token.end(), code[-1:].isalnum() or code.endswith(")"), token["word"]
        if token["number"]:
            unit = re.match(r" ([A-Za-z/]+)\b", found[at:])
            factor = UNITS.get(unit[1], 1) if unit else 1
            code += (
                f"({token['number'].replace(',', '')}*{factor})" if factor != 1 else token["number"].replace(",", "")
            )
        elif word == "of" and is_value:
            # 56 of 896 experts: the first counts
            at = re.compile(r" [\d,]+").match(found, at).end()
        elif word in FUNCTIONS and found[at] == "(":
            code += word
        elif word == "x":
            code += "*"
        elif token["sign"] == "(" and is_value and not code.endswith(tuple(FUNCTIONS)):
            at = found.index(")", at) + 1
        elif token["sign"]:
            code += SIGNS[token["sign"]]
    assert re.fullmatch(r"(?:[-0-9.e+*/(),]|min|max|floor|ceil|sqrt)+", code), f"{code!r} of {text!r}"
    return float(eval(code, {"__builtins__": {}}, FUNCTIONS))


def leading(text: str) -> float | None:
    """The number with its unit that a figure's text begins with."""
    found = re.match(r"(?:factor )?([\d,.]*\d(?:e[+-]\d+)?)(?: ([A-Za-z/]+)\b)?", text)
    return float(found[1].replace(",", "")) * UNITS.get(found[2], 1) if found else None


@pytest.mark.parametrize(
    ("shown", "value"),
    [
        ("(19 running + 5 reserved by handoffs) x 1,000 B", 24_000),
        ("56 of 896 experts x 92 layers x 17 B (MXFP4, 4.25 bits a weight)", 56 * 92 * 17),
        ("665,782,272 B / (50 GB/s x sqrt(0.56 x 0.96))", 665_782_272 / 50e9 / math.sqrt(0.56 * 0.96)),
        ("min(clients 48 / (104.8 ms + 10,315 ms / 1,100), 3 lanes x 1e3): words", 48 / (0.1048 + 10.315 / 1100)),
        ("norms 8.8 GiB + routers 2 MiB (bfloat16); rest", 8.8 * 2**30 + 2**21),
    ],
)
def test_the_evaluator_reads_what_is_shown(shown: str, value: float) -> None:
    assert evaluate(shown.replace("1e3", "1,000")) == pytest.approx(value)


CHOSEN = {
    "maxNumSeqs": "the most that fit, found by search; the bytes of as many and of one more are shown",
    "concurrency": "stated, or what decode runs",
    "knee": "chosen among the points of the curve; its height is shown, and tested on its own",
    "designs.length": "the least and the most of the table's lengths",
}
"""Figures whose text need not follow from their values, with the reason."""


@dataclass(frozen=True)
class Asked:
    """A plan's inputs."""

    file: str = ""
    flags: DeploymentFlags = field(default_factory=DeploymentFlags)
    work: WorkloadFlags = field(default_factory=WorkloadFlags)

    @property
    def outlook(self) -> Outlook:
        asked = asked_for([EXAMPLES / self.file] if self.file else [], self.flags, self.work)
        return outlook_of(make_plan(asked), asked)


LONG = WorkloadFlags(prompt_tokens="20000", output_tokens="100", concurrency=900)
SHORT = WorkloadFlags(prompt_tokens="64", output_tokens="4000", concurrency=9000)
COMES = WorkloadFlags(prompt_tokens="4000", output_tokens="500", target_tpot="500ms")
RATE = WorkloadFlags(prompt_tokens="4000", output_tokens="500", requests_per_second=0.8, target_tpot="500ms")
HELD = WorkloadFlags(prompt_tokens="30000", output_tokens="4000", concurrency=150)
BEYOND = WorkloadFlags(prompt_tokens="60000", output_tokens="500", requests_per_second=0.6, target_tpot="200ms")
MANY_PROMPTS = DeploymentFlags(chip="mi300x", nodes_per_group=2, prefill_groups=16)
WHOLE_NODE = DeploymentFlags(chip="mi325x", tensor_parallel=8, nodes_per_group=1, kv_cache="FP32")
PLANS = {
    "limits stated": Asked("mi300x-2p2d.yaml"),
    "more memory": Asked("mi325x-2p2d.yaml"),
    "solved for a workload": Asked("mi300x-workload.yaml"),
    "a tiny model in float32": Asked("local/2p2d.yaml"),
    "limits of the profile": Asked(flags=DeploymentFlags(chip="mi355x", decode_groups=2)),
    "no FLOPs": Asked(flags=DeploymentFlags(chip="mi308x")),
    "prefill binds": Asked(flags=DeploymentFlags(chip="mi300x"), work=LONG),
    "a rate": Asked(flags=DeploymentFlags(chip="mi300x"), work=RATE),
    "memory binds": Asked(flags=DeploymentFlags(chip="mi300x"), work=HELD),
    "a rate beyond memory": Asked(flags=MANY_PROMPTS, work=BEYOND),
    "lanes bind": Asked(flags=DeploymentFlags(chip="mi325x", prefill_groups=4), work=SHORT),
    "rows and layout stated": Asked(flags=WHOLE_NODE),
    "a rate that is served": Asked(flags=DeploymentFlags(chip="mi300x"), work=replace(COMES, requests_per_second=0.7)),
    "a rate beyond prefill": Asked(flags=DeploymentFlags(chip="mi300x"), work=replace(COMES, requests_per_second=5.0)),
}
"""Several chips, types, layouts and loads, with slots for handoffs and without."""


@pytest.fixture(scope="module", params=PLANS)
def outlook(request: pytest.FixtureRequest) -> Outlook:
    return PLANS[request.param].outlook


def cost_at(outlook: Outlook) -> Cost | None:
    """Of the plan at some price; None where nobody can say how many tokens it pays for."""
    return cost_of(outlook, 2.5) if outlook.speed else None


def name_of(figure: Mapping[str, str]) -> str:
    return figure["key"].removeprefix("prefill.").removeprefix("decode.")


def test_each_numeric_figure_follows_from_its_values(outlook: Outlook) -> None:
    figures = explanation_document(explained_figures(outlook, cost_at(outlook)))["figures"]
    checked = []
    for figure in figures:
        texts = figure["text"].split("; ")
        is_chosen = name_of(figure) in CHOSEN and figure["formula"] != "stated" and figure["values"][:4] != "min("
        if leading(texts[0]) is None or is_chosen:
            continue
        for text, values in zip(texts, figure["values"].split("; "), strict=False):
            check(figure["key"], text, values)
            checked.append(figure["key"])
    assert len(checked) > 50
    assert outlook.speed is None or {"cost.prompt", "cost.output", "cost.allIn", "cost.request"} <= set(checked)


def test_cards_that_gpus_share_are_shown(run: Run, tmp_path: Path) -> None:
    times = []
    for cards in (8, 1):
        profile = yaml.safe_load(run("profile", "show", "mi300x", "-o", "yaml")[1])
        profile["spec"]["fabric"]["nicsPerNode"] = cards
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(profile))
        _, out, _ = run("plan", "--chip", "mi300x", "-f", tmp_path / "mine.yaml", "--explain", "handoff", "-o", "json")
        (figure,) = (each for each in json.loads(out)["figures"] if each["key"] == "handoff")
        assert ("x 1 / 8" in figure["values"]) == (cards == 1)
        check(figure["key"], figure["text"], figure["values"])
        times.append(leading(figure["text"]))
    assert times[1] == pytest.approx(8 * times[0], rel=ROUNDED)


def test_memory_lines_show_what_makes_their_bytes(outlook: Outlook) -> None:
    """Weights and pools; what is reserved is stated, and its line says by whom."""
    for role in (outlook.plan.prefill, outlook.plan.decode):
        lines = {line.label: line for line in role.lines if line.is_weights or line.is_pool}
        assert len(lines) == 6
        for label, line in lines.items():
            check(label, f"{line.bytes:,} B = {bytes_text(line.bytes)}", line.how)


def check(key: str, text: str, values: str) -> None:
    """Whole numbers, as bytes are, to the last digit; what is rounded anywhere, to what is shown of it."""
    value, shown = evaluate(values), leading(text)
    is_exact = not re.search(r"\d\.\d|sqrt", values + text.partition(" = ")[0])
    assert value == (shown if is_exact else pytest.approx(shown, rel=ROUNDED)), f"{key}: {text} from {values}"
    if " = " in text:
        assert leading(text.split(" = ")[1]) == pytest.approx(shown, rel=0.05), f"{key}: {text}"


def test_what_is_chosen_shows_sums_that_hold(outlook: Outlook) -> None:
    for figure in explanation_document(explained_figures(outlook, None))["figures"]:
        for left, right in re.findall(r"(?:^|; |: |with one more )([^;:=]+) = ([\d.,]*\d)", figure["values"]):
            if name_of(figure) in CHOSEN:
                # of what is shown rounded, more than 1 at times, the sum is too
                rounded = ROUNDED if "." in left else 0
                assert evaluate(left) == pytest.approx(float(right.replace(",", "")), rel=rounded, abs=0.01), figure
    if outlook.speed is not None:
        (knee,) = (each for each in explained_figures(outlook, None) if each.key == "knee")
        assert " = " in knee.values


def test_terms_of_a_step_follow_from_what_they_move_and_how_often(outlook: Outlook) -> None:
    """62.51 GB at 3.71 TB/s, and 186 of 18 us, all as rounded as they are shown."""
    found = 0
    for figure in explained_figures(outlook, None):
        for label, amount, unit, rate in re.findall(
            r"; ([a-z -]+): ([\d.]+) (GB at|of) ([\d.]+) (?:TB/s|us)", figure.values
        ):
            shown = re.search(rf"{label} ([\d.,]+) ms", figure.values)
            assert shown is not None
            number, each = float(amount), float(rate)
            value, off = (number / each, 0.006 / each) if unit == "GB at" else (number * each / 1e3, number * 0.6e-3)
            assert float(shown[1].replace(",", "")) == pytest.approx(value, rel=ROUNDED, abs=ROUNDED * value + off), (
                figure
            )
            found += 1
    assert found >= 6 or outlook.decode_speed is outlook.speed is None


def test_sources_are_figures_of_the_plan_or_say_whose_they_are(outlook: Outlook) -> None:
    figures = explained_figures(outlook, cost_at(outlook))
    keys = {figure.key for figure in figures}
    for figure in figures:
        named = re.fullmatch(r"(?:[^;]*; )?(.*) of this plan", figure.source)
        if named:
            assert set(named[1].split(", ")) <= keys - {figure.key}, figure
        assert not re.search(r"planner|above|below", figure.source.partition(": ")[0]), figure
