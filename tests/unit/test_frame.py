"""The frame manager: what it plans, driven step by step by an engine of a few lines."""

from __future__ import annotations

import math
from typing import Any

import pytest
from plan_engine import BEST_EFFORT, FRAME_S, PARKED, RUNNING, Engine, running_engine

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    RequestTerms,
    Slo,
)
from scheduler.config import SchedulerConfig
from scheduler.frame import (
    REASON_DEADLINE,
    REASON_WAITING_TIME,
    FrameManager,
)
from scheduler.lifecycle import RequestState, TransitionError
from scheduler.plan import Ending, EngineCapacity, Move, PlanKind
from scheduler.policies import CANCEL_SUFFIX, POLICIES
from scheduler.step_time import StepObservation, StepTimeModel

PLAIN = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
every_policy = pytest.mark.parametrize("policy", PLAIN)


# Admission ----------------------------------------------------------------------------------------


def test_without_requests_there_is_nothing_to_plan() -> None:
    assert Engine().tick() is None


def test_admission_fills_the_free_slots_in_the_policys_order() -> None:
    engine = Engine(max_batch=3)
    for name, due_s in (("d", 40), ("a", 10), ("c", 30), ("b", 20), ("e", 50)):
        engine.arrive(name, DeadlineSlo(due_s))
    plan = engine.plan()
    assert plan.kind is PlanKind.FRAME
    assert plan.frame == 1
    assert plan.admit == ("a", "b", "c")
    assert (plan.run, plan.park, plan.preempt, plan.resume) == ((), (), (), ())
    moves = {decision.request_id: decision.move for decision in plan.decisions}
    assert moves == dict.fromkeys("abc", Move.ADMIT) | dict.fromkeys("de", Move.WAIT)
    assert set(plan.tokens) == set("abc")


@every_policy
def test_every_policy_fills_the_batch(policy: str) -> None:
    engine = Engine(policy, max_batch=3)
    for index in range(5):
        engine.arrive(f"r{index}", DeadlineSlo(60))
    assert engine.plan().admit == ("r0", "r1", "r2")


def test_no_more_are_admitted_than_there_are_request_slots() -> None:
    engine = Engine(max_batch=4, total_slots=2)
    for name in "abc":
        engine.arrive(name)
    assert engine.plan().admit == ("a", "b")


@every_policy
def test_no_more_are_admitted_than_there_is_kv(policy: str) -> None:
    engine = Engine(policy, max_batch=8, total_kv=500, frame_steps=10)
    for name in "abcdef":
        engine.arrive(name)  # 100 tokens and the 10 of the coming frame
    assert engine.plan().admit == ("a", "b", "c", "d")


def test_an_urgent_request_goes_before_everything() -> None:
    engine = Engine(max_batch=1)
    engine.arrive("due", DeadlineSlo(0.1))
    engine.arrive("health check", is_urgent=True)
    assert engine.plan().admit == ("health check",)


def test_an_id_that_is_live_is_refused_and_one_that_ended_may_come_again() -> None:
    engine = Engine()
    engine.arrive("a")
    with pytest.raises(ValueError, match="'a' is already live"):
        engine.arrive("a")
    engine.frames.ended("a", RequestState.ABORTED)
    assert engine.arrive("a").serial == 1


@pytest.mark.parametrize("max_batch", [2, 3], ids=["full", "with a free slot"])
def test_nothing_changes_inside_a_frame_without_news(max_batch: int) -> None:
    engine = Engine(max_batch=max_batch)
    engine.arrive("a")
    engine.arrive("b")
    engine.plan()
    engine.clock.advance(0.4 * FRAME_S)
    assert engine.tick() is None


# Inside a frame -----------------------------------------------------------------------------------


def test_inside_a_frame_a_newcomer_takes_a_free_slot_at_once() -> None:
    engine = Engine(max_batch=2)
    engine.arrive("a")
    engine.plan()
    engine.arrive("b")
    plan = engine.plan()
    assert (plan.kind, plan.admit, plan.run) == (PlanKind.BACKFILL, ("b",), ("a",))
    assert plan.frame == 1


def test_inside_a_frame_nobody_is_displaced() -> None:
    engine = running_engine("a", "b")
    engine.arrive("tight", DeadlineSlo(1.5))
    engine.arrive("tighter", DeadlineSlo(1.2))
    assert engine.tick() is None
    engine.finish("a")
    plan = engine.plan()
    assert plan.kind is PlanKind.BACKFILL
    assert (plan.admit, plan.run, plan.park, plan.preempt) == (("tighter",), ("b",), (), ())


def test_backfill_counts_the_kv_of_each_it_admits() -> None:
    engine = Engine(max_batch=4, total_kv=500, frame_steps=10)
    engine.arrive("first", input_tokens=200)
    engine.plan()
    engine.finish("first")
    for name in "abc":
        engine.arrive(name, input_tokens=200)
    plan = engine.plan()
    assert plan.kind is PlanKind.BACKFILL
    assert plan.admit == ("a", "b")


def test_backfill_takes_no_request_slot_that_a_parked_one_holds() -> None:
    engine = Engine(max_batch=2, total_slots=2)
    engine.arrive("a", DeadlineSlo(100))
    engine.arrive("b", DeadlineSlo(100))
    engine.plan()
    for name in "ab":
        engine.frames.parked(name)
    engine.arrive("tight", DeadlineSlo(5))
    plan = engine.plan()
    assert plan.kind is PlanKind.BACKFILL
    assert (set(plan.resume), plan.admit) == ({"a", "b"}, ())


def test_a_stream_whose_first_token_is_at_risk_does_not_wait_for_the_frame_to_end() -> None:
    engine = running_engine("loose")
    engine.arrive("stream", LatencySlo(0.5, 0.2))
    engine.clock.advance(0.05)
    engine.decode_steps(9)
    assert engine.tick() is None
    engine.decode_steps(1)  # a fifth of the frame's fifty
    plan = engine.plan()
    assert plan.kind is PlanKind.EARLY
    assert (plan.park, plan.admit) == (("loose",), ("stream",))


def test_a_stream_with_time_to_spare_waits_for_the_frame_to_end() -> None:
    engine = running_engine("loose")
    engine.arrive("stream", LatencySlo(5.0, 0.2))
    engine.clock.advance(0.05)
    engine.decode_steps(4)
    assert engine.tick() is None


# Frame boundaries ---------------------------------------------------------------------------------


def test_a_frame_ends_after_its_steps_of_decoding_or_its_seconds() -> None:
    engine = running_engine("a", "b", frame_steps=5)
    engine.decode_steps(4)
    assert engine.tick() is None
    engine.frames.observe_step(StepObservation(0.01, 0, 0, 500))  # prefill alone is no step of it
    assert engine.tick() is None
    engine.decode_steps(1)
    assert engine.plan().kind is PlanKind.FRAME
    assert engine.tick() is None
    engine.clock.advance(FRAME_S)
    assert engine.plan().frame == 3


def test_a_frame_boundary_displaces_for_a_request_that_is_clearly_better() -> None:
    engine = running_engine("loose", "looser", due_s=100.0)
    engine.arrive("tight", DeadlineSlo(60))
    plan = engine.next_frame()
    assert (plan.park, plan.admit, plan.run) == (("looser",), ("tight",), ("loose",))
    assert plan.preempt == ()


def by_length(**lengths: int) -> Engine:
    """Those of that many tokens run, under a policy whose score is one over the length."""
    engine = Engine("gmax-no-gmax", max_batch=len(lengths), step_time=StepTimeModel.known(0.01))
    for name, tokens in lengths.items():
        arrive_with(engine, name, tokens)
    engine.plan()
    return engine


def arrive_with(engine: Engine, name: str, tokens: int) -> None:
    engine.arrive(name, DeadlineSlo(1000), max_output_tokens=1000)
    engine.frames.forecast(name, [tokens])


def test_within_the_margin_nobody_is_displaced() -> None:
    engine = by_length(a=100, b=110)
    # With a margin of a tenth those that run count like 91 and 100 tokens.
    arrive_with(engine, "newcomer", 101)
    assert engine.next_frame().park == ()
    arrive_with(engine, "better newcomer", 80)
    assert engine.next_frame().park == ("b",)


@pytest.mark.parametrize(("margin", "is_displaced"), [(0.0, True), (0.5, False)])
def test_the_margin_is_as_configured(margin: float, is_displaced: bool) -> None:
    engine = Engine("gmax-no-gmax", max_batch=1, displace_margin=margin)
    arrive_with(engine, "a", 100)
    engine.plan()
    arrive_with(engine, "newcomer", 80)
    assert (engine.next_frame().park == ("a",)) is is_displaced


@pytest.mark.parametrize("policy", ["edf", "ltr", "plas", "priority"])
def test_a_strict_order_has_no_margin(policy: str) -> None:
    engine = Engine(policy, max_batch=1)
    engine.arrive("a", CompoundSlo(100, "served"), priority=1)
    engine.frames.forecast("a", [100])
    engine.plan()
    engine.frames.progressed("a", 600)
    engine.arrive("newcomer", DeadlineSlo(98.5), priority=2)
    engine.frames.forecast("newcomer", [99])
    assert engine.next_frame().park == ("a",)


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_strict_order_displaces_nobody_at_a_boundary_either(policy: str) -> None:
    engine = running_engine("a", "b", policy=policy)
    engine.arrive("tight", DeadlineSlo(0.5), max_output_tokens=1, input_tokens=1)
    plan = engine.next_frame()
    assert (plan.park, plan.preempt, plan.admit) == ((), (), ())


@pytest.mark.parametrize(("fraction", "most"), [(0.5, 4), (0.25, 2), (0.01, 1), (1.0, 8)])
def test_moves_of_a_frame_are_bounded_by_a_share_of_the_batch(fraction: float, most: int) -> None:
    engine = running_engine(*"abcdefgh", max_moves_fraction=fraction)
    for index in range(8):
        engine.arrive(f"tight{index}", DeadlineSlo(5 + index))
    plan = engine.next_frame()
    assert len(plan.park) == most
    assert plan.admit == tuple(f"tight{index}" for index in range(most))
    assert len(plan.run) == 8 - most


def test_a_parked_request_resumes_as_soon_as_there_is_a_place() -> None:
    engine = running_engine("loose")
    engine.arrive("tight", DeadlineSlo(10))
    engine.next_frame()
    assert engine.names(PARKED) == ["loose"]
    engine.clock.advance(0.1)
    engine.finish("tight")
    plan = engine.plan()
    assert (plan.kind, plan.resume, plan.admit) == (PlanKind.BACKFILL, ("loose",), ())
    assert engine.names(RUNNING) == ["loose"]


def test_a_parked_request_resumes_at_a_boundary_when_it_is_the_better_one() -> None:
    engine = running_engine("a", due_s=20.0)
    engine.arrive("b", DeadlineSlo(10))
    engine.next_frame()
    engine.clock.advance(15)  # b's is overdue and a's is near, but edf goes by due times alone
    assert engine.next_frame().resume == ()
    engine.finish("b")
    engine.arrive("c", DeadlineSlo(500))
    assert engine.next_frame().resume == ("a",)


@every_policy
def test_a_strict_order_resumes_parked_ones_even_behind_one_that_does_not_fit(policy: str) -> None:
    engine = Engine(policy, max_batch=3, total_kv=1000, frame_steps=10)
    engine.arrive("big", input_tokens=900)
    engine.arrive("a")
    engine.arrive("b")
    engine.run("a", "b")
    engine.frames.parked("b")
    assert "b" in engine.plan().resume


def test_waiting_is_counted_in_frames_and_kept_while_it_runs() -> None:
    engine = running_engine("a", policy="fcfs")
    waiter = engine.arrive("b")
    for expected in (1, 2, 3):
        engine.next_frame()
        assert waiter.frames_waited == expected
    engine.finish("a")
    engine.plan()
    engine.next_frame()
    assert waiter.frames_waited == 3


def test_a_stream_that_rests_ahead_of_its_timeline_does_not_count_as_waiting() -> None:
    engine = Engine(max_batch=1)
    ahead = engine.arrive("ahead", LatencySlo(5.0, 1.0))
    engine.plan()
    engine.frames.progressed("ahead", 20)  # token 20 is due at 25 s
    engine.arrive("tight", DeadlineSlo(6))
    assert engine.next_frame().park == ("ahead",)
    engine.next_frame()
    assert ahead.frames_waited == 0
    engine.clock.advance(25)
    engine.next_frame()
    assert ahead.frames_waited == 1


def test_parks_and_preemptions_are_counted() -> None:
    engine = running_engine("a", "b")
    engine.frames.parked("a")
    engine.frames.preempted("a")
    record = engine.frames.get("a")
    assert record is not None
    assert (record.num_parks, record.num_preemptions) == (1, 1)
    assert (engine.frames.num_parks, engine.frames.num_preemptions) == (1, 1)


# KV -----------------------------------------------------------------------------------------------


def engine_short_of_kv(policy: str) -> Engine:
    """One runs; of two that wait the first needs more KV than is free, the second fits."""
    engine = Engine(policy, max_batch=4, total_kv=1000, frame_steps=10)
    engine.arrive("runs", input_tokens=300)
    engine.plan()
    engine.arrive("big", input_tokens=800)
    engine.arrive("small", input_tokens=100)
    return engine


@pytest.mark.parametrize("policy", ["gmax", "edf"])
def test_one_that_does_not_fit_does_not_block_others(policy: str) -> None:
    assert engine_short_of_kv(policy).plan().admit == ("small",)
    assert engine_short_of_kv(policy).next_frame().admit == ("small",)


def test_the_place_of_one_that_does_not_fit_goes_to_the_next_that_does() -> None:
    engine = Engine(max_batch=2, total_kv=1000, frame_steps=10)
    engine.arrive("runs", DeadlineSlo(5), input_tokens=300)
    engine.plan()
    engine.arrive("big", DeadlineSlo(10), input_tokens=800)
    engine.arrive("also big", DeadlineSlo(20), input_tokens=700)
    engine.arrive("small", DeadlineSlo(30))
    engine.arrive("small too", DeadlineSlo(40))
    plan = engine.next_frame()
    assert (plan.run, plan.admit) == (("runs",), ("small",))


def test_under_fcfs_one_that_does_not_fit_holds_its_place() -> None:
    engine = engine_short_of_kv("fcfs")
    assert engine.plan().admit == ()
    assert engine.next_frame().admit == ()
    engine.finish("runs")
    assert engine.plan().admit == ("big", "small")


@every_policy
@pytest.mark.parametrize("kind", [PlanKind.FRAME, PlanKind.BACKFILL])
def test_a_prompt_larger_than_the_free_pool_runs_when_nothing_else_does(
    policy: str, kind: PlanKind
) -> None:
    engine = Engine(policy, max_batch=4, total_kv=1000)
    if kind is PlanKind.BACKFILL:
        engine.arrive("before")
        engine.plan()
        engine.finish("before")
    engine.arrive("big", input_tokens=900)
    short = EngineCapacity(4, free_kv_tokens=400, total_kv_tokens=1000, free_slots=64)
    plan = engine.frames.tick(engine.clock.now_s(), short)
    assert plan is not None
    assert (plan.kind, plan.admit) == (kind, ("big",))


@every_policy
def test_nothing_joins_a_prompt_that_has_already_more_than_the_free_pool(policy: str) -> None:
    engine = Engine(policy, max_batch=4, total_kv=1000)
    engine.arrive("big", input_tokens=900)
    engine.arrive("also big", input_tokens=900)
    short = EngineCapacity(4, free_kv_tokens=400, total_kv_tokens=1000, free_slots=64)
    plan = engine.frames.tick(engine.clock.now_s(), short)
    assert plan is not None
    assert plan.admit == ("big",)


def test_a_better_request_without_kv_preempts_the_worst_that_is_outside_the_batch() -> None:
    engine = Engine(max_batch=2, total_kv=1000, frame_steps=10)
    for name, due_s in (("a", 100), ("b", 200)):
        engine.arrive(name, DeadlineSlo(due_s), input_tokens=450)
    engine.plan()
    engine.arrive("tight", DeadlineSlo(10), input_tokens=300)
    plan = engine.next_frame()
    assert (plan.preempt, plan.admit, plan.run, plan.park) == (("b",), ("tight",), ("a",), ())


def test_the_margin_also_protects_kv_from_being_taken() -> None:
    def preempted(challenger_tokens: int) -> tuple[str, ...]:
        engine = Engine("gmax-no-gmax", max_batch=1, total_kv=1000, frame_steps=10)
        engine.arrive("parked", DeadlineSlo(1000), input_tokens=600, max_output_tokens=1000)
        engine.frames.forecast("parked", [100])
        engine.plan()
        engine.frames.parked("parked")
        engine.arrive("challenger", DeadlineSlo(1000), input_tokens=600, max_output_tokens=1000)
        engine.frames.forecast("challenger", [challenger_tokens])
        return engine.next_frame().preempt

    assert preempted(95) == ()
    assert preempted(80) == ("parked",)


def test_as_many_give_up_their_kv_as_are_needed_and_not_more() -> None:
    engine = Engine(max_batch=4, total_kv=1000, frame_steps=10)
    for index in range(4):
        engine.arrive(f"r{index}", DeadlineSlo(100 + 100 * index), input_tokens=240)
    engine.plan()
    for index in range(4):
        engine.arrive(f"tight{index}", DeadlineSlo(5 + index), input_tokens=10)
    engine.arrive("needs two", DeadlineSlo(4), input_tokens=400)
    plan = engine.next_frame()
    assert plan.preempt == ("r3", "r2")
    assert "needs two" in plan.admit


def test_no_more_give_up_their_kv_than_a_frame_may_move() -> None:
    engine = Engine(max_batch=4, total_kv=1000, frame_steps=10, max_moves_fraction=0.25)
    for index in range(4):
        engine.arrive(f"r{index}", DeadlineSlo(100 + 100 * index), input_tokens=240)
    engine.plan()
    for index in range(4):
        engine.arrive(f"tight{index}", DeadlineSlo(5 + index), input_tokens=400)
    assert engine.next_frame().preempt == ()  # one that leaves does not make room enough


def test_the_cost_gate_keeps_kv_that_is_dear_to_recompute() -> None:
    engine = Engine(max_batch=2, total_kv=200_000, frame_steps=10)
    for name, due_s in (("a", 100), ("b", 200)):
        engine.arrive(name, DeadlineSlo(due_s), input_tokens=99_990)
    engine.plan()
    engine.arrive("tight", DeadlineSlo(10), input_tokens=100, max_output_tokens=5)
    plan = engine.next_frame()
    assert (plan.preempt, plan.admit) == ((), ())
    assert set(plan.run) == {"a", "b"}


def test_a_pinned_request_is_neither_parked_nor_preempted() -> None:
    engine = Engine(max_batch=1, total_kv=1000, frame_steps=10)
    engine.arrive("pinned", DeadlineSlo(500), input_tokens=900, is_pinned=True)
    engine.plan()
    engine.arrive("tight", DeadlineSlo(5), input_tokens=500)
    plan = engine.next_frame()
    assert (plan.run, plan.park, plan.preempt, plan.admit) == (("pinned",), (), (), ())


def test_pinned_requests_of_unlike_length_both_stay_beside_a_group_of_like_length() -> None:
    engine = Engine("gmax", max_batch=3)
    engine.arrive("pinned short", DeadlineSlo(100), input_tokens=10, is_pinned=True)
    engine.arrive("pinned long", DeadlineSlo(100), input_tokens=9000, is_pinned=True)
    engine.plan()
    for index in range(4):
        engine.arrive(f"like{index}", DeadlineSlo(30), input_tokens=100 + index)
    for _ in range(5):
        plan = engine.next_frame()
        assert {"pinned short", "pinned long"} <= set(plan.run)
        assert not {"pinned short", "pinned long"} & {*plan.park, *plan.preempt}


def test_urgent_and_pinned_requests_take_their_places_before_a_group_of_like_length() -> None:
    engine = Engine("gmax", max_batch=2)
    engine.arrive("pinned", DeadlineSlo(100), input_tokens=9000, is_pinned=True)
    engine.plan()
    for index in range(4):
        engine.arrive(f"like{index}", DeadlineSlo(30), input_tokens=100 + index)
    engine.arrive("urgent", input_tokens=1, is_urgent=True)
    assert engine.next_frame().admit == ("urgent",)


def test_victims_are_parked_before_running_and_worst_first_and_pinned_last() -> None:
    engine = Engine(max_batch=8)
    due = {"urgent": 90, "pinned": 80, "r1": 10, "r2": 30, "r3": 30, "p1": 5, "p2": 7}
    for name, due_s in due.items():
        engine.arrive(
            name, DeadlineSlo(due_s), is_pinned=name == "pinned", is_urgent=name == "urgent"
        )
    engine.arrive("waits", DeadlineSlo(1000))
    engine.arrive("preempted", DeadlineSlo(1000))
    engine.run(*due, "preempted")
    engine.frames.preempted("preempted")
    for name in ("p1", "p2"):
        engine.frames.parked(name)
    victims = engine.frames.victims(engine.clock.now_s(), engine.capacity())
    assert victims == ["p2", "p1", "r3", "r2", "r1", "pinned", "urgent"]


# Preempted requests -------------------------------------------------------------------------------


def test_a_preempted_request_keeps_its_order_of_arrival() -> None:
    engine = running_engine("a", policy="fcfs")
    engine.arrive("b")
    engine.arrive("c")
    engine.frames.progressed("a", 7)
    engine.frames.preempted("a")
    plan = engine.plan()
    assert plan.admit == ("a",)
    record = engine.frames.get("a")
    assert record is not None
    assert (record.generated_tokens, record.serial) == (7, 0)


def test_a_preempted_request_needs_kv_for_what_it_has_generated_too() -> None:
    engine = Engine("fcfs", max_batch=2, total_kv=1000, frame_steps=10)
    engine.arrive("a", input_tokens=300, max_output_tokens=500)
    engine.arrive("b", input_tokens=400)
    engine.plan()
    engine.frames.progressed("a", 300)
    engine.frames.preempted("a")
    assert engine.plan().admit == ()  # 600 and the frame's 10 of the 600 that are free
    record = engine.frames.get("a")
    assert record is not None
    assert record.prefill_tokens == 600


# Endings ------------------------------------------------------------------------------------------


def test_a_request_not_started_within_its_waiting_time_is_dropped_with_a_reason() -> None:
    engine = running_engine("a", policy="fcfs")
    engine.arrive("b", waiting_time_s=0.5)
    engine.clock.advance(0.5)
    assert engine.tick() is None  # to the moment is still in time
    engine.clock.advance(0.01)
    plan = engine.plan()
    assert plan.kind is PlanKind.BACKFILL
    assert (plan.drop, plan.cancel) == ((Ending("b", REASON_WAITING_TIME),), ())
    assert plan.admit == ()
    assert engine.frames.num_ended[RequestState.DROPPED] == 1


def test_a_request_to_be_dropped_is_not_admitted_by_the_same_plan() -> None:
    engine = Engine()
    engine.arrive("late", waiting_time_s=0.5)
    engine.clock.advance(2)
    plan = engine.plan()
    assert plan.drop == (Ending("late", REASON_WAITING_TIME),)
    assert plan.admit == ()


@pytest.mark.parametrize("state", ["running", "parked", "preempted"])
def test_the_waiting_time_never_applies_to_a_request_that_has_started(state: str) -> None:
    engine = Engine(max_batch=1)
    engine.arrive("a", DeadlineSlo(1000), waiting_time_s=0.5)
    engine.plan()
    if state != "running":
        engine.arrive("tight", DeadlineSlo(1))
        getattr(engine.frames, state)("a")
        engine.run("tight")
    for _ in range(3):
        plan = engine.next_frame()
        assert (plan.drop, plan.cancel) == ((), ())


@pytest.mark.parametrize("slo", [DeadlineSlo(2.0), CompoundSlo(2.0, "p")], ids=["alone", "program"])
def test_on_miss_cancel_ends_a_running_request_after_its_deadline(slo: Slo) -> None:
    engine = Engine()
    engine.arrive("a", slo, on_miss=OnMiss.CANCEL)
    engine.plan()
    engine.clock.advance(2.0)
    plan = engine.plan()
    assert plan.cancel == ()  # to the moment is still in time
    engine.clock.advance(0.01)
    plan = engine.plan()
    assert (plan.cancel, plan.drop) == ((Ending("a", REASON_DEADLINE),), ())


def test_on_miss_cancel_ends_a_preempted_request_with_what_it_has() -> None:
    engine = Engine(max_batch=1)
    engine.arrive("a", DeadlineSlo(2.0), on_miss=OnMiss.CANCEL)
    engine.plan()
    engine.frames.preempted("a")
    engine.clock.advance(2.5)
    assert engine.plan().cancel == (Ending("a", REASON_DEADLINE),)


def test_on_miss_cancel_drops_a_request_that_has_not_started() -> None:
    engine = running_engine("a", policy="fcfs")
    engine.arrive("b", DeadlineSlo(0.5), on_miss=OnMiss.CANCEL)
    engine.clock.advance(0.6)
    assert engine.plan().drop == (Ending("b", REASON_DEADLINE),)


@pytest.mark.parametrize(
    ("slo", "on_miss"),
    [
        (DeadlineSlo(1.0), OnMiss.FINISH),
        (CompoundSlo(-1.0, "p"), OnMiss.FINISH),
        (LatencySlo(0.1, 0.1), OnMiss.CANCEL),
        (BestEffortSlo(1.0), OnMiss.CANCEL),
    ],
)
def test_nothing_else_is_ever_cancelled(slo: Slo, on_miss: OnMiss) -> None:
    engine = Engine()
    engine.arrive("a", slo, on_miss=on_miss)
    for _ in range(5):
        plan = engine.next_frame()
        assert (plan.drop, plan.cancel) == ((), ())


def test_ended_twice_counts_once_and_an_unknown_end_is_ignored() -> None:
    engine = running_engine("a", "b")
    for _ in range(2):
        engine.finish("a")
        engine.frames.ended("never seen", RequestState.ABORTED)
    assert engine.frames.num_ended == {
        RequestState.FINISHED: 1,
        RequestState.ABORTED: 0,
        RequestState.DROPPED: 0,
    }
    assert [request.request_id for request in engine.frames.live()] == ["b"]
    assert engine.frames.get("a") is None


def test_a_move_that_the_table_does_not_have_is_a_defect_of_the_caller() -> None:
    engine = running_engine("a")
    with pytest.raises(TransitionError):
        engine.frames.resumed("a")


def test_finished_answers_teach_their_lengths_and_aborted_ones_do_not() -> None:
    engine = running_engine("a", "b", "c")
    probe = engine.arrive("probe", DeadlineSlo(10), max_output_tokens=1000)
    before = engine.frames.lengths.points(probe.slo_type).tolist()
    engine.frames.progressed("b", 33)
    engine.frames.ended("b", RequestState.ABORTED)
    assert engine.frames.lengths.points(probe.slo_type).tolist() == before
    engine.frames.progressed("a", 33)
    engine.finish("a")
    assert set(engine.frames.lengths.points(probe.slo_type).tolist()) == {33.0}


# Odd clocks ---------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("jump_s", [-3600.0, -0.5, 3600.0])
def test_a_clock_that_jumps_delays_the_next_boundary_by_no_more_than_a_frame(
    policy: str, jump_s: float
) -> None:
    engine = running_engine("a", "b", policy=policy)
    engine.clock.advance(jump_s)
    engine.tick()
    before = engine.frames.last_plan
    assert before is not None
    assert engine.next_frame().frame == before.frame + 1
    assert set(engine.names(RUNNING)) == {"a", "b"}


def test_a_clock_that_goes_back_drops_nobody_and_still_admits() -> None:
    engine = running_engine("a", "b")
    engine.clock.advance(-3600)
    engine.finish("a")
    engine.arrive("c", waiting_time_s=5)
    plan = engine.plan()
    assert (plan.admit, plan.drop) == (("c",), ())


# What each needs in a frame -----------------------------------------------------------------------


def tokens_needed(slo: Slo, *, after_s: float = 0.0, generated: int = 0, limit: int = 100) -> int:
    """What a running request is told to need in the coming frame."""
    engine = Engine(frame_steps=50)
    engine.arrive("r", slo, max_output_tokens=limit)
    engine.plan()
    engine.frames.progressed("r", generated)
    engine.clock.advance(max(after_s, FRAME_S))
    return engine.plan().tokens["r"]


def test_a_stream_ahead_of_its_timeline_needs_one_token() -> None:
    assert tokens_needed(LatencySlo(5.0, 0.2), after_s=6.0, generated=80) == 1


def test_a_stream_needs_the_tokens_that_fall_due_before_the_frame_ends() -> None:
    # At 6.02 token 5 (due at 6.0) is the next. A step is 11 ms, so the frame 50 of them, 0.55 s:
    # tokens 5, 6 and 7 are due by its end.
    assert tokens_needed(LatencySlo(5.0, 0.2), after_s=6.02, generated=5) == 3


def test_nobody_needs_more_tokens_than_the_frame_has_steps() -> None:
    assert tokens_needed(LatencySlo(0.1, 1e-6), after_s=6.0) == 50
    assert tokens_needed(DeadlineSlo(0.1), after_s=6.0) == 50


def test_a_deadline_needs_its_share_of_the_frame() -> None:
    # 100 tokens take 1.1 s of the 6 s left: a good sixth of the frame's 50 steps.
    assert tokens_needed(DeadlineSlo(7.0), after_s=1.0) == 10
    assert tokens_needed(DeadlineSlo(10_000), after_s=1.0) == 1
    assert tokens_needed(BEST_EFFORT) == 1


@every_policy
@pytest.mark.parametrize("ttft_s", [5e-324, 1e7])
def test_a_target_as_small_as_a_float_can_be_does_not_stop_the_scheduler(
    policy: str, ttft_s: float
) -> None:
    engine = Engine(policy)
    engine.arrive("r", LatencySlo(ttft_s, 5e-324))
    assert engine.plan().admit == ("r",)
    engine.next_frame()


# Prefill beside decoding --------------------------------------------------------------------------


def frames_with_one_running(slo: Slo) -> FrameManager:
    frames = FrameManager(SchedulerConfig(max_decode_pause_s=0.25))
    frames.arrive("r", RequestTerms(0.0, slo), input_tokens=5, max_output_tokens=50)
    frames.started("r", 0.0)
    return frames


def test_between_long_prefills_those_that_run_get_a_step() -> None:
    frames = frames_with_one_running(LatencySlo(5, 0.2))
    assert frames.may_prefill(10.0, 4, was_prefill=False)
    assert frames.may_prefill(10.1, 4, was_prefill=True)
    assert frames.may_prefill(10.2, 4, was_prefill=True)
    assert not frames.may_prefill(10.3, 4, was_prefill=True)
    # They had their step: prefill may go on, for as long again.
    assert frames.may_prefill(10.35, 4, was_prefill=False)
    assert frames.may_prefill(10.55, 4, was_prefill=True)
    assert not frames.may_prefill(10.65, 4, was_prefill=True)


def test_where_nobody_could_decode_prefill_goes_on() -> None:
    frames = frames_with_one_running(LatencySlo(5, 0.2))
    assert all(frames.may_prefill(10.0 + second, 0, was_prefill=True) for second in range(10))
    # Whoever has just become able to decode waits no longer than the others.
    assert frames.may_prefill(20.0, 1, was_prefill=True)
    assert not frames.may_prefill(20.3, 1, was_prefill=True)


def test_a_clock_that_goes_back_starts_the_decode_pause_anew() -> None:
    frames = frames_with_one_running(LatencySlo(5, 0.2))
    frames.may_prefill(10.0, 4, was_prefill=False)
    assert frames.may_prefill(5.0, 4, was_prefill=True)
    assert not frames.may_prefill(5.3, 4, was_prefill=True)


def test_best_effort_requests_wait_longer_for_prefill_but_not_for_ever() -> None:
    frames = frames_with_one_running(BestEffortSlo(600))
    assert frames.may_prefill(10.0, 4, was_prefill=False)
    assert frames.may_prefill(14.9, 4, was_prefill=True)
    assert not frames.may_prefill(15.1, 4, was_prefill=True)


# Policies and settings ----------------------------------------------------------------------------


def test_another_policy_decides_from_the_next_boundary_on() -> None:
    engine = running_engine("a", policy="fcfs")
    engine.arrive("tight", DeadlineSlo(5))
    assert engine.next_frame().park == ()
    engine.frames.use_policy("edf")
    assert engine.frames.policy_name == "edf"
    assert engine.tick() is None
    assert engine.next_frame().park == ("a",)
    engine.frames.use_policy("fcfs")
    engine.finish("tight")
    assert engine.plan().resume == ("a",)


def test_an_unknown_policy_changes_nothing() -> None:
    frames = FrameManager(SchedulerConfig(policy="edf"))
    policy = frames.policy
    with pytest.raises(KeyError):
        frames.use_policy("psychic")
    assert (frames.policy, frames.policy_name) == (policy, "edf")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"policy": "psychic"}, "policy must be one of gmax, .*, got 'psychic'"),
        ({"frame_steps": 0}, "frame_steps must be at least 1, got 0"),
        ({"frame_s": 0.0}, "frame_s must be a number of seconds above 0"),
        ({"frame_s": math.nan}, "frame_s must be a number of seconds above 0"),
        ({"frame_s": math.inf}, "frame_s must be a number of seconds above 0"),
        ({"max_decode_pause_s": -1.0}, "max_decode_pause_s must be a number of seconds above 0"),
        ({"program_timeout_s": 0.0}, "program_timeout_s must be a number of seconds above 0"),
        ({"program_timeout_s": -1.0}, "program_timeout_s must be a number of seconds above 0"),
        ({"program_timeout_s": math.nan}, "program_timeout_s must be a number of seconds above 0"),
        ({"program_timeout_s": math.inf}, "program_timeout_s must be a number of seconds above 0"),
        ({"length_quantile": 1.0}, "length_quantile must be between 0 and 1"),
        ({"length_quantile": math.nan}, "length_quantile must be between 0 and 1"),
        ({"displace_margin": -0.1}, "displace_margin must be a number, 0 or more"),
        ({"displace_margin": math.nan}, "displace_margin must be a number, 0 or more"),
        ({"max_moves_fraction": 1.5}, "max_moves_fraction must be between 0 and 1"),
        ({"max_moves_fraction": math.nan}, "max_moves_fraction must be between 0 and 1"),
        ({"max_pinned_fraction": -0.5}, "max_pinned_fraction must be between 0 and 1"),
        ({"fairness": 2.0}, "fairness must be between 0 and 1"),
        ({"fairness": math.nan}, "fairness must be between 0 and 1"),
        ({"reserve_after_frames": 0}, "reserve_after_frames must be at least 1, got 0"),
        ({"starvation_frames": 0}, "starvation_frames must be at least 1, got 0"),
        ({"turns_per_frame": -1}, "turns_per_frame must be at least 0, got -1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(bad: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SchedulerConfig(**bad)


# A sender's own flags -----------------------------------------------------------------------------


def test_pinned_requests_keep_half_of_the_batch_and_no_more() -> None:
    engine = Engine("edf", max_batch=4, displace_margin=0.0)
    for name in ("p0", "p1", "p2", "p3"):
        engine.arrive(name, BestEffortSlo(600), is_pinned=True)
    engine.run("p0", "p1", "p2", "p3")
    for index in range(4):
        engine.arrive(f"tight{index}", DeadlineSlo(5))
    plan = engine.next_frame()
    assert set(plan.park) == {"p2", "p3"}
    assert len(plan.admit) == 2


def test_malformed_requests_take_one_place_at_a_time() -> None:
    engine = Engine("edf", max_batch=4, displace_margin=0.0)
    for index in range(4):
        engine.arrive(f"s{index}", LatencySlo(1, 0.1))
    engine.run("s0", "s1", "s2", "s3")
    for index in range(6):
        engine.arrive(f"bad{index}", BestEffortSlo(600), is_urgent=True)
    plan = engine.next_frame()
    assert plan.admit == ("bad0",)
    assert len(plan.park) == 1


def test_kv_is_taken_from_a_worse_request_also_where_the_batch_has_room() -> None:
    engine = Engine("edf", max_batch=8, total_kv=700, frame_steps=10)
    for name in ("patient0", "patient1"):
        engine.arrive(name, DeadlineSlo(3600), input_tokens=300)
    engine.run("patient0", "patient1")
    engine.arrive("urgent", DeadlineSlo(5), input_tokens=200)
    plan = engine.next_frame()
    assert plan.preempt == ("patient1",)
    assert plan.admit == ("urgent",)
