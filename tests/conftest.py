"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples each time, on a busy machine as on an idle one. HYPOTHESIS_PROFILE=default looks for new ones.
settings.register_profile(
    "house", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))
