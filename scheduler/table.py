"""All live requests as columns, so that a frame of ten thousand is planned in milliseconds.

Rows are dense: a request that leaves gives its row to the last one. Every column is a numpy
array; ``Rows`` is what policies get to see of it, aligned arrays of some or all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    ReasoningSlo,
    SloType,
)
from scheduler.lifecycle import RequestState
from scheduler.request import Request

Floats = npt.NDArray[np.float64]
Points = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int8]

NUM_POINTS = 32
"""Equal-mass points that describe a forecast of an answer's length."""

STATES = (
    RequestState.WAITING,
    RequestState.RUNNING,
    RequestState.PARKED,
    RequestState.PREEMPTED,
)
WAITING, RUNNING, PARKED, PREEMPTED = range(4)
_CODE = {state: code for code, state in enumerate(STATES)}

LATENCY, DEADLINE, COMPOUND, BEST_EFFORT = range(4)
"""Kinds. A request that reasons by a deadline is DEADLINE until its answer begins."""

SLO_TYPES: tuple[SloType, ...] = ("latency", "deadline", "compound", "best_effort", "reasoning")
"""The classes that lengths are learnt of, by code."""

MAX_FRAMES = 1e9
_MAX_TIME_S = 1e12


@dataclass(frozen=True, slots=True)
class Rows:
    """Aligned columns of the requests under consideration. Read only; shape (n,) each."""

    kind: Codes
    state: Codes
    serial: Ints
    arrival_s: Floats
    input_tokens: Floats
    generated_tokens: Floats
    max_output_tokens: Floats
    due_s: Floats
    """Absolute: the next token's (stream) or the whole answer's due time."""
    tbt_s: Floats
    """Seconds between due times of a stream's tokens; 0 for the rest."""
    frames_waited: Floats
    priority: Floats
    known_tokens: Floats
    """Total output tokens where certain, else NaN."""
    mean_tokens: Floats
    """Expected output tokens still to come, at least 1."""
    bound_tokens: Floats
    """Upper bound of the output tokens still to come, at the configured quantile."""
    spread_tokens: Floats
    """Standard deviation of the output tokens still to come."""
    points: Points
    """Shape (n, NUM_POINTS): ascending equal-mass points of the total length."""
    num_ahead: Ints
    """Points above ``generated_tokens``."""
    program: Ints
    """Index into ``Programs``; -1 for none."""
    tenant: Ints
    was_late: Bools
    """A stream that is not met as a whole any more."""

    @property
    def size(self) -> int:
        return len(self.kind)

    @property
    def holds_kv(self) -> Bools:
        held: Bools = (self.state == RUNNING) | (self.state == PARKED)
        return held

    @property
    def context_tokens(self) -> Floats:
        """Input and output tokens so far."""
        return self.input_tokens + self.generated_tokens

    @property
    def room_tokens(self) -> Floats:
        """Output tokens that max_tokens leaves, at least 1."""
        return np.maximum(self.max_output_tokens - self.generated_tokens, 1.0)

    def take(self, index: Ints) -> Rows:
        """The rows at ``index``, in that order."""
        return Rows(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


class RequestTable:
    """The columns. Grows by doubling; never shrinks."""

    _COLUMNS: tuple[tuple[str, type], ...] = (
        ("kind", np.int8),
        ("state", np.int8),
        ("length_class", np.int8),
        ("serial", np.int64),
        ("arrival_s", np.float64),
        ("input_tokens", np.float64),
        ("generated_tokens", np.float64),
        ("max_output_tokens", np.float64),
        ("first_due_s", np.float64),
        ("tbt_s", np.float64),
        ("timeline_from", np.float64),
        ("deadline_s", np.float64),
        ("frames_waited", np.float64),
        ("frames_blocked", np.float64),
        ("priority", np.float64),
        ("known_tokens", np.float64),
        ("mean_tokens", np.float64),
        ("bound_tokens", np.float64),
        ("spread_tokens", np.float64),
        ("num_ahead", np.int64),
        ("was_late", np.bool_),
        ("has_forecast", np.bool_),
        ("is_stale", np.bool_),
        ("is_pinned", np.bool_),
        ("is_urgent", np.bool_),
        ("program", np.int64),
        ("tenant", np.int64),
        ("frame_quota", np.float64),
        ("frame_from", np.float64),
    )

    kind: Codes
    state: Codes
    length_class: Codes
    """Index into ``SLO_TYPES``; it does not change when a request begins to stream."""
    serial: Ints
    arrival_s: Floats
    input_tokens: Floats
    generated_tokens: Floats
    max_output_tokens: Floats
    first_due_s: Floats
    tbt_s: Floats
    timeline_from: Floats
    """Output tokens before the stream's timeline began (reasoning), else 0."""
    deadline_s: Floats
    frames_waited: Floats
    frames_blocked: Floats
    priority: Floats
    known_tokens: Floats
    mean_tokens: Floats
    bound_tokens: Floats
    spread_tokens: Floats
    num_ahead: Ints
    was_late: Bools
    """A token of the stream was late: as a whole it cannot be met any more."""
    has_forecast: Bools
    is_stale: Bools
    """``mean_tokens``, ``bound_tokens`` and ``num_ahead`` are not those of now."""
    is_pinned: Bools
    is_urgent: Bools
    program: Ints
    tenant: Ints
    frame_quota: Floats
    """Tokens it was given for the current frame."""
    frame_from: Floats
    """``generated_tokens`` when the current frame began."""

    def __init__(self, capacity: int = 64) -> None:
        self.requests: list[Request] = []
        self.ids: list[str] = []
        self.count = [0, 0, 0, 0]
        """Requests per state code."""
        self._capacity = capacity
        for name, kind in self._COLUMNS:
            setattr(self, name, np.zeros(capacity, dtype=kind))
        self.points: Points = np.zeros((capacity, NUM_POINTS), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of all columns together, per row."""
        columns = sum(np.dtype(kind).itemsize for _, kind in self._COLUMNS)
        return columns + NUM_POINTS * self.points.itemsize

    def add(self, request: Request, *, program: int = -1, tenant: int = 0) -> int:
        """Enter a request; its row."""
        row = len(self.requests)
        if row == self._capacity:
            self._grow()
        self.requests.append(request)
        self.ids.append(request.request_id)
        request.attach(self, row)
        for name, _ in self._COLUMNS:
            getattr(self, name)[row] = 0
        self.serial[row] = request.serial
        self.length_class[row] = SLO_TYPES.index(request.slo_type)
        self.arrival_s[row] = _finite(request.terms.arrival_s)
        self.input_tokens[row] = request.input_tokens
        self.max_output_tokens[row] = request.max_output_tokens
        self.priority[row] = min(max(request.priority, -(1 << 53)), 1 << 53)
        known = request.known_output_tokens
        self.known_tokens[row] = math.nan if known is None else min(max(known, 1), 1 << 40)
        self.is_stale[row] = True
        self.is_pinned[row] = request.is_pinned
        self.is_urgent[row] = request.is_urgent
        self.program[row] = program
        self.tenant[row] = tenant
        self.count[WAITING] += 1
        self._set_slo(row, request)
        return row

    def _set_slo(self, row: int, request: Request) -> None:
        slo = request.terms.slo
        self.deadline_s[row] = _finite(request.deadline_at_s)
        self.first_due_s[row] = self.deadline_s[row]
        match slo:
            case LatencySlo(target_ttft_s, target_tbt_s):
                self.kind[row] = LATENCY
                self.tbt_s[row] = _finite(target_tbt_s)
                self.first_due_s[row] = _finite(request.terms.arrival_s + target_ttft_s)
            case DeadlineSlo() | ReasoningSlo():
                self.kind[row] = DEADLINE
            case CompoundSlo():
                self.kind[row] = COMPOUND
            case BestEffortSlo():
                self.kind[row] = BEST_EFFORT

    def begin_stream(self, row: int, tbt_s: float) -> None:
        """From its next token on, a request is a stream whose first token is due as before."""
        self.kind[row] = LATENCY
        self.tbt_s[row] = _finite(tbt_s)
        self.timeline_from[row] = self.generated_tokens[row]
        self.deadline_s[row] = _MAX_TIME_S

    def remove(self, row: int, state: RequestState) -> None:
        """A request leaves; the last row takes its place."""
        request = self.requests[row]
        self.count[self.state[row]] -= 1
        request.detach(state)
        last = len(self.requests) - 1
        if row != last:
            moved = self.requests[last]
            self.requests[row] = moved
            self.ids[row] = moved.request_id
            moved.row = row
            for name, _ in self._COLUMNS:
                column = getattr(self, name)
                column[row] = column[last]
            self.points[row] = self.points[last]
        self.requests.pop()
        self.ids.pop()

    def set_state(self, row: int, state: RequestState) -> None:
        """Record a move; one into an end is recorded by ``remove``."""
        code = _CODE.get(state)
        if code is None:
            return
        self.count[self.state[row]] -= 1
        self.count[code] += 1
        self.state[row] = code

    def num_in(self, state: RequestState) -> int:
        """Requests in a state; 0 for an end."""
        code = _CODE.get(state)
        return 0 if code is None else self.count[code]

    def state_of(self, row: int) -> RequestState:
        return STATES[self.state[row]]

    def next_due_s(self, row: int) -> float:
        """When its next token (stream) or its whole answer is due."""
        return float(self.next_dues_s(row))

    def next_dues_s(self, at: int | slice | Ints) -> Floats:
        """The same of several rows."""
        ahead = self.generated_tokens[at] - self.timeline_from[at]
        dues: Floats = self.first_due_s[at] + ahead * self.tbt_s[at]
        return dues

    def in_state(self, *codes: int) -> Ints:
        """Rows in one of the states, ascending."""
        state = self.state[: len(self.requests)]
        found = state == codes[0]
        for code in codes[1:]:
            found |= state == code
        rows: Ints = found.nonzero()[0]
        return rows

    def rows(self, index: Ints | None = None) -> Rows:
        """Columns of the rows at ``index``; of all without one (views, no copy)."""
        at: slice | Ints = slice(0, len(self.requests)) if index is None else index
        return Rows(
            kind=self.kind[at],
            state=self.state[at],
            serial=self.serial[at],
            arrival_s=self.arrival_s[at],
            input_tokens=self.input_tokens[at],
            generated_tokens=self.generated_tokens[at],
            max_output_tokens=self.max_output_tokens[at],
            due_s=self.next_dues_s(at),
            tbt_s=self.tbt_s[at],
            frames_waited=self.frames_waited[at],
            priority=self.priority[at],
            known_tokens=self.known_tokens[at],
            mean_tokens=self.mean_tokens[at],
            bound_tokens=self.bound_tokens[at],
            spread_tokens=self.spread_tokens[at],
            points=self.points[at] if index is None else self.points.take(index, axis=0),
            num_ahead=self.num_ahead[at],
            program=self.program[at],
            tenant=self.tenant[at],
            was_late=self.was_late[at],
        )

    def _grow(self) -> None:
        self._capacity *= 2
        for name, kind in self._COLUMNS:
            wider: npt.NDArray[Any] = np.zeros(self._capacity, dtype=kind)
            wider[: self._capacity // 2] = getattr(self, name)
            setattr(self, name, wider)
        points = np.zeros((self._capacity, NUM_POINTS), dtype=np.float32)
        points[: self._capacity // 2] = self.points
        self.points = points


def passed(kind: Codes, deadline_s: Floats, now_s: float) -> Bools:
    """Whose deadline has passed; streams and best-effort work have none. Shapes (n,)."""
    late: Bools = (deadline_s < now_s) & ((kind == DEADLINE) | (kind == COMPOUND))
    return late


def clip(values: Floats, low: float, high: float | Floats) -> Floats:
    """``np.clip`` without its wrappers, which cost more than a few hundred values do."""
    bounded: Floats = np.minimum(np.maximum(values, low), high)
    return bounded


def _finite(time_s: float) -> float:
    """Times beyond 30,000 years are not told apart; NaN counts as one that never comes."""
    return min(max(time_s, -_MAX_TIME_S), _MAX_TIME_S) if time_s == time_s else _MAX_TIME_S
