"""What a simulation refuses, and in what words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from simulated import BEST_EFFORT, DEADLINE, PROGRAM, call, program, request, simulate, stage

from engine.simulator.analysts import KnownLengths, NoisyLengths, ProgramHabits
from engine.simulator.shape import EngineShape
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.steps import A100_LLAMA_8B, LinearSteps
from engine.simulator.workload import Workload, num_calls
from scheduler.config import SchedulerConfig

NONSENSE = [-1.0, math.nan, math.inf]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("max_batch", "kv_tokens", "chunk_tokens")
            for value in (0, -1)
        ),
        ("slots", -1),
        *(("swap_token_s", value) for value in NONSENSE),
    ],
)
def test_an_engine_of_impossible_shape(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        EngineShape(**{field: value})


def test_slots_of_nobody_are_as_many_as_there_is_kv_for() -> None:
    assert EngineShape(kv_tokens=100, max_batch=7).num_slots == 100
    assert EngineShape(kv_tokens=100, max_batch=7, slots=9).num_slots == 9


@pytest.mark.parametrize("field", LinearSteps.__struct_fields__)
@pytest.mark.parametrize("value", NONSENSE)
def test_an_engine_of_impossible_speed(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        LinearSteps(**{"constant_s": 0.01, field: value})


def test_a_step_takes_time() -> None:
    with pytest.raises(ValueError, match=r"^constant_s"):
        LinearSteps(constant_s=0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"output_tokens": 11, "max_output_tokens": 10}, "output_tokens"),
        ({"prefix_tokens": 101, "prefix": 1}, "prefix_tokens"),
        ({"prefix_tokens": -1, "prefix": 1}, "prefix_tokens"),
        ({"input_tokens": 0}, "input_tokens"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"prefix_tokens": 5, "prefix": 0}, "prefix"),
    ],
)
def test_an_impossible_call(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call(**{"input_tokens": 100, "output_tokens": 5, **fields})


def test_limits_of_a_call() -> None:
    only = call(1, 1, max_output_tokens=1, prefix=1, prefix_tokens=1)
    assert (only.input_tokens, only.prefix_tokens) == (1, 1)


@pytest.mark.parametrize("tool_s", NONSENSE)
def test_impossible_tools(tool_s: float) -> None:
    with pytest.raises(ValueError, match="tool_s"):
        stage(call(1, 1), tool_s=tool_s)


def test_a_stage_of_nothing() -> None:
    with pytest.raises(ValueError, match="call"):
        stage()


@pytest.mark.parametrize("at_s", NONSENSE)
def test_an_impossible_arrival(at_s: float) -> None:
    with pytest.raises(ValueError, match="arrival_s"):
        request(1, 1, at_s=at_s)


@pytest.mark.parametrize("waiting_s", [-1.0, 0.0, math.nan])
def test_an_impossible_waiting_time(waiting_s: float) -> None:
    with pytest.raises(ValueError, match="waiting_time_s"):
        request(1, 1, waiting_time_s=waiting_s)


def test_a_program_of_no_stage() -> None:
    with pytest.raises(ValueError, match="stage"):
        program()


@pytest.mark.parametrize("slo", [DEADLINE, BEST_EFFORT])
def test_only_a_compound_objective_has_several_calls(slo: Any) -> None:
    with pytest.raises(ValueError, match="CompoundSlo"):
        program(stage(call(1, 1), call(1, 1)), slo=slo)
    with pytest.raises(ValueError, match="CompoundSlo"):
        program(stage(call(1, 1)), stage(call(1, 1)), slo=slo)
    assert program(stage(call(1, 1))).num_calls == 1


def test_sums_over_calls() -> None:
    asked = program(stage(call(1, 2), call(3, 4)), stage(call(5, 6)), slo=PROGRAM)
    assert (asked.num_calls, asked.input_tokens, asked.output_tokens) == (3, 9, 12)
    assert num_calls([asked, asked]) == 6


def test_programs_out_of_order() -> None:
    with pytest.raises(ValueError, match="programs"):
        Workload(programs=(request(1, 1, at_s=1.0), request(1, 1, at_s=0.5)), window_s=2.0)


@pytest.mark.parametrize("window_s", [0.5, math.nan, math.inf, -1.0])
def test_an_impossible_window(window_s: float) -> None:
    with pytest.raises(ValueError, match="window_s"):
        Workload(programs=(request(1, 1, at_s=1.0),), window_s=window_s)


@pytest.mark.parametrize("window_s", [math.nan, math.inf, -1.0])
def test_an_impossible_window_of_nothing(window_s: float) -> None:
    with pytest.raises(ValueError, match="window_s"):
        Workload(programs=(), window_s=window_s)


def test_no_replica() -> None:
    setup = SimulationSetup(replicas=(), config=SchedulerConfig())
    with pytest.raises(ValueError, match="replica"):
        Simulation(Workload(programs=(), window_s=1.0), setup)


@pytest.mark.parametrize("drain_s", [math.nan, -1.0, math.inf])
def test_an_impossible_drain(drain_s: float) -> None:
    with pytest.raises(ValueError, match="drain_s"):
        Simulation(
            Workload(programs=(request(1, 1),), window_s=1.0),
            SimulationSetup(
                replicas=((EngineShape(), A100_LLAMA_8B),),
                config=SchedulerConfig(),
                drain_s=drain_s,
            ),
        )


@pytest.mark.parametrize("sigma", NONSENSE)
def test_an_impossible_forecaster(sigma: float) -> None:
    with pytest.raises(ValueError, match=r"^sigma"):
        NoisyLengths(sigma, 0)


@pytest.mark.parametrize("latency_s", [-1.0, math.nan])
def test_an_impossible_latency(latency_s: float) -> None:
    with pytest.raises(ValueError, match="latency_s"):
        NoisyLengths(1.0, 0, latency_s=latency_s)


@pytest.mark.parametrize("latency_s", [-1.0, math.nan])
def test_an_impossible_latency_of_any_analyst(latency_s: float) -> None:
    slow = KnownLengths()
    slow.latency_s = latency_s
    with pytest.raises(ValueError, match=r"lengths\.latency_s"):
        simulate(Workload(programs=(), window_s=1.0), lengths=slow)
    with pytest.raises(ValueError, match=r"^latency_s"):
        ProgramHabits(latency_s=latency_s)


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="policy"):
        simulate(Workload(programs=(), window_s=1.0), policy="no such")
