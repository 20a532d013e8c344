"""What all tests share: how property tests run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine slows examples down without anything being wrong, and an example that failed elsewhere must run here.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tests")
