"""The decoding requests of a replica as arrays: a step is a few numpy operations.

Each request has a lane from its first token until it ends or loses its KV, parked or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.slo import LatencySlo
from engine.simulator.job import Job

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TBT_EDGES_S: tuple[float, ...] = tuple(float(f"{10 ** (-4 + i / 20):.4g}") for i in range(121))
"""0.1 ms to 100 s, twenty to a decade: percentiles are right to 12 %."""
_EDGES = np.array(TBT_EDGES_S)
_TOLERANCE = 1e-9
"""In shares of a TBT, as ``core.slo.OutcomeTracker`` has it."""


class Lanes:
    """Figures by lane; grows by doubling."""

    def __init__(self) -> None:
        self._free = list(range(63, -1, -1))
        self.jobs: list[Job | None] = [None] * 64
        self.generated: Ints = np.zeros(64, dtype=np.int64)
        self._until: Ints = np.zeros(64, dtype=np.int64)
        """Output tokens at which it ends."""
        self.context: Ints = np.zeros(64, dtype=np.int64)
        self._first_due_s: Floats = np.zeros(64)
        self._tbt_s: Floats = np.zeros(64)
        """0: not a stream."""
        self._last_s: Floats = np.zeros(64)
        self._max_tbt_s: Floats = np.zeros(64)
        self._on_time: Ints = np.zeros(64, dtype=np.int64)
        self._worst_s: Floats = np.zeros(64)
        self.tbt_counts: Ints = np.zeros(len(_EDGES) + 1, dtype=np.int64)
        """Times between tokens of streams, by ``TBT_EDGES_S``."""

    def enter(self, job: Job) -> int:
        """A request gets a lane, with what it has so far."""
        if not self._free:
            self._grow()
        lane = self._free.pop()
        self.jobs[lane], job.lane = job, lane
        self.generated[lane], self._until[lane] = job.generated, job.call.output_tokens
        self.context[lane] = job.context_tokens
        slo = job.terms.slo
        if isinstance(slo, LatencySlo):
            self._first_due_s[lane] = job.terms.arrival_s + slo.target_ttft_s
            self._tbt_s[lane] = slo.target_tbt_s
        else:
            self._first_due_s[lane], self._tbt_s[lane] = np.inf, 0.0
        self._last_s[lane], self._max_tbt_s[lane] = job.last_token_s, job.max_tbt_s
        self._on_time[lane], self._worst_s[lane] = job.on_time_tokens, job.worst_lateness_s
        return lane

    def leave(self, job: Job) -> None:
        """Its lane is free again; the job has its figures back."""
        lane = job.lane
        job.generated = int(self.generated[lane])
        job.last_token_s, job.max_tbt_s = float(self._last_s[lane]), float(self._max_tbt_s[lane])
        job.on_time_tokens = int(self._on_time[lane])
        job.worst_lateness_s = float(self._worst_s[lane])
        self.jobs[lane], job.lane = None, -1
        self._free.append(lane)

    def step(self, lanes: Ints, now_s: float) -> Ints:
        """Each of ``lanes`` has got one token, at ``now_s``; those that are done with it."""
        generated = self.generated[lanes]
        lateness_s = now_s - (self._first_due_s[lanes] + generated * self._tbt_s[lanes])
        self._on_time[lanes] += lateness_s <= _TOLERANCE * self._tbt_s[lanes]
        self._worst_s[lanes] = np.maximum(self._worst_s[lanes], lateness_s)
        gap_s = now_s - self._last_s[lanes]
        self._last_s[lanes] = now_s
        self._max_tbt_s[lanes] = np.maximum(self._max_tbt_s[lanes], gap_s)
        streams = self._tbt_s[lanes] > 0
        places = np.searchsorted(_EDGES, gap_s[streams])
        self.tbt_counts += np.bincount(places, minlength=len(_EDGES) + 1)
        self.generated[lanes] = generated + 1
        self.context[lanes] += 1
        done: Ints = lanes[generated + 1 >= self._until[lanes]]
        return done

    def first_token(self, job: Job, now_s: float) -> bool:
        """A prompt is computed and gives a token; whether that was the last one.

        It may be the first after a preemption. The job has no lane yet.
        """
        slo = job.terms.slo
        if isinstance(slo, LatencySlo):
            due_s = job.terms.arrival_s + slo.target_ttft_s + job.generated * slo.target_tbt_s
            lateness_s = now_s - due_s
            job.on_time_tokens += lateness_s <= _TOLERANCE * slo.target_tbt_s
            job.worst_lateness_s = max(job.worst_lateness_s, lateness_s)
        if job.first_token_s is None:
            job.first_token_s = now_s
        else:
            gap_s = now_s - job.last_token_s
            job.max_tbt_s = max(job.max_tbt_s, gap_s)
            if job.is_stream:
                self.tbt_counts[bisect_left(TBT_EDGES_S, gap_s)] += 1
        job.last_token_s = now_s
        job.generated += 1
        return job.generated >= job.call.output_tokens

    def at(self, jobs: Sequence[Job]) -> Ints:
        """The lanes of some jobs."""
        return np.array([job.lane for job in jobs], dtype=np.int64)

    def _grow(self) -> None:
        size = len(self.jobs)
        self._free = list(range(2 * size - 1, size - 1, -1))
        self.jobs += [None] * size
        for name in (
            "generated",
            "_until",
            "context",
            "_first_due_s",
            "_tbt_s",
            "_last_s",
            "_max_tbt_s",
            "_on_time",
            "_worst_s",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
