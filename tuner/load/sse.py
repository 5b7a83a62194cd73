"""Server-sent events on bytes, incrementally, to the standard."""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Turns reads of any size into event payloads.

    Accepts LF, CRLF and CR line ends, split anywhere, comments, fields other than `data`, and
    several data lines in one event (joined by a newline). Payloads stay bytes, so a character
    split over two reads is whole again when its event is.
    """

    def __init__(self) -> None:
        self._open_line: list[bytes] = []
        self._data: list[bytes] = []
        self._skip_line_feed = False
        self._is_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that this read completes."""
        if not chunk:
            return []
        lines = self._split(chunk)
        events: list[bytes] = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def _split(self, chunk: bytes) -> list[bytes]:
        if self._skip_line_feed and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._skip_line_feed = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # Pieces of an open line are joined once, when it ends: a long one costs no more for it.
        lines = chunk.split(b"\n")
        if len(lines) > 1:
            lines[0] = b"".join((*self._open_line, lines[0]))
            self._open_line = []
        self._open_line.append(lines.pop())
        return lines

    def _take(self, line: bytes) -> None:
        if self._is_start:
            line = line.removeprefix(_BOM)
            self._is_start = False
        if line.startswith(b"data:"):
            value = line[5:]
            self._data.append(value[1:] if value.startswith(b" ") else value)
        elif line == b"data":
            self._data.append(b"")
