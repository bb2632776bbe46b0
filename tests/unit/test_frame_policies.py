"""What policies and settings come to on the frame manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from plan_engine import BEST_EFFORT, RUNNING, Engine

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    ReasoningSlo,
    Slo,
)
from scheduler.config import SchedulerConfig
from scheduler.fairness import users
from scheduler.frame import REASON_DEADLINE, REASON_WAITING_TIME, FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import Ending, FramePlan, Move, Reason
from scheduler.policies import CANCEL_SUFFIX, POLICIES, gmax
from scheduler.policies.orders import LearningToRank
from scheduler.step_time import StepTimeModel

if TYPE_CHECKING:
    from scheduler.table import Floats

STEP_S = 1 / 64
PLAIN = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
every_policy = pytest.mark.parametrize("policy", PLAIN)
WITH_DEADLINE = pytest.mark.parametrize(
    "slo",
    [DeadlineSlo(2.0), CompoundSlo(2.0, "p"), ReasoningSlo(2.0, 0.25)],
    ids=["deadline", "compound", "reasoning"],
)


def steady_engine(policy: str, max_batch: int = 1, **more: Any) -> Engine:
    """An engine whose every step is known to take the same."""
    return Engine(policy, max_batch=max_batch, step_time=StepTimeModel.known(STEP_S), **more)


def plan_of_an_overload(engine: Engine) -> FramePlan:
    """The plan where not even one more would fit beside the others."""
    with patch.object(gmax, "FITTING_LOAD", 0.0):
        return engine.plan()


def first_admitted(engine: Engine, *, is_overload: bool = False) -> str:
    """Who gets the one place."""
    (name,) = (plan_of_an_overload(engine) if is_overload else engine.plan()).admit
    return name


# Cancelling what is late --------------------------------------------------------------------------


@every_policy
@WITH_DEADLINE
def test_a_cancelling_policy_ends_work_whose_deadline_has_passed(policy: str, slo: Slo) -> None:
    engine = Engine(policy + CANCEL_SUFFIX)
    engine.arrive("a", slo)
    engine.plan()
    engine.clock.advance(2.0)
    plan = engine.plan()
    assert (plan.drop, plan.cancel) == ((), ())  # to the moment is still in time
    engine.clock.advance(0.25)
    plan = engine.plan()
    assert (plan.drop, plan.cancel) == ((), (Ending("a", REASON_DEADLINE),))
    assert engine.frames.num_ended[RequestState.ABORTED] == 1


@every_policy
@WITH_DEADLINE
def test_without_the_suffix_late_work_goes_on(policy: str, slo: Slo) -> None:
    engine = Engine(policy)
    engine.arrive("a", slo)
    for _ in range(5):
        plan = engine.next_frame()
        assert (plan.drop, plan.cancel) == ((), ())
    assert engine.names(RUNNING) == ["a"]


@WITH_DEADLINE
def test_a_cancelling_policy_drops_what_is_late_before_it_started(slo: Slo) -> None:
    engine = Engine("fcfs+cancel", max_batch=1)
    engine.arrive("a")
    engine.plan()
    engine.arrive("b", slo)
    engine.clock.advance(2.25)
    plan = engine.plan()
    assert (plan.drop, plan.cancel) == ((Ending("b", REASON_DEADLINE),), ())
    assert engine.names(RUNNING) == ["a"]


@pytest.mark.parametrize("state", ["parked", "preempted"])
def test_a_cancelling_policy_ends_late_work_that_had_to_give_way_too(state: str) -> None:
    engine = Engine("fcfs+cancel", max_batch=1)
    engine.arrive("a", DeadlineSlo(2.0))
    engine.plan()
    getattr(engine.frames, state)("a")
    engine.arrive("b")
    engine.run("b")
    engine.clock.advance(2.25)
    assert engine.plan().cancel == (Ending("a", REASON_DEADLINE),)


@every_policy
@pytest.mark.parametrize("slo", [LatencySlo(0.5, 0.25), BestEffortSlo(0.5)], ids=["stream", "best"])
def test_a_cancelling_policy_leaves_streams_and_best_effort_work_alone(
    policy: str, slo: Slo
) -> None:
    engine = Engine(policy + CANCEL_SUFFIX, max_batch=1)
    engine.arrive("runs", slo, is_pinned=True)
    engine.plan()
    engine.arrive("waits", slo)
    for _ in range(5):
        plan = engine.next_frame()
        assert (plan.drop, plan.cancel) == ((), ())


def test_the_waiting_time_is_the_reason_where_it_ends_first() -> None:
    engine = Engine("fcfs+cancel", max_batch=1)
    engine.arrive("a")
    engine.plan()
    engine.arrive("b", DeadlineSlo(2.0), waiting_time_s=0.5)
    engine.clock.advance(0.75)
    assert engine.plan().drop == (Ending("b", REASON_WAITING_TIME),)


def test_a_late_request_is_ended_until_its_end_is_reported() -> None:
    engine = Engine("edf+cancel")
    engine.arrive("a", DeadlineSlo(2.0))
    engine.plan()
    engine.clock.advance(2.25)
    for _ in range(3):
        plan = engine.frames.tick(engine.clock.now_s(), engine.capacity())
        assert plan is not None
        assert plan.cancel == (Ending("a", REASON_DEADLINE),)
    engine.frames.ended("a", RequestState.ABORTED)
    assert engine.tick() is None


def test_switching_to_a_cancelling_policy_ends_what_is_late_already() -> None:
    engine = Engine("edf", max_batch=2)
    engine.arrive("late", DeadlineSlo(0.25))
    engine.arrive("in time", DeadlineSlo(50.0))
    engine.plan()
    engine.arrive("late and waiting", DeadlineSlo(0.25))
    engine.clock.advance(0.5)
    assert engine.tick() is None
    engine.frames.use_policy("edf+cancel")
    plan = engine.plan()
    assert plan.cancel == (Ending("late", REASON_DEADLINE),)
    assert plan.drop == (Ending("late and waiting", REASON_DEADLINE),)
    assert "in time" in engine.names(RUNNING)


def test_switching_to_a_cancelling_policy_ends_live_requests_once_they_are_late() -> None:
    engine = Engine("gmax")
    engine.arrive("a", DeadlineSlo(2.0))
    engine.plan()
    engine.frames.use_policy("gmax+cancel")
    assert engine.next_frame().cancel == ()
    engine.clock.advance(1.25)
    assert engine.plan().cancel == (Ending("a", REASON_DEADLINE),)


def test_switching_away_from_a_cancelling_policy_lets_live_requests_go_on() -> None:
    engine = Engine("gmax+cancel")
    engine.arrive("a", DeadlineSlo(2.0))
    engine.plan()
    engine.frames.use_policy("gmax")
    for _ in range(4):
        assert engine.next_frame().cancel == ()
    assert engine.names(RUNNING) == ["a"]


def test_switching_away_in_the_moment_of_the_deadline_spares_a_request_too() -> None:
    engine = Engine("gmax+cancel")
    engine.arrive("a", DeadlineSlo(2.0))
    engine.plan()
    engine.clock.advance(2.25)
    plan = engine.frames.tick(engine.clock.now_s(), engine.capacity())
    assert plan is not None
    assert plan.cancel != ()
    engine.frames.use_policy("gmax")
    assert engine.next_frame().cancel == ()


def test_whoever_asked_to_be_cancelled_is_under_every_policy() -> None:
    engine = Engine("edf+cancel", max_batch=2)
    engine.arrive("asked", DeadlineSlo(2.0), on_miss=OnMiss.CANCEL)
    engine.arrive("not", DeadlineSlo(2.0))
    engine.plan()
    engine.frames.use_policy("edf")
    engine.clock.advance(2.25)
    assert engine.plan().cancel == (Ending("asked", REASON_DEADLINE),)


# Orders -------------------------------------------------------------------------------------------


def test_priority_admits_the_higher_one_and_displaces_by_it() -> None:
    engine = Engine("priority", max_batch=1)
    engine.arrive("low", priority=1)
    engine.arrive("high", priority=5)
    assert first_admitted(engine) == "high"
    engine.arrive("higher", priority=6)
    plan = engine.next_frame()
    assert (plan.park, plan.admit) == (("high",), ("higher",))


def test_priority_displaces_nobody_for_an_equal_and_takes_negative_ones() -> None:
    engine = Engine("priority", max_batch=1)
    engine.arrive("a", priority=-3)
    engine.plan()
    engine.arrive("b", priority=-3)
    engine.arrive("c", priority=-4)
    assert engine.next_frame().park == ()
    engine.finish("a")
    assert first_admitted(engine) == "b"


@pytest.mark.parametrize("policy", ["gmax", "fcfs", "edf", "vtc"])
def test_under_other_policies_priority_counts_for_nothing(policy: str) -> None:
    engine = steady_engine(policy)
    engine.arrive("a", DeadlineSlo(10.0))
    engine.arrive("b", DeadlineSlo(10.0), priority=100)
    assert first_admitted(engine) == "a"


def served_more(engine: Engine, tenant: str, *, output_tokens: int = 50) -> None:
    """One of the tenant's requests runs and has got some tokens."""
    engine.arrive("served", BEST_EFFORT, tenant=tenant)
    engine.run("served")
    engine.frames.progressed("served", output_tokens)


def test_vtc_serves_the_tenant_with_less_service() -> None:
    engine = Engine("vtc", max_batch=2)
    engine.arrive("keeps b level", tenant="b")
    served_more(engine, "a")
    engine.run("keeps b level")
    assert engine.frames.tenants.service_of("a") == 100 + 2 * 50
    assert engine.frames.tenants.service_of("b") == 100
    engine.arrive("of a", tenant="a")
    engine.arrive("of b", tenant="b")
    assert engine.plan().admit == ()
    engine.finish("served")
    assert first_admitted(engine) == "of b"


def test_vtc_goes_by_arrival_between_tenants_that_are_level_and_displaces_nobody() -> None:
    engine = Engine("vtc", max_batch=1)
    engine.arrive("first", tenant="a")
    engine.arrive("second", tenant="b")
    assert first_admitted(engine) == "first"
    engine.frames.progressed("first", 80)
    assert engine.next_frame().park == ()


def test_what_the_engine_took_away_and_built_again_is_not_the_tenants_service() -> None:
    engine = Engine("vtc", max_batch=1)
    engine.arrive("a", tenant="a")
    engine.plan()
    engine.frames.progressed("a", 20)
    engine.frames.preempted("a")
    engine.run("a")
    assert engine.frames.tenants.service_of("a") == 100 + 2 * 20


def program(tokens: str, **more: Any) -> CompoundSlo:
    return CompoundSlo(100.0, tokens, **more)


def test_plas_runs_the_call_of_the_program_that_was_served_less() -> None:
    engine = Engine("plas", max_batch=1)
    engine.arrive("heavy 1", program("heavy"), input_tokens=200)
    engine.plan()
    engine.frames.progressed("heavy 1", 60)  # 260 tokens: beyond the first level's 256
    engine.arrive("heavy 2", program("heavy"), input_tokens=1)
    engine.arrive("light", program("light"), input_tokens=5000)
    engine.finish("heavy 1")
    assert first_admitted(engine) == "light"


def test_plas_goes_by_arrival_while_programs_are_on_one_level() -> None:
    engine = Engine("plas", max_batch=1)
    engine.arrive("heavier 1", program("heavier"), input_tokens=200)
    engine.plan()
    engine.frames.progressed("heavier 1", 56)  # 256 tokens are still the first level
    engine.arrive("heavier 2", program("heavier"))
    engine.arrive("light", program("light"))
    engine.finish("heavier 1")
    assert first_admitted(engine) == "heavier 2"


def test_plas_displaces_a_call_whose_program_has_sunk_a_level() -> None:
    engine = Engine("plas", max_batch=1)
    engine.arrive("heavy", program("heavy"), input_tokens=200)
    engine.plan()
    engine.arrive("light", program("light"))
    assert engine.next_frame().park == ()
    engine.frames.progressed("heavy", 60)
    assert engine.next_frame().park == ("heavy",)


def test_ltr_runs_the_shortest_forecast_and_promotes_what_was_passed_over_for_long() -> None:
    engine = Engine("ltr", max_batch=1)
    engine.arrive("short", DeadlineSlo(1e5))
    engine.frames.forecast("short", [10.0])
    engine.arrive("long", DeadlineSlo(1e5))
    engine.frames.forecast("long", [90.0])
    assert first_admitted(engine) == "short"
    # The first plan passed over it once; it is promoted when 100 have.
    for _ in range(int(LearningToRank.PROMOTE_AFTER_FRAMES) - 1):
        assert engine.next_frame().run == ("short",)
    plan = engine.next_frame()
    assert (plan.park, plan.admit) == (("short",), ("long",))
    assert engine.next_frame().run == ("long",)


# What is late waits -------------------------------------------------------------------------------

LATE = DeadlineSlo(0.5)
PATIENT = LatencySlo(100.0, 0.5)


def late_engine(num_late: int = 4, *, policy: str = "gmax", max_batch: int = 4, **more: Any) -> Any:
    """So many answers wait whose deadline passed a quarter of a second ago."""
    engine = steady_engine(policy, max_batch, **more)
    for index in range(num_late):
        engine.arrive(f"late {index}", LATE)
    engine.clock.advance(0.75)
    return engine


def late_ones(names: tuple[str, ...]) -> int:
    return sum(name.startswith("late") for name in names)


@pytest.mark.parametrize(
    ("in_time", "beside"),
    [
        ([], 4),
        ([BEST_EFFORT] * 2, 2),
        ([PATIENT], 1),
        ([PATIENT] * 2, 0),
        ([CompoundSlo(100.0, "p"), DeadlineSlo(100.0), PATIENT], 0),
    ],
)
def test_what_is_late_fills_the_batch_up_to_a_half_beside_what_can_be_in_time(
    in_time: list[Slo], beside: int
) -> None:
    # Best-effort work has no objective: it keeps nobody waiting, and goes before what is late.
    engine = late_engine()
    for index, slo in enumerate(in_time):
        engine.arrive(f"r{index}", slo)
    plan = engine.plan()
    assert late_ones(plan.admit) == beside
    assert len(plan.admit) == beside + len(in_time)


def test_a_program_past_its_deadline_waits_too_and_a_stream_behind_its_timeline_does_not() -> None:
    engine = steady_engine("gmax", 2)
    engine.arrive("late call", CompoundSlo(0.5, "p"))
    engine.arrive("stream behind", LatencySlo(0.5, 1.0))
    engine.clock.advance(0.75)
    assert engine.plan().admit == ("stream behind",)


def test_late_work_that_runs_is_parked_as_far_as_moves_go() -> None:
    engine = late_engine()
    engine.run(*(f"late {index}" for index in range(4)))
    for index in range(2):
        engine.arrive(f"stream {index}", PATIENT)
    plan = engine.plan()
    assert (len(plan.park), set(plan.admit)) == (2, {"stream 0", "stream 1"})
    plan = engine.next_frame()
    assert (len(plan.park), plan.admit) == (2, ())
    assert set(engine.names(RUNNING)) == {"stream 0", "stream 1"}


def test_late_work_does_not_enter_inside_a_frame_either() -> None:
    engine = late_engine(max_batch=2)
    engine.arrive("stream", PATIENT)
    assert engine.plan().admit == ("stream",)
    engine.arrive("whenever", BEST_EFFORT)
    assert engine.plan().admit == ("whenever",)
    engine.finish("whenever")
    engine.tick()
    assert engine.names(RUNNING) == ["stream"]
    engine.finish("stream")
    assert late_ones(engine.plan().admit) == 2


def test_late_work_that_waited_for_as_long_as_may_be_runs_beside_what_is_in_time() -> None:
    engine = late_engine(starvation_frames=3)
    for index in range(4):
        engine.arrive(f"stream {index}", PATIENT)
    engine.plan()
    for _ in range(2):
        assert late_ones(engine.next_frame().admit) == 0
    plan = engine.next_frame()
    assert late_ones(plan.admit) == 1
    decision = plan.explain("late 0")
    assert decision is not None
    assert decision.reason is Reason.STARVED
    assert plan.park == ("stream 3",)
    assert set(engine.next_frame().run) == {"late 0", "stream 0", "stream 1", "stream 2"}


@pytest.mark.parametrize("max_batch", [1, 2])
def test_where_the_kv_of_what_is_in_time_does_not_fit_late_work_runs_on(max_batch: int) -> None:
    # 320 tokens to be built again cost more than the streams' 20 are worth: nobody is preempted.
    step_time = StepTimeModel.known(0.01, prefill_s=4e-4)
    engine = Engine("gmax", max_batch=max_batch, total_kv=1000, step_time=step_time)
    engine.arrive("late", DeadlineSlo(1.0), input_tokens=800)
    engine.run("late")
    engine.frames.parked("late")
    engine.clock.advance(2.0)
    for index in range(3):
        slo = LatencySlo(5.0, 0.2)
        engine.arrive(f"stream {index}", slo, input_tokens=500, max_output_tokens=20)
    assert engine.plan().resume == ("late",)
    for _ in range(5):
        assert engine.next_frame().run == ("late",)


def test_however_much_is_late_what_is_not_gets_the_places() -> None:
    # The late ones are shorter than what cannot be in time any more, and so score higher.
    engine = steady_engine("gmax", 2)
    for index in range(100):
        engine.arrive(f"late {index}", LATE, max_output_tokens=10)
    engine.clock.advance(1.0)
    for index in range(2):
        engine.arrive(f"hopeless {index}", DeadlineSlo(0.25), max_output_tokens=100)
        engine.frames.forecast(f"hopeless {index}", [90.0])
    assert set(engine.plan().admit) == {"hopeless 0", "hopeless 1"}


def test_late_work_waits_behind_more_that_does_not_fit_than_a_frame_ranks() -> None:
    engine = steady_engine("gmax", 2, total_kv=1000)
    for index in range(5):
        engine.arrive(f"late {index}", LATE)
    engine.clock.advance(1.0)
    engine.arrive("stream", PATIENT)
    for index in range(90):
        engine.arrive(f"big {index}", PATIENT, input_tokens=950)
    assert engine.plan().admit == ("stream",)


def test_late_work_that_waits_makes_no_step_longer() -> None:
    # A quarter of a second per request: four streams take a second, eight would take two.
    engine = Engine("gmax", max_batch=8, step_time=StepTimeModel.known(0.0, 0.25))
    for index in range(8):
        engine.arrive(f"late {index}", LATE)
    engine.clock.advance(1.0)
    for index in range(4):
        engine.arrive(f"stream {index}", LatencySlo(100.0, 4.0))
    plan = engine.plan()
    assert late_ones(plan.admit) == 0
    decision = plan.explain("stream 0")
    assert decision is not None
    assert decision.slack_s == 99


@pytest.mark.parametrize("policy", ["gmax", "edf", "gmax-paper"])
def test_of_late_work_alone_whatever_fits_runs(policy: str) -> None:
    engine = steady_engine(policy, 2, total_kv=1000)
    engine.arrive("runs", BEST_EFFORT, is_pinned=True, input_tokens=500, max_output_tokens=4)
    engine.run("runs")
    for index in range(3):
        engine.arrive(f"late {index}", LATE, input_tokens=800)
    engine.arrive("late and small", LATE, max_output_tokens=200)
    engine.clock.advance(0.75)
    assert engine.plan().admit == ("late and small",)


@pytest.mark.parametrize("policy", ["gmax-paper", "edf", "ltr"])
def test_other_policies_do_not_have_late_work_wait(policy: str) -> None:
    engine = late_engine(policy=policy)
    engine.arrive("answer", DeadlineSlo(100.0))
    engine.arrive("stream", LatencySlo(100.0, 0.5))
    assert late_ones(engine.plan().admit) >= 2


# The order of admissions --------------------------------------------------------------------------


def rich_and_tight(policy: str) -> tuple[str, ...]:
    """Who is admitted in an overload, in order: all four have a place."""
    engine = steady_engine(policy, 4)
    engine.arrive("rich", DeadlineSlo(50.0), input_tokens=900)
    engine.arrive("tight", DeadlineSlo(5.0), input_tokens=100)
    engine.arrive("whenever", BEST_EFFORT)
    engine.arrive("stream", LatencySlo(1.0, 0.5))
    return plan_of_an_overload(engine).admit


def test_of_those_admitted_who_has_the_least_time_to_spare_is_first() -> None:
    assert rich_and_tight("gmax") == ("stream", "tight", "rich", "whenever")


def test_who_is_not_just_in_time_admits_the_best_first() -> None:
    assert rich_and_tight("gmax-no-jit") == ("rich", "tight", "stream", "whenever")


# Starvation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["gmax", "gmax-paper", "gmax-no-jit"])
def test_one_passed_over_for_as_long_as_may_be_runs_and_is_told_why(policy: str) -> None:
    engine = steady_engine(policy, starvation_frames=3, displace_margin=0.0)
    poor = engine.arrive("poor", BEST_EFFORT)
    for frame in range(3):
        engine.arrive(f"rich{frame}", LatencySlo(frame + 0.5, 0.125))
        plan = engine.next_frame() if frame else engine.plan()
        decision = plan.explain("poor")
        assert decision is not None
        assert (decision.move, decision.reason) == (Move.WAIT, Reason.OUTRANKED)
    assert poor.frames_waited == 3
    engine.arrive("rich3", LatencySlo(1.5, 0.125))
    plan = engine.next_frame()
    decision = plan.explain("poor")
    assert decision is not None
    assert (decision.move, decision.reason) == (Move.ADMIT, Reason.STARVED)
    assert plan.admit == ("poor",)


@pytest.mark.parametrize(("max_batch", "most"), [(1, 1), (4, 1), (127, 1), (128, 2)])
def test_of_the_starved_one_per_64_places_goes_first_and_the_oldest(
    max_batch: int, most: int
) -> None:
    engine = steady_engine(
        "gmax", max_batch, total_slots=512, starvation_frames=1, displace_margin=0.0
    )
    for index in range(max_batch):
        engine.arrive(f"rich{index}", LatencySlo(0.5, 0.125))
    for index in range(4):
        engine.arrive(f"poor{index}", BEST_EFFORT)
    engine.plan()
    for index in range(max_batch):
        engine.arrive(f"more{index}", LatencySlo(1.5, 0.125))
    plan = engine.next_frame()
    starved = [item.request_id for item in plan.decisions if item.reason is Reason.STARVED]
    assert starved == [f"poor{index}" for index in range(most)]
    assert set(starved) <= set(plan.admit)


@pytest.mark.parametrize("policy", ["edf", "priority"])
def test_a_baseline_lets_the_worst_starve(policy: str) -> None:
    engine = steady_engine(policy, starvation_frames=2)
    engine.arrive("poor", BEST_EFFORT)
    engine.arrive("rich", DeadlineSlo(5.0), priority=1)
    engine.plan()
    for _ in range(5):
        assert engine.next_frame().admit == ()


# Fairness -----------------------------------------------------------------------------------------


def two_tenants(policy: str = "gmax", **more: Any) -> Engine:
    """Tenant a was served and asks for the more urgent answer; b was not. One place."""
    engine = steady_engine(policy, **more)
    engine.arrive("of b", DeadlineSlo(50.0), tenant="b")
    served_more(engine, "a")
    engine.arrive("of a", DeadlineSlo(5.0), tenant="a")
    engine.finish("served")
    return engine


@pytest.mark.parametrize("policy", ["gmax", "gmax-oracle", "gmax-no-jit"])
def test_with_all_the_weight_on_fairness_the_least_served_tenant_goes_first(policy: str) -> None:
    engine = two_tenants(policy, fairness=1.0)
    assert first_admitted(engine) == "of b"


def test_without_fairness_the_more_urgent_goes_first_whoever_asks() -> None:
    assert first_admitted(two_tenants(fairness=0.0)) == "of a"


def test_baselines_do_not_count_fairness() -> None:
    assert first_admitted(two_tenants("edf", fairness=1.0)) == "of a"


def test_a_users_fair_function_decides_with_the_weight_that_it_is_given() -> None:
    def most_served_first(service: Floats) -> Floats:
        return service / 1000.0

    fair = users(most_served_first)
    engine = steady_engine("gmax", fairness=1.0, fair=fair)
    engine.arrive("of b", DeadlineSlo(5.0), tenant="b")
    served_more(engine, "a")
    engine.arrive("of a", DeadlineSlo(50.0), tenant="a")
    engine.finish("served")
    assert first_admitted(engine) == "of a"
    assert first_admitted(two_tenants(fair=fair)) == "of a"  # urgency, for fairness is 0


def test_a_users_fair_function_sees_each_requests_tenant_as_served_so_far() -> None:
    seen: list[list[float]] = []

    def watch(service: Floats) -> Floats:
        seen.append(service.tolist())
        return np.ones_like(service)

    engine = two_tenants(fairness=0.5, fair=users(watch))
    engine.plan()
    assert seen == [[0.0, 200.0]] or seen == [[200.0, 0.0]]


@pytest.mark.parametrize(
    "broken",
    [lambda service: 1 / 0, lambda service: service[:1], lambda service: service * np.nan],
    ids=["raises", "another shape", "no numbers"],
)
def test_a_users_fair_function_that_fails_does_not_stop_planning(broken: Any) -> None:
    engine = two_tenants(fairness=1.0, fair=users(broken))
    assert len(engine.plan().admit) == 1
    assert engine.next_frame().num_run >= 1


# Objectives ---------------------------------------------------------------------------------------


class Worth:
    """Answers are worth what a function of their input tokens says; streams nothing."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        return self.function(input_tokens)

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        return np.zeros_like(tokens_in_time)


def short_and_long_prompt(**more: Any) -> Engine:
    engine = steady_engine("gmax", **more)
    for name, input_tokens in (("short", 10), ("long", 500)):
        engine.arrive(name, DeadlineSlo(50.0), input_tokens=input_tokens)
        engine.frames.forecast(name, [20.0])
    return engine


def test_the_users_objective_says_who_is_worth_more() -> None:
    assert first_admitted(short_and_long_prompt(), is_overload=True) == "long"
    dear = Worth(lambda tokens: 1e4 / tokens)
    assert first_admitted(short_and_long_prompt(objective=dear), is_overload=True) == "short"


def test_built_in_objectives_say_who_is_worth_more() -> None:
    def first(goodput: str) -> str:
        return first_admitted(short_and_long_prompt(goodput=goodput), is_overload=True)

    assert first("request") == "short"  # a tie: arrival
    assert first("1:0") == "long"
    assert first("0:1") == "short"


def test_a_dotted_path_needs_its_object() -> None:
    with pytest.raises(ValueError, match=r"goodput: 'shop\.prices:all' needs an objective object"):
        FrameManager(SchedulerConfig(goodput="shop.prices:all"))
    FrameManager(SchedulerConfig(goodput="shop.prices:all"), objective=Worth(lambda tokens: tokens))


@pytest.mark.parametrize(
    "broken",
    [lambda tokens: 1 / 0, lambda tokens: tokens[:0], lambda tokens: tokens * np.nan, lambda _: 0],
    ids=["raises", "another shape", "no numbers", "a single number"],
)
@pytest.mark.parametrize("policy", ["gmax", "gmax-paper"])
def test_a_users_objective_that_fails_does_not_stop_planning(policy: str, broken: Any) -> None:
    engine = steady_engine(policy, objective=Worth(broken))
    for name in "ab":
        engine.arrive(name, DeadlineSlo(50.0))
    engine.arrive("stream", LatencySlo(5.0, 0.25))
    assert len(engine.plan().admit) == 1
    engine.finish(engine.names(RUNNING)[0])
    assert len(engine.plan().admit) == 1
    assert engine.next_frame().num_run >= 1


def test_with_an_objective_that_raises_tokens_count_instead() -> None:
    broken = Worth(lambda tokens: 1 / 0)
    assert first_admitted(short_and_long_prompt(objective=broken), is_overload=True) == "long"


# What is known of lengths -------------------------------------------------------------------------


def test_gmax_prefers_the_one_that_is_forecast_to_be_short() -> None:
    def first(*lengths: float) -> str:
        engine = steady_engine("gmax")
        for name, length in zip("ab", lengths, strict=True):
            engine.arrive(name, DeadlineSlo(50.0))
            engine.frames.forecast(name, [length])
        return first_admitted(engine, is_overload=True)

    assert first(20.0, 20.0) == "a"
    assert first(80.0, 20.0) == "b"
    assert first(20.0, 80.0) == "a"


def test_gmax_prefers_the_one_that_is_forecast_to_fit_into_its_time() -> None:
    engine = steady_engine("gmax")
    # 64 tokens take a second.
    for name, length in (("too long", 96.0), ("fits", 48.0)):
        engine.arrive(name, DeadlineSlo(1.0))
        engine.frames.forecast(name, [length])
    assert first_admitted(engine) == "fits"


def test_a_later_forecast_replaces_the_one_before() -> None:
    engine = steady_engine("gmax")
    for name in "ab":
        engine.arrive(name, DeadlineSlo(50.0))
        engine.frames.forecast(name, [50.0])
    engine.frames.forecast("b", [5.0])
    assert first_admitted(engine, is_overload=True) == "b"


def test_a_forecast_outlasts_what_the_class_learns() -> None:
    engine = steady_engine("gmax")
    engine.arrive("teacher", DeadlineSlo(50.0))
    engine.run("teacher")
    for name, length in (("long", 90.0), ("short", 10.0)):
        engine.arrive(name, DeadlineSlo(50.0))
        engine.frames.forecast(name, [length])
    engine.frames.progressed("teacher", 40)
    engine.finish("teacher")
    assert first_admitted(engine, is_overload=True) == "short"


def test_a_forecast_for_one_that_is_gone_is_ignored_and_nonsense_is_refused() -> None:
    engine = steady_engine("gmax")
    engine.frames.forecast("never seen", [5.0])
    engine.arrive("a", DeadlineSlo(50.0))
    for nonsense in ([], [-1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="a length forecast takes"):
            engine.frames.forecast("a", nonsense)
    assert first_admitted(engine) == "a"


@pytest.mark.parametrize("policy", ["gmax", "gmax-paper"])
def test_only_the_oracle_goes_by_the_true_length(policy: str) -> None:
    def first(name: str) -> str:
        engine = steady_engine(name)
        engine.arrive("long", DeadlineSlo(50.0), known_output_tokens=100)
        engine.arrive("short", DeadlineSlo(50.0), known_output_tokens=10)
        return first_admitted(engine, is_overload=True)

    assert first(policy) == "long"  # alike, so the first to arrive
    assert first(f"{policy}-oracle") == "short"


def test_where_the_true_length_is_not_known_the_oracle_goes_by_the_forecast() -> None:
    engine = steady_engine("gmax-oracle")
    engine.arrive("known", DeadlineSlo(50.0), known_output_tokens=50)
    engine.arrive("forecast", DeadlineSlo(50.0))
    engine.frames.forecast("known", [1.0])
    engine.frames.forecast("forecast", [20.0])
    assert first_admitted(engine, is_overload=True) == "forecast"


# A reasoning request ------------------------------------------------------------------------------


def thinking(policy: str = "gmax", **more: Any) -> Engine:
    """One that has thought for 20 tokens, with its answer to begin 4 s after 1000."""
    engine = steady_engine(policy)
    engine.arrive("r", ReasoningSlo(4.0, 0.25), **more)
    engine.plan()
    engine.frames.progressed("r", 20)
    return engine


def next_due_s(engine: Engine) -> float:
    request = engine.frames.get("r")
    assert request is not None
    return request.next_due_s()


def test_while_it_thinks_a_reasoning_request_is_due_by_its_deadline() -> None:
    engine = thinking()
    assert next_due_s(engine) == 1004.0
    engine.frames.progressed("r", 40)
    assert next_due_s(engine) == 1004.0


def test_once_its_answer_began_a_reasoning_request_is_a_stream_from_its_deadline_on() -> None:
    engine = thinking()
    engine.frames.answer_began("r")
    assert next_due_s(engine) == 1004.0
    engine.frames.progressed("r", 23)
    assert next_due_s(engine) == 1004.75
    engine.frames.answer_began("r")  # a second report changes nothing
    assert next_due_s(engine) == 1004.75


@pytest.mark.parametrize(
    ("policy", "on_miss"), [("gmax", OnMiss.CANCEL), ("gmax+cancel", OnMiss.FINISH)]
)
@pytest.mark.parametrize("has_begun", [True, False])
def test_only_thinking_is_cancelled_when_its_deadline_has_passed(
    policy: str, on_miss: OnMiss, has_begun: bool
) -> None:
    engine = thinking(policy, on_miss=on_miss)
    if has_begun:
        engine.frames.answer_began("r")
    engine.clock.advance(4.5)
    expected = () if has_begun else (Ending("r", REASON_DEADLINE),)
    assert engine.plan().cancel == expected


def test_a_policy_that_cancels_spares_a_stream_that_was_reasoning_after_a_switch_too() -> None:
    engine = thinking()
    engine.frames.answer_began("r")
    engine.frames.use_policy("edf+cancel")
    engine.clock.advance(4.5)
    assert engine.plan().cancel == ()


def test_an_answer_that_begins_after_the_deadline_is_no_stream() -> None:
    engine = thinking()
    engine.clock.advance(4.5)
    engine.plan()
    engine.frames.answer_began("r")
    engine.frames.progressed("r", 30)
    assert next_due_s(engine) == 1004.0


def test_the_answer_of_one_that_is_gone_or_does_not_reason_changes_nothing() -> None:
    engine = steady_engine("gmax")
    engine.arrive("r", DeadlineSlo(4.0))
    engine.plan()
    engine.frames.answer_began("r")
    engine.frames.answer_began("never seen")
    engine.frames.progressed("r", 30)
    assert next_due_s(engine) == 1004.0


# Programs -----------------------------------------------------------------------------------------


def service_of(engine: Engine, index: int = 0) -> float:
    return float(engine.frames.programs.column("service")[index])


def test_the_calls_of_a_program_share_its_service() -> None:
    engine = Engine("gmax", max_batch=4)
    engine.arrive("a", program("p"), input_tokens=100)
    engine.arrive("b", program("p"), input_tokens=30)
    engine.arrive("other", program("q"), input_tokens=1000)
    engine.plan()
    assert service_of(engine) == 130
    engine.frames.progressed("a", 7)
    engine.frames.progressed("b", 2)
    assert service_of(engine) == 139
    engine.finish("a")
    engine.arrive("c", program("p"), input_tokens=11)
    engine.plan()
    assert service_of(engine) == 150


def test_programs_of_one_name_are_apart_by_tenant() -> None:
    engine = Engine("gmax", max_batch=4)
    engine.arrive("a", program("p"), tenant="x", input_tokens=100)
    engine.arrive("b", program("p"), tenant="y", input_tokens=30)
    engine.plan()
    assert (service_of(engine, 0), service_of(engine, 1)) == (100, 30)
    assert len(engine.frames.programs) == 2


def test_what_finished_calls_gave_counts_for_the_program_and_aborted_ones_do_not() -> None:
    engine = Engine("gmax", max_batch=4)
    for name in ("a", "b", "c"):
        engine.arrive(name, program("p"), input_tokens=100)
    engine.plan()
    for name in ("a", "b"):
        engine.frames.progressed(name, 5)
    engine.finish("a")
    engine.frames.ended("b", RequestState.ABORTED)
    assert engine.frames.programs.column("done_in")[0] == 100
    assert engine.frames.programs.column("done_out")[0] == 5


def test_a_program_lives_between_its_calls_and_is_forgotten_after_the_final_one() -> None:
    engine = Engine("gmax", max_batch=4)
    engine.arrive("a", program("p"))
    engine.plan()
    engine.finish("a")
    assert len(engine.frames.programs) == 1
    engine.arrive("b", program("p", final=True))
    engine.plan()
    assert len(engine.frames.programs) == 1
    engine.finish("b")
    assert len(engine.frames.programs) == 0


@pytest.mark.parametrize("state", [RequestState.ABORTED, RequestState.FINISHED])
def test_a_program_is_forgotten_when_the_last_of_its_final_stage_has_ended(
    state: RequestState,
) -> None:
    engine = Engine("gmax", max_batch=4)
    engine.arrive("side", program("p"))
    engine.arrive("final", program("p", final=True))
    engine.plan()
    engine.finish("final")
    assert len(engine.frames.programs) == 1
    engine.frames.ended("side", state)
    assert len(engine.frames.programs) == 0


def test_gmax_finishes_the_program_that_has_got_most_already() -> None:
    engine = steady_engine("gmax")
    engine.arrive("old 1", program("old"))
    engine.frames.forecast("old 1", [20.0])
    engine.plan()
    engine.frames.progressed("old 1", 20)
    for name, program_id in (("new 1", "new"), ("old 2", "old")):
        engine.arrive(name, program(program_id))
        engine.frames.forecast(name, [20.0])
    engine.finish("old 1")
    # A frame later: how much there is to do is told at its boundary.
    engine.clock.advance(engine.frames.config.frame_s)
    assert first_admitted(engine, is_overload=True) == "old 2"


def test_a_call_whose_programs_deadline_has_passed_goes_after_one_in_time() -> None:
    engine = steady_engine("gmax")
    engine.arrive("late", CompoundSlo(-1.0, "p"))
    engine.arrive("in time", CompoundSlo(50.0, "q"))
    assert first_admitted(engine) == "in time"
