"""What counts in a simulation: ``core.slo.OutcomeTracker`` is the definition."""

from __future__ import annotations

import math

import pytest
from simulated import (
    BEST_EFFORT,
    call,
    program,
    request,
    simulate,
    stage,
    workload,
)

from core.slo import (
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    OutcomeTracker,
    RequestTerms,
)
from engine.simulator.job import Job
from engine.simulator.judge import Judge
from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps
from scheduler.lifecycle import RequestState

EVEN = LinearSteps(constant_s=0.125)
"""Every step takes an eighth of a second: sums are exact."""


def test_tokens_sent_exactly_when_due_are_on_time() -> None:
    run = simulate(workload(request(10, 8, slo=LatencySlo(0.125, 0.125))), steps=EVEN)
    assert run.tokens[0, 0, 0] == [0.125 * (index + 1) for index in range(8)]
    assert (run.program().goodput_tokens, run.program().met) == (8, True)
    assert run.program().worst_lateness_s == 0


@pytest.mark.parametrize("early_s", [1e-6, 1e-3])
def test_tokens_sent_just_after_are_late(early_s: float) -> None:
    slo = LatencySlo(0.125 - early_s, 0.125)
    run = simulate(workload(request(10, 8, slo=slo)), steps=EVEN)
    assert (run.program().goodput_tokens, run.program().met) == (0, False)
    assert run.program().worst_lateness_s == pytest.approx(early_s)


def test_a_stream_that_falls_behind() -> None:
    """Token i comes at 0.125 (i + 1) and is due at 0.5 + 0.1 i: on time up to i = 15."""
    run = simulate(workload(request(10, 40, slo=LatencySlo(0.5, 0.1))), steps=EVEN)
    assert run.program().goodput_tokens == 16
    assert run.call().on_time_tokens == 16
    assert not run.program().met


def test_a_stream_that_catches_up() -> None:
    run = simulate(workload(request(10, 40, slo=LatencySlo(0.1, 0.126))), steps=EVEN)
    assert run.program().goodput_tokens == 15
    assert not run.program().met


@pytest.mark.parametrize(("deadline_s", "goodput"), [(1.0, 18), (0.999, 0)])
def test_an_answer_counts_whole_or_not_at_all(deadline_s: float, goodput: int) -> None:
    run = simulate(workload(request(10, 8, slo=DeadlineSlo(deadline_s)), window_s=2), steps=EVEN)
    assert run.program().goodput_tokens == goodput
    assert run.program().met == (goodput > 0)
    assert run.call().on_time_tokens == 0


@pytest.mark.parametrize(("deadline_s", "goodput"), [(1.0, 44), (0.999, 0)])
def test_a_program_counts_whole_or_not_at_all(deadline_s: float, goodput: int) -> None:
    asked = program(
        stage(call(10, 4), call(10, 2)),
        stage(call(10, 4), call(3, 1)),
        slo=CompoundSlo(deadline_s, ""),
    )
    run = simulate(workload(asked, window_s=2), steps=EVEN)
    assert run.program().is_complete
    assert run.program().goodput_tokens == goodput
    assert run.program().worst_lateness_s == pytest.approx(1.0 - deadline_s)


def test_best_effort_counts_nothing() -> None:
    run = simulate(workload(request(10, 4, slo=BEST_EFFORT), window_s=2), steps=EVEN)
    assert (run.program().goodput_tokens, run.program().met) == (0, True)
    assert run.program().worst_lateness_s is None


def test_a_program_of_which_one_call_failed_counts_nothing() -> None:
    asked = program(stage(call(10, 4), call(5000, 4)), stage(call(1, 1)))
    run = simulate(workload(asked), EngineShape(kv_tokens=1000), steps=EVEN)
    assert not run.program().is_complete
    assert run.program().goodput_tokens == 0
    assert {row.end for row in run.result.calls} == {"finished", "aborted"}


def test_what_was_streamed_before_a_program_was_over_counts() -> None:
    run = simulate(
        workload(request(10, 400, slo=LatencySlo(0.25, 0.25)), window_s=1.0),
        steps=EVEN,
        drain_s=0.0,
    )
    assert run.call().end == "unfinished"
    assert run.program().goodput_tokens == run.call().on_time_tokens == 8
    assert not run.program().met


def test_a_cancelled_answer_counts_nothing() -> None:
    run = simulate(
        workload(request(10, 40, slo=DeadlineSlo(1.0), on_miss=OnMiss.CANCEL), window_s=9.0),
        steps=EVEN,
    )
    row = run.call()
    assert (row.end, row.reason) == ("aborted", "deadline_passed")
    assert 1.0 <= row.end_s <= 1.0 + 2 * 0.125
    assert run.program().goodput_tokens == 0


def test_a_late_answer_goes_on_where_it_may() -> None:
    run = simulate(
        workload(request(10, 40, slo=DeadlineSlo(1.0), on_miss=OnMiss.FINISH), window_s=9.0),
        steps=EVEN,
    )
    assert run.call().end == "finished"
    assert run.program().goodput_tokens == 0
    assert run.program().worst_lateness_s == pytest.approx(4.0)


def _verdicts(slo: DeadlineSlo | CompoundSlo, arrival_s: float, end_s: float) -> tuple[bool, bool]:
    """Of the judge and of the tracker, on an answer that ended then."""
    asked = request(10, 3, at_s=arrival_s, slo=slo)
    judge = Judge(workload(asked))
    terms = RequestTerms(arrival_s, slo)
    job = Job(0, asked.stages[0].calls[0], terms, program=0, stage=0, place=0)
    job.generated = 3
    judge.call_ended(job, RequestState.FINISHED, None, end_s)
    tracker = OutcomeTracker(terms)
    tracker.sent(3, end_s)
    (judged,) = judge.programs(end_s)
    return judged.met, tracker.finish(10, end_s).met


def test_an_answer_at_exactly_its_deadline_is_in_time() -> None:
    wrong = []
    for tenths in range(1, 100):
        for deadline_s in (0.1, 0.7, 5.0, 20.0):
            arrival_s = tenths / 10
            due_s = arrival_s + deadline_s
            for end_s in (math.nextafter(due_s, 0), due_s, math.nextafter(due_s, math.inf)):
                judged, expected = _verdicts(DeadlineSlo(deadline_s), arrival_s, end_s)
                if judged != expected:
                    wrong.append((arrival_s, deadline_s, end_s))
    assert not wrong


def test_times_between_tokens_are_counted_for_streams_alone() -> None:
    run = simulate(
        workload(
            request(10, 5, slo=LatencySlo(1, 1)),
            request(10, 9, slo=DeadlineSlo(9.0)),
            request(10, 9, slo=BEST_EFFORT),
            window_s=9.0,
        ),
        steps=EVEN,
    )
    edges, counts = run.result.tbt_edges_s, run.result.tbt_counts
    place = next(index for index, edge in enumerate(edges) if edge >= 0.125)
    assert counts[place] == sum(counts) == 4
