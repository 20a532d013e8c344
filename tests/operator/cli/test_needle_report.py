"""The figures and the verdict of a needle run."""

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_operator.cli.ask import Answer
from kimi_operator.cli.compare import compare
from kimi_operator.cli.haystack import make_run
from kimi_operator.cli.needle import needle, spread
from kimi_operator.cli.report import Level, Row, Run, decoding_at_once, document, print_run
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.pressure import percentile
from rich.console import Console


def answer(text: str = "123456", **changes: object) -> Answer:
    fields: dict[str, object] = {
        "token_ids": [1, 2, 3],
        "logprobs": [-0.1, -0.2, -0.3],
        "prompt_tokens": 300,
        "ttft_s": 0.5,
        "last_s": 0.7,
        "handoff_bytes": 2**21,
        "handoff_s": 0.02,
        **changes,
    }
    return Answer(text=text, **fields)  # type: ignore[arg-type]


def row(said: Answer, **changes: object) -> Row:
    return Row(number=0, num_tokens=300, key="a b", expected="123456", answer=said, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("123456", True),
        (" The key is 123456.", True),
        ("123457", False),
        ("1234567", False),
        ("123456 or 999999", False),
        ("", False),
    ],
)
def test_found_means_the_value_and_no_other(text: str, found: bool) -> None:
    assert row(answer(text)).is_found is found
    assert (row(answer(text)).problem is None) is found


def test_an_answer_that_broke_off_is_not_found() -> None:
    assert not row(answer(error="503: gone")).is_found
    assert row(answer(error="503: gone")).problem == "503: gone"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"logprobs": [-0.1, -0.2, -0.309]}, None),
        ({"logprobs": [-0.1, -0.2, -0.4]}, "differs by 0.1"),
        ({"logprobs": [-0.1, -0.2, math.nan]}, "differs by inf"),
        ({"token_ids": [1, 9, 3]}, "token 1 differs: [9], reference [2]"),
        ({"token_ids": [1, 2], "logprobs": [-0.1, -0.2]}, "token 2 differs: [], reference [3]"),
        ({"logprobs": []}, "0 log-probabilities for 3 tokens"),
    ],
)
def test_answers_are_compared_token_by_token(changes: dict[str, object], reason: str | None) -> None:
    difference = compare(answer(**changes), answer(), bound=0.01)
    assert difference.reason is None if reason is None else reason in str(difference.reason)


def test_a_failed_reference_is_a_difference() -> None:
    assert "the reference failed: 500" in str(compare(answer(), answer(error="500: x"), bound=1.0).reason)


@given(values=st.lists(st.floats(0, 10), max_size=20), share=st.sampled_from([0.5, 0.95, 1.0]))
def test_percentile_matches_its_definition(values: list[float], share: float) -> None:
    result = percentile(sorted(values), share)
    if not values:
        assert result is None
        return
    assert result in values
    assert sum(value <= result for value in values) >= share * len(values)
    assert sum(value < result for value in values) < share * len(values)


@pytest.mark.parametrize(
    ("spans", "mean"),
    [
        ([(1.0, 3.0)], 1.0),
        ([(1.0, 3.0)] * 3, 3.0),
        ([(1.0, 3.0), (5.0, 6.0)], 1.0),
        # 1 s with two, 2 s with one: two seconds of requests see two, two see one
        ([(1.0, 3.0), (2.0, 4.0)], 1.5),
        ([(None, 0.0), (1.0, 3.0)], 1.0),
        ([(1.0, 1.0)], None),
        ([], None),
    ],
)
def test_requests_that_decode_at_once_are_those_whose_first_token_came(
    spans: list[tuple[float | None, float]], mean: float | None
) -> None:
    assert decoding_at_once(answer(ttft_s=began, last_s=ended) for began, ended in spans) == mean


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=12))
def test_each_request_sees_itself_and_what_it_overlaps(spans: list[tuple[int, int]]) -> None:
    whole = [(began, began + length) for began, length in spans]
    seen = sum(max(0, min(b, d) - max(a, c)) for a, b in whole for c, d in whole)
    expected = seen / sum(length for _, length in spans)
    assert decoding_at_once(answer(ttft_s=a, last_s=b) for a, b in whole) == pytest.approx(expected)


def make(*rows: Row) -> Run:
    return Run("http://s", "m", [Level(len(rows), 2.0, list(rows))])


def test_a_run_is_right_only_without_problems() -> None:
    assert make(row(answer()), row(answer())).is_right
    assert not make(row(answer()), row(answer("999999"))).is_right
    wrong = compare(answer(token_ids=[4]), answer(), bound=0.1)
    assert not make(row(answer(), difference=wrong)).is_right


def test_the_document_is_json_with_units_in_its_names() -> None:
    figures = document(make(row(answer()), row(answer(ttft_s=1.5, last_s=1.6))))
    level = json.loads(json.dumps(figures))["levels"][0]
    assert level["found"] == level["asked"] == 2
    assert level["ttft_p50_ms"] == pytest.approx(500)
    assert level["ttft_p95_ms"] == pytest.approx(1500)
    assert level["tpot_p95_ms"] == pytest.approx(100)
    assert level["output_tokens_per_s"] == pytest.approx(3.0)
    assert level["handoff_bytes_mean"] == 2**21
    assert level["handoff_p50_ms"] == pytest.approx(20)


def test_the_table_shows_what_failed() -> None:
    page = io.StringIO()
    run = Run("http://s", "m", [Level(2, 2.0, [row(answer()), row(answer(error="503: [gone]"))])])
    print_run(run, Console(file=page, width=150))
    for text in ("1/2", "500 / 500", "100.0 / 100.0", "2.0 MiB", "20.0 / 20.0", "503: [gone]", "1 of 2 needles found"):
        assert text in page.getvalue()


def test_lengths_are_spread_and_repeat_with_the_seed() -> None:
    lengths = spread(57, 256, 4096, 4, seed=1)
    assert (min(lengths), max(lengths), len(set(lengths))) == (256, 4096, 57)
    assert lengths == spread(57, 256, 4096, 4, seed=1)
    assert lengths != spread(57, 256, 4096, 4, seed=2)
    needles = list(make_run(1, lengths, 4))
    assert len({needle.answer for needle in needles}) == len({needle.key for needle in needles}) == 57


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"concurrency": "1,x"}, "--concurrency"),
        ({"concurrency": "0"}, "--concurrency"),
        ({"min_tokens": 50}, "--min-tokens"),
        ({"min_tokens": 500, "max_tokens": 400}, "--max-tokens"),
        ({"needles": 0}, "--needles"),
        ({"needles": 65}, "--needles"),
        ({"concurrency": "4000,97"}, "together at most 4,096"),
        ({"max_tokens": 2**20 + 1}, "--max-tokens"),
        ({"timeout_s": math.nan}, "--timeout-s"),
        ({"timeout_s": 0.0}, "--timeout-s"),
        ({"logprob_bound": math.nan}, "--logprob-bound"),
        ({"logprob_bound": -0.1}, "--logprob-bound"),
        ({"url": ""}, "--url"),
        ({"url": "127.0.0.1:8000"}, "--url"),
        ({"url": "ftp://service"}, "--url"),
        ({"url": "http://service:99999"}, "--url"),
        ({"url": "http://[::1"}, "--url"),
        ({"reference_url": "service"}, "--reference-url"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        needle(**{"url": "http://127.0.0.1:1", **options})  # type: ignore[arg-type]
