"""Published figures of Kimi-K3 against what the planner computes, row by row of the file that ships with it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import published_settings
from kimi_operator.planner.budget import Captures
from kimi_operator.planner.case import Limit
from kimi_operator.planner.figures import Computed, Figure, Kind, Verdict, judge, read_figures
from kimi_operator.planner.fit import Use
from kimi_operator.planner.published import COMPUTATIONS, Given, compute
from kimi_operator.planner.published_settings import SETTINGS
from kimi_operator.planner.roofline import DecodeLoad
from kimi_operator.profiles import architecture
from kimi_operator.profiles.figures import published_figures
from kimi_operator.profiles.measurements import built_in_measurements
from msgspec.structs import replace

FIGURES = published_figures()
MEASURED = built_in_measurements()
GIVEN = Given(architecture("kimi-k3"), MEASURED.samples, {note.name: note.explained for note in MEASURED.notes})
SPEEDS = ("decode_tpot_ms", "throughput")
"""Sections whose models stand in the measured points."""


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.path)
def test_published_figure_is_met(figure: Figure) -> None:
    row = judge(figure, compute(figure.path, GIVEN))
    assert row.computed is not None, f"{figure.path} has no computation in planner/published.py"
    assert row.is_right, f"computed {row.computed.value}, published {figure.published} ({figure.kind})"
    assert row.computed.how
    assert (figure.kind is Kind.NOTE) == bool(row.computed.reason)
    assert (row.verdict is Verdict.FITTED) == figure.name.startswith("fit_")


def test_every_computation_has_its_row() -> None:
    assert set(COMPUTATIONS) == {figure.path for figure in FIGURES}


SIZES_OF_K3 = re.compile(
    r"\b(896|56 experts|(92|69|24) (layers|of)|96 heads|48 heads|3 x 12,288|3,256,320|5,760|79,626,240|13,824"
    r"|449,372,160|(50|100|163|251|502) blocks|(59|177) a request|40 would|125 would)\b"
)


@pytest.mark.parametrize("path", [p for p in COMPUTATIONS if p.split(".")[0] not in ("settings", *SPEEDS)])
def test_the_arithmetic_that_is_told_is_that_of_the_model(path: str) -> None:
    """A text with the sizes of another model would explain a value that was computed from other numbers."""
    tiny = compute(path, replace(GIVEN, architecture=architecture("kimi-k3-tiny")))
    assert tiny is not None
    assert not SIZES_OF_K3.search(tiny.how), tiny.how
    assert not SIZES_OF_K3.search(tiny.reason), tiny.reason


def test_the_arithmetic_of_the_published_model() -> None:
    texts = " ".join(found.how for path in COMPUTATIONS if (found := compute(path, GIVEN)))
    for part in (
        "896 experts / 16 ranks",
        "56 experts x 92 layers at 4.25 bits a weight",
        "69 layers x (96 x 128 x 128 x 4 B + 3 x 3 x 12,288 x 2 B)",
        "3,256,320 B of state a layer / 576 B a row, up to 128 tokens",
        "502 blocks / 177 a request x 1,000,000",
        "(174 + 3) blocks x 79,626,240 B / 2^30",
        "50 blocks / (1 + 3) a request, x 8 lanes",
        "(163 blocks - 3) x 5,760 tokens",
        "8 running x 8 lanes; 40 would fit a lane",
        "1 + 8 + 16 + 32 questions",
    ):
        assert part in texts


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_comes_out_for_its_contexts_and_no_others(name: str) -> None:
    setting, a = SETTINGS[name], GIVEN.architecture
    first, last = setting.contexts(a)
    assert last == setting.tokens, "the longest is the one that is chosen"
    found = [replace(setting, tokens=tokens).solution(a).max_num_seqs for tokens in (first - 1, first, last, last + 1)]
    assert found[0] > setting.max_num_seqs > found[3]
    assert found[1:3] == [setting.max_num_seqs] * 2


def test_the_published_cause_of_8_is_solved_for_beside_the_chosen_case() -> None:
    """11 captured sizes left 1.29e9 B on MI300X, which was too little: graphs, not pages, bound short requests."""
    setting, a = SETTINGS["mi300x_max_num_seqs_13e9"], GIVEN.architecture
    found = {tokens: setting.with_published_graphs(a, tokens) for tokens in (2176, 20_000, 97_920)}
    assert [solution.max_num_seqs for solution in found.values()] == [24, 16, 8]
    assert [solution.binds for solution in found.values()] == [Limit.GRAPHS, Limit.PAGES, Limit.PAGES]
    sizes, each = Captures(1).sizes(32), (setting.free - setting.pool_bytes - 1_290_000_000) // 11
    assert len(sizes) == 11
    how = setting.how(a)
    assert f"11 captured sizes of 32 requests left 1,290,000,000 B: {each:,} B each without activations" in how
    assert "24 of 2,176 tokens, graph captures bind; 16 of 20,000 tokens, pages bind; 8 of 97,920 tokens, pages" in how
    for other in ("mi325x_max_num_seqs_40e9", "mi325x_max_num_seqs_40e9_at_floor"):
        assert "captured sizes of" not in SETTINGS[other].how(a)


@pytest.mark.parametrize("graphs", [25, 50, 1000])
def test_the_bytes_of_a_graph_that_are_chosen_do_not_decide(monkeypatch: pytest.MonkeyPatch, graphs: int) -> None:
    monkeypatch.setattr(published_settings, "GRAPHS_IN_REST", graphs)
    solutions = {setting.max_num_seqs: setting.solution(GIVEN.architecture) for setting in SETTINGS.values()}
    assert all(solution.max_num_seqs == seqs for seqs, solution in solutions.items())
    assert {solution.binds for solution in solutions.values()} == {Limit.PAGES}


def test_measured_points_are_the_published_ones_and_only_rows_that_say_so_are_fitted() -> None:
    """Times stand in two files: what is fitted on and what is checked against must not come apart."""
    rows = {figure.name: figure.published for figure in FIGURES if figure.section == "decode_tpot_ms"}
    points = {sample.name: sample for sample in MEASURED.samples if isinstance(sample.load, DecodeLoad)}
    assert {name: pytest.approx(points[name].measured_s * 1e3) for name in rows} == rows
    assert all(points[name].use is Use.HELD_OUT for name in points.keys() - rows.keys())
    assert {name for name in rows if name.startswith("fit_")} == {
        name for name, point in points.items() if point.use is Use.FITTED
    }
    notes = {figure.name: figure.published for figure in FIGURES if figure.section == "throughput"}
    assert notes == {note.name: note.published for note in MEASURED.notes}


def figure(published: float | str, kind: Kind, tolerance: float | None = None) -> Figure:
    return Figure("section", "name", published, kind, tolerance)


@pytest.mark.parametrize(
    ("row", "computed", "verdict"),
    [
        (figure(13_824, Kind.EXACT), 13_824, Verdict.MET),
        (figure(13_824, Kind.EXACT), 13_825, Verdict.MISSED),
        (figure(84.2, Kind.EXACT), 84.249, Verdict.MET),
        (figure(84.2, Kind.EXACT), 84.26, Verdict.MISSED),
        (figure("57/57", Kind.EXACT), "56/57", Verdict.MISSED),
        (figure(100.0, Kind.WITHIN, 0.01), 99.1, Verdict.MET),
        (figure(100.0, Kind.WITHIN, 0.01), 101.1, Verdict.MISSED),
        (figure(100.0, Kind.WITHIN, 0.01), 98.9, Verdict.MISSED),
        (figure(100, Kind.NOTE), 7, Verdict.MISSED),
        (figure(8, Kind.CHOSEN), 8, Verdict.CHOSEN),
        (figure(8, Kind.CHOSEN), 9, Verdict.MISSED),
        (figure("57/57", Kind.DEFINITION), "57/57", Verdict.DEFINITION),
        (figure("57/57", Kind.DEFINITION), "56/57", Verdict.MISSED),
    ],
)
def test_verdict(row: Figure, computed: float | str, verdict: Verdict) -> None:
    assert judge(row, Computed(computed, "how")).verdict is verdict


@pytest.mark.parametrize("computed", [6.98, 7.02])
def test_a_note_whose_value_moved_is_a_miss(computed: float) -> None:
    """Its reason was written for another value."""
    assert judge(figure(100, Kind.NOTE), Computed(computed, "how", "other units", recorded=7)).verdict is Verdict.MISSED
    assert judge(figure(100, Kind.NOTE), Computed(computed, "how", "other units")).verdict is Verdict.MISSED


CACHE_NOTES = [row for row in FIGURES if row.section == "cache" and row.kind is Kind.NOTE]


@pytest.mark.parametrize("row", CACHE_NOTES, ids=lambda row: row.name)
def test_a_note_of_another_model_is_a_miss(row: Figure) -> None:
    """Only a verdict that depends on the value says anything about the planner."""
    a = replace(
        GIVEN.architecture, kv_lora=GIVEN.architecture.kv_lora // 2, kda_heads=GIVEN.architecture.kda_heads // 2
    )
    assert judge(row, compute(row.path, replace(GIVEN, architecture=a))).verdict is Verdict.MISSED


def test_a_row_met_by_a_factor_fitted_on_it_is_told_apart_and_can_still_miss() -> None:
    row = figure(100.0, Kind.WITHIN, 0.01)
    assert judge(row, Computed(100.0, "how", is_fitted=True)).verdict is Verdict.FITTED
    assert judge(row, Computed(102.0, "how", is_fitted=True)).verdict is Verdict.MISSED


def test_a_note_says_why_and_a_row_without_computation_is_not_right() -> None:
    note = judge(figure(100, Kind.NOTE), Computed(7, "how", "other units", recorded=7))
    assert (note.verdict, note.is_right) == (Verdict.NOTE, True)
    bare = judge(figure(100, Kind.NOTE), None)
    assert (bare.verdict, bare.is_right) == (Verdict.NOT_COMPUTED, False)


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (None, "figures"),
        ({"cache": {}}, "cache"),
        ({"cache": {"row": 7}}, "cache.row"),
        ({"cache": {"row": {"published": 7, "kind": "about"}}}, "cache.row.kind"),
        ({"cache": {"row": {"published": None, "kind": "exact"}}}, "cache.row.published"),
        ({"cache": {"row": {"published": float("nan"), "kind": "exact"}}}, "cache.row.published"),
        ({"cache": {"row": {"published": 7, "kind": "within"}}}, "cache.row.tol"),
        ({"cache": {"row": {"published": 7, "kind": "within", "tol": 5}}}, "cache.row.tol"),
        ({"cache": {"row": {"published": 7, "kind": "exact", "tol": 0.1}}}, "cache.row.tol"),
        ({"cache": {"row": {"published": 7, "kind": "exact", "tolerance": 0.1}}}, "cache.row"),
    ],
)
def test_a_broken_row_is_named(document: Any, names: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        read_figures(document)
    (problem,) = error.value.problems
    assert problem.field == names
