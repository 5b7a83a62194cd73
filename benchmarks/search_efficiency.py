"""How soon a search finds a setting within 5 % of the best, in engine seconds.

    .venv/bin/python benchmarks/search_efficiency.py [STRATEGY ...] [--seeds N] [--gp-seeds N]
        [--certify N] [--traffic KIND ...] [--memory] [--results FILE]

Simulated engines with known truth: two GPUs, four kinds of traffic, 36 settings each, or with
`--memory` spaces of which half does not start (`search_worlds.py`). Ours runs whole sessions in
virtual time; the simulator that guides it is learned from the run, or made wrong on purpose; peers
restart the engine for every trial (`search_strategies.py`). A strategy is *within 5 %* from the
trial on from which its best setting truly carries at least 95 % of what the best one of the space
does. With `--results` a study can be made in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

from search_strategies import ABLATIONS, OURS, PEERS, Strategy, Trace, ours
from search_worlds import MEMORY_WORLDS, WORKLOADS, WORLDS, World, regret, true_tokens, world_slo

from objectives import percentile
from search_spaces import fingerprint

_NEAR = 0.05
_TPE, _GRID, _OURS, _NO_PRIOR = "TPE, restarts", "whole grid, restarts", "ours", "prior off"
_GP = "GP, restarts"
# No seed makes a difference to these.
_ONCE = ("simulator only, coefficients high", "simulator only, coefficients low")
_REVERSED = ("carried over, reversed", "never learns, reversed")


@dataclass(frozen=True, slots=True)
class Found:
    """One search, judged by the truth.

    Attributes:
        near_s: engine seconds until the best setting was within 5 % for good; infinite if never.
        total_s: of the whole search.
        regret: of its last best setting.
        failed_share: of its trials, those whose engine did not start or did not stay up.
        is_dropped: whether the simulator's guidance was dropped.
    """

    near_s: float
    total_s: float
    regret: float
    failed_share: float
    is_dropped: bool


def judged(world: World, trace: Trace) -> Found:
    """A trace against the truth."""
    regrets = [regret(world, step.best) for step in trace.steps]
    near_s = math.inf
    for step, value in zip(reversed(trace.steps), reversed(regrets), strict=True):
        if value > _NEAR:
            break
        near_s = step.engine_s
    return Found(
        near_s, trace.steps[-1].engine_s, regrets[-1], trace.failed_share, trace.is_dropped
    )


@dataclass(frozen=True, slots=True)
class Searches:
    """Some searches of one strategy on one world.

    Attributes:
        world: to search.
        strategy: by its name.
        seeds: one a search.
    """

    world: World
    strategy: str
    seeds: tuple[int, ...]

    def run(self) -> list[Found]:
        """All of them."""
        every: Mapping[str, Strategy] = {**OURS, **ABLATIONS, **PEERS}
        return [judged(self.world, every[self.strategy](self.world, s)) for s in self.seeds]


class Results:
    """What was found so far, in a file of one line a search, so that a study can go on later.

    Args:
        path: of the file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[tuple[str, str, int], Found] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for row in map(json.loads, lines):
            key = row.pop("world"), row.pop("strategy"), row.pop("seed")
            near_s = row.pop("near_s")
            self._found[key] = Found(math.inf if near_s is None else near_s, **row)

    def missing(self, searches: Searches) -> Searches:
        """Those of which nothing is known yet."""
        world, strategy = searches.world.name, searches.strategy
        seeds = (s for s in searches.seeds if (world, strategy, s) not in self._found)
        return replace(searches, seeds=tuple(seeds))

    def add(self, searches: Searches, found: Sequence[Found]) -> None:
        """Keep what they found."""
        world, strategy = searches.world.name, searches.strategy
        for seed, each in zip(searches.seeds, found, strict=True):
            self._found[world, strategy, seed] = each
            near_s = None if each.near_s == math.inf else each.near_s
            row = {"world": world, "strategy": strategy, "seed": seed, **asdict(each)}
            if self._path is not None:
                with self._path.open("a") as lines:
                    lines.write(json.dumps({**row, "near_s": near_s}) + "\n")

    def of(self, searches: Searches) -> list[Found]:
        """What searches found that have all been run."""
        return [self._found[searches.world.name, searches.strategy, s] for s in searches.seeds]


def run_all(wanted: Sequence[Searches], results: Results) -> None:
    """Run what is missing, a world and strategy at a time on each core."""
    jobs = [job for searches in wanted if (job := results.missing(searches)).seeds]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(Searches.run, job): job for job in jobs}
        for count, done in enumerate(as_completed(running), start=1):
            job, found = running[done], done.result()
            results.add(job, found)
            near = sum(f.near_s < math.inf for f in found)
            print(
                f"{count}/{len(jobs)} {job.world.name}: {job.strategy}: "
                f"{near} of {len(found)} within 5 %",
                file=sys.stderr,
                flush=True,
            )


def print_tables(results: Mapping[World, Mapping[str, list[Found]]]) -> None:
    """A line a strategy, over all worlds; then the targets."""
    names = list(next(iter(results.values())))
    print(
        f"{'strategy':<38}{'searches':>9}{'within 5 %':>11}{'engine s':>9}{'/ TPE':>7}"
        f"{'/ grid':>8}{'regret':>8}{'p90':>7}{'failed':>8}{'dropped':>9}"
    )
    for name in names:
        found = [f for world in results.values() for f in world[name]]
        near = sum(f.near_s < math.inf for f in found) / len(found)
        regrets = [f.regret for f in found]
        print(
            f"{name:<38}{len(found):>9}{near:>11.0%}{_seconds(_median_s(found)):>9}"
            f"{_ratio(results, name, _TPE):>7}{_ratio(results, name, _GRID):>8}"
            f"{median(regrets):>8.1%}{percentile(regrets, 90):>7.1%}"
            f"{mean(f.failed_share for f in found):>8.0%}"
            f"{sum(f.is_dropped for f in found):>9}"
        )
    print()
    for world, by_name in results.items():
        cells = (f"{_seconds(_median_s(by_name[name])):>8}" for name in names)
        print(f"{world.name:<20}{world_slo(world):<36}{''.join(cells)}")
    for name in set(_REVERSED) & set(names):
        print(f"\n{name} / without a prior: {_ratio(results, name, _NO_PRIOR)}")


def _median_s(found: Sequence[Found]) -> float:
    """Median engine seconds to within 5 %; infinite where fewer than half get there."""
    return median(f.near_s for f in found)


def _ratio(results: Mapping[World, Mapping[str, list[Found]]], name: str, other: str) -> str:
    """Median over the worlds of the ratio of median engine seconds."""
    if any(other not in world or name not in world for world in results.values()):
        return "-"
    ratios = []
    for world in results.values():
        mine, theirs = _median_s(world[name]), _median_s(world[other])
        if other == _GRID:
            # What is best is known when all was measured.
            theirs = median(f.total_s for f in world[other])
        if not mine == theirs == math.inf:
            ratios.append(mine / theirs)
    return f"{median(ratios):.2f}" if ratios else "-"


def _seconds(value: float) -> str:
    return "never" if value == math.inf else f"{value:.0f}"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a whole run certified.

    Attributes:
        verdict: of the run.
        regret: of the recommended setting; None where there is none.
        excess: its published tokens/s over what it truly carries, less 1.
    """

    verdict: str
    regret: float | None = None
    excess: float | None = None


def print_certified(worlds: Sequence[World], runs: int) -> None:
    """Whole runs: what is certified, against the truth."""
    print("\nwhole runs, certified: verdict, true tokens/s of the recommended setting / the best")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = [(world, seed) for world in worlds for seed in range(runs)]
        claims = list(pool.map(_claim, *zip(*jobs, strict=True)))
    regrets = [c.regret for c in claims if c.regret is not None]
    excesses = [c.excess for c in claims if c.excess is not None]
    counts = Counter(c.verdict for c in claims)
    print(f"  {len(claims)} runs: " + ", ".join(f"{n} {v}" for v, n in sorted(counts.items())))
    if not regrets:
        return
    print(f"  regret: median {median(regrets):.1%}, p90 {percentile(regrets, 90):.1%}")
    print(f"  within 5 %: {sum(v <= _NEAR for v in regrets)} of {len(regrets)}")
    print(f"  published / true tokens/s: median {1 + median(excesses):.2f}")
    print(f"  more than 5 % over the truth: {sum(v > _NEAR for v in excesses)} of {len(excesses)}")


def _claim(world: World, seed: int) -> Claim:
    confirm = {"replicates": 5, "requests": 600}
    document = ours(world, seed, certify=True, confirm=confirm).document
    assert document is not None
    best = document["recommendations"]["throughput_first"]
    if best is None:
        return Claim(document["verdict"])
    true = true_tokens(world)[fingerprint(best["settings"])]
    excess = best["metrics"]["output_tokens_per_s"] / true - 1 if true else math.inf
    return Claim(document["verdict"], regret(world, best["settings"]), excess)


def main() -> None:
    """Run what is asked for."""
    every = {**OURS, **ABLATIONS, **PEERS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategies", nargs="*", help="; ".join(every).replace("%", "%%"))
    parser.add_argument("--seeds", type=int, default=30, help="searches a world and strategy (30)")
    parser.add_argument("--gp-seeds", type=int, default=3, help="of the slow GP sampler (3)")
    parser.add_argument("--results", type=Path, help="file to keep them in, and to go on from")
    parser.add_argument("--traffic", nargs="*", choices=WORKLOADS, help="kinds of it (all)")
    parser.add_argument(
        "--memory", action="store_true", help="worlds where many settings do not start, instead"
    )
    parser.add_argument("--certify", type=int, default=0, help="whole runs a world (none)")
    asked = parser.parse_args()
    unknown = set(asked.strategies) - set(every)
    if unknown:
        parser.error(f"no strategy {', '.join(sorted(unknown))}; there are: {'; '.join(every)}")
    every_world = MEMORY_WORLDS if asked.memory else WORLDS
    worlds = [w for w in every_world if asked.traffic is None or w.traffic in asked.traffic]
    started_s = time.monotonic()
    counts = {_GP: asked.gp_seeds, **dict.fromkeys(_ONCE, 1)}
    wanted = [
        Searches(world, name, tuple(range(counts.get(name, asked.seeds))))
        for world in worlds
        for name in asked.strategies or every
    ]
    known = Results(asked.results)
    run_all(wanted, known)
    results: dict[World, dict[str, list[Found]]] = {world: {} for world in worlds}
    for searches in wanted:
        results[searches.world][searches.strategy] = known.of(searches)
    print_tables(results)
    if asked.certify:
        print_certified(worlds, asked.certify)
    best = ", ".join(f"{w.name} {max(true_tokens(w).values()):.0f}" for w in worlds[:2])
    print(f"\nbest tokens/s: {best}, ...")
    print(f"({os.cpu_count()} cores, {time.monotonic() - started_s:.0f} s)")


if __name__ == "__main__":
    main()
