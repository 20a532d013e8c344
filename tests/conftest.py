"""What all tests share: how property tests run, and which tests may run side by side."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine slows examples without anything being wrong, and who sees a failure must be able to run it again.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -n 2 --dist loadgroup`: tests of the cluster share one, those of worker pods would crowd each other, and
    those of a file share its fixtures."""
    shared = ("cluster", "multiproc")
    for item in items:
        group = next((mark for mark in shared if item.get_closest_marker(mark)), item.path.stem)
        item.add_marker(pytest.mark.xdist_group(group))
