"""Manifest in, manifests out: the whole rendering of each example beside its golden file."""

from __future__ import annotations

from pathlib import Path

import pytest
from kimi_operator.cli.manifests import read_and_plan
from kimi_operator.cli.render import to_yaml
from kimi_operator.planner import Plan
from kimi_operator.render import Owner, RenderConfig, RenderInputs, render

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GOLDEN = Path(__file__).parent / "golden"
UID = "5f0c3d1e-8a4b-4f0e-9d3c-1b2a3c4d5e6f"


@pytest.mark.parametrize("example", ["mi300x-2p2d.yaml", "mi325x-2p2d.yaml", "local/2p2d.yaml"])
def test_rendering_equals_the_golden_file(example: str, request: pytest.FixtureRequest) -> None:
    planned = read_and_plan([EXAMPLES / example])
    assert isinstance(planned.plan, Plan)
    owner = Owner(planned.deployment.metadata.name, "serving", UID)
    config = RenderConfig(worker_image="registry.example/kimi-worker:0.1.0", image_pull_secrets=("registry",))
    inputs = RenderInputs(owner, planned.deployment.spec, planned.plan, planned.profile, config)
    text = to_yaml([dict(manifest.body) for manifest in render(inputs).manifests])
    golden = GOLDEN / example.replace("/", "-")
    if request.config.getoption("--update", default=False):
        golden.write_text(text)
    assert text == golden.read_text(), "run `pytest tests/operator/render --update` and read the difference"
