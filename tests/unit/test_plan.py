"""Plans explain themselves: a decision for every request, as data."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from plan_engine import BEST_EFFORT, PARKED, Engine, running_engine

from core.slo import DeadlineSlo, LatencySlo, OnMiss
from scheduler.lifecycle import RequestState
from scheduler.plan import (
    MOVE_CODE,
    REASON_CODE,
    Decision,
    FramePlan,
    Ledger,
    Move,
    PlanKind,
    Reason,
    turn_ledger,
)
from scheduler.policies import CANCEL_SUFFIX, POLICIES
from scheduler.step_time import StepTimeModel

PLAIN = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
every_policy = pytest.mark.parametrize("policy", PLAIN)


def told(plan: FramePlan, request_id: str) -> tuple[Move, Reason]:
    """What became of a request, and why."""
    decision = plan.explain(request_id)
    assert decision is not None
    assert decision.request_id == request_id
    return decision.move, decision.reason


def mixed_engine(policy: str) -> Engine:
    """Requests of every state and class, more of them than places."""
    engine = Engine(policy, max_batch=4, total_kv=3000, frame_steps=10)
    slos = (LatencySlo(1.0, 0.25), DeadlineSlo(20.0), BEST_EFFORT)
    for index in range(12):
        engine.arrive(f"r{index}", slos[index % 3], input_tokens=50 + 20 * index)
    engine.arrive("big", DeadlineSlo(2.0), input_tokens=2500)
    engine.run("r0", "r1", "r2", "r3", "r4")
    engine.frames.parked("r3")
    engine.frames.preempted("r4")
    return engine


# Every request is told ----------------------------------------------------------------------------


@every_policy
def test_every_live_request_has_one_decision_in_every_frame(policy: str) -> None:
    engine = mixed_engine(policy)
    for _ in range(4):
        live = sorted(request.request_id for request in engine.frames.live())
        plan = engine.next_frame()
        assert sorted(decision.request_id for decision in plan.decisions) == live
        assert len(plan.ledger) == len(live)


@every_policy
def test_decisions_say_what_the_plan_does(policy: str) -> None:
    engine = mixed_engine(policy)
    for _ in range(4):
        plan = engine.next_frame()
        groups = {
            Move.RUN: plan.run,
            Move.PARK: plan.park,
            Move.PREEMPT: plan.preempt,
            Move.RESUME: plan.resume,
            Move.ADMIT: plan.admit,
        }
        done = {name: move for move, names in groups.items() for name in names}
        for decision in plan.decisions:
            assert decision.move is done.pop(decision.request_id, Move.WAIT)
        assert not done


@every_policy
def test_all_numbers_are_finite_or_unknown(policy: str) -> None:
    engine = mixed_engine(policy)
    engine.arrive("urgent", is_urgent=True)
    for decision in engine.next_frame().decisions:
        for number in (decision.score, decision.in_time_fraction, decision.slack_s):
            assert number is None or math.isfinite(number)
        assert decision.score is not None


def test_one_that_is_not_there_is_not_explained() -> None:
    engine = running_engine("a")
    engine.finish("a")
    engine.arrive("b")
    plan = engine.plan()
    assert plan.explain("a") is None
    assert plan.explain("never seen") is None


def test_inside_a_frame_one_that_was_not_looked_at_is_told_so() -> None:
    engine = Engine("edf", max_batch=1)
    for index in range(100):
        engine.arrive(f"r{index}", DeadlineSlo(100.0 + index))
    engine.plan()
    engine.finish("r0")
    plan = engine.plan()
    assert (plan.kind, plan.admit) == (PlanKind.BACKFILL, ("r1",))
    assert plan.explain("r99") is None
    # The frame's ranking had it; one that came since and was not looked at either is told so.
    assert engine.frames.explain("r99") == engine.frames.last_frame_plan.explain("r99")
    engine.arrive("newcomer", DeadlineSlo(900.0))
    decision = engine.frames.explain("newcomer")
    assert decision is not None
    assert (decision.move, decision.reason) == (Move.WAIT, Reason.NOT_LOOKED_AT)
    assert engine.frames.explain("never seen") is None


# The moves and their reasons ----------------------------------------------------------------------


def test_run_and_outranked() -> None:
    engine = running_engine("a")
    engine.arrive("b", DeadlineSlo(200.0))
    plan = engine.next_frame()
    assert told(plan, "a") == (Move.RUN, Reason.BEST)
    assert told(plan, "b") == (Move.WAIT, Reason.OUTRANKED)


def test_admit_and_give_place() -> None:
    engine = running_engine("a")
    engine.arrive("tight", DeadlineSlo(5.0))
    plan = engine.next_frame()
    assert told(plan, "tight") == (Move.ADMIT, Reason.BEST)
    assert told(plan, "a") == (Move.PARK, Reason.GIVES_PLACE)
    assert told(engine.next_frame(), "a") == (Move.WAIT, Reason.OUTRANKED)


def test_resume() -> None:
    engine = running_engine("a")
    engine.arrive("tight", DeadlineSlo(5.0))
    engine.next_frame()
    engine.finish("tight")
    plan = engine.plan()
    assert told(plan, "a") == (Move.RESUME, Reason.BEST)


@pytest.mark.parametrize("policy", ["edf", "fcfs", "gmax"])
def test_no_kv(policy: str) -> None:
    engine = Engine(policy, max_batch=4, total_kv=1000, frame_steps=10)
    engine.arrive("runs", DeadlineSlo(10.0), input_tokens=300)
    engine.plan()
    engine.arrive("big", BEST_EFFORT, input_tokens=800)
    plan = engine.next_frame()
    stays = Reason.NOBODY_BETTER if policy == "fcfs" else Reason.BEST
    assert told(plan, "runs") == (Move.RUN, stays)
    assert told(plan, "big") == (Move.WAIT, Reason.NO_KV)


def test_preempt_for_kv() -> None:
    engine = Engine(max_batch=2, total_kv=1000, frame_steps=10)
    for name, due_s in (("a", 100.0), ("b", 200.0)):
        engine.arrive(name, DeadlineSlo(due_s), input_tokens=450)
    engine.plan()
    engine.arrive("tight", DeadlineSlo(10.0), input_tokens=300)
    plan = engine.next_frame()
    assert told(plan, "b") == (Move.PREEMPT, Reason.GIVES_KV)
    assert told(plan, "tight") == (Move.ADMIT, Reason.BEST)
    assert told(engine.next_frame(), "b")[0] is Move.WAIT


def test_a_stream_ahead_of_its_timeline_rests() -> None:
    engine = Engine(max_batch=1)
    engine.arrive("ahead", LatencySlo(5.0, 1.0))
    engine.plan()
    engine.frames.progressed("ahead", 20)  # token 20 is due after 25 s
    engine.arrive("tight", DeadlineSlo(6.0))
    engine.next_frame()
    assert engine.names(PARKED) == ["ahead"]
    assert told(engine.next_frame(), "ahead") == (Move.WAIT, Reason.RESTS)
    engine.clock.advance(25.0)
    assert told(engine.next_frame(), "ahead") == (Move.WAIT, Reason.OUTRANKED)


def test_must_run() -> None:
    engine = running_engine("a", "b", max_moves_fraction=1.0)
    engine.arrive("pinned", is_pinned=True)
    engine.run("pinned")
    engine.frames.parked("pinned")
    engine.arrive("urgent", is_urgent=True)
    engine.arrive("urgent too", is_urgent=True)
    plan = engine.next_frame()
    assert told(plan, "urgent") == (Move.ADMIT, Reason.MUST_RUN)
    assert told(plan, "pinned") == (Move.RESUME, Reason.MUST_RUN)
    assert told(plan, "urgent too") == (Move.WAIT, Reason.OUTRANKED)


def test_one_that_stays_because_nobody_may_take_its_place_is_not_among_the_best() -> None:
    engine = running_engine("a", "b", max_moves_fraction=0.5)
    for index in range(2):
        engine.arrive(f"tight{index}", DeadlineSlo(5.0 + index))
    plan = engine.next_frame()
    assert (plan.park, plan.run, plan.admit) == (("b",), ("a",), ("tight0",))
    move, reason = told(plan, "a")
    assert move is Move.RUN
    assert reason is not Reason.BEST


def test_what_is_dropped_and_what_is_cancelled_is_in_the_plan_and_nowhere_else() -> None:
    engine = Engine("edf", max_batch=1)
    engine.arrive("late", DeadlineSlo(0.5), on_miss=OnMiss.CANCEL)
    engine.plan()
    engine.arrive("impatient", waiting_time_s=0.25)
    engine.arrive("next")
    plan = engine.next_frame()
    assert [ending.request_id for ending in plan.cancel] == ["late"]
    assert [ending.request_id for ending in plan.drop] == ["impatient"]
    moved = {*plan.run, *plan.park, *plan.preempt, *plan.resume, *plan.admit, *plan.line}
    assert not moved & {"late", "impatient"}
    assert not set(plan.tokens) & {"late", "impatient"}


@pytest.mark.parametrize("kind", [PlanKind.FRAME, PlanKind.BACKFILL])
def test_a_plan_explains_whom_it_drops_and_cancels(kind: PlanKind) -> None:
    engine = Engine("edf", max_batch=2)
    engine.arrive("late", DeadlineSlo(0.5), on_miss=OnMiss.CANCEL)
    engine.arrive("runs")
    engine.plan()
    engine.arrive("impatient", waiting_time_s=0.25)
    engine.arrive("too late", DeadlineSlo(0.5), on_miss=OnMiss.CANCEL)
    engine.clock.advance(1.0 if kind is PlanKind.FRAME else 0.75)
    plan = engine.plan()
    assert plan.kind is kind
    assert told(plan, "late") == (Move.CANCEL, Reason.DEADLINE_PASSED)
    assert told(plan, "impatient") == (Move.DROP, Reason.WAITING_TIME)
    assert told(plan, "too late") == (Move.DROP, Reason.DEADLINE_PASSED)


# Numbers ------------------------------------------------------------------------------------------


def test_a_policy_without_estimates_leaves_chance_and_slack_unknown() -> None:
    engine = Engine("edf")
    engine.arrive("a", DeadlineSlo(7.0))
    decision = engine.plan().explain("a")
    assert decision == Decision("a", Move.ADMIT, Reason.BEST, score=-7.0)
    assert (decision.in_time_fraction, decision.slack_s) == (None, None)


def test_gmax_tells_chance_and_slack() -> None:
    engine = Engine("gmax", step_time=StepTimeModel.known(1 / 64))
    for name, due_s in (("fits", 2.0), ("does not", 1.0)):
        engine.arrive(name, DeadlineSlo(due_s))
        engine.frames.forecast(name, [96.0])  # takes 1.5 s
    plan = engine.plan()
    fits, late = plan.explain("fits"), plan.explain("does not")
    assert fits is not None
    assert late is not None
    assert (fits.in_time_fraction, fits.slack_s) == (1.0, 0.5)
    assert (late.in_time_fraction, late.slack_s) == (0.0, -0.5)
    assert fits.score is not None
    assert late.score is not None
    assert fits.score > late.score > 0


def ledger(**columns: Any) -> Ledger:
    fields: dict[str, Any] = {
        "ids": ("a", "b"),
        "moves": bytes([MOVE_CODE[Move.RUN], MOVE_CODE[Move.WAIT]]),
        "reasons": bytes([REASON_CODE[Reason.BEST], REASON_CODE[Reason.OUTRANKED]]),
        "scores": np.array([2.0, 1.0]).tobytes(),
        "in_time": b"",
        "slack_s": b"",
    }
    return Ledger(**fields | columns)


def test_a_ledger_reads_as_decisions_as_often_as_one_likes() -> None:
    book = ledger(in_time=np.array([0.5, 1.0], dtype=np.float32).tobytes())
    expected = [
        Decision("a", Move.RUN, Reason.BEST, 2.0, 0.5),
        Decision("b", Move.WAIT, Reason.OUTRANKED, 1.0, 1.0),
    ]
    assert list(book) == expected
    assert list(book) == expected
    assert len(book) == 2


def test_numbers_that_are_none_are_unknown_and_infinite_ones_are_bounded() -> None:
    book = ledger(scores=np.array([math.nan, math.inf]).tobytes())
    assert [decision.score for decision in book] == [None, 1e300]
    book = ledger(slack_s=np.array([math.nan, -math.inf], dtype=np.float32).tobytes())
    assert [decision.slack_s for decision in book] == [None, -1e300]


def test_an_empty_ledger_is_empty() -> None:
    book = turn_ledger([], (), [], [])
    assert (list(book), len(book)) == ([], 0)


def test_the_ledger_of_a_turn_has_its_four_groups_in_order() -> None:
    book = turn_ledger(["s"], ("p",), ["r"], ["a"])
    assert [(item.request_id, item.move) for item in book] == [
        ("s", Move.RUN),
        ("p", Move.PARK),
        ("r", Move.RESUME),
        ("a", Move.ADMIT),
    ]


def test_every_move_and_every_reason_has_a_code_of_its_own_in_a_byte() -> None:
    assert sorted(MOVE_CODE.values()) == list(range(len(Move)))
    assert sorted(REASON_CODE.values()) == list(range(len(Reason)))
    assert len({reason.value for reason in Reason}) == len(Reason) <= 256


# As data ------------------------------------------------------------------------------------------


@every_policy
def test_a_plan_is_json_and_reads_back_as_it_was(policy: str) -> None:
    engine = mixed_engine(policy)
    engine.arrive("impatient", waiting_time_s=0.25)
    engine.arrive("urgent", is_urgent=True)
    for _ in range(3):
        plan = engine.next_frame()
        assert msgspec.json.decode(msgspec.json.encode(plan), type=FramePlan) == plan
        decisions = msgspec.json.encode(plan.decisions)
        assert tuple(msgspec.json.decode(decisions, type=list[Decision])) == plan.decisions


@every_policy
def test_equal_inputs_give_equal_plans_byte_for_byte(policy: str) -> None:
    def prefix() -> list[bytes]:
        engine = mixed_engine(policy)
        plans = [engine.next_frame()]
        engine.decode_steps(3)
        for name in engine.names(RequestState.RUNNING):
            engine.frames.progressed(name, 9)
        engine.finish(engine.names(RequestState.RUNNING)[0])
        plans.append(engine.plan())
        engine.arrive("newcomer", DeadlineSlo(3.0))
        plans += [engine.next_frame() for _ in range(3)]
        return [msgspec.json.encode(plan) for plan in plans]

    assert prefix() == prefix()


def test_other_inputs_give_another_plan() -> None:
    plans = []
    for due_s in (5.0, 6.0):
        engine = Engine("edf")
        engine.arrive("a", DeadlineSlo(due_s))
        plans.append(msgspec.json.encode(engine.plan()))
    assert plans[0] != plans[1]
