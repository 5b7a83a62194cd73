"""The meter as a worker sees it: a child process that drives probes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from typing import IO, Protocol

from tuner.errors import MeterError
from tuner.load.spec import MeterReport, ProbeSpec
from tuner.records import Failure, FailureKind

_END_TIMEOUT_S = 5.0


class Meter(Protocol):
    """Drives probes against a running engine."""

    def run(self, spec: ProbeSpec) -> MeterReport:
        """Drive one probe.

        Raises:
            MeterError: when the meter itself fails, or is closed meanwhile.
        """
        ...

    def close(self) -> None:
        """End the meter; a probe in progress is given up."""
        ...


class ProcessMeter:
    """The load generator in a process of its own, kept for many probes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, spec: ProbeSpec) -> MeterReport:
        """Drive one probe; starts the process at the first one.

        Raises:
            MeterError: when the process ended without a report.
        """
        process = self._started()
        try:
            requests, reports = _pipes(process)
            pickle.dump(spec, requests)
            requests.flush()
            report: MeterReport = pickle.load(reports)  # noqa: S301 - written by our own child
        except (EOFError, BrokenPipeError, pickle.UnpicklingError, ValueError, OSError) as error:
            self.close()
            raise MeterError(
                Failure(
                    FailureKind.METER_FAILED,
                    f"the load generator ended without a report ({type(error).__name__})",
                )
            ) from error
        return report

    def close(self) -> None:
        """End the process: close its stdin, then kill it if it does not follow."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(_END_TIMEOUT_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close(pipe)

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                # -P: a folder of the user's, as ./objectives, must not stand in for our package.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tuner.load.process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=_meter_env(),
                )
            return self._process


def _meter_env() -> dict[str, str]:
    """The worker's environment; the meter needs no GPU and must not see one."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the load generator has no pipes")
    return process.stdin, process.stdout


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return
