"""Sequential test on the share of violating requests: may end a probe early, never certifies.

Mixtures of bets, `E = mean over q of prod (1 + b_q * w * (x - p0))`, where x is the share of a
request that violates, w its weight, and `b_q = (q - p0) / (p0 * (1 - p0))`. With whole requests (x
is 0 or 1, w = 1) these are likelihood ratios, `(q/p0)^S * ((1-q)/(1-p0))^(n-S)` after n requests
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
        fine_level: how often one beyond it may be called fine; None for the same.
    """

    def __init__(
        self, limit_share: float, *, level: float = 0.05, fine_level: float | None = None
    ) -> None:
        self._fail_bound = math.log(1 / level)
        self._fine_bound = math.log(1 / (fine_level or level))
        # A promise of no violation at all is judged by the first one, not by a share.
        self._is_any_proof = limit_share <= 0
        self._share = min(max(limit_share, _SMALLEST_SHARE), 1 - _SMALLEST_SHARE)
        self._fail_bets = _bets(self._share, _FAIL_FACTORS)
        self._pass_bets = _bets(self._share, _PASS_FACTORS)
        self._fail_logs = [0.0] * len(_FAIL_FACTORS)
        self._pass_logs = [0.0] * len(_PASS_FACTORS)
        self.requests = 0
        self.violations = 0.0

    def add(self, violation: float, *, weight: float = 1.0) -> None:
        """Count one request.

        Args:
            violation: 1 for a request that violates, 0 for one that does not, else the share of it.
            weight: of the request, at most 1, where a share is one of all requests' parts.
        """
        self.requests += 1
        self.violations += violation
        gain = weight * (violation - self._share)
        for bets, logs in ((self._fail_bets, self._fail_logs), (self._pass_bets, self._pass_logs)):
            for place, bet in enumerate(bets):
                logs[place] += math.log1p(bet * gain)

    @property
    def evidence(self) -> Evidence:
        """What has been shown by now."""
        if self._is_any_proof and self.violations:
            return Evidence.FAILS
        if _log_mean(self._fail_logs) >= self._fail_bound:
            return Evidence.FAILS
        if _log_mean(self._pass_logs) >= self._fine_bound:
            return Evidence.LOOKS_FINE
        return Evidence.OPEN


def _log_mean(logs: Sequence[float]) -> float:
    """Log of the mean of the products; in logs, because they leave any float."""
    top = max(logs)
    return top + math.log(sum(math.exp(value - top) for value in logs) / len(logs))


def _bets(share: float, factors: Sequence[float]) -> list[float]:
    alternatives = [min(share * factor, max(share, _LARGEST_SHARE)) for factor in factors]
    return [(q - share) / (share * (1 - share)) for q in alternatives]
