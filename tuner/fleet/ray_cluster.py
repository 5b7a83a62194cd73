"""The Ray cluster under a fleet: connected to, watched, and left again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from tuner.clock import Clock, SystemClock
from tuner.errors import InfrastructureError

# The head of a cluster may be started again; after so long nobody does.
HEAD_PATIENCE_S = 30.0
_ADDRESS_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 5.0
_PROBE_EVERY_S = 2.0
# Ray takes 10 to 20 s to call a node dead that went without a word.
_VERDICT_TIMEOUT_S = 25.0
_VERDICT_POLL_S = 0.5
_RESUME = "the run can be resumed"


class RayCluster:
    """The connection to Ray: to an existing cluster by address, else to one started here.

    Ray ends the process of a driver whose cluster's head (GCS) is silent for a minute, and until
    then some of its calls wait without a limit. So Ray is told to wait longer, the head is watched
    from here, and Ray is asked about nodes only while the head answers.

    Args:
        address: of a running cluster; None starts Ray here.
        logical_gpus: how many GPUs to tell a local Ray of; None lets it count real ones.
        head_patience_s: how long the head may be silent.
        clock: tells the time.

    Raises:
        InfrastructureError: when nobody answers at the address, or Ray does not start.
    """

    def __init__(
        self,
        *,
        address: str | None,
        logical_gpus: int | None,
        head_patience_s: float = HEAD_PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._patience_s = head_patience_s
        self._is_own_connection = _connect(address, logical_gpus=logical_gpus)
        context = ray.get_runtime_context()
        self._own_node: str = context.get_node_id()
        self._head: str = _client_server(address) or context.gcs_address
        self._silent_since_s: float | None = None
        self._next_probe_s = 0.0
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether Ray itself is known to be gone."""
        return self._is_lost

    def check(self) -> None:
        """Look whether the head answers, every few seconds.

        Raises:
            InfrastructureError: when it has been silent for too long.
        """
        if self._clock.now_s() >= self._next_probe_s:
            self._next_probe_s = self._clock.now_s() + _PROBE_EVERY_S
            self._head_answers()

    def node_is_dead(self, node: str, *, is_sure: bool) -> bool:
        """Whether Ray holds a node for dead.

        Args:
            node: its id.
            is_sure: whether Ray knows why the worker went; else its verdict on the node is awaited.

        Raises:
            InfrastructureError: when Ray itself is gone: its head, or this machine's part of it.
        """
        end_s = self._clock.now_s() + (0.0 if is_sure else _VERDICT_TIMEOUT_S)
        while True:
            if self._head_answers():
                living = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
                if self._own_node not in living:
                    raise self._lost("Ray on this machine (its raylet) died")
                if node not in living or self._clock.now_s() >= end_s:
                    return node not in living
            self._clock.sleep_s(_VERDICT_POLL_S)

    def gpus(self) -> float:
        """All GPUs of the cluster, in use or not."""
        return float(ray.cluster_resources().get("GPU", 0))

    def wait(self, references: Sequence[Any], *, count: int = 1, timeout_s: float) -> list[Any]:
        """The calls that ended, waiting at most so long for so many.

        Raises:
            InfrastructureError: when Ray fails.
        """
        if not references:
            return []
        with in_words():
            ready, _ = ray.wait(
                list(references), num_returns=min(count, len(references)), timeout=timeout_s
            )
        return list(ready)

    def disconnect(self) -> None:
        """Leave a cluster, end a Ray that was started here."""
        if self._is_own_connection:
            with suppress(RayError):
                ray.shutdown()

    def _head_answers(self) -> bool:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()
        except OSError as error:
            now_s = self._clock.now_s()
            if self._silent_since_s is None:
                self._silent_since_s = now_s
            if now_s - self._silent_since_s >= self._patience_s:
                raise self._lost(
                    f"the head of the Ray cluster (GCS at {self._head}) has not answered for "
                    f"{self._patience_s:g} s ({error.strerror or error})"
                ) from error
            return False
        self._silent_since_s = None
        return True

    def _lost(self, reason: str) -> InfrastructureError:
        self._is_lost = True
        return InfrastructureError(f"{reason}; {_RESUME}")


@contextmanager
def in_words() -> Iterator[None]:
    """Ray's own errors, of whatever kind, as one of ours."""
    try:
        yield
    except (RayError, ConnectionError) as error:
        raise InfrastructureError(f"Ray failed: {reason_of(error)}; {_RESUME}") from error


def reason_of(error: BaseException) -> str:
    """The line of Ray's message that says why, else the first one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "creation task" in lines[0]:
        return lines[-1]  # of the traceback: what it raised
    reasons = [line for line in lines if " because " in line]
    return (reasons or lines or [type(error).__name__])[0]


def _connect(address: str | None, *, logical_gpus: int | None) -> bool:
    """Connect to Ray; whether this process did (and so must disconnect)."""
    if ray.is_initialized():
        return False
    # Ray reads this before it starts; the usage report is a phone call home.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Workers, and so engines and load generators, would yield to everything else (nice 15). A
    # cluster that runs already was started without this; see the actor's `_take_priority`.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # After that long without its head Ray ends this process; before, RayCluster ends the run.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": True}
    if address is None:
        options |= {"num_gpus": logical_gpus, "include_dashboard": False}
    else:
        _refuse_silent_address(address)
        options["address"] = address
    try:
        ray.init(logging_level="ERROR", **options)
    # An OSError, for one, where TMPDIR is too long a path for Ray's sockets, or the disk is full.
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise InfrastructureError(f"cannot reach {where}: {error}") from error
    return True


def _client_server(address: str | None) -> str:
    """The head's server for clients from outside, who cannot reach more of it; else empty."""
    return address.removeprefix("ray://") if address and address.startswith("ray://") else ""


def _refuse_silent_address(address: str) -> None:
    """Say at once that nobody answers; Ray itself tries a wrong address for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a form that only Ray knows
    try:
        socket.create_connection((host, int(port)), timeout=_ADDRESS_TIMEOUT_S).close()
    except OSError as error:
        raise InfrastructureError(
            f"cannot reach the Ray cluster at {address}: {error.strerror or error}"
        ) from error
