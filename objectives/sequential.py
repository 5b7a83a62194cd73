"""Sequential test on the share of violating requests: may end a probe early, never certifies.

Mixtures of likelihood ratios, `E = mean over q of (q/p0)^S * ((1-q)/(1-p0))^(n-S)` after n requests
with S violations. By Ville's inequality a stream whose share is on the right side of p0 crosses
1/level with probability `level` at most, however often one looks (Waudby-Smith and Ramdas, 2023).
Bursts of violations break the assumption behind it, so it only saves time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

_FAIL_FACTORS = (1.4, 2.0, 3.0, 5.0, 8.0, 14.0)
_PASS_FACTORS = (0.04, 0.1, 0.2, 0.4, 0.6)
_LARGEST_SHARE = 0.9
_SMALLEST_SHARE = 1e-6


class Evidence(Enum):
    """What the requests so far say about the share of violations."""

    OPEN = "open"
    FAILS = "fails"
    LOOKS_FINE = "looks_fine"


class SequentialTest:
    """Counts requests one by one.

    Args:
        limit_share: share of violations that the promise allows, 0..1.
        level: how often a stream within the promise may be called failing, looked at for ever.
    """

    def __init__(self, limit_share: float, *, level: float = 0.05) -> None:
        self._bound = math.log(1 / level)
        # A promise of no violation at all is judged by the first one, not by a share.
        self._is_any_proof = limit_share <= 0
        share = max(limit_share, _SMALLEST_SHARE)
        self._fail_steps = _log_steps(share, _FAIL_FACTORS)
        self._pass_steps = _log_steps(share, _PASS_FACTORS)
        self.requests = 0
        self.violations = 0

    def add(self, *, is_violation: bool) -> None:
        """Count one request."""
        self.requests += 1
        self.violations += is_violation

    @property
    def evidence(self) -> Evidence:
        """What has been shown by now."""
        if self._is_any_proof and self.violations:
            return Evidence.FAILS
        if self._log_mean(self._fail_steps) >= self._bound:
            return Evidence.FAILS
        if self._log_mean(self._pass_steps) >= self._bound:
            return Evidence.LOOKS_FINE
        return Evidence.OPEN

    def _log_mean(self, steps: Sequence[tuple[float, float]]) -> float:
        """Log of the mean of the likelihood ratios; in logs, because they leave any float."""
        good = self.requests - self.violations
        logs = [self.violations * bad_step + good * good_step for bad_step, good_step in steps]
        top = max(logs)
        return top + math.log(sum(math.exp(value - top) for value in logs) / len(logs))


def _log_steps(share: float, factors: Sequence[float]) -> list[tuple[float, float]]:
    """What a violation and a good request add to the log of each likelihood ratio."""
    alternatives = [min(share * factor, _LARGEST_SHARE) for factor in factors]
    return [(math.log(q / share), math.log((1 - q) / (1 - share))) for q in alternatives]
