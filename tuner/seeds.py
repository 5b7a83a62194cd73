"""The seeds of a run: one for the search, others for every fresh measurement."""

from __future__ import annotations

_REPLICATES_MAX = 100_000
# Where verifications start: no confirmation of the run has used these.
VERIFY_FROM = 1000


def replicate_seed(run_seed: int, replicate: int) -> int:
    """The seed of a request plan; replicate 0 is the search's own, and no two runs share one."""
    if not 0 <= replicate < _REPLICATES_MAX:
        raise ValueError(f"replicate {replicate} is not within 0 to {_REPLICATES_MAX - 1}")
    return run_seed * _REPLICATES_MAX + replicate
