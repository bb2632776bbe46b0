"""Just in time: tokens of a frame, turns inside it, the surplus, and how many run at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from plan_engine import BEST_EFFORT, RUNNING, Engine

from core.slo import DeadlineSlo, LatencySlo
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, FramePlan, Move, PlanKind, Reason
from scheduler.policies import BASELINES
from scheduler.step_time import StepTimeModel

STEP_S = 1 / 64
FRAME_STEPS = 32
TURN_STEPS = 8
LENGTH_S = FRAME_STEPS * STEP_S
"""Of a frame: half a second, exact in binary as all times here."""
JUST_IN_TIME = ("gmax", "gmax-paper", "gmax-oracle", "gmax-no-grouping", "gmax-no-adaptive-batch")
RUNS_THROUGH = ("gmax-no-jit", *(name for name in BASELINES if name != "gmax-paper"))


def jit_engine(policy: str = "gmax", max_batch: int = 1, **more: Any) -> Engine:
    """A frame of 32 steps with a turn after 8, 16 and 24; every step takes the same."""
    return Engine(
        policy,
        max_batch=max_batch,
        frame_steps=FRAME_STEPS,
        turns_per_frame=FRAME_STEPS // TURN_STEPS,
        step_time=StepTimeModel.known(STEP_S),
        **more,
    )


def needing(tokens: int) -> LatencySlo:
    """A stream as fast as the engine that needs so many tokens in a frame that begins now."""
    return LatencySlo(LENGTH_S - (tokens - 1) * STEP_S, STEP_S)


def decode(engine: Engine, num_steps: int) -> None:
    engine.decode(num_steps, STEP_S)


def turn_after(engine: Engine, num_steps: int) -> FramePlan:
    """Nothing happens until so many more steps have run; then there is a turn."""
    for _ in range(num_steps - 1):
        decode(engine, 1)
        assert engine.tick() is None
    decode(engine, 1)
    plan = engine.plan()
    assert plan.kind is PlanKind.TURN
    return plan


def assert_runs_through(engine: Engine) -> None:
    """Nobody is moved until the frame has ended."""
    for _ in range(FRAME_STEPS - 1):
        decode(engine, 1)
        assert engine.tick() is None


# The line -----------------------------------------------------------------------------------------


def test_behind_one_that_needs_a_part_of_the_frame_the_next_stands_in_line() -> None:
    engine = jit_engine()
    engine.arrive("a", needing(3))
    engine.arrive("b", needing(1))
    plan = engine.plan()
    assert (plan.admit, plan.line) == (("a",), ("b",))
    assert plan.tokens == {"a": 3, "b": 1}
    assert (plan.num_run, plan.frame_tokens) == (1, FRAME_STEPS)
    decision = plan.explain("b")
    assert decision is not None
    assert (decision.move, decision.reason) == (Move.WAIT, Reason.IN_LINE)


def test_by_default_nobody_stands_in_line() -> None:
    engine = Engine(
        "gmax", max_batch=1, frame_steps=FRAME_STEPS, step_time=StepTimeModel.known(STEP_S)
    )
    engine.arrive("a", needing(3))
    engine.arrive("b", needing(1))
    plan = engine.plan()
    assert (plan.admit, plan.line) == (("a",), ())
    assert_runs_through(engine)


def test_the_line_is_in_the_order_of_the_ranking() -> None:
    engine = jit_engine(max_batch=4, max_moves_fraction=1.0)
    for name in "abcd":
        engine.arrive(name, needing(8))
    # Beyond one and a half average streams the longer has the less for the request, per token.
    for name, tokens, length in (
        ("later", 1, 600),
        ("last", 1, 700),
        ("first", 4, 400),
        ("second", 3, 500),
    ):
        engine.arrive(name, needing(tokens), max_output_tokens=1000)
        engine.frames.forecast(name, [length])
    assert engine.plan().line == ("first", "second", "later", "last")


@pytest.mark.parametrize(
    "slo",
    [BEST_EFFORT, LatencySlo(2.0, STEP_S), DeadlineSlo(1000.0)],
    ids=["best effort", "stream with time to spare", "loose deadline"],
)
def test_who_does_not_fall_behind_before_the_frame_ends_is_not_in_line(slo: Any) -> None:
    engine = jit_engine()
    engine.arrive("a", needing(3))
    # So long that its input hardly counts: a second of it is worth less than one of a.
    engine.arrive("b", slo, max_output_tokens=2000)
    engine.frames.forecast("b", [1000.0])
    plan = engine.plan()
    assert (plan.admit, plan.line) == (("a",), ())
    assert plan.tokens == {"a": 3}


def test_what_can_no_longer_make_its_deadline_is_not_in_line() -> None:
    engine = jit_engine(max_batch=2)
    engine.arrive("a", needing(3))
    engine.arrive("b", needing(3))
    engine.arrive("late", DeadlineSlo(-0.125))
    engine.frames.forecast("late", [8.0])  # an eighth of a second, and the frame has room for it
    plan = engine.plan()
    assert (plan.admit, plan.line) == (("a", "b"), ())


def test_the_line_gets_no_more_than_the_frame_has_left() -> None:
    engine = jit_engine()
    engine.arrive("a", needing(20))
    engine.arrive("too much", needing(13))
    engine.arrive("as much as is left", needing(12))
    plan = engine.plan()
    assert (plan.admit, plan.line) == (("a",), ("as much as is left",))
    assert plan.tokens == {"a": 20, "as much as is left": 12}


def test_where_those_that_run_need_all_of_the_frame_nobody_is_in_line() -> None:
    engine = jit_engine()
    engine.arrive("a", needing(32))
    engine.arrive("b", needing(31))
    plan = engine.plan()
    assert (plan.line, plan.tokens) == ((), {"a": 32})
    assert_runs_through(engine)


def test_nobody_is_in_line_whose_kv_does_not_fit_beside_those_that_run() -> None:
    engine = jit_engine(total_kv=1000)
    engine.arrive("a", needing(4))  # 100 and the frame's 32, and 400 stay free: that leaves 468
    engine.arrive("big", needing(3), input_tokens=440)
    engine.arrive("small", needing(2), input_tokens=430)
    assert engine.plan().line == ("small",)


def test_who_has_its_kv_stands_in_line_however_little_is_free() -> None:
    engine = jit_engine()
    slo = LatencySlo(LENGTH_S / 2, 2 * STEP_S)
    engine.arrive("a", slo)
    engine.arrive("b", slo)
    engine.plan()
    for _ in range(FRAME_STEPS - 1):
        decode(engine, 1)
        engine.tick()
    engine.total_kv = sum(request.context_tokens for request in engine.frames.live()) + 40
    decode(engine, 1)
    plan = engine.plan()
    assert (plan.kind, plan.run, plan.line) == (PlanKind.FRAME, ("b",), ("a",))


def test_the_line_is_no_longer_than_the_moves_that_a_frame_has_left() -> None:
    engine = jit_engine(max_batch=4, max_moves_fraction=0.5)
    for name in "abcd":
        engine.arrive(name, needing(8))
    for name in "efgh":
        engine.arrive(name, needing(1))
    assert engine.plan().line == ("e", "f")


def test_moves_at_the_boundary_leave_fewer_for_the_line() -> None:
    engine = jit_engine(max_batch=4, max_moves_fraction=0.5)
    for name in "abcd":
        engine.arrive(name, BEST_EFFORT)
    engine.plan()
    for index in range(8):
        engine.arrive(f"stream{index}", LatencySlo(1.25, STEP_S))
    plan = engine.next_frame()
    assert len(plan.park) == 2
    assert plan.line == ()


# Turns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", JUST_IN_TIME)
def test_who_has_its_tokens_gives_way_to_who_is_in_line(policy: str) -> None:
    engine = jit_engine(policy)
    engine.arrive("a", needing(3))
    engine.arrive("b", needing(1))
    frame = engine.plan()
    (out,), (into,) = frame.admit, frame.line
    plan = turn_after(engine, TURN_STEPS)
    assert (plan.park, plan.admit, plan.resume) == ((out,), (into,), ())
    assert (plan.run, plan.line, plan.preempt) == ((), (), ())
    assert (plan.num_run, plan.frame_tokens, plan.frame) == (1, FRAME_STEPS, frame.frame)
    assert (plan.drop, plan.cancel) == ((), ())


def test_a_turn_comes_only_at_its_step_and_not_before_the_tokens_are_there() -> None:
    engine = jit_engine()
    engine.arrive("a", needing(9))
    engine.arrive("b", needing(1))
    engine.plan()
    # After 8 steps one token is missing, after 9 there is none, and the next turn is after 16.
    assert turn_after(engine, 2 * TURN_STEPS).park == ("a",)


def test_a_turn_brings_back_one_that_is_parked() -> None:
    engine = jit_engine()
    engine.arrive("a", LatencySlo(0.25, 0.125))
    engine.arrive("b", LatencySlo(0.5, 0.125))
    engine.plan()
    turn_after(engine, TURN_STEPS)
    decode(engine, FRAME_STEPS - TURN_STEPS)
    # b is 24 tokens ahead and stays by its margin; a's next is due before this frame ends.
    frame = engine.plan()
    assert (frame.kind, frame.run, frame.line) == (PlanKind.FRAME, ("b",), ("a",))
    plan = turn_after(engine, TURN_STEPS)
    assert (plan.park, plan.resume, plan.admit) == (("b",), ("a",), ())
    assert engine.names(RUNNING) == ["a"]


def test_who_has_most_beyond_its_need_gives_way_first() -> None:
    engine = jit_engine(max_batch=3)
    for name, tokens in (("needs 6", 6), ("needs 4", 4), ("needs 5", 5), ("b", 1)):
        engine.arrive(name, needing(tokens))
    assert engine.plan().line == ("b",)
    plan = turn_after(engine, TURN_STEPS)
    assert plan.park == ("needs 4",)
    assert set(plan.run) == {"needs 6", "needs 5"}


def test_of_equals_the_first_to_arrive_gives_way() -> None:
    engine = jit_engine(max_batch=2)
    for name in ("a", "b"):
        engine.arrive(name, needing(4))
    engine.arrive("c", needing(1))
    engine.plan()
    assert turn_after(engine, TURN_STEPS).park == ("a",)


def test_only_as_many_give_way_as_have_their_tokens_and_the_rest_of_the_line_stays() -> None:
    engine = jit_engine(max_batch=2, max_moves_fraction=1.0)
    engine.arrive("needs 12", needing(12))
    engine.arrive("needs 8", needing(8))
    engine.arrive("c", needing(5))
    engine.arrive("d", needing(2))
    assert engine.plan().line == ("c", "d")
    plan = turn_after(engine, TURN_STEPS)
    assert (plan.park, plan.admit, plan.line) == (("needs 8",), ("c",), ("d",))
    assert plan.run == ("needs 12",)
    plan = turn_after(engine, TURN_STEPS)
    assert (plan.park, plan.admit, plan.line) == (("needs 12",), ("d",), ())
    # Both have more than they need now, but nobody is in line any more.
    for _ in range(FRAME_STEPS - 2 * TURN_STEPS - 1):
        decode(engine, 1)
        assert engine.tick() is None


@pytest.mark.parametrize("flag", ["is_pinned", "is_urgent"])
def test_pinned_and_urgent_requests_never_give_way(flag: str) -> None:
    engine = jit_engine()
    engine.arrive("a", BEST_EFFORT, **{flag: True})
    engine.plan()
    engine.clock.advance(1.0)
    engine.arrive("b", needing(1))
    frame = engine.plan()
    assert (frame.kind, frame.run, frame.line) == (PlanKind.FRAME, ("a",), ("b",))
    assert_runs_through(engine)


def test_one_of_the_line_that_ended_meanwhile_is_skipped() -> None:
    engine = jit_engine(max_batch=2, max_moves_fraction=1.0)
    engine.arrive("a", needing(4))
    engine.arrive("b", needing(4))
    engine.arrive("gone", needing(2))
    engine.arrive("next", needing(1))
    assert engine.plan().line == ("gone", "next")
    engine.frames.ended("gone", RequestState.ABORTED)
    plan = turn_after(engine, TURN_STEPS)
    assert (plan.park, plan.admit) == (("a",), ("next",))
    assert "gone" not in [decision.request_id for decision in plan.decisions]


def test_where_all_of_the_line_has_ended_nobody_gives_way() -> None:
    engine = jit_engine()
    engine.arrive("a", needing(4))
    engine.arrive("gone", needing(2))
    engine.plan()
    engine.frames.ended("gone", RequestState.ABORTED)
    assert_runs_through(engine)


def test_one_of_the_line_that_got_a_free_place_takes_no_second_one() -> None:
    engine = jit_engine(max_batch=2)
    engine.arrive("a", needing(4))
    engine.arrive("b", needing(4))
    engine.arrive("c", needing(2))
    assert engine.plan().line == ("c",)
    decode(engine, 2)
    engine.finish("a")
    plan = engine.plan()
    assert (plan.kind, plan.admit, plan.run) == (PlanKind.BACKFILL, ("c",), ("b",))
    for _ in range(FRAME_STEPS - 3):
        decode(engine, 1)
        assert engine.tick() is None


def test_what_the_engine_has_not_begun_yet_keeps_its_place_through_a_turn() -> None:
    engine = jit_engine(max_batch=2)
    engine.arrive("a", needing(4))
    engine.arrive("long prompt", needing(3))
    engine.arrive("c", needing(2))
    frame = engine.frames.tick(engine.clock.now_s(), engine.capacity())
    assert frame is not None
    assert (frame.admit, frame.line) == (("a", "long prompt"), ("c",))
    engine.run("a")
    decode(engine, TURN_STEPS)
    plan = engine.frames.tick(engine.clock.now_s(), engine.capacity())
    assert plan is not None
    assert (plan.kind, plan.park) == (PlanKind.TURN, ("a",))
    assert plan.admit == ("c", "long prompt")
    assert len(plan.run) + len(plan.admit) + len(plan.resume) <= plan.num_run


def test_nobody_gives_way_to_one_of_the_line_that_has_a_free_place_already() -> None:
    engine = jit_engine(max_batch=2)
    engine.arrive("a", needing(4))
    engine.arrive("b", needing(4))
    engine.arrive("long prompt", needing(2))
    assert engine.plan().line == ("long prompt",)
    decode(engine, 2)
    engine.finish("a")
    backfill = engine.frames.tick(engine.clock.now_s(), engine.capacity())
    assert backfill is not None
    assert (backfill.run, backfill.admit, backfill.num_run) == (("b",), ("long prompt",), 2)
    decode(engine, TURN_STEPS)
    plan = engine.frames.tick(engine.clock.now_s(), engine.capacity())
    assert plan is None or plan.park == ()


def test_a_turn_explains_itself() -> None:
    engine = jit_engine(max_batch=2)
    engine.arrive("needs 12", needing(12))
    engine.arrive("a", needing(4))
    engine.arrive("b", needing(1))
    engine.plan()
    plan = turn_after(engine, TURN_STEPS)
    told = {item.request_id: (item.move, item.reason) for item in plan.decisions}
    assert told == {
        "needs 12": (Move.RUN, Reason.NOBODY_BETTER),
        "a": (Move.PARK, Reason.HAS_ITS_TOKENS),
        "b": (Move.ADMIT, Reason.HAS_TURN),
    }
    assert {item.score for item in plan.decisions} == {None}


@pytest.mark.parametrize("policy", RUNS_THROUGH)
def test_who_is_not_just_in_time_has_no_turns(policy: str) -> None:
    engine = jit_engine(policy)
    engine.arrive("a", needing(3))
    engine.arrive("b", needing(1))
    plan = engine.plan()
    assert (len(plan.admit), plan.line) == (1, ())
    assert sum(plan.tokens.values()) <= FRAME_STEPS
    assert_runs_through(engine)


@pytest.mark.parametrize("policy", ["fcfs", "gmax-no-jit"])
def test_under_another_policy_nobody_gives_way_before_the_next_boundary(policy: str) -> None:
    engine = jit_engine()
    engine.arrive("a", needing(3))
    engine.arrive("b", needing(1))
    assert engine.plan().line == ("b",)
    engine.frames.use_policy(policy)
    assert_runs_through(engine)


def test_a_turn_admits_nobody_whose_kv_does_not_fit_any_more() -> None:
    engine = jit_engine(max_batch=2, total_kv=1000)
    engine.arrive("a", needing(8), input_tokens=100)
    engine.arrive("b", needing(8), input_tokens=100)
    engine.arrive("line", needing(1), input_tokens=250, max_output_tokens=1000)
    engine.frames.forecast("line", [1000.0])  # worth less per token than those of up to 100
    assert engine.plan().line == ("line",)
    decode(engine, 2)
    engine.finish("a")
    engine.arrive("newcomer", needing(20), input_tokens=700)
    plan = engine.plan()
    assert (plan.kind, plan.admit) == (PlanKind.BACKFILL, ("newcomer",))
    for _ in range(FRAME_STEPS - 3):
        decode(engine, 1)
        free = engine.capacity().free_kv_tokens
        turn = engine.tick()
        for name in () if turn is None else turn.admit:
            request = engine.frames.get(name)
            assert request is not None
            assert request.context_tokens <= free


# Surplus ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", JUST_IN_TIME)
def test_with_nobody_in_line_everybody_runs_on_beyond_its_need(policy: str) -> None:
    engine = jit_engine(policy, max_batch=2)
    for name in "ab":
        engine.arrive(name, needing(2))
    plan = engine.plan()
    assert plan.tokens == {"a": 2, "b": 2}
    assert_runs_through(engine)
    for name in "ab":
        request = engine.frames.get(name)
        assert request is not None
        assert request.generated_tokens == FRAME_STEPS - 1


def test_steps_that_nobody_needs_go_to_best_effort_work_that_has_a_place() -> None:
    engine = jit_engine(max_batch=2)
    engine.arrive("stream", needing(2))
    engine.arrive("whenever", BEST_EFFORT)
    plan = engine.plan()
    assert set(plan.admit) == {"stream", "whenever"}
    assert plan.tokens == {"stream": 2, "whenever": 1}
    assert_runs_through(engine)


# How many run -------------------------------------------------------------------------------------


def crowd(policy: str = "gmax", **more: Any) -> Engine:
    """Four answers of 8 tokens due in 5 s on an engine whose step takes 0.25 s per request.

    Two at once end after 4 s; three after 6 s, so all of them late; four after 8 s.
    """
    engine = Engine(policy, max_batch=4, step_time=StepTimeModel.known(0.0, 0.25), **more)
    for name in "abcd":
        engine.arrive(name, DeadlineSlo(5.0))
        engine.frames.forecast(name, [8.0])
    return engine


def test_fewer_run_where_all_at_once_would_make_all_late() -> None:
    plan = crowd().plan()
    assert (plan.admit, plan.num_run) == (("a", "b"), 2)


def test_without_the_adaptive_batch_all_run_and_are_late() -> None:
    plan = crowd("gmax-no-adaptive-batch").plan()
    assert (plan.admit, plan.num_run) == (("a", "b", "c", "d"), 4)


def test_where_all_can_be_in_time_together_all_run() -> None:
    engine = Engine("gmax", max_batch=4, step_time=StepTimeModel.known(0.0, 0.25))
    for name in "abcd":
        engine.arrive(name, DeadlineSlo(9.0))
        engine.frames.forecast(name, [8.0])
    plan = engine.plan()
    assert (plan.admit, plan.num_run) == (("a", "b", "c", "d"), 4)


def test_those_that_are_too_many_are_parked_and_told_why() -> None:
    engine = crowd()
    engine.run(*"abcd")
    plan = engine.plan()
    assert (plan.run, set(plan.park), plan.num_run) == (("a", "b"), {"c", "d"}, 2)
    for name in "cd":
        decision = plan.explain(name)
        assert decision is not None
        assert (decision.move, decision.reason) == (Move.PARK, Reason.FEWER_EARN_MORE)


def test_no_more_are_parked_at_once_than_a_frame_may_move() -> None:
    engine = crowd(max_moves_fraction=0.25)
    engine.run(*"abcd")
    plan = engine.plan()
    assert (len(plan.park), plan.num_run) == (1, 3)


def test_a_newcomer_does_not_enter_a_place_that_was_left_empty_by_choice() -> None:
    engine = crowd()
    engine.plan()
    engine.arrive("e", DeadlineSlo(50.0))
    assert engine.tick() is None
    assert engine.names(RUNNING) == ["a", "b"]


def test_where_one_of_fewer_has_ended_one_and_not_more_takes_its_place() -> None:
    engine = crowd()
    engine.plan()
    engine.finish("a")
    plan = engine.plan()
    assert (plan.kind, plan.run, plan.num_run) == (PlanKind.BACKFILL, ("b",), 2)
    assert len(plan.admit) == 1


@pytest.mark.parametrize("policy", [*JUST_IN_TIME, "gmax-no-jit"])
def test_a_newcomer_enters_a_free_place_where_all_that_there_were_run(policy: str) -> None:
    engine = jit_engine(policy, max_batch=4)
    engine.arrive("a", DeadlineSlo(100.0))
    engine.arrive("b", needing(3))
    assert engine.plan().num_run == 4
    decode(engine, 1)
    engine.arrive("c", BEST_EFFORT)
    plan = engine.plan()
    assert (plan.kind, plan.admit) == (PlanKind.BACKFILL, ("c",))
    assert set(plan.run) == {"a", "b"}


def test_another_policy_may_fill_the_places_that_were_left_empty() -> None:
    engine = crowd()
    engine.plan()
    engine.frames.use_policy("edf")
    assert engine.next_frame().admit == ("c", "d")


@pytest.mark.parametrize("max_batch", [1, 2])
def test_the_engine_has_the_last_word_on_how_many_run(max_batch: int) -> None:
    engine = crowd()
    now_s, full = engine.clock.now_s(), engine.capacity()
    small = EngineCapacity(max_batch, full.free_kv_tokens, full.total_kv_tokens, full.free_slots)
    plan = engine.frames.tick(now_s, small)
    assert plan is not None
    assert len(plan.admit) <= plan.num_run <= max_batch


def test_an_engine_that_shrank_is_not_told_to_run_more_than_it_can() -> None:
    engine = Engine("gmax", max_batch=4)
    for name in "abcd":
        engine.arrive(name, DeadlineSlo(100.0))
    engine.plan()
    engine.clock.advance(1.0)
    full = engine.capacity()
    small = EngineCapacity(2, full.free_kv_tokens, full.total_kv_tokens, full.free_slots)
    plan = engine.frames.tick(engine.clock.now_s(), small)
    assert plan is not None
    assert plan.num_run <= 2


# All of it together -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["gmax", "gmax-paper"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_arrives_frames_keep_to_their_tokens_places_and_moves(
    policy: str, seed: int
) -> None:
    rng = random.Random(seed)
    max_batch, most_moves = 4, 2
    engine = jit_engine(policy, max_batch=max_batch)
    moves, num_turns = 0, 0
    for count in range(240):
        for part in range(rng.choice((0, 0, 0, 1, 2))):
            slo = rng.choice(
                (needing(rng.randint(1, 16)), LatencySlo(0.5, 0.125), DeadlineSlo(2.0), BEST_EFFORT)
            )
            engine.arrive(f"{count}.{part}", slo, max_output_tokens=rng.randint(4, 60))
        plan = engine.tick()  # which checks num_run, see Engine.obey
        if plan is not None:
            moves = 0 if plan.kind is PlanKind.FRAME else moves
            moves += len(plan.park) + len(plan.preempt)
            num_turns += plan.kind is PlanKind.TURN
            assert moves <= most_moves
            assert len(plan.line) <= most_moves
            assert plan.num_run <= max_batch
            assert sum(plan.tokens.values()) <= plan.num_run * plan.frame_tokens
            if plan.kind is PlanKind.FRAME:
                assert set(plan.tokens) == {*plan.run, *plan.resume, *plan.admit, *plan.line}
            if plan.kind is PlanKind.BACKFILL:
                assert (plan.park, plan.preempt) == ((), ())
        decode(engine, 4)
        for request in list(engine.frames.live()):
            if request.generated_tokens >= request.max_output_tokens:
                engine.finish(request.request_id)
    assert num_turns > 0
