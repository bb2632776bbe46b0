"""Programs in the frame manager: calls that are foreseen, stages that are due, and their end."""

from __future__ import annotations

import math

import pytest
from plan_engine import BEST_EFFORT, FRAME_S, Engine

from core.slo import CompoundSlo, DeadlineSlo, LatencySlo, Slo
from scheduler.frame import MAX_NEW_CALLS
from scheduler.lifecycle import RequestState
from scheduler.plan import PlanKind
from scheduler.policies import CANCEL_SUFFIX, POLICIES
from scheduler.programs import ProgramOutlook
from scheduler.step_time import StepTimeModel

PLAIN = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
every_policy = pytest.mark.parametrize("policy", PLAIN)
STEP_S = 0.01

# Calls that are foreseen --------------------------------------------------------------------------


def foreseeing(
    policy: str = "gmax", *, tokens: float = 200.0, in_s: float = 0.5, total_kv: int = 1000
) -> Engine:
    """Nothing runs, and a program is between two stages: its next one is expected so soon."""
    engine = Engine(policy, max_batch=16, total_kv=total_kv, frame_steps=10)
    engine.arrive("earlier call", CompoundSlo(600, "p"))
    engine.plan()
    engine.finish("earlier call")
    engine.clock.advance(FRAME_S)
    expect_call(engine, tokens, in_s)
    return engine


def expect_call(engine: Engine, tokens: float, in_s: float) -> None:
    outlook = ProgramOutlook(
        next_call_s=engine.clock.now_s() + in_s,
        next_input_tokens=tokens,
        future_input_tokens=tokens,
    )
    engine.frames.expect("", "p", outlook)


def num_admitted(engine: Engine, slo: Slo = BEST_EFFORT, *, count: int = 12) -> int:
    """How many are let in, each of 100 tokens of input and the 10 of the coming frame."""
    for number in range(count):
        engine.arrive(f"r{number}", slo)
    return len(engine.plan().admit)


@every_policy
def test_under_gmax_best_effort_leaves_kv_for_a_call_that_is_expected(policy: str) -> None:
    is_ours = policy.startswith("gmax") and "paper" not in policy
    assert num_admitted(foreseeing(policy)) == (7 if is_ours else 9)
    assert num_admitted(foreseeing(policy, tokens=0.0)) == 9


def test_who_leaves_room_for_a_call_blocks_nobody_behind_it() -> None:
    engine = foreseeing(tokens=200.0, total_kv=400)
    engine.arrive("patient", BEST_EFFORT)
    for _ in range(50):
        expect_call(engine, 390.0, 0.5)
        engine.clock.advance(FRAME_S)
        engine.plan()
    record = engine.frames.get("patient")
    assert record is not None
    blocked = engine.frames.table.frames_blocked[record.row]
    assert blocked == 0
    engine.arrive("urgent", DeadlineSlo(5))
    assert "urgent" in engine.plan().admit


def test_a_call_that_is_expected_after_the_frame_keeps_nobody_out() -> None:
    assert num_admitted(foreseeing(in_s=FRAME_S + 0.1)) == 9
    assert num_admitted(foreseeing(in_s=-0.1)) == 9


@pytest.mark.parametrize(
    "slo",
    [DeadlineSlo(600), LatencySlo(60, 5), CompoundSlo(600, "q")],
    ids=lambda slo: type(slo).__name__,
)
def test_who_has_an_objective_does_not_have_to_leave_kv(slo: Slo) -> None:
    assert num_admitted(foreseeing(), slo) == 9


@pytest.mark.parametrize("tokens", [260.0, 1e5, 1e300])
def test_at_most_a_quarter_of_all_kv_is_left(tokens: float) -> None:
    assert num_admitted(foreseeing(tokens=tokens)) == 6


def test_the_engine_is_never_idle_for_a_call_that_may_come() -> None:
    engine = foreseeing(tokens=1e6)
    engine.arrive("large", BEST_EFFORT, input_tokens=900)
    assert engine.plan().admit == ("large",)


def test_inside_a_frame_best_effort_leaves_kv_as_well() -> None:
    engine = foreseeing(in_s=FRAME_S + 0.2)
    engine.arrive("first")
    assert engine.plan().kind is PlanKind.FRAME
    engine.clock.advance(0.4 * FRAME_S)
    for number in range(12):
        engine.arrive(f"r{number}")
    plan = engine.plan()
    assert plan.kind is PlanKind.BACKFILL
    # The first has 100 of the 1,000 tokens and will have 110 by the end of the frame.
    assert len(plan.admit) == 6


def test_nobody_who_runs_loses_its_kv_to_a_call_that_may_come() -> None:
    engine = foreseeing(tokens=0.0)
    assert num_admitted(engine) == 9
    expect_call(engine, 250.0, FRAME_S + 0.5)
    plan = engine.next_frame()
    assert (plan.park, plan.preempt) == ((), ())
    assert len(plan.run) == 9


def test_the_call_itself_finds_the_kv_that_was_left_for_it() -> None:
    engine = foreseeing()
    num_admitted(engine)
    engine.arrive("call", CompoundSlo(600, "p"), input_tokens=200)
    plan = engine.plan()
    assert plan.kind is PlanKind.BACKFILL
    assert "call" in plan.admit
    assert plan.preempt == ()


@pytest.mark.parametrize("how", ["arrived", "closed", "nothing fits"])
def test_once_it_is_known_that_none_will_come_best_effort_has_all_kv(how: str) -> None:
    engine = foreseeing()
    if how == "arrived":
        engine.arrive("call", CompoundSlo(600, "p"), input_tokens=1)
    elif how == "closed":
        engine.frames.program_closed("", "p")
    else:
        engine.frames.expect("", "p", None)
    assert num_admitted(engine) - (how == "arrived") >= 8


# Stages that are due ------------------------------------------------------------------------------


def loaded(*, policy: str = "edf", num_running: int = 1) -> Engine:
    """So many that can wait fill the batch, and a frame of 1 s and of 50 steps has just begun."""
    engine = Engine(policy, max_batch=num_running, step_time=StepTimeModel.known(STEP_S))
    for number in range(num_running):
        engine.arrive(f"loose{number}", DeadlineSlo(1000), max_output_tokens=1000)
    engine.plan()
    return engine


def arrive_call(
    engine: Engine,
    name: str = "call",
    *,
    due_in_s: float = 60.0,
    stage_in_s: float | None = None,
    tokens: int = 40,
    program: str = "p",
) -> None:
    """A call of 40 tokens: 0.4 s of steps."""
    slo = CompoundSlo(due_in_s, program)
    engine.arrive(name, slo, input_tokens=10, max_output_tokens=1000)
    engine.frames.forecast(name, [tokens])
    if stage_in_s is not None:
        outlook = ProgramOutlook(stage_due_s=engine.clock.now_s() + stage_in_s)
        engine.frames.expect("", program, outlook)


def after_a_part_of_the_frame(engine: Engine) -> PlanKind | None:
    """What is planned after 10 of its 50 steps, a tenth of its second."""
    engine.decode(10, STEP_S)
    plan = engine.tick()
    return None if plan is None else plan.kind


def test_a_call_that_would_be_late_after_the_frame_starts_an_early_boundary() -> None:
    engine = loaded()
    # It must begin within 0.8 s.
    arrive_call(engine, due_in_s=1.2)
    assert engine.tick() is None, "too early in the frame"
    engine.decode(10, STEP_S)
    plan = engine.plan()
    assert (plan.kind, plan.park, plan.admit) == (PlanKind.EARLY, ("loose0",), ("call",))


def test_a_stage_that_would_be_late_after_the_frame_starts_one_too() -> None:
    engine = loaded()
    arrive_call(engine, stage_in_s=1.2)
    assert after_a_part_of_the_frame(engine) is PlanKind.EARLY


@pytest.mark.parametrize("due_in_s", [1.6, 60.0])
def test_a_call_with_time_to_spare_waits_for_the_frame_to_end(due_in_s: float) -> None:
    engine = loaded()
    arrive_call(engine, due_in_s=due_in_s)
    assert after_a_part_of_the_frame(engine) is None
    engine = loaded()
    arrive_call(engine, due_in_s=600.0, stage_in_s=due_in_s)
    assert after_a_part_of_the_frame(engine) is None


@pytest.mark.parametrize("due_in_s", [-5.0, 0.3])
def test_a_call_that_is_late_in_any_case_shortens_no_frame(due_in_s: float) -> None:
    engine = loaded()
    arrive_call(engine, due_in_s=due_in_s)
    assert after_a_part_of_the_frame(engine) is None


def test_a_longer_call_must_begin_earlier() -> None:
    for tokens, kind in ((40, None), (100, PlanKind.EARLY)):
        engine = loaded()
        arrive_call(engine, due_in_s=1.6, tokens=tokens)
        assert after_a_part_of_the_frame(engine) is kind


def test_only_calls_of_programs_have_stages() -> None:
    engine = loaded()
    engine.arrive("alone", DeadlineSlo(1.2), input_tokens=10, max_output_tokens=40)
    engine.frames.forecast("alone", [40])
    assert after_a_part_of_the_frame(engine) is None


def test_a_call_that_has_ended_or_begun_is_not_waited_for() -> None:
    engine = loaded(num_running=2)
    arrive_call(engine, due_in_s=1.2)
    engine.frames.ended("call", RequestState.ABORTED)
    assert after_a_part_of_the_frame(engine) is None
    engine = loaded(num_running=2)
    engine.finish("loose1")
    arrive_call(engine, due_in_s=1.2)
    assert engine.plan().admit == ("call",)
    assert after_a_part_of_the_frame(engine) is None


@pytest.mark.parametrize(("before", "kind"), [(0, PlanKind.EARLY), (1, None)])
def test_so_many_new_calls_are_looked_at_and_no_more(before: int, kind: PlanKind | None) -> None:
    engine = loaded()
    for number in range(MAX_NEW_CALLS - 1 + before):
        arrive_call(engine, f"patient{number}", program=f"p{number}")
    arrive_call(engine, due_in_s=1.2)
    assert after_a_part_of_the_frame(engine) is kind


def test_at_the_next_boundary_new_calls_are_counted_anew() -> None:
    engine = loaded()
    for number in range(2 * MAX_NEW_CALLS):
        arrive_call(engine, f"patient{number}", program=f"p{number}")
    engine.next_frame()
    arrive_call(engine, due_in_s=1.2)
    assert after_a_part_of_the_frame(engine) is PlanKind.EARLY


@pytest.mark.parametrize("due_in_s", [math.nan, math.inf, -math.inf, 1e300, 5e-324])
def test_an_absurd_date_of_a_stage_stops_nothing(due_in_s: float) -> None:
    engine = loaded()
    arrive_call(engine, stage_in_s=due_in_s)
    after_a_part_of_the_frame(engine)
    assert engine.next_frame().kind is PlanKind.FRAME


# Its end ------------------------------------------------------------------------------------------


def test_a_program_that_its_client_ends_is_forgotten_with_its_last_call() -> None:
    engine = Engine()
    engine.arrive("a", CompoundSlo(600, "p"))
    engine.plan()
    engine.frames.program_closed("", "p")
    assert len(engine.frames.programs) == 1
    engine.finish("a")
    assert len(engine.frames.programs) == 0


def test_a_program_that_its_client_ends_between_two_calls_is_forgotten_at_once() -> None:
    engine = Engine()
    engine.arrive("a", CompoundSlo(600, "p"))
    engine.plan()
    engine.finish("a")
    engine.frames.program_closed("", "q")
    engine.frames.program_closed("other", "p")
    assert len(engine.frames.programs) == 1
    engine.frames.program_closed("", "p")
    assert len(engine.frames.programs) == 0


def test_a_program_that_goes_quiet_is_forgotten_after_the_timeout() -> None:
    engine = Engine(max_batch=8, program_timeout_s=60.0)
    engine.arrive("quiet call", CompoundSlo(600, "quiet"))
    engine.arrive("live call", CompoundSlo(600, "live"))
    engine.plan()
    engine.finish("quiet call")
    engine.clock.advance(50)
    engine.next_frame()
    assert len(engine.frames.programs) == 2
    engine.clock.advance(10)
    engine.next_frame()
    assert len(engine.frames.programs) == 1
    engine.frames.program_closed("", "live")
    assert len(engine.frames.programs) == 1, "it is the live one that is left"


def test_calls_of_a_program_that_were_aborted_leave_nothing_behind() -> None:
    engine = Engine(max_batch=1)
    for number in range(3):
        engine.arrive(f"call{number}", CompoundSlo(600, "p"))
    engine.plan()
    engine.frames.program_closed("", "p")
    for number in range(3):
        engine.frames.ended(f"call{number}", RequestState.ABORTED)
    assert len(engine.frames.programs) == 0
    assert list(engine.frames.live()) == []
    assert engine.tick() is None


def test_a_request_for_no_tokens_is_no_call_of_a_program() -> None:
    # SGLang fills its prefix cache so, before it asks for several answers to one prompt.
    engine = Engine()
    engine.arrive("fills", CompoundSlo(600, "p", final=True), max_output_tokens=0)
    engine.plan()
    assert len(engine.frames.programs) == 0
    engine.arrive("call", CompoundSlo(600, "p"))
    assert engine.frames.programs.column("stages")[0] == 1
