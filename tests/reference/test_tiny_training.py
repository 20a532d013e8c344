"""The training script runs, and a run that was ended goes on as if it had not been."""

import json
from pathlib import Path

import pytest
import torch
import train
from tiny_k3.data import Mixture
from torch.testing import assert_close


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two short conversations, of both kinds of mixture, the second with rounded experts; all are logged."""
    mixtures = (Mixture(64, 2, 2, 0, digits=1), Mixture(96, 2, 1, 1))
    monkeypatch.setattr(train, "PHASES", (train.Phase(0, mixtures, 192),))
    monkeypatch.setattr(train, "ROUNDING_FIRST_STEP", 1)
    monkeypatch.setattr(train, "LOG_EVERY", 1)


def lines(folder: Path) -> list[dict[str, float]]:
    """The log without the time that its steps took."""
    read = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "at_s"} for line in read]


def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    whole = train.train(tmp_path / "whole", num_steps=2, seed=1)
    train.train(tmp_path / "halves", num_steps=1, seed=1)
    resumed = train.train(tmp_path / "halves", num_steps=2, seed=1)

    assert lines(tmp_path / "halves") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "whole")] == [1, 2]
    for name, value in whole.state_dict().items():
        assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)
    saved = [torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("whole", "halves")]
    assert saved[0]["step"] == saved[1]["step"] == 2
    assert_close(saved[1]["optimizer"]["state"], saved[0]["optimizer"]["state"], rtol=0, atol=0)


def test_training_moves_every_weight_that_it_should(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = {name: value.clone() for name, value in train.TinyK3(train.Sizes()).state_dict().items()}
    after = train.train(tmp_path, num_steps=2, seed=1).state_dict()
    still = {name for name, value in after.items() if torch.equal(value, before[name])}
    trained = ("_proj.weight", "norm.weight", "A_log", "dt_bias", "w1", "w2", "w3")
    # before the first layer there is nothing to mix, so the released format has two weights that nothing uses
    unused = {f"model.layers.0.self_attention_res_{name}.weight" for name in ("proj", "norm")}
    assert {name for name in still if name.endswith(trained)} == unused
