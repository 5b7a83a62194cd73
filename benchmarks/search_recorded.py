"""Searches on measurements of real engines: a recorded grid of ours, and public tables.

    .venv/bin/python benchmarks/search_recorded.py [--tables FOLDER]

First the grid that `prediction_record.py` measured twice on real vLLM: twelve settings at 12
concurrent, and promises of p95 TPOT from tight to loose. Counted are the settings that have to be
measured until one of them is within 5 % of the best: in the order of the simulator, which knows
three short probes, and in random ones.

Then, where the folder is there, the P-PAS table (vLLM 0.22.1, token budgets, five seeds each; not
part of this project): the budget with the lowest p95 TTFT within a p95 TPOT limit, chosen on the
first seeds and judged on those left.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

from prediction import RECORDING, ComparedCell, calibration_of, compare, read_recording

_CELLS_AT = ("concurrency", 12.0)
_NEAR = 0.05
_SHUFFLES = 400
_QUANTILES = (0.25, 0.4, 0.6, 0.8)
_TABLE = "ppas_vllm_0.22.1_mbt_runs.csv"
_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings of one promise, as predicted and as measured (the mean of two).

    Attributes:
        predicted: tokens/s, by setting; 0 where the promise is predicted to be broken.
        measured: likewise.
    """

    predicted: Sequence[float]
    measured: Sequence[float]

    def trials_to_near(self, order: Iterable[int]) -> int:
        """Settings measured until one of them is within 5 % of the best."""
        enough = (1 - _NEAR) * max(self.measured)
        return next(n for n, i in enumerate(order, start=1) if self.measured[i] >= enough)


def recorded_grids(cells: Sequence[ComparedCell]) -> list[tuple[float, Grid]]:
    """A grid for each promise of p95 TPOT, in ms."""
    at = [c for c in cells if c.name[2:] == _CELLS_AT]
    paces = sorted(mean(m["p95_tpot_ms"] for m in c.measured) for c in at)
    limits = [paces[round(q * (len(paces) - 1))] * 1.05 for q in _QUANTILES]
    return [(limit, _grid(at, limit)) for limit in limits]


def _grid(cells: Sequence[ComparedCell], limit_ms: float) -> Grid:
    def kept(values: Mapping[str, float]) -> float:
        return values["output_tokens_per_s"] if values["p95_tpot_ms"] <= limit_ms else 0.0

    both = [{name: mean(m[name] for m in c.measured) for name in c.predicted} for c in cells]
    return Grid(
        [kept(c.predicted) for c in cells],
        [kept(values) for values in both],
    )


def by_prediction(grid: Grid) -> list[int]:
    """Settings in the order of their predicted tokens/s within the promise."""
    return sorted(range(len(grid.predicted)), key=lambda i: -grid.predicted[i])


def print_recorded() -> None:
    """The recorded grid."""
    recording = read_recording(RECORDING)
    grids = recorded_grids(compare(recording, calibration_of(recording)))
    count = len(grids[0][1].measured)
    print(f"real vLLM, {count} settings at {_CELLS_AT[1]:g} concurrent: settings measured until")
    print("one of them is within 5 % of the best")
    print(f"{'p95 TPOT':>10}{'keep it':>9}{'simulator first':>17}{'random (median, p90)':>22}")
    rng = random.Random(1)
    for limit_ms, grid in grids:
        orders = [rng.sample(range(count), count) for _ in range(_SHUFFLES)]
        by_chance = sorted(grid.trials_to_near(order) for order in orders)
        kept = sum(value > 0 for value in grid.measured)
        print(
            f"{limit_ms:>7.0f} ms{kept:>9}{grid.trials_to_near(by_prediction(grid)):>17}"
            f"{median(by_chance):>13.0f}{by_chance[int(0.9 * _SHUFFLES)]:>9.0f}"
        )


Cell = dict[int, tuple[float, float]]


def read_table(path: Path) -> dict[tuple[str, str], dict[str, Cell]]:
    """By GPU, model and phases: for each static budget and seed p95 TTFT and p95 TPOT in s."""
    found: dict[tuple[str, str], dict[str, Cell]] = defaultdict(lambda: defaultdict(dict))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["config_name"].startswith("mbt_"):
                world = (row["source"], row["phase_schedule"])
                values = (float(row["p95_ttft"]), float(row["p95_tpot"]))
                found[world][row["config_name"]][int(row["seed"])] = values
    return {world: cells for world, cells in found.items() if len(cells) >= 3}


def chosen(cells: Mapping[str, Cell], seeds: Sequence[int], limit_s: float) -> str | None:
    """The budget with the lowest mean p95 TTFT whose mean p95 TPOT keeps the limit."""
    held = {
        name: mean(cell[s][0] for s in seeds)
        for name, cell in cells.items()
        if mean(cell[s][1] for s in seeds) <= limit_s
    }
    return min(held, key=lambda name: held[name]) if held else None


def print_tables(path: Path) -> None:
    """How far a choice made on few seeds is from the one that the others make."""
    worlds = read_table(path)
    print(f"\nP-PAS table, {len(worlds)} GPU x model x load with at least 3 budgets")
    print("lowest p95 TTFT within the median budget's p95 TPOT + 10 %, judged on the other seeds")
    print(f"{'seeds':>6}{'same choice':>13}{'regret, median':>16}{'p90':>7}{'breaks limit':>14}")
    for count in (1, 2, 3):
        regrets, broken, same = [], 0, 0
        for cells in worlds.values():
            paces = [mean(v[1] for v in cell.values()) for cell in cells.values()]
            limit_s = 1.1 * median(paces)
            for first in range(_SEEDS):
                seeds = [(first + i) % _SEEDS for i in range(count)]
                rest = [s for s in range(_SEEDS) if s not in seeds]
                mine, theirs = chosen(cells, seeds, limit_s), chosen(cells, rest, limit_s)
                if mine is None or theirs is None:
                    continue
                same += mine == theirs
                broken += mean(cells[mine][s][1] for s in rest) > limit_s
                ttfts = [mean(cells[name][s][0] for s in rest) for name in (mine, theirs)]
                regrets.append(ttfts[0] / ttfts[1] - 1)
        regrets.sort()
        print(
            f"{count:>6}{same / len(regrets):>13.0%}{median(regrets):>16.1%}"
            f"{regrets[int(0.9 * len(regrets))]:>7.1%}{broken / len(regrets):>14.0%}"
        )


def main() -> None:
    """Both, as far as they are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, help="folder of public tables")
    asked = parser.parse_args()
    print_recorded()
    if asked.tables is None or not (asked.tables / _TABLE).is_file():
        print(f"\nno public tables: --tables FOLDER with {_TABLE}")
        return
    print_tables(asked.tables / _TABLE)


if __name__ == "__main__":
    main()
