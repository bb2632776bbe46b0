"""Measures how long each engine step takes, for the step-time model."""

from collections import deque
from typing import Any

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
        self._done.append(
            StepObservation(duration_s, step.num_decodes, step.context_tokens, step.prefill_tokens)
        )


def _composition(batch: Any) -> StepObservation:
    """What a batch is about to do; its duration is not known yet."""
    num_reqs = len(batch.reqs)
    if not batch.forward_mode.is_extend():
        context = 0 if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum())
        return StepObservation(0.0, num_reqs, context, 0)
    decoding = batch.decoding_reqs or []
    context = sum(len(req.origin_input_ids) + len(req.output_ids) for req in decoding)
    prefill_tokens = max((batch.extend_num_tokens or 0) - len(decoding), 0)
    return StepObservation(0.0, len(decoding), context, prefill_tokens)
