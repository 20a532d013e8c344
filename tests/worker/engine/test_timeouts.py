"""Time limits of a worker must agree with each other; those of the default settings do."""

from pathlib import Path
from typing import Any

import pytest
from kimi_worker.engine.connections import HEARTBEAT_S, SILENCE_S
from kimi_worker.settings import HandoffSettings, TimeoutSettings, WorkerSettings
from pydantic import ValidationError


def settings(role: str, **changes: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "deployment": "test",
            "role": role,
            "model": {"checkpoint": Path("/nowhere"), "served_name": "tiny", "max_model_len": 64},
            "limits": {"max_num_seqs": 1, "num_pages": 1, "num_state_slots": 1},
            **changes,
        }
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_that_may_outlast_the_writes_is_refused(role: str) -> None:
    with pytest.raises(ValidationError, match=r"write_timeout_s 120 is not above timeouts\.collective_s 1800"):
        settings(role, timeouts={"collective_s": 1800.0})
    settings(role, timeouts={"collective_s": 1800.0}, handoff={"write_timeout_s": 1860.0})


def test_a_role_without_handoff_may_have_long_steps() -> None:
    settings("both", timeouts={"collective_s": 1800.0})


def test_defaults_agree() -> None:
    assert HandoffSettings().write_timeout_s > TimeoutSettings().collective_s
    assert HandoffSettings().reservation_timeout_s > HandoffSettings().silence_s
    assert SILENCE_S > 3 * HEARTBEAT_S
