"""`vllm-simulated`: a process that looks like `vllm serve` from the outside."""

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from aiohttp import web

from tuner.simulator.children import EngineChildren
from tuner.simulator.engine import RealTimeEngine
from tuner.simulator.faults import FaultPlan, fault_table
from tuner.simulator.flags import EngineArguments, parse_arguments
from tuner.simulator.launch import EngineSetup, InvalidSettings, StartFailed, prepare_engine
from tuner.simulator.live import LiveSide
from tuner.simulator.logs import (
    API_SERVER,
    ENGINE_CORE,
    VERSION,
    engine_log,
    set_up_logs,
    web_log,
)
from tuner.simulator.metrics import EngineMetrics
from tuner.simulator.profile import profile_names
from tuner.simulator.server import EngineServer, is_dev_mode
from tuner.simulator.startup import CoreDied, announce_engine, start_engine

_KEEP_ALIVE_S = 5.0  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE
_CLEAN_UP_S = 0.1
_DRAIN_POLL_S = 0.02
_USAGE = """usage: vllm-simulated serve MODEL [options]
       vllm-simulated --version

A simulated vLLM server. `vllm-simulated serve --help` lists the options.

profiles: {profiles}

faults (--fault NAME[:ARG], repeatable):
{faults}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with vLLM's codes: 2 bad usage, 1 failure, 0 stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--version"], ["-v"]):
        sys.stdout.write(f"{VERSION}\n")
        raise SystemExit(0)
    if words[:1] != ["serve"]:
        text = _USAGE.format(profiles=", ".join(profile_names()), faults=fault_table())
        asked = words[:1] in (["--help"], ["-h"])
        (sys.stdout if asked else sys.stderr).write(text)
        raise SystemExit(0 if asked else 2)
    raise SystemExit(serve(parse_arguments(words[1:])))


def serve(arguments: EngineArguments) -> int:
    """Start the engine and serve until a signal or a fault ends it; return the exit code."""
    set_up_logs()
    faults = FaultPlan(arguments.fault, seed=arguments.seed)
    stop = _StopRequest(ignore_first="ignore_first_term" in faults)
    signal.signal(signal.SIGTERM, stop.on_signal_during_start)
    signal.signal(signal.SIGINT, stop.on_signal_during_start)
    log = engine_log(API_SERVER)
    log.info("vLLM server version %s", VERSION)
    log.info("non-default args: %s", arguments.non_default)
    try:
        setup = prepare_engine(arguments)
    except InvalidSettings as error:
        _print_traceback(f"pydantic_core._pydantic_core.ValidationError: {error}")
        return 1
    except StartFailed as error:
        return _fail_start(error)
    for warning in setup.warnings:
        log.warning("%s", warning)
    if setup.limits.enable_chunked_prefill:
        log.info(
            "Chunked prefill is enabled with max_num_batched_tokens=%d.",
            setup.limits.max_num_batched_tokens,
        )
    return _bind_and_serve(setup, faults, stop)


def _bind_and_serve(setup: EngineSetup, faults: FaultPlan, stop: "_StopRequest") -> int:
    """Bind early, as vLLM does, but listen only when the engine is ready."""
    arguments = setup.arguments
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    children: EngineChildren | None = None
    try:
        if "port_ignored" not in faults:
            listener.bind((arguments.host, arguments.port))
        children = EngineChildren(faults)
        announce_engine(setup)
        start_engine(setup, faults, sleep=time.sleep)
        live = LiveSide(setup, faults)
        return asyncio.run(_serve(setup, faults, stop, listener=listener, live=live))
    except StartFailed as error:
        return _fail_start(error)
    except CoreDied:
        return _fail_start(None)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        _print_traceback(f"OSError: [Errno {errno.EADDRINUSE}] Address already in use")
        return 1
    finally:
        if children is not None:
            children.stop()
        listener.close()


async def _serve(
    setup: EngineSetup,
    faults: FaultPlan,
    stop: "_StopRequest",
    *,
    listener: socket.socket,
    live: LiveSide,
) -> int:
    arguments = setup.arguments
    metrics = EngineMetrics(
        model_name=arguments.served_model_name[0], max_model_len=setup.max_model_len
    )
    metrics.cache_config = _cache_config(setup)
    engine = RealTimeEngine(setup, metrics=metrics, live=live)
    server = EngineServer(
        setup, engine=engine, metrics=metrics, faults=faults, dev_mode=is_dev_mode()
    )
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handle_signals=False,
        keepalive_timeout=_KEEP_ALIVE_S,
        handler_cancellation=True,
        shutdown_timeout=_CLEAN_UP_S,
    )
    await runner.setup()
    steps = asyncio.create_task(engine.run())
    steps.add_done_callback(server.on_engine_stopped)
    stop.attach(server.ended)
    gc.collect()
    gc.freeze()
    site = await _listen(runner, listener, ignored="port_ignored" in faults)
    await server.ended.wait()
    if stop.requested:
        await _drain(engine, arguments.shutdown_timeout)
        engine_log(API_SERVER).info("Shutting down")
    if site is not None:
        await site.stop()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    await runner.cleanup()
    return server.exit_code


async def _listen(
    runner: web.AppRunner, listener: socket.socket, *, ignored: bool
) -> web.SockSite | None:
    if not ignored:
        host, port = listener.getsockname()[:2]
        engine_log(API_SERVER).info("Starting vLLM server on http://%s:%d", host, port)
    log = web_log()
    log.info("INFO:     Started server process [%d]", os.getpid())
    log.info("INFO:     Waiting for application startup.")
    log.info("INFO:     Application startup complete.")
    if ignored:
        return None
    site = web.SockSite(runner, listener, backlog=2048)
    await site.start()
    return site


async def _drain(engine: RealTimeEngine, timeout_s: float) -> None:
    """Let requests in flight finish for at most `timeout_s` seconds, 0 to drop them at once."""
    end_s = time.monotonic() + timeout_s
    while engine.n_requests and time.monotonic() < end_s:  # noqa: ASYNC110 - once, at the end
        await asyncio.sleep(_DRAIN_POLL_S)


def _cache_config(setup: EngineSetup) -> dict[str, str]:
    arguments = setup.arguments
    concurrency = setup.kv_cache_tokens / setup.max_model_len
    return {
        "block_size": str(arguments.block_size),
        "num_gpu_blocks": str(setup.n_kv_blocks),
        "kv_cache_size_tokens": str(setup.kv_cache_tokens),
        "kv_cache_max_concurrency": f"{concurrency:.2f}",
        "kv_cache_memory_bytes": str(arguments.kv_cache_memory_bytes),
        "gpu_memory_utilization": str(arguments.gpu_memory_utilization),
        "enable_prefix_caching": str(arguments.enable_prefix_caching),
        "cache_dtype": arguments.kv_cache_dtype,
    }


class _StopRequest:
    """SIGTERM and SIGINT, before and after the server is ready."""

    def __init__(self, *, ignore_first: bool) -> None:
        self._left_to_ignore = 1 if ignore_first else 0
        self._ended: asyncio.Event | None = None
        self.requested = False

    def on_signal_during_start(self, _number: int, _frame: object) -> None:
        """End the start with exit code 1."""
        if self._left_to_ignore:
            self._left_to_ignore -= 1
            return
        raise SystemExit(1)

    def attach(self, ended: asyncio.Event) -> None:
        """From now on a signal ends the server in good order."""
        self._ended = ended
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._left_to_ignore:
            self._left_to_ignore -= 1
            return
        self.requested = True
        if self._ended is not None:
            self._ended.set()


def _fail_start(cause: StartFailed | None) -> int:
    """Print what vLLM prints when the engine core fails: the cause, far above the last line."""
    core = engine_log(ENGINE_CORE)
    if cause is not None:
        core.error("EngineCore failed to start.")
        core.error("Traceback (most recent call last):")
        core.error("%s", cause)
    _print_traceback(
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}"
    )
    return 1


def _print_traceback(last_line: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"Traceback (most recent call last):\n  ...\n{last_line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
