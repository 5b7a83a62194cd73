"""`tune run --dry-run`: what would be done, and about how long it would take."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from objectives import Load, requests_needed
from search_spaces import Choice, Fixed, FloatRange, IntRange, LogIntRange, Parameter, PowerOfTwo
from tuner.config import RunConfig
from tuner.durations import format_duration
from tuner.engines import launch_command
from tuner.launch_groups import LIVE_SETTINGS
from tuner.report.document import slo_data, workload_data
from tuner.report.phrases import command_text
from tuner.run import Plan
from tuner.secrets import masked_words

_SHOWN = 10
# Rough figures for the estimate, said to be rough: a start of vLLM on a GPU, and a request that
# decodes at 30 ms a token.
_START_S = {"vllm": 90.0, "simulated": 3.0}
_TOKEN_S = 0.03
# Rough figures of a capacity search: probes of the first trial and of a challenger, and their load.
_PROBES = (8, 2.5)
_TYPICAL_LOAD = {"concurrency": 32.0, "rate": 4.0}


def dry_run_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain data (CONTRACT 8)."""
    config = plan.config
    settings = [dict(s) for _, s in plan.references]
    settings += _samples(plan, _SHOWN - len(settings))
    engine = plan.engine.config
    return {
        "slo": slo_data(config.slo),
        "engine": {
            "kind": engine.kind,
            "simulated": engine.kind == "simulated",
            "command": masked_words(engine.command),
            "reason": plan.engine.reason,
            "workers": plan.workers,
            "gpus_per_engine": config.options.gpus_per_engine,
        },
        "model": engine.model,
        "workload": workload_data(config),
        "space": {
            "name": config.space.name,
            "parameters": {n: _parameter(p) for n, p in config.space.parameters.items()},
            "size": config.space.size,
        },
        "settings": [
            {"settings": s, "launch_command": masked_words(launch_command(engine, s))}
            for s in settings[: config.options.trials]
        ],
        "estimate": {"trials": _trials(plan), "wall_s": round(_wall_s(plan), 1)},
    }


def dry_run_text(document: Mapping[str, Any]) -> str:
    """The plan for people."""
    engine, estimate = document["engine"], document["estimate"]
    size = document["space"]["size"]
    loads = ", ".join(f"{load:g}" for load in document["workload"]["loads"])
    loads = loads or "as high as each setting carries"
    lines = [
        f"engine    {engine['reason']}",
        f"SLO       {document['slo']['canonical']}",
        f"workload  {document['workload']['name']}, {document['workload']['load_mode']} {loads}",
        f"space     {document['space']['name']}, {size or 'uncountably many'} settings",
        f"workers   {engine['workers']} with {engine['gpus_per_engine']} GPU each",
        f"estimate  {estimate['trials']} trials, roughly {format_duration(estimate['wall_s'])}",
        "",
        "first settings:",
        *(f"  {command_text(item['launch_command'])}" for item in document["settings"]),
    ]
    return "\n".join(lines)


def _samples(plan: Plan, count: int) -> list[dict[str, Any]]:
    rng = random.Random(plan.config.options.seed)
    drawn = (plan.config.space.sample(rng) for _ in range(max(count, 0)))
    return [settings for settings in drawn if settings is not None]


def _trials(plan: Plan) -> int:
    size = plan.config.space.size
    wanted = plan.config.options.trials
    return wanted if size is None else min(wanted, size + len(plan.references))


def _wall_s(plan: Plan) -> float:
    """Trials, then confirmations of three settings, shared out over the workers."""
    config = plan.config
    workload = config.workload
    start_s = _START_S[plan.engine.config.kind]
    ladder = workload.ladder(config.options.load)
    if ladder is None:
        mode = config.options.load
        probe_s = _probe_s(config, Load(mode, _TYPICAL_LOAD[mode]))
        measure_s = (_PROBES[0] + (_trials(plan) - 1) * _PROBES[1]) * probe_s
    else:
        levels = [_probe_s(config, load) for load in ladder]
        probe_s = sum(levels) / len(levels)
        measure_s = _trials(plan) * sum(levels)
    search_s = _search_starts(plan) * start_s + measure_s
    confirm = config.options.confirm
    if workload.requests is None:
        probe_s *= max(1.0, confirm.requests / workload.min_requests)
    confirm_s = 3 * (min(confirm.replicates, 2) * start_s + 2 * confirm.replicates * probe_s)
    budget_s = config.options.budget
    total_s = (search_s + confirm_s) / plan.workers
    return total_s if budget_s is None else min(total_s, budget_s)


def _probe_s(config: RunConfig, load: Load) -> float:
    workload = config.workload
    needed = requests_needed(config.slo, class_shares=workload.class_shares)
    count = workload.measured_requests(load, needed=needed)
    if load.mode == "rate":
        return count / load.value
    tokens = sum(c.share * sum(c.output_tokens) / 2 for c in workload.classes)
    return count / load.value * _TOKEN_S * tokens


def _search_starts(plan: Plan) -> int:
    """Engine starts of the search: with live retuning one for the defaults, one for the space."""
    space, trials = plan.config.space, _trials(plan)
    if not plan.config.options.live or not set(space.varying) <= LIVE_SETTINGS:
        return trials
    own = [s for _, s in plan.references if not set(s) <= LIVE_SETTINGS]
    return min(trials, 1 + plan.workers + len(own))


def _parameter(parameter: Parameter) -> dict[str, Any]:
    if isinstance(parameter, Choice):
        return {"choice": list(parameter.choices)}
    if isinstance(parameter, Fixed):
        return {"fixed": parameter.value}
    if isinstance(parameter, PowerOfTwo):
        return {"power_of_two": [parameter.low, parameter.high]}
    if isinstance(parameter, IntRange):
        return {"int": [parameter.low, parameter.high], "step": parameter.step}
    if isinstance(parameter, LogIntRange):
        return {"int": [parameter.low, parameter.high], "log": True}
    assert isinstance(parameter, FloatRange)
    return {"float": [parameter.low, parameter.high], "step": parameter.step, "log": parameter.log}
