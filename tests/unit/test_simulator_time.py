"""How long things take in the simulated engine: small cases, worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from simulated import (
    DEADLINE,
    STEPS,
    STREAM,
    Run,
    call,
    program,
    request,
    simulate,
    stage,
    workload,
)

from core.slo import BestEffortSlo, DeadlineSlo, LatencySlo
from engine.simulator.dispatch import RoundRobin
from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps, Step


def prompt(tokens: int, *, done: int = 0) -> Step:
    """A step of prompt tokens alone, after so many of the same prompt."""
    return Step(0, 0, 0, tokens, sum(range(done + 1, done + tokens + 1)))


def decode(*contexts: int) -> Step:
    total = sum(contexts)
    return Step(len(contexts), total, max(contexts) * len(contexts) - total, 0, 0)


def ends(steps: LinearSteps, *taken: Step, start_s: float = 0.0) -> list[float]:
    """When each of these steps is over."""
    times = itertools.accumulate((steps.seconds(step) for step in taken), initial=start_s)
    return list(times)[1:]


# Steps --------------------------------------------------------------------------------------------


def test_linear_steps_add_up() -> None:
    steps = LinearSteps(
        constant_s=1,
        decode_s=10,
        context_s=100,
        padding_s=1000,
        prefill_s=1e4,
        pair_s=1e5,
        prefill_constant_s=1e6,
    )
    assert steps.seconds(Step(2, 3, 4, 5, 6)) == 1 + 20 + 300 + 4000 + 5e4 + 6e5 + 1e6
    assert steps.seconds(Step(2, 3, 4, 0)) == 1 + 20 + 300 + 4000


def test_one_request_alone() -> None:
    run = simulate(workload(request(100, 4, at_s=0.25)))
    taken = [prompt(100), decode(101), decode(102), decode(103)]
    assert run.steps == [taken]
    assert run.tokens[0, 0, 0] == ends(STEPS, *taken, start_s=0.25)
    row = run.call()
    assert row.first_scheduled_s == row.arrival_s == 0.25
    assert row.first_token_s == 0.25 + STEPS.seconds(prompt(100))
    assert run.program().ttft_s == pytest.approx(0.01 + 100e-4, abs=1e-12)
    assert row.max_tbt_s == pytest.approx(0.01 + 0.001 + 103e-6, abs=1e-12)
    assert run.result.replicas[0].busy_s == pytest.approx(row.end_s - 0.25, abs=1e-12)
    assert run.result.end_s == row.end_s


def test_an_answer_of_one_token_is_over_with_its_prompt() -> None:
    run = simulate(workload(request(100, 1, call_fields={"max_output_tokens": 1})))
    assert run.steps == [[prompt(100)]]
    assert run.call().end_s == run.call().first_token_s == STEPS.seconds(prompt(100))
    assert run.call().max_tbt_s == 0


def test_two_requests_share_a_step() -> None:
    run = simulate(workload(request(100, 3), request(40, 3)))
    first = Step(0, 0, 0, 140, 100 * 101 // 2 + 40 * 41 // 2)
    taken = [first, decode(101, 41), decode(102, 42)]
    assert run.steps == [taken]
    assert run.tokens[0, 0, 0] == run.tokens[1, 0, 0] == ends(STEPS, *taken)
    assert taken[1].padding_tokens == 60


def test_a_decode_goes_on_beside_the_chunks_of_another() -> None:
    run = simulate(
        workload(request(100, 5), request(700, 2, at_s=0.001)), EngineShape(chunk_tokens=256)
    )
    chunks = [prompt(256), prompt(256, done=256), prompt(188, done=512)]
    mixed = [
        Step(1, 101 + index, 0, part.prefill_tokens, part.prefill_pairs)
        for index, part in enumerate(chunks)
    ]
    taken = [prompt(100), *mixed, decode(104, 701)]
    assert run.steps == [taken]
    times = ends(STEPS, *taken)
    assert run.tokens[0, 0, 0] == times
    assert run.tokens[1, 0, 0] == times[3:]


def test_a_chunk_holds_the_end_of_one_prompt_and_the_beginning_of_the_next() -> None:
    run = simulate(workload(request(100, 1), request(100, 1)), EngineShape(chunk_tokens=150))
    assert [step.prefill_tokens for step in run.steps[0]] == [150, 50]
    assert run.steps[0][0].prefill_pairs == 100 * 101 // 2 + 50 * 51 // 2
    assert run.steps[0][1].prefill_pairs == sum(range(51, 101))


def test_without_mixing_a_step_is_one_or_the_other() -> None:
    shape = EngineShape(chunk_tokens=256, mixes_chunks=False)
    run = simulate(workload(request(100, 5), request(700, 2, at_s=0.001)), shape)
    taken = [
        *(prompt(100), prompt(256), prompt(256, done=256), prompt(188, done=512)),
        *(decode(101, 701), decode(102), decode(103), decode(104)),
    ]
    assert run.steps == [taken]
    times = ends(STEPS, *taken)
    assert run.tokens[0, 0, 0] == [times[0], *times[4:]]
    assert run.call(0).max_tbt_s == pytest.approx(times[4] - times[0])


def test_without_mixing_long_prompts_do_not_starve_the_decodes() -> None:
    shape = EngineShape(chunk_tokens=100, mixes_chunks=False)
    run = simulate(
        workload(request(100, 5), request(8000, 2, at_s=0.001)),
        shape,
        config={"max_decode_pause_s": 0.1},
    )
    assert run.call(0).max_tbt_s < 0.1 + 2 * STEPS.seconds(prompt(100)) + 0.02


def test_an_arrival_at_the_end_of_a_step_joins_the_next_one() -> None:
    at_s = STEPS.seconds(prompt(100))
    run = simulate(workload(request(100, 2), request(50, 1, at_s=at_s)))
    assert run.call(1).first_scheduled_s == at_s
    assert run.steps[0][1] == Step(1, 101, 0, 50, 50 * 51 // 2)


def test_an_arrival_within_a_step_waits_for_its_end() -> None:
    run = simulate(workload(request(100, 2), request(50, 1, at_s=0.0001)))
    assert run.call(1).first_scheduled_s == STEPS.seconds(prompt(100))


def test_those_that_arrive_together_keep_their_order() -> None:
    """By number, not by name: the eleventh comes after the third."""
    run = simulate(workload(*(request(5, 1) for _ in range(13))), EngineShape(max_batch=1))
    firsts = [run.call(index).first_token_s for index in range(13)]
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 13


def test_a_wider_batch_than_the_lanes_begin_with() -> None:
    run = simulate(
        workload(*(request(2, 20 + index % 7, slo=DeadlineSlo(600.0)) for index in range(200))),
        EngineShape(max_batch=200, chunk_tokens=100),
    )
    assert max(step.num_decodes for step in run.steps[0]) > 130
    assert {row.end for row in run.result.calls} == {"finished"}


# Prefix cache -------------------------------------------------------------------------------------

TEXT = {"prefix": 7, "prefix_tokens": 80}


def test_a_cached_prefix_shortens_the_prompt() -> None:
    run = simulate(
        workload(request(100, 2, call_fields=TEXT), request(120, 1, at_s=1.0, call_fields=TEXT))
    )
    taken = prompt(40, done=80)
    assert run.steps[0][-1] == taken
    assert run.call(1).end_s == 1.0 + STEPS.seconds(taken)
    assert run.result.replicas[0].cached_tokens == 80


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    run = simulate(
        workload(request(100, 2, call_fields=TEXT), request(120, 1, at_s=1.0, call_fields=TEXT)),
        EngineShape(has_prefix_cache=False),
    )
    assert run.steps[0][-1] == prompt(120)
    assert run.result.replicas[0].cached_tokens == 0


def test_of_a_prompt_that_is_all_cached_one_token_is_computed() -> None:
    whole = {"prefix": 7, "prefix_tokens": 100}
    run = simulate(
        workload(request(100, 2, call_fields=whole), request(100, 1, at_s=1.0, call_fields=whole))
    )
    assert run.steps[0][-1] == prompt(1, done=99)


def test_a_prompt_is_shared_once_it_is_computed_not_before() -> None:
    run = simulate(
        workload(request(100, 9, call_fields=TEXT), request(120, 1, call_fields=TEXT)),
        EngineShape(chunk_tokens=1000),
    )
    assert run.steps[0][0].prefill_tokens == 220


def test_what_a_call_leaves_is_the_prefix_of_the_next_stage() -> None:
    run = simulate(
        workload(
            program(stage(call(100, 5, leaves=9)), stage(call(130, 1, prefix=9, prefix_tokens=105)))
        )
    )
    assert run.steps[0][-1] == prompt(25, done=105)


def test_replicas_do_not_share_a_cache() -> None:
    run = simulate(
        workload(request(100, 2, call_fields=TEXT), request(120, 1, at_s=1.0, call_fields=TEXT)),
        EngineShape(),
        EngineShape(),
        dispatcher=RoundRobin(),
    )
    assert [counts.cached_tokens for counts in run.result.replicas] == [0, 0]
    assert run.steps[1] == [prompt(120)]


# Programs -----------------------------------------------------------------------------------------


def test_a_stage_waits_for_all_calls_and_for_its_tools() -> None:
    run = simulate(
        workload(
            program(
                stage(call(10, 2), call(10, 7), call(10, 3)),
                stage(call(20, 1), call(30, 1), tool_s=0.75),
                stage(call(5, 1)),
            )
        )
    )
    last_s = run.call(0, 0, 1).end_s
    assert [row.end_s < last_s for row in run.result.calls[:3]] == [True, True, False]
    assert run.call(0, 1, 0).arrival_s == run.call(0, 1, 1).arrival_s == last_s + 0.75
    assert run.call(0, 1, 0).first_token_s == last_s + 0.75 + STEPS.seconds(
        Step(0, 0, 0, 50, 20 * 21 // 2 + 30 * 31 // 2)
    )
    assert run.call(0, 2, 0).arrival_s == run.call(0, 1, 0).end_s
    assert run.program().is_complete
    assert run.program().end_s == run.call(0, 2, 0).end_s
    assert run.program().ttft_s == run.call(0, 0, 0).first_token_s


def test_the_tools_of_the_first_stage_ran_before_the_program_arrived() -> None:
    """``SimProgram.arrival_s`` is when the first stage's calls arrive, whatever its tools took."""
    run = simulate(workload(program(stage(call(10, 2), tool_s=0.5), at_s=0.25)))
    assert run.call().arrival_s == 0.25


# Parking, preemption, swapping --------------------------------------------------------------------

LONG, URGENT = (200, 100), (10, 5)


def _displaced(**shape: object) -> Run:
    """A long answer with time to spare, and a short one that has none, under EDF."""
    return simulate(
        workload(
            request(*LONG, slo=DeadlineSlo(60.0)),
            request(*URGENT, at_s=0.1, slo=DeadlineSlo(1.0)),
        ),
        EngineShape(max_batch=1, **shape),  # type: ignore[arg-type]
        policy="edf",
        config={"frame_steps": 5},
    )


def test_one_that_is_parked_resumes_where_it_was() -> None:
    run = _displaced()
    assert (run.call(0).num_parks, run.call(0).num_preemptions) == (1, 0)
    assert run.result.replicas[0].prefill_tokens == 210
    taken = run.steps[0]
    contexts = [step.context_tokens for step in taken if step.context_tokens > 200]
    assert contexts == list(range(201, 300))
    assert sorted(run.tokens[0, 0, 0] + run.tokens[1, 0, 0]) == ends(STEPS, *taken)
    gap_s = sum(STEPS.seconds(step) for step in [prompt(10), *map(decode, range(11, 15))])
    before = len([time for time in run.tokens[0, 0, 0] if time <= run.call(1).end_s])
    assert run.call(0).max_tbt_s == pytest.approx(gap_s + STEPS.seconds(decode(200 + before)))


def test_one_that_is_preempted_computes_its_context_again() -> None:
    run = _displaced(slots=1)
    assert (run.call(0).num_parks, run.call(0).num_preemptions) == (0, 1)
    before = len([time for time in run.tokens[0, 0, 0] if time < run.call(1).end_s])
    assert prompt(200 + before) in run.steps[0]
    assert run.result.replicas[0].prefill_tokens == 210 + 200 + before
    contexts = [step.context_tokens for step in run.steps[0] if step.context_tokens > 200]
    assert contexts == [n for n in range(201, 300) if n != 200 + before]
    assert run.call(0).end_s == ends(STEPS, *run.steps[0])[-1]


def test_one_that_is_swapped_computes_one_token_again() -> None:
    run = _displaced(slots=1, swap_token_s=1e-5)
    before = len([time for time in run.tokens[0, 0, 0] if time < run.call(1).end_s])
    held = 200 + before
    assert prompt(1, done=held - 1) in run.steps[0]
    assert run.result.replicas[0].prefill_tokens == 211
    swap_s = (held - 1) * 1e-5
    assert run.call(0).end_s == pytest.approx(ends(STEPS, *run.steps[0])[-1] + swap_s)
    assert run.call(0).end_s < _displaced(slots=1).call(0).end_s


def test_a_swap_that_is_slower_is_not_taken() -> None:
    assert _displaced(slots=1, swap_token_s=1.0).result == _displaced(slots=1).result


@pytest.mark.parametrize("swap_token_s", [1.1e-4, 1.2e-4, 1.3e-4])
def test_of_swap_and_recompute_the_cheaper_is_taken(swap_token_s: float) -> None:
    swapped = _displaced(slots=1, swap_token_s=swap_token_s)
    assert swapped.call(0).end_s <= _displaced(slots=1).call(0).end_s


def test_one_whose_prompt_is_under_way_begins_it_again_after_a_preemption() -> None:
    run = simulate(
        workload(
            request(2000, 5, slo=DeadlineSlo(60.0)),
            request(10, 5, at_s=0.1, slo=DeadlineSlo(1.0)),
        ),
        EngineShape(max_batch=1, slots=1, chunk_tokens=50),
        policy="edf",
        config={"frame_steps": 5, "frame_s": 0.05},
    )
    row = run.call(0)
    assert row.output_tokens == 5
    again = run.result.replicas[0].prefill_tokens - 2010
    assert (again > 0) == (row.num_preemptions > 0)


# KV pressure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "edf", "gmax", "sarathi"])
@pytest.mark.parametrize("mixes_chunks", [True, False])
def test_answers_that_outgrow_the_kv_give_way_and_all_finish(
    policy: str, mixes_chunks: bool
) -> None:
    run = simulate(
        workload(*(request(20, 60, slo=DEADLINE) for _ in range(6))),
        EngineShape(max_batch=6, kv_tokens=200, mixes_chunks=mixes_chunks),
        policy=policy,
        config={"frame_steps": 5},
    )
    assert {row.end for row in run.result.calls} == {"finished"}
    assert run.result.replicas[0].preemptions > 0


def test_a_decode_beside_a_long_prompt_does_not_run_out_of_kv() -> None:
    run = simulate(
        workload(
            request(20, 100, slo=DeadlineSlo(60.0)),
            request(160, 20, at_s=0.05, slo=DeadlineSlo(5.0)),
        ),
        EngineShape(max_batch=2, kv_tokens=190, chunk_tokens=16),
        policy="edf",
        config={"frame_steps": 2},
    )
    assert {row.end for row in run.result.calls} == {"finished"}


def test_a_call_that_just_fits_is_served() -> None:
    run = simulate(workload(request(60, 40)), EngineShape(kv_tokens=100))
    assert run.call().end == "finished"


def test_a_call_of_one_token_less_is_served() -> None:
    run = simulate(workload(request(60, 39)), EngineShape(kv_tokens=100))
    assert run.call().end == "finished"


# The end of time ----------------------------------------------------------------------------------


def test_tokens_at_the_very_end_of_the_simulation_count() -> None:
    """The window ends with the second token's step."""
    taken = [prompt(100), decode(101)]
    end_s = ends(STEPS, *taken)[-1]
    run = simulate(workload(request(100, 3), window_s=end_s), drain_s=0.0)
    assert run.result.end_s == end_s
    assert (run.call().end, run.call().output_tokens) == ("unfinished", 2)


def test_by_default_it_goes_on_while_anything_could_count() -> None:
    run = simulate(workload(request(10, 400, slo=LatencySlo(0.5, 0.001)), window_s=0.1))
    assert run.result.end_s == pytest.approx(0.5 + 400 * 0.001)
    run = simulate(workload(request(10, 4000, slo=DeadlineSlo(3.0)), window_s=0.1))
    assert run.result.end_s == pytest.approx(3.0)


def test_best_effort_has_its_time_and_no_more() -> None:
    def end_of(deadline_s: float, output: int) -> tuple[str, float]:
        slo, more = BestEffortSlo(deadline_s), {"max_output_tokens": output}
        run = simulate(workload(request(10, output, slo=slo, call_fields=more), window_s=0.1))
        return run.call().end, run.result.end_s

    assert end_of(600.0, 400)[0] == "finished"
    assert end_of(1.0, 400) == ("unfinished", 1.0)
    assert end_of(600.0, 9000) == ("unfinished", 60.1)


def test_nothing_arrives() -> None:
    run = simulate(workload(window_s=10.0))
    assert (run.result.programs, run.result.calls) == ((), ())
    assert run.result.replicas[0].steps == 0


def test_a_step_under_way_at_the_end_counts_by_its_time_alone() -> None:
    run = simulate(workload(request(100, 30), window_s=0.025), drain_s=0.0)
    counts = run.result.replicas[0]
    assert (counts.steps, counts.prefill_tokens, counts.decode_tokens) == (1, 100, 0)
    assert counts.busy_s == pytest.approx(run.result.end_s) == 0.025


def test_an_engine_is_not_busy_for_longer_than_it_was_there() -> None:
    run = simulate(workload(request(100, 30), window_s=0.05), drain_s=0.0)
    assert run.result.replicas[0].busy_s <= run.result.end_s


def test_progress_is_told_now_and_then() -> None:
    told: list[float] = []
    simulate(
        workload(*(request(10, 5, at_s=float(at_s)) for at_s in range(0, 100, 3))),
        on_progress=told.append,
    )
    assert told == sorted(told)
    assert 5 <= len(told) <= 10


def test_padding_costs() -> None:
    steps = LinearSteps(constant_s=0.01, padding_s=1e-4, pair_s=1e-7, prefill_constant_s=0.002)
    run = simulate(workload(request(100, 2, slo=STREAM), request(10, 2)), steps=steps)
    assert run.call(0).first_token_s == pytest.approx(0.012 + 1e-7 * (5050 + 55), abs=1e-12)
    assert run.call(0).max_tbt_s == pytest.approx(0.01 + 90e-4, abs=1e-12)
