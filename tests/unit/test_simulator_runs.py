"""Whole simulations: reproducible, with many ends, on several replicas."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated import (
    BEST_EFFORT,
    DEADLINE,
    STEPS,
    STREAM,
    Heard,
    call,
    program,
    request,
    simulate,
    stage,
    workload,
)

from core.clock import ManualClock
from core.slo import CompoundSlo, DeadlineSlo, LatencySlo, OnMiss
from engine.simulator.analysts import NoisyLengths, ProgramHabits
from engine.simulator.dispatch import (
    ByProgram,
    LeastLoad,
    OnlyOne,
    PowerOfKDispatch,
    RoundRobin,
)
from engine.simulator.outcome import SimResult
from engine.simulator.shape import EngineShape
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.steps import LinearSteps, Step
from engine.simulator.workload import SimProgram, Workload
from scheduler.config import SchedulerConfig

ROOT = Path(__file__).parents[2]
SMALL = EngineShape(max_batch=3, kv_tokens=700, slots=5, chunk_tokens=64)


def busy_hour(num_programs: int = 60) -> Workload:
    """More than twice as much of everything as ``SMALL`` can do, for a few seconds."""
    rng = random.Random(8)
    programs: list[SimProgram] = []
    at_s = 0.0
    for index in range(num_programs):
        at_s += rng.expovariate(20.0)
        kind = rng.randrange(4)
        more: dict[str, Any] = {
            "at_s": at_s,
            "tenant": rng.choice("abc"),
            "on_miss": rng.choice(list(OnMiss)),
            "waiting_time_s": rng.choice([None, 2.0]),
        }
        if kind == 3:
            text = {"prefix": 1000 + index, "prefix_tokens": 45}
            first = stage(call(40, 5, leaves=1000 + index), call(30, rng.randint(5, 40)))
            second = stage(call(60, 20, **text), call(50, 9, **text), tool_s=0.2)
            programs.append(program(first, second, slo=CompoundSlo(8.0, ""), **more))
            continue
        slo = (LatencySlo(1.0, 0.05), DeadlineSlo(4.0), BEST_EFFORT)[kind]
        text = {"prefix": rng.randint(1, 3), "prefix_tokens": 30}
        programs.append(
            request(rng.randint(31, 150), rng.randint(1, 60), slo=slo, call_fields=text, **more)
        )
    return workload(*programs)


def run_busy_hour(policy: str, num_replicas: int = 2, wall: Any = None) -> SimResult:
    config = SchedulerConfig(policy=policy, frame_steps=10, fairness=0.1)
    k = min(2, num_replicas)
    return Simulation(
        busy_hour(),
        SimulationSetup(replicas=((SMALL, STEPS),) * num_replicas, config=config),
        lengths=NoisyLengths(0.5, 1, latency_s=0.03),
        programs=ProgramHabits(latency_s=0.02),
        dispatcher=PowerOfKDispatch(num_replicas, k, config, random.Random(4)),
        wall=wall,
    ).run()


def digest(policy: str) -> str:
    return hashlib.sha256(msgspec.json.encode(run_busy_hour(policy))).hexdigest()


# Reproducible -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "sarathi", "edf", "gmax", "gmax-paper", "vtc"])
def test_a_second_run_is_the_same_to_the_byte(policy: str) -> None:
    assert digest(policy) == digest(policy)


def test_another_process_with_another_hash_seed_says_the_same() -> None:
    here = digest("gmax")
    code = "import test_simulator_runs as t; print(t.digest('gmax'))"
    paths = (ROOT, ROOT / "tests/support", ROOT / "tests/unit")
    for seed in ("1", "77"):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert found.stdout.strip() == here


class Ticking(ManualClock):
    """A millisecond passes with every look."""

    def now_s(self) -> float:
        self.advance(0.001)
        return super().now_s()


def test_a_wall_clock_changes_nothing_but_the_times_of_plans() -> None:
    plain, timed = run_busy_hour("gmax"), run_busy_hour("gmax", wall=Ticking())
    assert plain.plan_s == ()
    assert len(timed.plan_s) == sum(counts.plans for counts in timed.replicas)
    assert timed.plan_s == pytest.approx([0.001] * len(timed.plan_s))
    assert msgspec.structs.replace(timed, plan_s=()) == plain


def test_a_result_survives_its_encoding() -> None:
    result = run_busy_hour("edf")
    assert msgspec.json.decode(msgspec.json.encode(result), type=SimResult) == result


def test_it_makes_no_difference_who_watches() -> None:
    work = busy_hour()
    run = simulate(work, SMALL, policy="gmax")
    # Wrapped as there: a plain speed is taken as it is, any other fitted.
    steps = Heard(STEPS)
    setup = SimulationSetup(replicas=((SMALL, steps),), config=SchedulerConfig(policy="gmax"))
    assert Simulation(work, setup, on_progress=lambda now_s: None).run() == run.result


@pytest.mark.parametrize(
    "policy",
    ["fcfs", "sarathi", "edf", "sjf", "plas", "ltr", "vtc", "priority", "gmax", "gmax-paper"],
)
def test_a_busy_time_adds_up_under_every_policy(policy: str) -> None:
    run = simulate(busy_hour(), SMALL, policy=policy, config={"frame_steps": 10})
    ends = Counter(row.end for row in run.result.calls)
    assert ends["finished"] > 20
    assert ends["dropped"] + ends["aborted"] + ends["unfinished"] > 5


# Ends ---------------------------------------------------------------------------------------------


def test_one_that_has_waited_too_long_is_dropped() -> None:
    run = simulate(
        workload(
            request(10, 300, slo=DeadlineSlo(60.0)),
            request(10, 5, at_s=0.01, waiting_time_s=0.5),
        ),
        EngineShape(max_batch=1),
    )
    row = run.call(1)
    assert (row.end, row.reason, row.first_scheduled_s) == (
        "dropped",
        "waiting_time_exceeded",
        None,
    )
    assert 0.51 <= row.end_s <= 0.51 + 0.02
    assert run.program(1).goodput_tokens == 0
    assert not run.program(1).met


def test_one_that_has_started_is_not_dropped() -> None:
    run = simulate(workload(request(10, 90, slo=DEADLINE, waiting_time_s=0.1)))
    assert run.call().end == "finished"


def test_a_call_that_never_fits_fails_its_program_and_touches_nobody() -> None:
    others = [request(20, 30, at_s=0.05 * index, slo=DEADLINE) for index in range(6)]
    odd = program(stage(call(30, 5), call(2000, 5)), stage(call(10, 5)), at_s=0.12)
    alone = program(stage(call(30, 5)), at_s=0.12)
    shape = EngineShape(max_batch=2, kv_tokens=1000)
    with_odd = simulate(workload(*others[:3], odd, *others[3:]), shape)
    row = with_odd.call(3, 0, 1)
    assert (row.end, row.reason, row.output_tokens) == ("aborted", "does_not_fit", 0)
    assert row.end_s == row.arrival_s == 0.12
    assert row.first_scheduled_s is None
    assert not with_odd.program(3).is_complete
    without = simulate(workload(*others[:3], alone, *others[3:]), shape)

    def of_others(result: SimResult) -> list[Any]:
        return [item for item in (*result.calls, *result.programs) if item.program != 3]

    assert of_others(with_odd.result) == of_others(without.result)


def test_a_call_that_fits_the_replica_it_is_for_is_served() -> None:
    run = simulate(
        workload(request(100, 5, slo=DEADLINE)),
        EngineShape(kv_tokens=1000),
        EngineShape(kv_tokens=50),
        dispatcher=OnlyOne(),
    )
    assert run.call().end == "finished"


def test_everything_at_once() -> None:
    run = simulate(
        workload(*(request(20, 1 + index % 5, slo=DEADLINE) for index in range(80))), SMALL
    )
    assert {row.end for row in run.result.calls} == {"finished"}
    starts = [run.call(index).first_scheduled_s for index in range(80)]
    assert starts == sorted(starts)


def test_best_effort_alone_is_served() -> None:
    run = simulate(
        workload(*(request(20, 9, slo=BEST_EFFORT) for _ in range(12)), window_s=30.0),
        SMALL,
        policy="gmax",
    )
    assert {row.end for row in run.result.calls} == {"finished"}
    assert sum(item.goodput_tokens for item in run.result.programs) == 0


def test_answers_up_to_their_limit() -> None:
    limits = [{"max_output_tokens": output} for output in (1, 2, 9)]
    run = simulate(
        workload(*(request(20, one["max_output_tokens"], call_fields=one) for one in limits))
    )
    assert [run.call(index).output_tokens for index in range(3)] == [1, 2, 9]


def test_a_slot_for_every_request_that_holds_kv() -> None:
    """The audit counts slots at every step; here parked ones are short of them."""
    long = [request(50, 80, slo=DeadlineSlo(60.0)) for _ in range(3)]
    quick = [request(10, 5, at_s=0.1 * index + 0.05, slo=DeadlineSlo(1.0)) for index in range(9)]
    shape = EngineShape(max_batch=3, slots=4)
    run = simulate(workload(*long, *quick), shape, policy="edf", config={"frame_steps": 3})
    assert run.result.replicas[0].parks > 0
    assert {row.end for row in run.result.calls} == {"finished"}


# Replicas -----------------------------------------------------------------------------------------


def dispatchers(num: int) -> list[Any]:
    config = SchedulerConfig(policy="fcfs")
    power = [PowerOfKDispatch(num, k, config, random.Random(2)) for k in range(1, num + 1)]
    return [OnlyOne(), RoundRobin(), LeastLoad(), ByProgram(), *power]


@pytest.mark.parametrize("which", range(7))
def test_replicas_of_unequal_speed_lose_nothing(which: int) -> None:
    slow = LinearSteps(constant_s=0.05, decode_s=0.002, prefill_s=1e-3)
    work = busy_hour(40)
    run = simulate(
        work,
        SMALL,
        EngineShape(max_batch=1, kv_tokens=400, mixes_chunks=False),
        EngineShape(max_batch=8, kv_tokens=2000),
        steps=[STEPS, slow, STEPS],
        dispatcher=dispatchers(3)[which],
    )
    begun = sum(1 for row in run.result.calls if row.first_scheduled_s is not None)
    assert begun > 20
    assert {row.replica for row in run.result.calls} <= {-1, 0, 1, 2}


def test_round_robin_goes_in_turn() -> None:
    run = simulate(
        workload(*(request(10, 3, at_s=0.01 * index) for index in range(9))),
        *(SMALL,) * 3,
        dispatcher=RoundRobin(),
    )
    assert [run.call(index).replica for index in range(9)] == [0, 1, 2] * 3


def test_least_load_goes_where_the_fewest_are() -> None:
    asked = [request(10, output, slo=DEADLINE) for output in (100, 2, 100)]
    asked += [request(10, 5, at_s=0.5), request(10, 5, at_s=0.5), request(10, 5, at_s=0.5)]
    run = simulate(workload(*asked), *(EngineShape(),) * 2, dispatcher=LeastLoad())
    assert [run.call(index).replica for index in range(3)] == [0, 1, 0]
    assert [run.call(index).replica for index in (3, 4, 5)] == [1, 1, 0]


def test_by_program_keeps_a_program_together() -> None:
    asked = [
        program(stage(call(10, 5), call(10, 5)), stage(call(10, 5)), at_s=0.1 * index)
        for index in range(20)
    ]
    run = simulate(workload(*asked), *(EngineShape(),) * 3, dispatcher=ByProgram())
    homes = [{row.replica for row in run.result.calls if row.program == n} for n in range(20)]
    assert all(len(home) == 1 for home in homes)
    assert set().union(*homes) == {0, 1, 2}


def test_what_waits_in_front_when_it_is_over_is_unfinished() -> None:
    config = SchedulerConfig(policy="fcfs")
    run = simulate(
        workload(*(request(10, 400, slo=DeadlineSlo(9.0)) for _ in range(7)), window_s=1.0),
        *(EngineShape(max_batch=1),) * 2,
        drain_s=0.0,
        dispatcher=PowerOfKDispatch(2, 2, config, random.Random(2)),
    )
    assert len(run.result.calls) == 7
    assert {row.end for row in run.result.calls} == {"unfinished"}
    assert sorted(row.replica for row in run.result.calls) == [-1] * 5 + [0, 1]


def test_what_waits_in_front_goes_to_the_first_place_that_is_free() -> None:
    config = SchedulerConfig(policy="fcfs")
    run = simulate(
        workload(request(10, 300, slo=DEADLINE), request(10, 3, slo=DEADLINE), request(10, 3)),
        *(EngineShape(max_batch=1),) * 2,
        dispatcher=PowerOfKDispatch(2, 2, config, random.Random(2)),
    )
    assert run.call(2).replica == run.call(1).replica != run.call(0).replica
    assert run.call(2).first_scheduled_s == run.call(1).end_s


def test_a_forecast_finds_the_call_that_waits_in_front() -> None:
    config = SchedulerConfig(policy="fcfs")
    run = simulate(
        workload(*(request(10, 40, slo=DEADLINE) for _ in range(4))),
        *(EngineShape(max_batch=1),) * 2,
        dispatcher=PowerOfKDispatch(2, 2, config, random.Random(2)),
        lengths=NoisyLengths(0.1, 1, latency_s=0.01),
    )
    assert len({key for key, _ in run.forecasts}) == len(run.forecasts) == 4


def test_waiting_in_front_is_waiting() -> None:
    config = SchedulerConfig(policy="fcfs")
    run = simulate(
        workload(
            request(10, 300, slo=DeadlineSlo(60.0)),
            request(10, 300, slo=DeadlineSlo(60.0)),
            request(10, 5, slo=STREAM, waiting_time_s=0.5),
        ),
        *(EngineShape(max_batch=1),) * 2,
        dispatcher=PowerOfKDispatch(2, 2, config, random.Random(2)),
        drain_s=30.0,
    )
    row = run.call(2)
    assert (row.end, row.reason, row.end_s) == ("dropped", "waiting_time_exceeded", 0.5)
    assert (row.replica, row.first_scheduled_s, row.output_tokens) == (-1, None, 0)
    assert not run.program(2).is_complete


@pytest.mark.parametrize(
    ("policy", "on_miss", "waiting_s", "end"),
    [
        ("fcfs", OnMiss.CANCEL, None, ("dropped", "deadline_passed", 0.75)),
        ("fcfs", OnMiss.CANCEL, 0.5, ("dropped", "waiting_time_exceeded", 0.5)),
        ("fcfs", OnMiss.CANCEL, 0.75, ("dropped", "deadline_passed", 0.75)),
        ("fcfs+cancel", OnMiss.FINISH, None, ("dropped", "deadline_passed", 0.75)),
        ("fcfs", OnMiss.FINISH, None, ("finished", None, None)),
    ],
)
def test_a_deadline_that_passes_in_front(
    policy: str, on_miss: OnMiss, waiting_s: float | None, end: tuple[Any, ...]
) -> None:
    late = {"slo": DeadlineSlo(0.75), "on_miss": on_miss, "waiting_time_s": waiting_s}
    run = simulate(
        workload(request(10, 300, slo=DeadlineSlo(60.0)), request(10, 5, **late)),
        EngineShape(max_batch=1),
        policy=policy,
        dispatcher=PowerOfKDispatch(1, 1, SchedulerConfig(policy=policy), random.Random(2)),
    )
    row = run.call(1)
    assert (row.end, row.reason, row.end_s if end[2] else None) == end


def test_a_place_that_is_free_when_the_wait_is_over_is_taken() -> None:
    first = request(100, 1, slo=DEADLINE)
    over_s = STEPS.seconds(Step(0, 0, 0, 100, 5050))
    run = simulate(
        workload(first, request(10, 5, slo=DEADLINE, waiting_time_s=over_s)),
        EngineShape(max_batch=1),
        dispatcher=PowerOfKDispatch(1, 1, SchedulerConfig(policy="fcfs"), random.Random(2)),
    )
    assert run.call(0).end_s == run.call(1).first_scheduled_s == over_s
    assert run.call(1).end == "finished"


def test_a_place_that_a_plan_makes_is_taken_at_once() -> None:
    run = simulate(
        workload(
            request(10, 300, slo=DeadlineSlo(0.5), on_miss=OnMiss.CANCEL),
            request(10, 5, slo=DEADLINE),
        ),
        EngineShape(max_batch=1),
        dispatcher=PowerOfKDispatch(1, 1, SchedulerConfig(policy="fcfs"), random.Random(2)),
    )
    assert run.call(0).end == "aborted"
    assert run.call(1).first_scheduled_s == run.call(0).end_s
    assert run.call(1).end == "finished"


@pytest.mark.parametrize("k", [1, 2, 3])
def test_late_binding_is_to_where_a_call_fits(k: int) -> None:
    config = SchedulerConfig(policy="fcfs")
    run = simulate(
        workload(
            *(request(100, 5, at_s=0.05 * index) for index in range(9)), request(2000, 5, at_s=1.0)
        ),
        *(EngineShape(kv_tokens=size) for size in (50, 1000, 90)),
        dispatcher=PowerOfKDispatch(3, k, config, random.Random(2)),
    )
    assert [run.call(index).replica for index in range(9)] == [1] * 9
    assert {run.call(index).end for index in range(9)} == {"finished"}
    assert (run.call(9).end, run.call(9).reason) == ("aborted", "does_not_fit")


def test_who_is_sent_to_where_it_does_not_fit_is_refused() -> None:
    run = simulate(
        workload(*(request(100, 5, at_s=0.1 * index) for index in range(4))),
        *(EngineShape(kv_tokens=size) for size in (1000, 50)),
        dispatcher=RoundRobin(),
    )
    assert [run.call(index).end for index in range(4)] == ["finished", "aborted"] * 2
