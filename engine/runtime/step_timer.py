"""Measures how long each engine step takes, for the step-time model."""

from collections import deque
from typing import Any

import msgspec

from core.clock import Clock
from scheduler.step_time import StepObservation

STALL_S = 20.0
"""Without a finished step for this long while work waits, the engine is not healthy."""


class StepTimer:
    """Turns launches and results of batches into ``StepObservation``.

    On a CPU a step runs inside the launch. On a GPU the launch returns at once and the
    result comes later, so a step lasts from the previous result (or its own launch, where
    the engine was idle) to its result.
    """

    def __init__(self, clock: Clock, *, is_synchronous: bool) -> None:
        self._clock = clock
        self._is_synchronous = is_synchronous
        self._launched: deque[tuple[float, StepObservation]] = deque(maxlen=8)
        self._done: list[StepObservation] = []
        self._last_result_s = self._last_progress_s = clock.now_s()

    def step_launched(self, batch: Any) -> None:
        self._launched.append((self._clock.now_s(), _composition(batch)))

    def step_returned(self, batch: Any) -> None:
        self._last_progress_s = self._clock.now_s()
        if self._is_synchronous and self._launched:
            launched_s, step = self._launched.pop()
            self._add(step, self._last_progress_s - launched_s)

    def step_processed(self, batch: Any) -> None:
        now_s = self._last_progress_s = self._clock.now_s()
        if not self._is_synchronous and self._launched:
            launched_s, step = self._launched.popleft()
            self._add(step, now_s - max(launched_s, self._last_result_s))
        self._last_result_s = now_s

    def take(self) -> tuple[StepObservation, ...]:
        """Observations since the last call."""
        done, self._done = tuple(self._done), []
        return done

    def is_making_progress(self) -> bool:
        """Whether a step has been launched or finished lately."""
        return self._clock.now_s() - self._last_progress_s < STALL_S

    def _add(self, step: StepObservation, duration_s: float) -> None:
        self._done.append(msgspec.structs.replace(step, duration_s=duration_s))


def _composition(batch: Any) -> StepObservation:
    """What a batch is about to do; its duration is not known yet."""
    num_reqs = len(batch.reqs)
    if not batch.forward_mode.is_extend():
        if batch.seq_lens_cpu is None or num_reqs == 0:
            return StepObservation(0.0, num_reqs, 0, 0)
        context, longest = int(batch.seq_lens_cpu.sum()), int(batch.seq_lens_cpu.max())
        return StepObservation(0.0, num_reqs, context, 0, longest * num_reqs - context)
    decoding = batch.decoding_reqs or []
    lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in decoding]
    padding = max(lengths, default=0) * len(lengths) - sum(lengths)
    prefill_tokens = max((batch.extend_num_tokens or 0) - len(decoding), 0)
    return StepObservation(0.0, len(decoding), sum(lengths), prefill_tokens, padding)
