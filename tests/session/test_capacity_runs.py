"""Whole runs in virtual time where the workload names no loads: capacities, races, certificates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces import fingerprint
from tests.session.running import SMALL_RUN, VirtualRun, make_config
from tuner.cli.progress import headline
from tuner.events import NOT_CERTIFIED
from tuner.latency_trials import LATENCY_LABEL, LATENCY_TRIALS

_CLASSES = SMALL_RUN["workload"]["classes"]


def _config(folder: Path, **changes: Any) -> Any:
    workload = {"classes": _CLASSES, "min_requests": 100}
    options = {"workload": workload, "confirm": {"replicates": 5, "requests": 300}, **changes}
    return make_config(folder, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[VirtualRun, dict[str, Any]]:
    """One run that several tests look at, and its report."""
    run = VirtualRun(_config(tmp_path_factory.mktemp("capacity")), workers=1)
    return run, run.run()


def test_a_run_finds_capacities_races_and_certifies_below_them(
    finished: tuple[VirtualRun, dict[str, Any]],
) -> None:
    """The defaults get a whole search, challengers a probe or two, the winner a certificate."""
    run, document = finished
    records = run.folder.trials()
    assert len(records[0].levels) >= 5
    challengers = [len(r.levels) for r in records[2:]]
    assert sorted(challengers)[len(challengers) // 2] <= 3
    first = document["recommendations"]["throughput_first"]
    assert document["verdict"] == "improved"
    assert first["confirmed"] is True
    assert first["replications"] == 5
    winner = records[first["trial"]]
    capacity = document["trials"][winner.number]["capacity"]
    assert first["load"]["value"] < capacity
    assert first["load"]["value"] == int(first["load"]["value"])
    assert all(check["high"] <= _limit(check) for check in first["slo_checks"])


def _limit(check: dict[str, Any]) -> float:
    """The limit of a latency target or of the error rate, in the unit of its observation."""
    text = check["target"].partition("<=")[2]
    return float(text.removesuffix("ms")) if text.endswith("ms") else float(text[:-1]) / 100


def test_races_cost_a_fraction_of_a_search_for_every_setting(
    finished: tuple[VirtualRun, dict[str, Any]],
) -> None:
    """Fewer probes than half of what as many whole searches on three seeds would take."""
    run, _ = finished
    records = run.folder.trials()
    probes = [len(r.levels) for r in records if r.levels]
    assert sum(probes) < 0.5 * (probes[0] + 2) * len(probes)


def test_probes_that_clearly_fail_end_early_and_say_why(
    finished: tuple[VirtualRun, dict[str, Any]],
) -> None:
    """A level far above the capacity is stopped, failed, and marked in the report."""
    run, document = finished
    stopped = [lv for r in run.folder.trials() for lv in r.levels if lv.stopped_early]
    assert stopped
    assert all(lv.holds is False for lv in stopped)
    assert all(lv.requests < 400 for lv in stopped)
    # All slots were busy when they ended: they carry no less than the levels that held.
    for record in run.folder.trials():
        held = [lv.metrics.output_tokens_per_s or 0.0 for lv in record.levels if lv.holds]
        ended = [lv.metrics.output_tokens_per_s or 0.0 for lv in record.levels if lv.stopped_early]
        assert not held or all(value > 0.6 * min(held) for value in ended)
    levels = [lv for t in document["trials"] for lv in t["levels"]]
    assert sum(bool(lv["stopped_early"]) for lv in levels) == len(stopped)
    confirmed = run.folder.trials(kind="confirmations")
    assert not any(lv.stopped_early for r in confirmed for lv in r.levels)


def test_poisson_rates_are_searched_and_certified_too(tmp_path: Path) -> None:
    """Rate mode: a capacity in requests/s, certified 5 % below or lower."""
    run = VirtualRun(_config(tmp_path, load="rate", trials=6), workers=1)
    document = run.run()
    first = document["recommendations"]["throughput_first"]
    assert first is not None
    assert first["load"]["mode"] == "rate"
    capacity = document["trials"][first["trial"]]["capacity"]
    assert first["load"]["value"] <= 0.951 * capacity


def test_finalists_start_twice_and_pairs_share_worker_and_seed(tmp_path: Path) -> None:
    """Two starts each; the starts of one number are on one worker, with the same seeds."""
    run = VirtualRun(_config(tmp_path), workers=2)
    run.run()
    records = run.folder.trials(kind="confirmations")
    starts: dict[int, set[str]] = {}
    for record in records:
        starts.setdefault(record.replicate, set()).add(record.worker)
    assert set(starts) == {1, 2}
    assert all(len(workers) == 1 for workers in starts.values())
    for trial in {r.of_trial for r in records}:
        assert {r.replicate for r in records if r.of_trial == trial} == {1, 2}


def test_live_capacities_are_repeated_cold_on_their_own_requests(
    finished: tuple[VirtualRun, dict[str, Any]],
) -> None:
    """The published load is lower than any live probe's, so one cold probe repeats the best."""
    run, _ = finished
    live = {r.number: r for r in run.folder.trials() if r.fidelity == "live"}
    repeated = [
        (r.of_trial, lv.load.value, lv.seed)
        for r in run.folder.trials(kind="confirmations")
        for lv in r.levels
        if r.of_trial in live and lv.seed in {s.seed for s in live[r.of_trial].levels}
    ]
    assert repeated
    for trial, load, _ in repeated:
        assert trial is not None
        assert load in {lv.load.value for lv in live[trial].levels if lv.holds}


def test_a_throughput_floor_is_met_above_the_first_load(tmp_path: Path) -> None:
    """8 concurrent carry too few tokens/s; the recommended load carries enough."""
    slo = "p95_ttft=800ms,tpot=50ms,output_tokens_per_s>=700"
    document = VirtualRun(_config(tmp_path, slo=slo, trials=3), workers=1).run()
    first = document["recommendations"]["throughput_first"]
    assert first is not None
    assert first["metrics"]["output_tokens_per_s"] >= 700
    assert document["trials"][0]["levels"][0]["holds"] is False


def test_patience_ends_a_search_that_no_longer_wins(tmp_path: Path) -> None:
    """After eight trials at least, so many races lost in a row are enough."""
    few = {"replicates": 3, "requests": 100}
    options = {"trials": 15, "confirm": few}
    long = VirtualRun(_config(tmp_path / "long", **options), workers=1).run()
    short = VirtualRun(_config(tmp_path / "short", **options, patience=3), workers=1).run()
    assert 8 <= len(short["trials"]) < len(long["trials"])
    assert short["recommendations"]["throughput_first"]["confirmed"] is True


def test_an_slo_at_the_edge_is_lowered_or_left_open_but_never_claimed(tmp_path: Path) -> None:
    """Whatever is recommended has every bound within its limit; what is not stays unclaimed."""
    few = {"replicates": 3, "requests": 100}
    for seed in range(2):
        folder, slo = tmp_path / str(seed), "p95_ttft=800ms,tpot=28ms"
        config = _config(folder, seed=seed, slo=slo, trials=4, confirm=few)
        document = VirtualRun(config, workers=1).run()
        for found in document["recommendations"].values():
            if found is not None:
                assert all(c["holds"] is True for c in found["slo_checks"])


def test_what_is_not_certified_is_told_once_with_its_bounds(tmp_path: Path) -> None:
    """Each setting and load that may not be published, never one that is; with the target."""
    few = {"replicates": 3, "requests": 100}
    config = _config(tmp_path, slo="p95_ttft=800ms,tpot=28ms", trials=4, confirm=few)
    run = VirtualRun(config, workers=1)
    document = run.run()
    told = [event for event in run.events if event.kind == NOT_CERTIFIED]
    places = [(e.details["trial"], e.details["load"]["value"]) for e in told]
    assert places
    assert len(set(places)) == len(places)
    found = [r for r in document["recommendations"].values() if r is not None]
    assert not {(r["trial"], r["load"]["value"]) for r in found} & set(places)
    for event, (trial, load) in zip(told, places, strict=True):
        text = headline(event)
        assert text.startswith(f"not certified: trial {trial} at {load:g} concurrent: p95_")
        assert "(observed " in text
        assert json.loads(json.dumps(event.details)) == event.details


@pytest.mark.parametrize("mode", ["concurrency", "rate"])
def test_defaults_that_are_best_stay_also_without_a_ladder(tmp_path: Path, mode: str) -> None:
    """A space of worse settings: every challenger loses its race, the defaults are certified."""
    space = {"parameters": {"max_num_seqs": {"choice": [2, 4]}}}
    document = VirtualRun(_config(tmp_path, space=space, trials=3, load=mode), workers=1).run()
    assert document["verdict"] == "default_is_best"
    assert document["recommendations"]["throughput_first"]["trial"] == 0


def test_the_last_trials_look_where_latency_first_may_still_gain(tmp_path: Path) -> None:
    """At most four, at the target load alone, within the trials allowed; Optuna is not told."""
    workload = {"classes": _CLASSES, "min_requests": 100, "target_load": 12}
    choices = {
        "max_num_seqs": {"choice": [12, 16, 24, 32, 48, 64]},
        "max_num_batched_tokens": {"choice": [192, 256, 384, 512, 768, 1024, 1536, 2048, 4096]},
    }
    config = _config(tmp_path, workload=workload, space={"parameters": choices}, trials=14, seed=2)
    run = VirtualRun(config, workers=1)
    run.run()
    records = run.folder.trials()
    extra = [r for r in records if r.label == LATENCY_LABEL]
    assert len(records) == 14
    assert 1 <= len(extra) <= LATENCY_TRIALS
    assert all([level.load.value for level in r.levels] == [12] for r in extra)
    assert min(r.number for r in extra) >= 14 - LATENCY_TRIALS
    assert len({fingerprint(r.settings) for r in records}) == 14
    told = run.folder.journal.read_text()
    assert not any(f'{{"trial":{r.number}}}' in told for r in extra)
    assert '{"trial":9}' in told
