"""Starts the simulated engine as a real process and speaks HTTP with it, for the tests beside."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

MODEL = "Qwen/Qwen2.5-7B-Instruct"
READY = "Application startup complete."
COMMAND = (sys.executable, "-m", "tuner.simulator.main", "serve", MODEL)
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Stream:
    """An event stream, read to its end.

    `events` are the JSON documents, `arrived_s` when each came, `headers_s` when the status came.
    """

    status: int
    raw: bytes
    events: list[Any]
    arrived_s: list[float]
    headers_s: float
    done: bool
    broken: bool

    @property
    def tokens(self) -> list[Any]:
        """The chunks that carry generated text or a finish reason."""
        return [event for event in self.events if _content(event) is not None]

    @property
    def usage(self) -> Any:
        """The usage of the last chunk that has one."""
        found = [event["usage"] for event in self.events if event.get("usage")]
        return found[-1] if found else None


def _content(event: Any) -> str | None:
    if "error" in event or not event["choices"]:
        return None
    choice = event["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    return None if "role" in choice["delta"] else str(choice["delta"].get("content"))


class EngineProcess:
    """A running simulated engine. Leave the context to end its whole process group."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        self.port = 0

    @property
    def log(self) -> str:
        """What it has printed so far, both streams."""
        return self._log.read_text("utf-8")

    def wait_for_log(self, text: str) -> None:
        """Wait until a text is in the log."""
        wait_until(lambda: text in self.log or self.process.poll() is not None, text)
        assert text in self.log, f"{text!r} never came:\n{self.log}"

    def wait_ready(self) -> None:
        """Wait until it answers."""
        self.wait_for_log(READY)
        match = re.search(r"Starting vLLM server on http://127.0.0.1:(\d+)", self.log)
        assert match is not None
        self.port = int(match.group(1))
        wait_until(lambda: self.health() is not None, "the port answers")

    def wait_exit(self) -> int:
        """Wait for its end; return the exit code."""
        return self.process.wait(PATIENCE_S)

    def health(self) -> int | None:
        """The status of `/health`, None where nobody answers."""
        try:
            return self.get("/health").status
        except OSError:
            return None

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        """GET a path."""
        return self._request("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """POST JSON (or raw bytes) to a path."""
        return self._request("POST", path, body, headers)

    def chat(self, **fields: Any) -> Answer:
        """A chat completion that is not streamed."""
        return self.post("/v1/chat/completions", chat_body(**fields))

    def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> Stream:
        """A streamed completion, read to its end."""
        with self.open_stream(path, **fields) as (response, _):
            return _read_stream(response)

    @contextlib.contextmanager
    def open_stream(
        self, path: str = "/v1/chat/completions", **fields: Any
    ) -> Iterator[tuple[http.client.HTTPResponse, http.client.HTTPConnection]]:
        """A streamed completion whose reading is the caller's."""
        connection = self._connection()
        body = chat_body(stream=True, **fields) if "chat" in path else {"stream": True, **fields}
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        try:
            yield connection.getresponse(), connection
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The value of a sample of `/metrics`, summed over matching labels."""
        text = self.get("/metrics").body.decode()
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"{name} {labels} is not in /metrics"
        return sum(values)

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def _request(self, method: str, path: str, body: Any, headers: dict[str, str] | None) -> Answer:
        connection = self._connection()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()


def chat_body(**fields: Any) -> dict[str, Any]:
    """The body of a chat completion with one short message."""
    messages = [{"role": "user", "content": "How long does a step take?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


def _read_stream(response: http.client.HTTPResponse) -> Stream:
    headers_s = time.monotonic()
    raw = b""
    events: list[Any] = []
    arrived_s: list[float] = []
    done = broken = False
    try:
        while line := response.readline():
            raw += line
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                done = True
            else:
                events.append(json.loads(data))
                arrived_s.append(time.monotonic())
    except (http.client.IncompleteRead, ConnectionError):
        broken = True
    # http.client takes a missing last chunk for the end; the marker tells.
    return Stream(response.status, raw, events, arrived_s, headers_s, done, broken or not done)


@contextlib.contextmanager
def start_engine(
    *words: str, startup_s: float = 0.0, environment: dict[str, str] | None = None
) -> Iterator[EngineProcess]:
    """Start an engine on a free port in a process group of its own; end the group afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        command = [*COMMAND, "--port", "0", "--startup-s", str(startup_s), *words]
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        try:
            yield EngineProcess(process, path)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


@contextlib.contextmanager
def ready_engine(*words: str, environment: dict[str, str] | None = None) -> Iterator[EngineProcess]:
    """Start an engine and wait until it answers."""
    with start_engine(*words, environment=environment) as engine:
        engine.wait_ready()
        yield engine


def run_engine(*words: str) -> subprocess.CompletedProcess[str]:
    """Run an engine that is expected to end by itself."""
    return subprocess.run(
        [*COMMAND, "--port", "0", "--startup-s", "0", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Any, what: str) -> None:
    """Wait until a condition holds, for at most `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {PATIENCE_S} s for: {what}"
        time.sleep(0.02)
