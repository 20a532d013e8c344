"""What all tests share: how property tests run, and which tests may run side by side."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A loaded machine slows examples without anything being wrong, and who sees a failure must be able to run it again.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tests")

# A shell that starts tests in the background has them ignore Ctrl-C, and their child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER = ("tests/cluster/", "tests/multiproc/")
"""One worker of `pytest -n` each: the first share one cluster, the others would crowd each other."""


class ByFile(LoadScopeScheduling):
    """Hands out files, whose tests share fixtures, and the folders of TOGETHER, in the order of names."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)
