"""The upper bound: known answers of tiny workloads, and schedules that must not beat it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.bound import LEEWAY_S, Bound, What, upper_bound
from bench.exact import optimum, random_instance
from bench.least_work import LeastWork
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo
from engine.simulator.shape import EngineShape
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.steps import A100_LLAMA_8B, LinearSteps, Step
from engine.simulator.workload import (
    SimCall,
    SimProgram,
    SimSlo,
    SimStage,
    Workload,
    num_calls,
)
from scheduler.config import SchedulerConfig

ONE_A_SECOND = LinearSteps(constant_s=1.0)
"""Prompts cost nothing; a step takes a second whatever it computes."""


def call(input_tokens: int = 1, output_tokens: int = 4) -> SimCall:
    return SimCall(input_tokens=input_tokens, output_tokens=output_tokens)


def program(slo: SimSlo, *stages: SimStage | SimCall, arrival_s: float = 0.0) -> SimProgram:
    """Of stages, or of calls that are a stage each."""
    parts = tuple(
        part if isinstance(part, SimStage) else SimStage(calls=(part,)) for part in stages
    )
    return SimProgram(arrival_s=arrival_s, application="test", slo=slo, stages=parts)


def bound(
    *programs: SimProgram,
    steps: LinearSteps = ONE_A_SECOND,
    max_batch: int = 1,
    num_replicas: int = 1,
    bin_s: float = 100.0,
    what: What = "token",
) -> Bound:
    ordered = tuple(sorted(programs, key=lambda one: one.arrival_s))
    return upper_bound(
        Workload(programs=ordered, window_s=100.0),
        steps,
        max_batch=max_batch,
        num_replicas=num_replicas,
        bin_s=bin_s,
        what=what,
    )


# Known answers.


def test_nothing_to_do_is_worth_nothing() -> None:
    result = upper_bound(Workload(programs=(), window_s=0.0), ONE_A_SECOND, max_batch=1)
    assert (result.goodput, result.per_s, result.num_variables) == (0.0, 0.0, 0)


@pytest.mark.parametrize("bin_s", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("what", ["token", "request"])
def test_a_request_that_just_fits_counts_whole(bin_s: float, what: What) -> None:
    result = bound(program(DeadlineSlo(4.0), call(input_tokens=6)), bin_s=bin_s, what=what)
    assert result.goodput == pytest.approx(10.0 if what == "token" else 1.0)
    assert result.per_s == pytest.approx(result.goodput / 100)


def test_a_request_that_cannot_be_in_time_counts_nothing() -> None:
    assert bound(program(DeadlineSlo(3.99), call())).goodput == 0


def test_a_longer_prompt_takes_longer() -> None:
    steps = LinearSteps(constant_s=1.0, prefill_s=0.1, pair_s=0.01, prefill_constant_s=0.5)
    # One step: 1 + 0.5 + 10 * 0.1 + 55 * 0.01; three with the prompt in chunks of four.
    of_prompt = call(input_tokens=10, output_tokens=1)
    work = LeastWork(steps, max_batch=1).of_call(of_prompt)
    assert work.prompt_time_s == pytest.approx(3.05)
    chunked = LeastWork(steps, max_batch=1, chunk_tokens=4).of_call(of_prompt)
    assert chunked.prompt_time_s == pytest.approx(3 * 1.5 + 1.55)
    assert bound(program(DeadlineSlo(3.04), of_prompt), steps=steps).goodput == 0
    assert bound(program(DeadlineSlo(3.06), of_prompt), steps=steps).goodput > 0


def test_what_may_be_cached_costs_nothing_but_one_token() -> None:
    steps = LinearSteps(constant_s=1.0, prefill_s=1.0)
    cached = SimCall(input_tokens=5, output_tokens=1, prefix=1, prefix_tokens=5)
    assert LeastWork(steps, max_batch=1).of_call(cached).prompt_time_s == pytest.approx(2.0)


def test_two_that_compete_share_what_the_bins_have() -> None:
    both = [program(DeadlineSlo(4.0), call(input_tokens=6)) for _ in range(2)]
    # Of the two, each 4 of the 6 engine-seconds of a bin: one and a half.
    assert bound(*both, bin_s=6.0).goodput == pytest.approx(15.0)
    assert bound(*both, bin_s=6.0, max_batch=2).goodput == pytest.approx(20.0)
    assert bound(*both, bin_s=6.0, num_replicas=2).goodput == pytest.approx(20.0)


def test_of_two_that_compete_the_worthier_is_served() -> None:
    cheap = program(DeadlineSlo(4.0), call(input_tokens=6))
    dear = program(DeadlineSlo(4.0), call(input_tokens=96))
    assert bound(cheap, dear, bin_s=4.0).goodput == pytest.approx(100.0, rel=1e-4)
    assert bound(cheap, dear, bin_s=4.0, what="request").goodput == pytest.approx(1.0, rel=1e-4)


def test_of_a_stream_only_what_can_be_on_time_counts() -> None:
    # Tokens at 1, 2, 3, 4 at the earliest; due at 1, 1.5, 2, ...: the first.
    fast = program(LatencySlo(1.0, 0.5), call())
    assert bound(fast).goodput == pytest.approx(1.0)
    assert bound(fast, what="request").goodput == 0
    # Due at 2, 2.5, 3, 3.5: all but the last.
    later = program(LatencySlo(2.0, 0.5), call())
    assert bound(later).goodput == pytest.approx(3.0)
    # Due at 0.5, 2, 3.5, 5: all but the first.
    slow = program(LatencySlo(0.5, 1.5), call())
    assert bound(slow).goodput == pytest.approx(3.0)
    assert bound(program(LatencySlo(1.0, 1.0), call()), what="request").goodput == 1


def test_tokens_of_a_stream_cannot_be_put_off_beyond_their_due_times() -> None:
    # The engine is another's until 4; what is due before then is lost to one of them.
    stream = program(LatencySlo(1.0, 1.0), call(output_tokens=8))
    other = program(DeadlineSlo(4.0), call(input_tokens=996))
    got = bound(stream, other, bin_s=1.0).goodput
    # Tokens 0 to 3 are due by 4; the first has no work of its own but its prompt's.
    assert 1004.0 - 1e-3 <= got <= 1006.0


def test_a_chain_with_tools_needs_the_time_of_all_of_it() -> None:
    stages = (call(), SimStage(calls=(call(), call()), tool_s=2.5), call(output_tokens=1))
    assert bound(program(CompoundSlo(11.5, "p"), *stages), max_batch=2).goodput > 0
    assert bound(program(CompoundSlo(11.4, "p"), *stages), max_batch=2).goodput == 0
    # Alone on its engine one of the two calls has to wait.
    assert bound(program(CompoundSlo(11.5, "p"), *stages)).goodput == 0
    assert bound(program(CompoundSlo(11.5, "p"), *stages), num_replicas=2).goodput == 17


def test_best_effort_counts_nothing() -> None:
    assert bound(program(BestEffortSlo(1e9), call())).goodput == 0


@pytest.mark.parametrize(
    "arguments",
    [{"max_batch": 0}, {"num_replicas": 0}, {"chunk_tokens": 0}, {"bin_s": 0.0}],
)
def test_what_is_out_of_range_is_named(arguments: dict[str, float]) -> None:
    workload = Workload(programs=(), window_s=1.0)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        upper_bound(workload, ONE_A_SECOND, **{"max_batch": 1, **arguments})


# The least that a call costs.


@given(
    st.integers(1, 2000), st.integers(0, 2000), st.integers(1, 300), st.integers(1, 64), st.data()
)
def test_work_of_a_call_is_within_its_time(
    input_tokens: int, prefix_tokens: int, output_tokens: int, max_batch: int, data: st.DataObject
) -> None:
    swap_s = data.draw(st.sampled_from([None, 0.0, 1e-6]))
    least = LeastWork(A100_LLAMA_8B, max_batch=max_batch, chunk_tokens=512, swap_token_s=swap_s)
    one = SimCall(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix=1,
        prefix_tokens=min(prefix_tokens, input_tokens),
    )
    work = least.of_call(one)
    assert work.prompt_s <= work.prompt_time_s
    assert work.answer_s <= work.answer_time_s
    assert np.all(np.diff(work.token_s) >= 0)
    assert work.most_answer_s(work.answer_time_s) == pytest.approx(work.answer_s)
    parts = [work.most_answer_s(part * work.answer_time_s) for part in (0.3, 0.7)]
    assert sum(parts) >= work.answer_s * (1 - 1e-9)


# Other schedules.


def test_never_below_the_exact_optimum_of_small_instances() -> None:
    rng = random.Random(5)
    for _ in range(60):
        instance = random_instance(rng, max_jobs=6)
        programs = [
            program(
                DeadlineSlo(float(job.due - job.arrival)),
                call(max(job.input_tokens, 1), job.steps),
                arrival_s=float(job.arrival),
            )
            for job in instance.jobs
        ]
        for bin_s in (1.0, 2.7):
            got = bound(*programs, max_batch=instance.slots, bin_s=bin_s).goodput
            assert got >= optimum(instance) - 1e-6


@dataclass
class _Live:
    """A call that the greedy engine serves."""

    program: int
    call: SimCall
    left: int
    due_s: float
    generated: int = 0
    on_time: list[bool] = field(default_factory=list)


def greedy(
    workload: Workload, steps: LinearSteps, *, max_batch: int, chunk_tokens: int, what: What
) -> float:
    """Goodput of earliest deadline first on one engine that mixes prompts and decodes."""
    programs = workload.programs
    coming = [(one.arrival_s, index, 0) for index, one in enumerate(programs)]
    live: list[_Live] = []
    num_left: dict[int, int] = {}
    earned: list[float] = [0.0] * len(programs)
    now_s = 0.0
    while coming or live:
        coming.sort()
        if not live:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            _, index, stage = coming.pop(0)
            calls = programs[index].stages[stage].calls
            num_left[index] = len(calls)
            due_s = programs[index].arrival_s + _due_s(programs[index])
            live += [_Live(index, one, one.input_tokens, due_s) for one in calls]
        batch = sorted(live, key=lambda one: one.due_s)[:max_batch]
        decodes = [one for one in batch if not one.left]
        room, pairs, computed = chunk_tokens, 0, 0
        ready = list(decodes)
        for one in batch:
            tokens = min(one.left, room)
            if one.left and tokens:
                done = one.call.input_tokens - one.left
                pairs += tokens * done + tokens * (tokens + 1) // 2
                one.left -= tokens
                room, computed = room - tokens, computed + tokens
                if not one.left:
                    ready.append(one)
        contexts = [one.call.input_tokens + one.generated for one in decodes]
        padding = max(contexts, default=0) * len(contexts) - sum(contexts)
        now_s += steps.seconds(Step(len(decodes), sum(contexts), padding, computed, pairs))
        for one in ready:
            slo = programs[one.program].slo
            if isinstance(slo, LatencySlo):
                due_s = slo.target_ttft_s + one.generated * slo.target_tbt_s
                one.on_time.append(now_s <= programs[one.program].arrival_s + due_s)
            one.generated += 1
            if one.generated < one.call.output_tokens:
                continue
            live.remove(one)
            num_left[one.program] -= 1
            if not num_left[one.program]:
                stages = programs[one.program].stages
                stage = _stage_of(stages, one.call)
                if stage + 1 < len(stages):
                    coming.append((now_s + stages[stage + 1].tool_s, one.program, stage + 1))
                else:
                    earned[one.program] = _earned(programs[one.program], one, now_s, what)
    return sum(earned)


def _stage_of(stages: tuple[SimStage, ...], one: SimCall) -> int:
    return next(k for k, stage in enumerate(stages) if any(one is other for other in stage.calls))


def _due_s(one: SimProgram) -> float:
    match one.slo:
        case LatencySlo(ttft_s, tbt_s):
            return ttft_s + tbt_s * one.output_tokens
        case DeadlineSlo(deadline_s) | CompoundSlo(deadline_s) | BestEffortSlo(deadline_s):
            return deadline_s


def _earned(one: SimProgram, last: _Live, now_s: float, what: What) -> float:
    if isinstance(one.slo, BestEffortSlo):
        return 0.0
    if isinstance(one.slo, LatencySlo):
        return float(sum(last.on_time) if what == "token" else all(last.on_time))
    if now_s > one.arrival_s + _due_s(one):
        return 0.0
    return 1.0 if what == "request" else float(one.input_tokens + one.output_tokens)


calls = st.builds(call, st.integers(1, 30), st.integers(1, 12))
times_s = st.floats(0.0, 12.0)
stages_of_calls = st.builds(
    lambda some, tool_s: SimStage(calls=tuple(some), tool_s=tool_s),
    st.lists(calls, min_size=1, max_size=3),
    st.floats(0.0, 2.0),
)
programs_of_all_kinds = st.one_of(
    st.builds(
        lambda one, ttft_s, tbt_s, at_s: program(LatencySlo(ttft_s, tbt_s), one, arrival_s=at_s),
        calls,
        st.floats(0.1, 8.0),
        st.floats(0.05, 2.0),
        times_s,
    ),
    st.builds(
        lambda one, due_s, at_s: program(DeadlineSlo(due_s), one, arrival_s=at_s),
        calls,
        st.floats(0.5, 20.0),
        times_s,
    ),
    st.builds(
        lambda some, due_s, at_s: program(CompoundSlo(due_s, "p"), *some, arrival_s=at_s),
        st.lists(stages_of_calls, min_size=1, max_size=3),
        st.floats(2.0, 40.0),
        times_s,
    ),
)
workloads = st.lists(programs_of_all_kinds, min_size=1, max_size=6).map(
    lambda some: Workload(
        programs=tuple(sorted(some, key=lambda one: one.arrival_s)), window_s=12.0
    )
)
costs_s = st.sampled_from([0.0, 0.001, 0.02])
engines = st.builds(
    lambda constant, decode, context, padding, prefill, pair, extra: LinearSteps(
        constant_s=constant,
        decode_s=decode,
        context_s=context / 10,
        padding_s=padding / 10,
        prefill_s=prefill,
        pair_s=pair / 10,
        prefill_constant_s=extra,
    ),
    st.sampled_from([0.05, 0.3, 1.0]),
    *[costs_s] * 6,
)


@settings(max_examples=150, deadline=None)
@given(
    workloads,
    engines,
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([0.4, 1.0, 3.3, 50.0]),
    st.sampled_from(["token", "request"]),
)
def test_no_schedule_beats_it(
    workload: Workload,
    steps: LinearSteps,
    max_batch: int,
    chunk_tokens: int,
    bin_s: float,
    what: What,
) -> None:
    got = greedy(workload, steps, max_batch=max_batch, chunk_tokens=chunk_tokens, what=what)
    best = upper_bound(
        workload, steps, max_batch=max_batch, chunk_tokens=chunk_tokens, bin_s=bin_s, what=what
    )
    assert got <= best.goodput + 1e-6


@settings(max_examples=40, deadline=None)
@given(workloads, engines, st.integers(1, 3), st.sampled_from(["token", "request"]))
def test_more_engine_is_never_worth_less(
    workload: Workload, steps: LinearSteps, max_batch: int, what: What
) -> None:
    def worth(batch: int, num_replicas: int) -> float:
        return upper_bound(
            workload, steps, max_batch=batch, num_replicas=num_replicas, bin_s=2.0, what=what
        ).goodput

    least = worth(max_batch, 1)
    assert least <= worth(max_batch + 1, 1) + 1e-6
    assert least <= worth(max_batch, 2) + 1e-6


@settings(max_examples=40, deadline=None)
@given(workloads, engines, st.sampled_from(["token", "request"]))
def test_longer_bins_are_rounded_outward(
    workload: Workload, steps: LinearSteps, what: What
) -> None:
    """Two bins as one only forget in which of them something was done."""
    short, long = (
        upper_bound(workload, steps, max_batch=2, bin_s=bin_s, what=what).goodput
        for bin_s in (1.0, 2.0)
    )
    assert short <= long + 1e-3


def test_windows_that_begin_or_end_within_a_bin_still_count() -> None:
    for arrival_s in (0.0, 0.7, 0.999999999, 1.0 - LEEWAY_S):
        one = program(DeadlineSlo(4.0), call(), arrival_s=arrival_s)
        assert bound(one, bin_s=1.0).goodput == pytest.approx(5.0)


@pytest.mark.parametrize("policy", ["gmax", "edf+cancel", "sarathi"])
def test_no_policy_beats_it_in_the_simulator(policy: str) -> None:
    rng = random.Random(3)
    programs = []
    for number in range(45):
        some = [call(rng.randint(1, 900), rng.randint(1, 120)) for _ in range(3)]
        kinds = (
            program(LatencySlo(0.3, 0.02), some[0], arrival_s=number / 20),
            program(DeadlineSlo(2.0), some[1], arrival_s=number / 20),
            program(CompoundSlo(5.0, "p"), *some, arrival_s=number / 20),
        )
        programs.append(kinds[number % 3])
    workload = Workload(programs=tuple(programs), window_s=3.0)
    assert num_calls(programs) == 75
    shape = EngineShape(max_batch=8)
    setup = SimulationSetup(
        replicas=((shape, A100_LLAMA_8B),), config=SchedulerConfig(policy=policy)
    )
    outcome = Simulation(workload, setup).run().programs
    measured = {
        "token": sum(one.goodput_tokens for one in outcome),
        "request": sum(one.met for one in outcome),
    }
    for what in ("token", "request"):
        best = upper_bound(
            workload,
            A100_LLAMA_8B,
            max_batch=shape.max_batch,
            chunk_tokens=shape.chunk_tokens,
            bin_s=0.5,
            what=what,
        )
        assert 0 < measured[what] <= best.goodput
