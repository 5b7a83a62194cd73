"""Atomic writes; a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tuner.errors import StoreError


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file as a whole, through a temporary one beside it.

    Raises:
        StoreError: when the folder cannot be written or the disk is full.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise store_error(path, error) from error


def append_line(path: Path, line: bytes) -> None:
    """Add one line; a line that an interrupted write left open is closed first.

    Raises:
        StoreError: when the file cannot be written or the disk is full.
    """
    try:
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
    except OSError as error:
        raise store_error(path, error) from error


def read_file(path: Path) -> bytes:
    """The content of a file.

    Raises:
        StoreError: when it is missing, no file, or may not be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error


def store_error(path: Path, error: OSError) -> StoreError:
    """What went wrong with a file, in words for the user."""
    return StoreError(f"{path}: cannot be written: {error.strerror or error}")
