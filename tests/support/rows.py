"""Requests as rows of a table, in whatever condition a test wants them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    ReasoningSlo,
    RequestTerms,
    Slo,
)
from scheduler.estimates import Estimates, FrameContext
from scheduler.lengths import Information, equal_mass_points, refresh
from scheduler.objective import WeightedTokens
from scheduler.programs import Programs
from scheduler.request import Request
from scheduler.step_time import StepTimeModel
from scheduler.table import NUM_POINTS, WAITING, Floats, RequestTable, Rows

NOW_S = 1000.0
STEP_S = 0.125
"""Of an engine whose steps all take the same: exact in binary."""
BEST_EFFORT = BestEffortSlo(600.0)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; lengths come from ``points``, or are what ``mean`` and ``bound`` say."""

    slo: Slo = BEST_EFFORT
    arrival_s: float = NOW_S
    input_tokens: int = 100
    generated: float = 0
    max_output_tokens: int = 10_000
    mean: float = 100.0
    bound: float = 100.0
    points: tuple[float, ...] | None = None
    state: int = WAITING
    waited: float = 0
    was_late: bool = False
    priority: int = 0
    known: int | None = None
    program: int = -1
    tenant: int = 0
    serial: int | None = None


def request_of(ask: Ask, name: str = "r", serial: int = 0) -> Request:
    """The request, not yet in any table."""
    return Request(
        name,
        serial,
        RequestTerms(ask.arrival_s, ask.slo),
        input_tokens=ask.input_tokens,
        max_output_tokens=ask.max_output_tokens,
        priority=ask.priority,
        known_output_tokens=ask.known,
    )


def table_of(*asks: Ask, quantile: float = 0.9) -> RequestTable:
    """A table of these, in this order; they are named by their place in it."""
    table = RequestTable(capacity=2)
    for place, ask in enumerate(asks):
        serial = place if ask.serial is None else ask.serial
        request = request_of(ask, str(place), serial)
        row = table.add(request, program=ask.program, tenant=ask.tenant)
        table.generated_tokens[row] = ask.generated
        table.state[row] = ask.state
        table.frames_waited[row] = ask.waited
        table.was_late[row] = ask.was_late
        table.points[row] = ask.points or ask.mean + ask.generated
        refresh(table, np.array([row]), quantile)
        if ask.points is None:
            table.mean_tokens[row], table.bound_tokens[row] = ask.mean, ask.bound
    return table


def rows_of(*asks: Ask) -> Rows:
    """Their rows."""
    return table_of(*asks).rows()


def steps(multiple: float = 1.0) -> tuple[float, ...]:
    """Lengths from ``multiple`` to ``NUM_POINTS * multiple``, equally far apart."""
    return tuple(multiple * (place + 1) for place in range(NUM_POINTS))


def frame_context(**changes: Any) -> FrameContext:
    """A frame at ``NOW_S`` on an engine whose every step takes ``STEP_S``."""
    fields: dict[str, Any] = {
        "now_s": NOW_S,
        "step_time": StepTimeModel.known(STEP_S),
        "objective": WeightedTokens(),
        "programs": Programs(),
        "batch_size": 1,
        "mean_context_tokens": 0.0,
        "frame_steps": 50,
        "frame_s": 1.0,
    }
    return FrameContext(**fields | changes)


def estimates_of(
    *asks: Ask, information: Information = Information.FORECAST, **context: Any
) -> Estimates:
    """What is estimated of these requests."""
    return Estimates(rows_of(*asks), frame_context(**context), information)


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float64)


@dataclass(frozen=True)
class Absurd:
    """Strategies for requests that no sane sender makes."""

    times: st.SearchStrategy[float] = field(
        default_factory=lambda: st.one_of(
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(-1e4, 1e4),
            st.sampled_from([0.0, 5e-324, 1e-300, 1e300, -1e300]),
        )
    )
    tokens: st.SearchStrategy[int] = field(
        default_factory=lambda: st.one_of(
            st.integers(-(1 << 70), 1 << 70), st.integers(0, 2000), st.sampled_from([0, 1])
        )
    )

    def slos(self) -> st.SearchStrategy[Slo]:
        times = self.times
        return st.one_of(
            st.builds(LatencySlo, times, times),
            st.builds(DeadlineSlo, times),
            st.builds(CompoundSlo, times, st.just("p")),
            st.builds(BestEffortSlo, times),
            st.builds(ReasoningSlo, times, times),
        )

    def asks(self, *, num_programs: int = 0, num_tenants: int = 1) -> st.SearchStrategy[Ask]:
        lengths = st.lists(st.floats(0, 1e300), min_size=1, max_size=40)
        return st.builds(
            Ask,
            slo=self.slos(),
            arrival_s=self.times,
            input_tokens=self.tokens,
            generated=st.integers(0, 1 << 40) | st.integers(0, 500),
            max_output_tokens=self.tokens,
            points=lengths.map(lambda sample: tuple(map(float, equal_mass_points(sample)))),
            state=st.integers(0, 3),
            waited=st.sampled_from([0.0, 1.0, 150.0, 1e9]),
            priority=self.tokens,
            known=st.none() | self.tokens,
            program=st.integers(-1, num_programs - 1),
            tenant=st.integers(0, num_tenants - 1),
        )


ABSURD = Absurd()
