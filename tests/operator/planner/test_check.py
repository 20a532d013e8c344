"""`kimictl plan --check` as a user runs it."""

from __future__ import annotations

import json

import pytest
from kimi_operator.cli import check as check_module
from kimi_operator.cli import main
from kimi_operator.planner.figures import Figure, Kind
from kimi_operator.profiles.figures import published_figures


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_every_row_is_shown_with_both_values_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--check")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    for figure in published_figures():
        assert figure.name in rows
    assert rows["pool_tokens_40e9_max_len_1e6"].split()[1:5] == ["2,836,158", "2,836,158", "exact", "met"]
    assert rows["weights_gib_per_gpu_measured_int4"].split()[1:8] == [
        "148.6",
        "148.192",
        "0.5",
        "%",
        "met",
        "-0.27",
        "%",
    ]
    note = out.splitlines()[out.splitlines().index(rows["mib_per_1024_token_request"]) + 1]
    assert note.startswith("    why: printed is 14,098 B x 1,024")
    assert out.endswith(f"{len(published_figures())} rows: 47 met, 4 known not to reconcile\n")


def test_json_holds_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--check", "-o", "json")
    document = json.loads(out)
    assert (status, document["ok"]) == (0, True)
    assert [f"{row['section']}.{row['name']}" for row in document["rows"]] == [f.path for f in published_figures()]
    caps = next(row for row in document["rows"] if row["name"] == "short_request_cap_mi300x_4e9_8_lanes")
    assert (caps["published"], caps["computed"], caps["verdict"], caps["deviation"]) == (96, 96, "met", 0.0)
    assert {row["verdict"] for row in document["rows"]} == {"met", "known not to reconcile"}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (Figure("cache", "mla_bytes_per_token_fp8", 13_825, Kind.EXACT), "13,825 13,824 exact MISSED"),
        (Figure("cache", "kda_state_mib_per_rank_tp2", 215.0, Kind.WITHIN, 0.001), "215 214.277 0.1 % MISSED -0.34 %"),
        (Figure("cache", "a_new_row", 7, Kind.EXACT), "7 - exact not computed"),
    ],
)
@pytest.mark.parametrize("output", ["text", "json"])
def test_a_missed_row_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, row: Figure, shown: str, output: str
) -> None:
    monkeypatch.setattr(check_module, "published_figures", lambda: (row,))
    status, out, _ = run(capsys, "--check", "-o", output)
    assert status == 1
    if output == "json":
        assert json.loads(out)["ok"] is False
    else:
        assert shown in " ".join(out.split())


def test_without_a_file_and_without_check_the_way_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert status != 0
    assert out == ""
    assert err.startswith("kimictl: --file: got nothing, expected a manifest")
    assert "--check; name one with -f" in err
