"""What the frame manager keeps, counts and learns, and for how long."""

from __future__ import annotations

import pytest
from plan_engine import BEST_EFFORT, FRAME_S, RUNNING, Engine

from core.slo import CompoundSlo, DeadlineSlo, LatencySlo, OnMiss, ReasoningSlo, RequestTerms
from scheduler.lifecycle import RequestState
from scheduler.plan import PlanKind
from scheduler.step_time import StepObservation, StepTimeModel

# What is kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "edf", "gmax-no-grouping", "gmax"])
def test_what_was_earned_is_not_kept_for_longer_than_a_frame(policy: str) -> None:
    engine = Engine(policy)
    for index in range(50):
        engine.arrive(f"r{index}", DeadlineSlo(60))
        engine.next_frame()
        engine.finish(f"r{index}")
    assert len(engine.frames._earnings._inputs) <= 1


def test_timers_of_requests_that_ended_do_not_pile_up() -> None:
    engine = Engine("fcfs")
    for index in range(5000):
        engine.arrive(f"r{index}", DeadlineSlo(3e7), on_miss=OnMiss.CANCEL)
        engine.frames.ended(f"r{index}", RequestState.ABORTED)
    assert len(engine.frames._timers) < 1100


def test_a_clock_that_goes_back_does_not_plan_in_every_tick() -> None:
    engine = Engine("fcfs", max_batch=1)
    engine.arrive("runs")
    engine.plan()
    engine.arrive("late", DeadlineSlo(5), on_miss=OnMiss.CANCEL)
    engine.clock.advance(6)
    assert engine.frames._is_timer_due(engine.clock.now_s())
    engine.clock.advance(-5.5)
    engine.tick()
    engine.clock.advance(0.01)
    assert engine.tick() is None
    engine.clock.advance(6)
    assert [ending.request_id for ending in engine.plan().drop] == ["late"]


def test_a_streamed_last_call_closes_its_program() -> None:
    engine = Engine("gmax")
    engine.arrive("first", CompoundSlo(60, "p"))
    engine.finish_all()
    assert len(engine.frames.programs) == 1
    terms = RequestTerms(engine.clock.now_s(), LatencySlo(2, 0.1), closes_program="p")
    engine.frames.arrive("last", terms, input_tokens=5, max_output_tokens=5)
    engine.finish_all()
    assert len(engine.frames.programs) == 0


# What is counted ----------------------------------------------------------------------------------


def test_a_request_that_started_is_not_blocked_any_more() -> None:
    engine = Engine("edf", max_batch=2, total_kv=1000, frame_steps=10)
    engine.arrive("runs", DeadlineSlo(5), input_tokens=900)
    engine.plan()
    big = engine.arrive("big", DeadlineSlo(50), input_tokens=900)
    for _ in range(3):
        engine.next_frame()
    assert big.frames_blocked == 3
    engine.finish("runs")
    engine.next_frame()
    assert big.state is RUNNING
    assert big.frames_blocked == 0


def test_whom_the_engine_does_not_take_counts_as_waiting_for_kv() -> None:
    engine = Engine("edf", max_batch=2)
    refused = engine.arrive("refused", DeadlineSlo(5))
    for count in range(3):
        engine.clock.advance(FRAME_S)
        plan = engine.frames.tick(engine.clock.now_s(), engine.capacity())
        assert plan is not None
        assert plan.admit == ("refused",)  # and the engine does not
        assert (refused.frames_waited, refused.frames_blocked) == (count, count)


def test_an_early_boundary_ages_nobody_and_moves_few() -> None:
    engine = Engine("edf", max_batch=4)
    for index in range(4):
        engine.arrive(f"runs {index}", DeadlineSlo(100))
    waits = engine.arrive("waits", DeadlineSlo(200))
    engine.plan()
    assert waits.frames_waited == 1
    for index in range(3):
        engine.arrive(f"stream {index}", LatencySlo(0.5, 0.2))
    engine.decode_steps(10)
    plan = engine.plan()
    assert (plan.kind, len(plan.park), len(plan.admit)) == (PlanKind.EARLY, 1, 1)
    assert waits.frames_waited == 1
    assert engine.next_frame().kind is PlanKind.FRAME
    assert waits.frames_waited == 2


@pytest.mark.parametrize(("ttft_s", "is_early"), [(1.5, True), (2.5, False)])
def test_a_first_token_is_at_risk_where_its_chunks_wait_for_decode_steps(
    ttft_s: float, is_early: bool
) -> None:
    # Chunks of 100 beside decodes of 1/64 s: 6,400 tokens take a second, the frame another one.
    step_time = StepTimeModel.known(1 / 64)
    step_time.observe(StepObservation(1 / 64, 1, 0, 100))
    engine = Engine("gmax", max_batch=1, step_time=step_time)
    engine.arrive("runs")
    engine.plan()
    engine.decode(16, 1 / 64)
    engine.clock.advance(-0.25)  # as if no time had passed: the frame's second is ahead
    engine.arrive("stream", LatencySlo(ttft_s, 0.5), input_tokens=6400)
    plan = engine.tick()
    assert (plan is not None) == is_early
    assert plan is None or plan.kind is PlanKind.EARLY


# What is learnt -----------------------------------------------------------------------------------


def test_the_one_token_of_a_health_check_teaches_nothing() -> None:
    engine = Engine("gmax")
    engine.arrive("check", BEST_EFFORT, is_urgent=True)
    engine.plan()
    engine.frames.progressed("check", 1)
    engine.finish("check")
    assert engine.frames.lengths.average_tokens == 256


def test_a_stream_that_was_late_all_along_earns_nothing() -> None:
    engine = Engine("gmax")
    engine.arrive("late", LatencySlo(0.1, 0.01), input_tokens=1000)
    engine.clock.advance(60)
    engine.plan()
    engine.frames.progressed("late", 40)
    engine.finish("late")
    assert engine.frames._earnings.take(100.0) == 0


def test_an_answer_in_time_earns_its_tokens() -> None:
    engine = Engine("gmax")
    engine.arrive("timely", DeadlineSlo(60), input_tokens=1000)
    engine.plan()
    engine.frames.progressed("timely", 40)
    engine.finish("timely")
    assert engine.frames._earnings.take(100.0) == 1040


def test_an_idle_hour_is_not_charged_to_the_cutoff() -> None:
    engine = Engine("gmax", max_batch=1)
    told: list[bool] = []
    tuner = engine.frames.policy.tuner
    assert tuner is not None
    tuner.frame = lambda earned, elapsed_s, *, is_contended: told.append(is_contended)  # type: ignore[method-assign]
    for name in "abc":
        engine.arrive(name, DeadlineSlo(60))
    engine.plan()
    engine.next_frame()
    engine.finish_all()
    engine.clock.advance(3600)
    assert engine.tick() is None
    for name in "abc":
        engine.arrive(name, DeadlineSlo(60))
    engine.plan()
    assert told == [False, True, False]


def test_the_average_request_is_one_with_an_objective_and_a_program_is_one() -> None:
    engine = Engine("gmax")
    slos = {"a": DeadlineSlo(60), "b": LatencySlo(5, 0.1), "c": BEST_EFFORT}
    slos |= {"d": CompoundSlo(60, "p"), "e": CompoundSlo(60, "p"), "aborted": DeadlineSlo(60)}
    for name, slo in slos.items():
        engine.arrive(name, slo, input_tokens=90)
        engine.run(name)
        engine.frames.progressed(name, 48)
        if name == "aborted":
            engine.frames.ended(name, RequestState.ABORTED)
        else:
            engine.finish(name)
    average = engine.frames._average
    # Beside eight of 256 tokens: an answer, a stream, a program and one that came to nothing.
    assert average.input_tokens == 3 * 90 / 12
    assert average.output_tokens == (8 * 256 + 4 * 48) / 12


def test_until_it_answers_a_reasoning_request_is_as_long_as_its_thinking() -> None:
    engine = Engine("gmax", step_time=StepTimeModel.known(0.1))
    for index in range(8):
        engine.arrive(f"before {index}", ReasoningSlo(60, 0.5), max_output_tokens=5000)
        engine.plan()
        engine.frames.progressed(f"before {index}", 100)
        engine.frames.answer_began(f"before {index}")
        engine.frames.progressed(f"before {index}", 3000)
        engine.finish(f"before {index}")
    engine.arrive("now", ReasoningSlo(20, 0.5), max_output_tokens=5000)
    engine.frames.forecast("now", [3000.0])  # of the whole: not what its deadline is about
    engine.plan()
    decision = engine.frames.explain("now")
    assert decision is not None
    # 100 steps of 0.1 s fit into 20 s; 3,000 would not.
    assert decision.in_time_fraction == 1


def test_a_program_that_never_ends_does_not_outrank_everybody() -> None:
    engine = Engine("gmax", max_batch=1, step_time=StepTimeModel.known(0.01))
    for index in range(200):
        engine.arrive(f"call {index}", CompoundSlo(3e7, "session"), input_tokens=2000)
        engine.finish_all()
    engine.arrive("next call", CompoundSlo(3e7, "session"), input_tokens=100)
    engine.arrive("answer", DeadlineSlo(5), input_tokens=300)
    assert engine.next_frame().admit == ("answer",)


@pytest.mark.parametrize("num_calls", [3, 200])
def test_nor_does_it_in_an_overload_for_all_that_it_has_got(num_calls: int) -> None:
    # Calls of 300 tokens and a second each. What it has got counts as much as what is to come,
    # however much it is: 600 a second, against the answer's 700.
    engine = Engine("gmax", max_batch=1, step_time=StepTimeModel.known(0.01))
    for index in range(num_calls):
        engine.arrive(f"call {index}", CompoundSlo(3e7, "session"), input_tokens=200)
        engine.plan()
        engine.frames.progressed(f"call {index}", 100)
        engine.finish(f"call {index}")
    engine.arrive("next call", CompoundSlo(3e7, "session"), input_tokens=200)
    engine.arrive("answer", DeadlineSlo(5), input_tokens=600)
    for name in ("no time 1", "no time 2"):
        engine.arrive(
            name, DeadlineSlo(1.5), input_tokens=1
        )  # half a second once the frame is over
    for name in ("next call", "answer", "no time 1", "no time 2"):
        engine.frames.forecast(name, [100.0])
    assert engine.next_frame().admit == ("answer",)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_stream_with_a_late_token_is_not_met_whatever_follows(is_stepped: bool) -> None:
    engine = Engine("gmax", step_time=StepTimeModel.known(0.01))

    def one_token(after_s: float) -> float | None:
        engine.clock.advance(after_s)
        engine.tick()
        request = engine.frames.get("stream")
        assert request is not None
        if is_stepped:
            engine.frames.stepped([request])
        else:
            engine.frames.progressed("stream", request.generated_tokens + 1)
        engine.next_frame()
        decision = engine.frames.explain("stream")
        assert decision is not None
        return decision.in_time_fraction

    engine.arrive("stream", LatencySlo(1.0, 2.0))
    engine.frames.forecast("stream", [50.0])
    engine.plan()
    assert one_token(0.5) == 1  # due at 1 s; the next at 3 s, by a clock of 1.5 s
    # Half a second late; the next, due at 5 s, can be in time. The request's own worth is lost:
    # that of the average of eight of 256 tokens and this one, which has not ended.
    own = 8 * 256 / 9
    assert one_token(2.0) == pytest.approx(48 / (48 + own))
    assert one_token(0.0) == pytest.approx(47 / (47 + own))


def test_those_that_run_in_any_case_slow_the_others_down() -> None:
    # 1 ms and 2 ms per request; tokens are due every 60 ms: 29 fit beside nobody.
    def num_run(num_pinned: int) -> int:
        step_time = StepTimeModel.known(0.001, 0.002)
        engine = Engine("gmax", max_batch=64, step_time=step_time)
        for index in range(num_pinned):
            engine.arrive(f"pinned {index}", BEST_EFFORT, is_pinned=True, max_output_tokens=4000)
            engine.run(f"pinned {index}")
        for index in range(64):
            name = f"stream {index}"
            engine.arrive(name, LatencySlo(0.3, 0.06), max_output_tokens=4000)
            engine.frames.forecast(name, [2000.0])
        return engine.plan().num_run

    assert num_run(0) < 40
    assert num_run(20) < 45
