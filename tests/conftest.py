"""What every test shares: no deadline that a busy machine could miss, no config of the folder."""

from __future__ import annotations

import hypothesis

# Cores drift by a factor of two here: an example that is slow once says nothing about the code.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")
