"""What all tests share: how property tests run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine slows examples without anything being wrong, and who sees a failure must be able to run it again.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tests")
