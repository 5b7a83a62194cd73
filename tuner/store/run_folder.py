"""The run folder (CONTRACT 5): the only place where a run's state lives."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from objectives import Probe
from tuner.clock import Clock
from tuner.errors import StoreError
from tuner.records import RecordKind, TrialRecord
from tuner.secrets import masked_bytes, masked_data, masked_json_lines, masked_words, shell_words
from tuner.store.codec import dump_json, load_json, read_trial, trial_document
from tuner.store.documents import check_document, check_event
from tuner.store.files import append_line, read_file, store_error, write_atomic
from tuner.store.requests_log import REQUESTS_LOG, read_probes

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
JOURNAL = "study.journal"
EVENTS = "events.jsonl"
TRIALS = "trials"
LIVE = "live"
EXPORT = "export"
REPORT = "report.json"
_LOCK = ".lock"
_TRIAL = "trial.json"


class RunFolder:
    """One run on disk.

    Args:
        path: the folder; it must exist.
        clock: stamps events.
    """

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._lock: IO[bytes] | None = None
        self._secrets: tuple[str, ...] = ()

    @classmethod
    def create(cls, runs_dir: Path, *, name: str, clock: Clock) -> RunFolder:
        """A new folder, named by UTC time and name.

        Raises:
            StoreError: when it cannot be made.
        """
        stamp = clock.utc_now().strftime("%Y%m%dT%H%M%SZ")
        for attempt in range(100):
            suffix = f"-{attempt}" if attempt else ""
            path = runs_dir / f"{stamp}-{name}{suffix}"
            try:
                path.mkdir(parents=True)
                (path / TRIALS).mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise store_error(path, error) from error
            return cls(path, clock=clock)
        raise StoreError(f"{runs_dir}: cannot find a free name for the run {name!r}")

    @classmethod
    def open(cls, path: Path, *, clock: Clock) -> RunFolder:
        """An existing run.

        Raises:
            StoreError: when the folder is not a run.
        """
        if not (path / CONFIG).is_file():
            raise StoreError(f"{path}: is not a run folder (it has no {CONFIG})")
        return cls(path, clock=clock)

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def journal(self) -> Path:
        """Optuna's journal."""
        return self.path / JOURNAL

    @property
    def live(self) -> Path:
        """Where the channels to running engines are, for the owner only."""
        return self.path.resolve() / LIVE

    def clear_live(self) -> None:
        """Remove what a killed session left there; only the run's driver may do that."""
        shutil.rmtree(self.live, ignore_errors=True)
        try:
            self.live.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise store_error(self.live, error) from error

    def lock(self) -> None:
        """Make this process the run's only driver, until it ends.

        Raises:
            StoreError: when another one has it.
        """
        try:
            lock = (self.path / _LOCK).open("ab")
        except OSError as error:
            raise store_error(self.path / _LOCK, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise StoreError(
                f"{self.path}: another process is working on this run; wait for it, or stop it"
            ) from error
        self._lock = lock

    def unlock(self) -> None:
        """Give the run back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def hide(self, secrets: Sequence[str]) -> None:
        """Mask these values in all that is written from now on."""
        self._secrets = tuple(secrets)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have the run for oneself; it is given back in every case.

        Raises:
            StoreError: when another process has it.
        """
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def write_config(self, data: Mapping[str, Any]) -> None:
        """Keep the resolved configuration."""
        text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
        write_atomic(self.path / CONFIG, text.encode())

    def write_environment(self, data: Mapping[str, Any]) -> None:
        """Keep versions, hardware and seed."""
        write_atomic(self.path / ENVIRONMENT, dump_json(data))

    def read_environment(self) -> dict[str, Any]:
        """Versions, hardware and seed."""
        return self.read_json(ENVIRONMENT)

    def add_event(self, kind: str, **details: Any) -> None:
        """Append to the one stream of all that happened."""
        hidden = masked_data(details, self._secrets)
        event = {"at": _stamp(self._clock.utc_now()), "event": kind, **hidden}
        line = json.dumps(event, ensure_ascii=False, default=str)
        append_line(self.path / EVENTS, f"{line}\n".encode(errors="backslashreplace"))

    def write_trial(
        self, record: TrialRecord, *, files: Mapping[str, bytes], kind: RecordKind
    ) -> None:
        """Keep a finished trial; its record is written last, so a folder with one is whole."""
        folder = self._trial_folder(record.number, kind=kind)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise store_error(folder, error) from error
        record = replace(record, command=tuple(masked_words(record.command, self._secrets)))
        write_atomic(folder / "command.sh", command_script(record.command))
        for name, content in files.items():
            write_atomic(folder / name, self._masked_file(name, content))
        write_atomic(folder / _TRIAL, trial_document(record, secrets=self._secrets))

    def trials(self, *, kind: RecordKind = "trials") -> list[TrialRecord]:
        """Every finished trial of a kind, by number.

        Raises:
            StoreError: when a record cannot be read.
        """
        folder = self.path / kind
        documents = sorted(folder.glob(f"*/{_TRIAL}")) if folder.exists() else []
        records = [_stored_trial(path) for path in documents]
        return sorted(records, key=lambda r: r.number)

    def artifact(self, record: TrialRecord, name: str, *, kind: RecordKind) -> bytes | None:
        """A file of a trial's folder; None where it has none of that name."""
        path = self._trial_folder(record.number, kind=kind) / name
        return read_file(path) if path.is_file() else None

    def probes(self, record: TrialRecord, *, kind: RecordKind) -> list[Probe]:
        """The probes of a trial with every request; empty where its log was left out.

        Raises:
            StoreError: when the log is damaged.
        """
        folder = self._trial_folder(record.number, kind=kind)
        path = folder / REQUESTS_LOG
        if not path.exists():
            return []
        content = read_file(path)
        try:
            return read_probes(content, record.levels)
        except ValueError as error:
            raise StoreError(f"{path}: is damaged ({error})") from error

    def write_file(self, name: str, content: bytes) -> Path:
        """Write a file of the run, as a report or an export; folders are made as needed."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise store_error(path, error) from error
        write_atomic(path, content)
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run.

        Raises:
            StoreError: when it is missing or damaged.
        """
        path = self.path / name
        data = load_json(read_file(path), where=str(path))
        check_document(name, data, where=str(path))
        return data

    def events(self) -> Iterable[dict[str, Any]]:
        """Every event; a line that an interrupted write tore is skipped.

        Raises:
            StoreError: when a whole line is no event.
        """
        path = self.path / EVENTS
        if not path.exists():
            return
        lines = read_file(path).decode("utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            check_event(event, where=f"{path}:{number}")
            yield event

    def _masked_file(self, name: str, content: bytes) -> bytes:
        if name == REQUESTS_LOG:
            return masked_json_lines(content, self._secrets)
        return masked_bytes(content, self._secrets) if name.endswith(".log") else content

    def _trial_folder(self, number: int, *, kind: RecordKind) -> Path:
        return self.path / kind / f"{number:04d}"


def command_script(command: Sequence[str]) -> bytes:
    """A shell script with the command that was measured."""
    return f"#!/bin/sh\nexec {' '.join(shell_words(command))}\n".encode()


def _stored_trial(path: Path) -> TrialRecord:
    record = read_trial(read_file(path), where=str(path))
    if path.parent.name != f"{record.number:04d}":
        raise StoreError(f"{path}: says that it is trial {record.number}, which its folder is not")
    return record


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_writable(folder: Path) -> bool:
    """Whether runs can be made in a folder, or in the nearest one above that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)
