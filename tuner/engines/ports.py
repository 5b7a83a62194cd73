"""Ports: take a free one, prove who listens on it."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

LOOPBACK = "127.0.0.1"


def take_free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(port: int) -> bool:
    """Whether a server could listen on the port, on loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def is_answering(port: int) -> bool:
    """Whether anybody accepts a connection on the port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, port)) == 0


def listens_on(processes: Iterable[psutil.Process], port: int) -> bool:
    """Whether one of the processes holds the listening socket of the port."""
    for process in processes:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return False
