"""Many requests as columns: what metrics are computed on, without looking at each request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from objectives.records import Probe, RequestFailure, RequestRecord, RequestRole

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

_ROLES = tuple(RequestRole)
_CODE_OF = {role: code for code, role in enumerate(_ROLES)}
_FAILURES = tuple(RequestFailure)
# In place of a failure.
SUCCESS = -1
_OPTIONAL = ("sent_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns(Sequence[RequestRecord]):
    """Request records by column; one is made where somebody asks for it.

    Attributes:
        indices: positions in the request plan.
        class_names: of the traffic classes.
        class_codes: of each request, its class' place among the names.
        role_codes: its place among the roles.
        failure_codes: its place among the failures; -1 for a success.
        scheduled_s, end_s: as in `RequestRecord`.
        sent_s, first_token_s, last_token_s: likewise; nan where there is none.
        prompt_tokens, output_tokens: by the server; nan if not told.
        planned_output_tokens: what was asked for.
        chunk_times_s: arrivals of all chunks, request by request, in the requests' order; a part of
            the requests keeps those of all, as copying hundreds of thousands is dear.
        chunk_starts, chunk_ends: where each request's chunks begin and end there.
        messages: details of failures; empty where there are none.
    """

    indices: Integers
    class_names: tuple[str, ...]
    class_codes: Integers
    role_codes: Integers
    failure_codes: Integers
    scheduled_s: Floats
    sent_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    end_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    planned_output_tokens: Integers
    chunk_times_s: Floats
    chunk_starts: Integers
    chunk_ends: Integers
    messages: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> RequestColumns:
        """Records as columns; columns stay what they are."""
        if isinstance(records, RequestColumns):
            return records
        rows = list(records)
        names = tuple(dict.fromkeys(r.traffic_class for r in rows))
        code_of = {name: code for code, name in enumerate(names)}
        counts = np.array([len(r.chunk_times_s) for r in rows], np.int64)
        ends = np.cumsum(counts, dtype=np.int64)
        chunks = chain.from_iterable(r.chunk_times_s for r in rows)
        optional = {
            name: np.array([getattr(r, name) for r in rows], dtype=float) for name in _OPTIONAL
        }
        return cls(
            indices=np.array([r.index for r in rows], np.int64),
            class_names=names,
            class_codes=np.array([code_of[r.traffic_class] for r in rows], np.int64),
            role_codes=role_codes(r.role for r in rows),
            failure_codes=np.array([_failure_code(r.failure) for r in rows], np.int64),
            scheduled_s=np.array([r.scheduled_s for r in rows], float),
            end_s=np.array([r.end_s for r in rows], float),
            planned_output_tokens=np.array([r.planned_output_tokens for r in rows], np.int64),
            chunk_times_s=np.fromiter(chunks, float, count=int(counts.sum())),
            chunk_starts=ends - counts,
            chunk_ends=ends,
            messages=tuple(r.message for r in rows) if any(r.message for r in rows) else (),
            **optional,
        )

    @classmethod
    def joined(cls, parts: Sequence[RequestColumns]) -> RequestColumns:
        """Several loads' requests in one, in order."""
        if len(parts) < 2:
            return parts[0] if parts else cls.of(())
        names = tuple(dict.fromkeys(name for part in parts for name in part.class_names))
        offsets = np.cumsum([0, *(len(part.chunk_times_s) for part in parts[:-1])])
        aligned = [
            replace(
                part,
                class_codes=np.array([names.index(n) for n in part.class_names], np.int64)[
                    part.class_codes
                ],
                chunk_starts=part.chunk_starts + offset,
                chunk_ends=part.chunk_ends + offset,
            )
            for part, offset in zip(parts, offsets, strict=True)
        ]
        has_messages = any(part.messages for part in parts)
        texts = chain.from_iterable(part.messages or ("",) * len(part) for part in parts)
        return cls(
            class_names=names,
            messages=tuple(texts) if has_messages else (),
            **{
                name: np.concatenate([getattr(part, name) for part in aligned])
                for name in (*_BY_REQUEST, "chunk_times_s")
            },
        )

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> RequestRecord: ...

    @overload
    def __getitem__(self, place: slice) -> RequestColumns: ...

    def __getitem__(self, place: int | slice) -> RequestRecord | RequestColumns:
        selected = np.zeros(len(self), np.bool_)
        selected[place] = True
        if isinstance(place, slice):
            return self.where(selected)
        return next(iter(self.where(selected)))

    def __iter__(self) -> Iterator[RequestRecord]:
        optional = {name: _or_none(getattr(self, name)) for name in _OPTIONAL}
        chunks = self.chunk_times_s.tolist()
        places = list(zip(self.chunk_starts.tolist(), self.chunk_ends.tolist(), strict=True))
        for i, (start, end) in enumerate(places):
            failure = int(self.failure_codes[i])
            yield RequestRecord(
                index=int(self.indices[i]),
                traffic_class=self.class_names[self.class_codes[i]],
                role=_ROLES[self.role_codes[i]],
                scheduled_s=float(self.scheduled_s[i]),
                sent_s=optional["sent_s"][i],
                first_token_s=optional["first_token_s"][i],
                last_token_s=optional["last_token_s"][i],
                end_s=float(self.end_s[i]),
                prompt_tokens=_as_count(optional["prompt_tokens"][i]),
                output_tokens=_as_count(optional["output_tokens"][i]),
                planned_output_tokens=int(self.planned_output_tokens[i]),
                chunk_times_s=tuple(chunks[start:end]),
                failure=None if failure == SUCCESS else _FAILURES[failure],
                message=self.messages[i] if self.messages else "",
            )

    def where(self, selected: Mask) -> RequestColumns:
        """The requests that a mask selects."""
        if selected.all():
            return self
        texts = zip(self.messages, selected, strict=False)
        return replace(
            self,
            messages=tuple(text for text, is_selected in texts if is_selected),
            **{name: getattr(self, name)[selected] for name in _BY_REQUEST},
        )

    def with_role(self, role: RequestRole, *, where: Mask) -> RequestColumns:
        """The same requests, some in another role."""
        return replace(self, role_codes=np.where(where, _CODE_OF[role], self.role_codes))

    def has_role(self, role: RequestRole) -> Mask:
        """Which requests have a role."""
        mask: Mask = self.role_codes == _CODE_OF[role]
        return mask

    def has_failure(self, *failures: RequestFailure) -> Mask:
        """Which requests failed in one of these ways."""
        # The last one is for successes, whose code counts from the end.
        is_one = np.array([*(failure in failures for failure in _FAILURES), False])
        mask: Mask = is_one[self.failure_codes]
        return mask

    def is_of(self, traffic_class: str | None) -> Mask:
        """Which requests belong to a traffic class; None are all."""
        if traffic_class is None:
            return np.ones(len(self), np.bool_)
        if traffic_class not in self.class_names:
            return np.zeros(len(self), np.bool_)
        mask: Mask = self.class_codes == self.class_names.index(traffic_class)
        return mask

    @property
    def measured(self) -> RequestColumns:
        """The requests that make the metrics."""
        return self.where(self.has_role(RequestRole.MEASURED))

    @property
    def succeeded(self) -> Mask:
        """Which streams proved a full success."""
        mask: Mask = self.failure_codes == SUCCESS
        return mask

    @property
    def is_error(self) -> Mask:
        """Which requests the engine failed."""
        return self.has_failure(*(f for f in _FAILURES if f.is_error))

    @property
    def chunk_counts(self) -> Integers:
        """How many chunks each request got."""
        return self.chunk_ends - self.chunk_starts

    @property
    def gap_counts(self) -> Integers:
        """How many gaps between chunks each request has."""
        return np.maximum(self.chunk_counts - 1, 0)

    @property
    def ttft_ms(self) -> Floats:
        """First token minus the scheduled moment; nan where there is none."""
        return (self.first_token_s - self.scheduled_s) * 1000

    @property
    def tpot_ms(self) -> Floats:
        """(last token - first token) / (output tokens - 1); nan for one token."""
        gaps = np.where(self.output_tokens >= 2, self.output_tokens - 1, np.nan)
        tpot: Floats = (self.last_token_s - self.first_token_s) * 1000 / gaps
        return tpot

    @property
    def e2e_ms(self) -> Floats:
        """Last token minus the scheduled moment; nan where there is none."""
        return (self.last_token_s - self.scheduled_s) * 1000

    @property
    def send_delay_ms(self) -> Floats:
        """Actual send minus scheduled moment; nan for what was never sent."""
        return (self.sent_s - self.scheduled_s) * 1000

    @property
    def gaps_ms(self) -> Floats:
        """The gaps between consecutive chunks of all requests."""
        gaps_s = np.diff(self.chunk_times_s)
        return gaps_s[_stretches(self.chunk_starts, self.gap_counts, total=len(gaps_s))] * 1000

    def chunks_between(self, start_s: float, end_s: float) -> Integers:
        """How many chunks of each request came in a window, both ends included."""
        inside = (self.chunk_times_s >= start_s) & (self.chunk_times_s <= end_s)
        counts = np.zeros(len(self), np.int64)
        has_chunks = self.chunk_counts > 0
        edges = np.stack([self.chunk_starts, self.chunk_ends], axis=1)[has_chunks].ravel()
        # Sums from each edge to the next, of which every other is of a request's own chunks. The
        # last edge may lie behind the last chunk, where numpy wants to find something.
        flags = np.append(inside, np.False_).view(np.int8)
        counts[has_chunks] = np.add.reduceat(flags, edges, dtype=np.int32)[::2]
        return counts


def in_window(moments_s: Floats, probe: Probe) -> Mask:
    """Which moments lie in a probe's measured window, both ends included; nan does not."""
    return (probe.window_start_s <= moments_s) & (moments_s <= probe.window_end_s)


def defined(values: Floats) -> Floats:
    """The values that there are."""
    known: Floats = values[~np.isnan(values)]
    return known


def role_codes(roles: Iterable[RequestRole]) -> Integers:
    """Roles as `RequestColumns` has them."""
    return np.fromiter((_CODE_OF[role] for role in roles), np.int64)


def repeated_role_codes(runs: Sequence[tuple[RequestRole, int]]) -> Integers:
    """As `role_codes`, of each role so many times in turn."""
    return np.repeat(role_codes(role for role, _ in runs), [count for _, count in runs])


_BY_REQUEST = tuple(
    field.name
    for field in fields(RequestColumns)
    if field.name not in ("class_names", "chunk_times_s", "messages")
)


def _stretches(starts: Integers, counts: Integers, *, total: int) -> Mask:
    """A mask of stretches that follow one another, each `counts` long."""
    # A request without chunks may lie behind the last one.
    starts = np.minimum(starts, total)
    edges = np.stack([starts, starts + counts], axis=1).ravel()
    lengths = np.diff(edges, prepend=0, append=total)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def _failure_code(failure: RequestFailure | None) -> int:
    return SUCCESS if failure is None else _FAILURES.index(failure)


def _or_none(values: Floats) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _as_count(value: float | None) -> int | None:
    return None if value is None else int(value)
