"""The seeds of a run: one for the search, others for every fresh measurement."""

from __future__ import annotations

_REPLICATES_MAX = 100_000
# Verifications use what comes after this one; no confirmation of a run reaches it.
BEFORE_VERIFY = 999
# Nor does one reach these.
_PROMOTIONS = 90_000


def replicate_seed(run_seed: int, replicate: int) -> int:
    """The seed of a request plan; replicate 0 is the search's own, and no two runs share one."""
    if not 0 <= replicate < _REPLICATES_MAX:
        raise ValueError(f"replicate {replicate} is not within 0 to {_REPLICATES_MAX - 1}")
    return run_seed * _REPLICATES_MAX + replicate


def promotion_seeds(run_seed: int, count: int) -> tuple[int, ...]:
    """Further seeds of the search, for a setting that would become its best."""
    return tuple(replicate_seed(run_seed, _PROMOTIONS + index) for index in range(count))


def start_seeds(
    run_seed: int, *, start: int, starts: int, replicates: int, after: int = 0
) -> list[int]:
    """The seeds that one of several cold starts measures; together they share out all replicates.

    Args:
        run_seed: of the run.
        start: which one, from 1.
        starts: how many there are.
        replicates: how many seeds in all.
        after: the replicates that were used before.
    """
    return [
        replicate_seed(run_seed, after + replicate)
        for replicate in range(start, replicates + 1, starts)
    ]
