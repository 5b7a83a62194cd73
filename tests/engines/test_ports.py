"""Ports: free, answering, and whose they are."""

from __future__ import annotations

import socket

import psutil

from tuner.engines.ports import is_answering, is_port_free, listens_on, take_free_port


def test_a_free_port_is_free_and_silent() -> None:
    """A port just taken and given back can be listened on and is answered by nobody."""
    port = take_free_port()
    assert is_port_free(port)
    assert not is_answering(port)


def test_a_listening_socket_is_seen_with_its_owner() -> None:
    """A port in use is not free, answers, and belongs to the process that listens."""
    me, other = psutil.Process(), psutil.Process(psutil.Process().ppid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_port_free(port)
        assert is_answering(port)
        assert listens_on([other, me], port)
        assert not listens_on([other], port)
        assert not listens_on([], port)
    assert not listens_on([me], port)
