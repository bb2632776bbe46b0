"""Measuring steps: on a CPU inside the launch, on a GPU from result to result."""

from __future__ import annotations

from types import SimpleNamespace

from core.clock import ManualClock
from engine.runtime.step_timer import STALL_S, StepTimer
from scheduler.step_time import StepObservation


class Lengths:
    """Stands in for the tensor of sequence lengths."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths

    def sum(self) -> int:
        return sum(self._lengths)

    def max(self) -> int:
        return max(self._lengths)


def decode_batch(*contexts: int) -> SimpleNamespace:
    """A batch in which every request gets one token."""
    mode = SimpleNamespace(is_extend=lambda: False)
    return SimpleNamespace(
        forward_mode=mode, reqs=[None] * len(contexts), seq_lens_cpu=Lengths(*contexts)
    )


def prefill_batch(tokens: int, *decoding: int) -> SimpleNamespace:
    """A prefill of so many tokens, with requests of these contexts decoding along."""
    reqs = [SimpleNamespace(origin_input_ids=[0] * (n - 1), output_ids=[0]) for n in decoding]
    mode = SimpleNamespace(is_extend=lambda: True)
    return SimpleNamespace(
        forward_mode=mode,
        reqs=[None, *reqs],
        decoding_reqs=reqs or None,
        extend_num_tokens=tokens + len(reqs),
    )


def test_on_a_cpu_a_step_lasts_as_long_as_its_launch() -> None:
    clock = ManualClock(10.0)
    timer = StepTimer(clock, is_synchronous=True)
    batch = decode_batch(100, 250)
    timer.step_launched(batch)
    clock.advance(0.25)
    timer.step_returned(batch)
    clock.advance(3)
    timer.step_processed(batch)
    assert timer.take() == (StepObservation(0.25, 2, 350, 0, 150),)
    assert timer.take() == ()


def test_on_a_gpu_a_step_lasts_from_the_result_before_it_to_its_own() -> None:
    clock = ManualClock(10.0)
    timer = StepTimer(clock, is_synchronous=False)
    first, second = decode_batch(100), decode_batch(100, 200)
    timer.step_launched(first)
    timer.step_returned(first)
    clock.advance(0.25)
    timer.step_launched(second)  # while the first runs
    timer.step_returned(second)
    clock.advance(0.25)
    timer.step_processed(first)
    clock.advance(0.125)
    timer.step_processed(second)
    assert timer.take() == (StepObservation(0.5, 1, 100, 0), StepObservation(0.125, 2, 300, 0, 100))


def test_on_an_idle_gpu_a_step_begins_with_its_launch() -> None:
    clock = ManualClock(10.0)
    timer = StepTimer(clock, is_synchronous=False)
    timer.step_processed(decode_batch(1))
    clock.advance(60)
    timer.step_launched(decode_batch(1))
    clock.advance(0.5)
    timer.step_processed(decode_batch(1))
    assert [step.duration_s for step in timer.take()] == [0.5]


def test_a_prefill_is_counted_by_its_tokens_and_by_who_decodes_along() -> None:
    clock = ManualClock(10.0)
    timer = StepTimer(clock, is_synchronous=True)
    for batch in (prefill_batch(512), prefill_batch(512, 100, 50)):
        timer.step_launched(batch)
        clock.advance(0.5)
        timer.step_returned(batch)
    assert timer.take() == (StepObservation(0.5, 0, 0, 512), StepObservation(0.5, 2, 150, 512, 50))


def test_an_engine_without_a_step_for_long_makes_no_progress() -> None:
    clock = ManualClock(10.0)
    timer = StepTimer(clock, is_synchronous=True)
    clock.advance(STALL_S - 0.1)
    assert timer.is_making_progress()
    clock.advance(0.2)
    assert not timer.is_making_progress()
    timer.step_returned(decode_batch(1))
    assert timer.is_making_progress()
