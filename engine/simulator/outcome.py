"""What came of a simulation: one row per program and per call, and the engine's counts."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.slo import SloType

CallEnd = Literal["finished", "dropped", "aborted", "unfinished"]
"""``unfinished``: the simulation was over before it ended, and nothing of it could count."""


class CallOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One call. Times are absolute, in seconds of the simulation; None: did not happen."""

    program: int
    """Index into ``Workload.programs``."""
    stage: int
    place: int
    """Within its stage."""
    end: CallEnd
    reason: str | None
    """Machine-readable, of a drop or an abort."""
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float
    input_tokens: int
    output_tokens: int
    """Generated."""
    on_time_tokens: int
    """Of a stream: tokens sent by when they were due."""
    max_tbt_s: float
    """Longest time between two of its tokens; 0 with fewer than two."""
    num_preemptions: int
    num_parks: int
    replica: int
    """-1: it ended in front of them."""


class ProgramOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One program, judged as ``docs/metrics.md`` says."""

    program: int
    kind: SloType
    application: str
    arrival_s: float
    end_s: float
    """When its last call ended; of an unfinished one when the simulation did."""
    is_complete: bool
    """Every call finished."""
    met: bool
    """Request-level goodput: 1 if its objective was met as a whole, else 0."""
    goodput_tokens: int
    """Token-level goodput."""
    ttft_s: float | None
    """From its arrival to its first token."""
    worst_lateness_s: float | None
    """Of a stream the largest lateness of a token; else of the whole; negative is early."""
    offered_tokens: int
    """Token-level goodput if all of it was in time: the most that it can give."""


class EngineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica did."""

    steps: int
    """That were over; so with the tokens."""
    busy_s: float
    """Of a step under way at the end its time up to then."""
    decode_tokens: int
    prefill_tokens: int
    """Computed again after a preemption included."""
    cached_tokens: int
    """Of prompts what was in the prefix cache."""
    preemptions: int
    parks: int
    plans: int
    mean_running: float
    """Requests decoding, averaged over decode steps."""


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    policy: str
    workload: str
    window_s: float
    end_s: float
    """When the last call ended; if some had not, when the simulation was over."""
    programs: tuple[ProgramOutcome, ...]
    calls: tuple[CallOutcome, ...]
    replicas: tuple[EngineCounts, ...]
    tbt_edges_s: tuple[float, ...]
    """Edges of ``tbt_counts``, ascending."""
    tbt_counts: tuple[int, ...]
    """Times between two tokens of a stream, one more than there are edges."""
    plan_s: tuple[float, ...] = ()
    """Wall-clock seconds of each plan, where the caller has given a clock; never part of the
    reproducible outcome."""
