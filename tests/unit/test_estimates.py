"""What is estimated of each request in a frame, against sums done by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD, BEST_EFFORT, NOW_S, STEP_S, Ask, estimates_of, floats, frame_context, steps

from core.slo import CompoundSlo, DeadlineSlo, LatencySlo, ReasoningSlo, Slo
from scheduler.estimates import Estimates, Expected
from scheduler.lengths import Information
from scheduler.objective import WeightedTokens, WholeRequests
from scheduler.programs import ProgramOutlook, Programs
from scheduler.step_time import StepObservation, StepTimeModel
from scheduler.table import PARKED, PREEMPTED, RUNNING, WAITING

DETAILED = StepTimeModel.known(0.08, 0.01, 1e-5, 1e-4)
"""0.08 s a step, 10 ms a decode, 10 us a context token, 0.1 ms a prompt token."""


def stream(due_in_s: float, tbt_s: float, mean: float = 20, **ask: Any) -> Ask:
    """A running stream whose next token is due in so many seconds."""
    ask = {"state": RUNNING, "bound": mean} | ask
    return Ask(slo=LatencySlo(due_in_s, tbt_s), mean=mean, **ask)


def expected(*asks: Ask, step_s: float = STEP_S, **context: Any) -> Expected:
    """What they are worth at a step time."""
    return estimates_of(*asks, **context).expected(step_s)


# The frame ----------------------------------------------------------------------------------------


def test_a_step_takes_longer_with_more_requests_and_longer_contexts() -> None:
    context = frame_context(step_time=DETAILED, batch_size=4, mean_context_tokens=1000.0)
    assert context.step_s == pytest.approx(0.08 + 4 * 0.01 + 4 * 1000 * 1e-5)
    assert context.step_s_at(8) == pytest.approx(0.08 + 8 * 0.01 + 8 * 1000 * 1e-5)


@pytest.mark.parametrize(
    ("frame_s", "frame_steps", "tokens"),
    [(1.0, 50, 8), (1.0, 5, 5), (0.01, 50, 1), (1e300, 50, 50)],
)
def test_a_frame_has_the_steps_that_its_seconds_hold_and_at_least_one(
    frame_s: float, frame_steps: int, tokens: int
) -> None:
    assert frame_context(frame_s=frame_s, frame_steps=frame_steps).frame_tokens == tokens


# Times of a request -------------------------------------------------------------------------------


def test_generation_takes_the_bound_of_the_length_times_the_step() -> None:
    assert estimates_of(Ask(mean=10, bound=40)).generation_s.tolist() == [5.0]


def test_a_deadline_leaves_the_time_until_it() -> None:
    asks = Ask(slo=DeadlineSlo(60.0)), Ask(slo=DeadlineSlo(60.0), arrival_s=NOW_S - 80)
    assert estimates_of(*asks).left_s.tolist() == [60.0, -20.0]


def test_a_stream_leaves_the_time_until_its_last_expected_token_is_due() -> None:
    # The fourth token is due 3.5 s after arrival, ten more follow 0.5 s apart.
    ask = Ask(slo=LatencySlo(2.0, 0.5), generated=3, bound=11, arrival_s=NOW_S - 1)
    assert estimates_of(ask).left_s.tolist() == [3.5 + 10 * 0.5 - 1]


def test_only_deadlines_expire_and_not_in_their_last_moment() -> None:
    late = {"arrival_s": NOW_S - 10}
    asks = (
        Ask(slo=DeadlineSlo(9.0), **late),
        Ask(slo=CompoundSlo(9.0, "p"), **late),
        Ask(slo=DeadlineSlo(10.0), **late),
        Ask(slo=LatencySlo(1.0, 0.1), **late),
        Ask(slo=BEST_EFFORT, arrival_s=NOW_S - 1e6),
    )
    assert estimates_of(*asks).is_expired.tolist() == [True, True, False, False, False]


def test_a_request_still_thinking_at_its_deadline_has_nothing_left_that_counts() -> None:
    ask = Ask(slo=ReasoningSlo(9.0, 0.5), arrival_s=NOW_S - 10, state=RUNNING, generated=50)
    assert estimates_of(ask).is_expired.tolist() == [True]


def test_best_effort_has_no_objective() -> None:
    asks = Ask(), Ask(slo=DeadlineSlo(9)), stream(1, 1), Ask(slo=CompoundSlo(9, "p"))
    assert estimates_of(*asks).has_slo.tolist() == [False, True, True, True]


# Bandwidth ----------------------------------------------------------------------------------------


def test_a_deadline_needs_its_generation_time_over_its_time_left() -> None:
    # 40 tokens take 5 s of 20.
    assert estimates_of(Ask(slo=DeadlineSlo(20), bound=40)).bandwidth.tolist() == [0.25]


def test_a_stream_needs_a_step_per_interval() -> None:
    assert estimates_of(stream(1.0, 0.5)).bandwidth.tolist() == [0.25]


def test_nobody_needs_more_than_a_slot_and_best_effort_needs_nothing() -> None:
    asks = (
        Ask(slo=DeadlineSlo(1), bound=1000),
        Ask(slo=DeadlineSlo(-5), bound=10),
        stream(1.0, 0.01),
        Ask(bound=1000),
    )
    assert estimates_of(*asks).bandwidth.tolist() == [1, 1, 1, 0]


def test_a_deadline_needs_its_share_of_the_frame_rounded_up() -> None:
    asks = Ask(slo=DeadlineSlo(20), bound=40), Ask(slo=DeadlineSlo(20), bound=48)
    # Of 8 steps a quarter, and 0.3.
    assert estimates_of(*asks).frame_tokens.tolist() == [2, 3]


def test_a_stream_needs_the_tokens_that_fall_due_in_the_frame() -> None:
    # Of a frame of 1 s: due at 0.1, 0.35, 0.6 and 0.85 s.
    assert estimates_of(stream(0.1, 0.25)).frame_tokens.tolist() == [4]


def test_everybody_needs_one_token_and_nobody_more_than_the_frame_has() -> None:
    asks = stream(50.0, 0.25), Ask(), stream(-50.0, 0.25), Ask(slo=DeadlineSlo(0.5), bound=1000)
    assert estimates_of(*asks).frame_tokens.tolist() == [1, 1, 8, 8]


# Engine seconds -----------------------------------------------------------------------------------


def test_prefill_counts_only_without_kv() -> None:
    asks = [
        Ask(input_tokens=900, generated=100, state=state)
        for state in (WAITING, RUNNING, PARKED, PREEMPTED)
    ]
    found = estimates_of(*asks, step_time=DETAILED).prefill_s
    assert found == pytest.approx([0.1, 0, 0, 0.1])


def test_engine_seconds_are_prefill_and_the_share_of_each_step() -> None:
    ask = Ask(input_tokens=1000, mean=200)
    estimates = estimates_of(ask, step_time=DETAILED, batch_size=4)
    # A quarter of the constant, its decode, and its context, on average 1,100 tokens.
    token_s = 0.08 / 4 + 0.01 + 1100 * 1e-5
    assert estimates.token_s == pytest.approx([token_s])
    assert estimates.engine_s == pytest.approx([1000 * 1e-4 + 200 * token_s])


def test_alone_a_request_takes_the_engine_for_as_long_as_its_steps_last() -> None:
    assert estimates_of(Ask(mean=40, state=RUNNING)).engine_s.tolist() == [5.0]


def test_the_estimates_of_some_rows_are_those_rows_of_all() -> None:
    estimates = estimates_of(Ask(mean=10), Ask(mean=20), Ask(mean=30))
    taken = estimates.take(np.array([2, 0]))
    assert taken.mean_tokens.tolist() == [30, 10]
    assert taken.engine_s.tolist() == estimates.engine_s[[2, 0]].tolist()


@pytest.mark.parametrize(
    ("ask", "load"),
    [
        (Ask(slo=DeadlineSlo(25.0), state=RUNNING), 12.5 / 25),
        (Ask(slo=DeadlineSlo(5.0), state=RUNNING), 1.0),  # all of the engine, and no more
        (Ask(slo=LatencySlo(5.0, 0.25), mean=41, bound=41, state=RUNNING), 41 / 8 / (5 + 40 / 4)),
        (Ask(slo=CompoundSlo(25.0, "p"), state=RUNNING), 12.5 / 25),
        (Ask(slo=DeadlineSlo(-1.0), state=RUNNING), 0.0),
        (Ask(), 0.0),
    ],
    ids=["deadline", "tight deadline", "stream", "call", "late", "best effort"],
)
def test_the_load_is_the_share_of_the_engine_that_each_needs_until_it_is_due(
    ask: Ask, load: float
) -> None:
    assert estimates_of(ask).load_shares.sum() == pytest.approx(load)
    assert estimates_of(ask, ask).load_shares.sum() == pytest.approx(2 * load)


def test_the_load_is_that_of_an_answer_as_long_as_its_bound() -> None:
    ask = Ask(slo=DeadlineSlo(50.0), mean=100, bound=200, state=RUNNING)
    assert estimates_of(ask).load_shares.tolist() == pytest.approx([25 / 50])


@pytest.mark.parametrize(
    ("ask", "load"),
    [
        (Ask(slo=LatencySlo(4.0, 0.25), mean=41, bound=41), 1 / 4 + 41 / 8 / (4 + 40 / 4)),
        # It cannot be in time for its first token any more, but for later ones.
        (Ask(slo=LatencySlo(0.5, 0.25), mean=41, bound=41), (1 + 41 / 8) / (0.5 + 40 / 4)),
        (Ask(slo=DeadlineSlo(27.0)), (1 + 12.5) / 27),
        (
            Ask(slo=LatencySlo(1.125, 0.125), mean=41, bound=41),
            1.0,
        ),  # 8/9, and more than 1/9 beside it
    ],
    ids=["stream", "late for its first", "deadline", "no more than all"],
)
def test_a_streams_prompt_is_a_load_until_its_first_token(ask: Ask, load: float) -> None:
    step_time = StepTimeModel.known(STEP_S, prefill_s=1 / 100)  # 1 s for its 100 tokens
    found = estimates_of(ask, step_time=step_time).load_shares.tolist()
    assert found == pytest.approx([load])


def test_nothing_is_no_load() -> None:
    assert estimates_of().load_shares.sum() == 0


def test_what_is_foreseen_of_a_program_is_load_once_however_many_of_its_calls_are_live() -> None:
    programs = Programs()
    outlook = ProgramOutlook(future_input_tokens=1024, future_output_tokens=20)
    rows = [
        Ask(slo=CompoundSlo(64.0, "p"), mean=64, bound=64, program=program, state=RUNNING)
        for program in [programs.join("", "p", is_final=False) for _ in range(2)]
    ]
    programs.expect("", "p", outlook)
    step_time = StepTimeModel.known(STEP_S, prefill_s=1 / 1024)
    # Two calls of 8 s, and 1 s of prompts and 2.5 s of steps to come.
    load = estimates_of(*rows, programs=programs, step_time=step_time).load_shares.sum()
    assert load == pytest.approx((8 + 8 + 1 + 2.5) / 64)


@pytest.mark.parametrize(
    ("information", "tokens"),
    [(Information.FORECAST, 165), (Information.KNOWN, 40), (Information.AVERAGE, 70)],
)
def test_lengths_are_those_that_the_policy_may_know(
    information: Information, tokens: float
) -> None:
    ask = Ask(points=steps(10), known=40)
    found = estimates_of(ask, information=information, average_tokens=70.0).mean_tokens
    assert found.tolist() == [tokens]


# Streams ------------------------------------------------------------------------------------------


def test_a_stream_ahead_of_its_timeline_on_a_fast_engine_is_all_in_time() -> None:
    found = expected(stream(1.125, 0.25))
    assert found.full_value.tolist() == [20]
    assert found.in_time_fraction.tolist() == [1]
    assert found.slack_s.tolist() == [1.0]


def test_a_stream_ahead_on_an_engine_too_slow_is_in_time_until_its_slack_is_used_up() -> None:
    # It loses 1/16 s a token: nine tokens, the first with 0.5 s to spare, the ninth with none.
    found = expected(stream(0.625, 0.0625))
    assert found.slack_s.tolist() == [0.5]
    assert found.in_time_fraction == pytest.approx([9 / 20])


def test_a_stream_that_ends_before_its_slack_is_used_up_is_all_in_time() -> None:
    assert expected(stream(0.625, 0.0625, mean=9)).in_time_fraction.tolist() == [1]


def test_a_stream_behind_its_timeline_is_in_time_again_once_it_has_caught_up() -> None:
    # 1 s behind; it wins back 1/8 s a token: eight of its twenty tokens are lost.
    found = expected(stream(-0.875, 0.25))
    assert found.slack_s.tolist() == [-1.0]
    assert found.in_time_fraction == pytest.approx([12 / 20])


def test_a_stream_further_behind_than_it_can_win_back_is_worth_nothing() -> None:
    assert expected(stream(-10.0, 0.25)).in_time_fraction.tolist() == [0]


@pytest.mark.parametrize("tbt_s", [STEP_S, STEP_S / 2])
def test_a_stream_behind_on_an_engine_no_faster_than_it_never_catches_up(tbt_s: float) -> None:
    assert expected(stream(-0.5, tbt_s, mean=1e9)).in_time_fraction.tolist() == [0]


def test_a_stream_exactly_as_fast_as_its_engine_stays_in_time() -> None:
    assert expected(stream(STEP_S, STEP_S)).in_time_fraction.tolist() == [1]


def test_a_stream_must_prefill_before_its_next_token() -> None:
    waiting = stream(1.125, 0.25, state=WAITING, input_tokens=1000)
    found = expected(waiting, step_time=StepTimeModel.known(STEP_S, prefill_s=1e-3))
    assert found.slack_s == pytest.approx([0.0])


@pytest.mark.parametrize("slo", [LatencySlo(20.0, 0.25), DeadlineSlo(20.0), CompoundSlo(20.0, "p")])
def test_until_the_first_token_every_chunk_of_a_prompt_takes_a_decode_step_as_well(
    slo: Slo,
) -> None:
    # 1,000 tokens in chunks of 250 beside decodes: four steps of 1/8 s and 1 s of their own.
    step_time = StepTimeModel.known(STEP_S, prefill_s=1e-3)
    step_time.observe(StepObservation(STEP_S + 0.25, 1, 0, 250))
    found, held = (
        estimates_of(Ask(slo=slo, input_tokens=1000, state=state), step_time=step_time)
        for state in (WAITING, RUNNING)
    )
    token_s = step_time.prompt_token_s(STEP_S)
    assert token_s == pytest.approx(STEP_S / 250 + step_time.prefill_s(1), rel=1e-3)
    assert found.wait_s == pytest.approx([1000 * token_s])
    assert held.wait_s.tolist() == [0]
    sooner = held.expected(STEP_S).slack_s - found.expected(STEP_S).slack_s
    assert sooner == pytest.approx([1000 * token_s])
    # Of the engine it takes no more than before: those decodes are others' tokens.
    prefill_s = step_time.prefill_s(1000)
    assert found.engine_s - held.engine_s == pytest.approx([prefill_s])


def test_more_requests_at_once_leave_a_stream_less_in_time() -> None:
    ask = stream(0.25, 0.25)
    fast, slow = expected(ask, step_s=0.125), expected(ask, step_s=0.375)
    assert fast.in_time_fraction[0] == 1
    assert slow.in_time_fraction[0] == 0


def test_for_whole_requests_a_stream_counts_only_if_all_of_it_is_in_time() -> None:
    asks = stream(1.0, 0.25), stream(0.625, 0.0625), stream(-0.875, 0.25)
    found = expected(*asks, objective=WholeRequests())
    assert found.full_value.tolist() == [1, 1, 1]
    assert found.in_time_fraction.tolist() == [1, 0, 0]


# Answers with a deadline --------------------------------------------------------------------------


def test_an_answer_is_worth_all_of_its_tokens_by_the_chance_that_it_fits() -> None:
    # 20 s hold 160 tokens; of the lengths 10, 20 .. 320 half are no longer.
    ask = Ask(slo=DeadlineSlo(20), points=steps(10), state=RUNNING)
    found = expected(ask)
    assert found.full_value.tolist() == [100 + 165]
    assert found.in_time_fraction.tolist() == [0.5]
    assert found.slack_s.tolist() == [20 - 165 * STEP_S]


def test_tokens_generated_so_far_count_towards_the_answer() -> None:
    ask = Ask(slo=DeadlineSlo(20), points=steps(10), generated=165, state=RUNNING)
    assert expected(ask).full_value.tolist() == [100 + 165 + 80]


def test_an_answer_must_prefill_before_it_decodes() -> None:
    # 1.25 s of prefill leave the time of 150 tokens.
    ask = Ask(slo=DeadlineSlo(20), points=steps(10), input_tokens=1250)
    found = expected(ask, step_time=StepTimeModel.known(STEP_S, prefill_s=1e-3))
    assert found.in_time_fraction.tolist() == [15 / 32]


def test_an_answer_on_a_slower_engine_fits_less_likely() -> None:
    ask = Ask(slo=DeadlineSlo(20), points=steps(10), state=RUNNING)
    assert expected(ask, step_s=0.25).in_time_fraction.tolist() == [8 / 32]


def test_an_answer_whose_deadline_has_passed_cannot_fit() -> None:
    ask = Ask(slo=DeadlineSlo(-1), points=steps(10), state=RUNNING)
    found = expected(ask)
    assert found.in_time_fraction.tolist() == [0]
    assert found.slack_s[0] < -1


def test_weights_price_input_and_output_tokens() -> None:
    asks = Ask(slo=DeadlineSlo(90), mean=50), stream(1.0, 0.25), Ask(mean=30)
    found = expected(*asks, objective=WeightedTokens(2.0, 3.0))
    assert found.full_value.tolist() == [2 * 100 + 3 * 50, 3 * 20, 3 * 30]


def test_best_effort_is_always_in_time_and_never_urgent() -> None:
    found = expected(Ask(mean=30, arrival_s=NOW_S - 1e5))
    assert found.full_value.tolist() == [30]
    assert found.in_time_fraction.tolist() == [1]
    assert found.slack_s[0] > 1e6


# Programs -----------------------------------------------------------------------------------------


def calls(*asks: tuple[float, float], programs: Programs, **context: Any) -> Expected:
    """Running calls of program ``p``, each due in so many seconds, with so many tokens to come."""
    rows = [
        Ask(
            slo=CompoundSlo(due_in_s, "p"),
            mean=mean,
            program=programs.join("", "p", is_final=False),
            state=RUNNING,
        )
        for due_in_s, mean in asks
    ]
    estimates = estimates_of(*rows, programs=programs, **context)
    return estimates.pool_programs(estimates.expected(STEP_S))


def density(expected: Expected, *engine_s: float) -> list[float]:
    """Value per engine second."""
    return (expected.full_value / floats(*engine_s)).tolist()


def test_calls_of_a_program_share_its_whole_value_over_all_their_engine_seconds() -> None:
    # 100 + 48 and 100 + 152 tokens in 6 and 19 s.
    found = calls((60, 48), (60, 152), programs=Programs())
    assert found.whole_value.tolist() == [400, 400]
    assert density(found, 6, 19) == pytest.approx([16, 16])


def test_a_program_is_as_likely_as_its_unlikeliest_call_and_its_straggler_is_urgent() -> None:
    # 8 s hold 64 tokens: the second call, of 80, does not fit.
    found = calls((8, 32), (8, 80), programs=Programs())
    assert found.in_time_fraction.tolist() == [0, 0]
    assert found.slack_s.tolist() == [4, -2]


def test_what_earlier_calls_gave_counts_towards_a_program() -> None:
    programs = Programs()
    first = programs.join("", "p", is_final=False)
    programs.leave(first, input_tokens=60, output_tokens=40)
    found = calls((60, 100), programs=programs)
    assert found.whole_value.tolist() == [60 + 40 + 100 + 100]
    assert density(found, 12.5) == pytest.approx([300 / 12.5])


def test_what_is_still_to_come_counts_in_the_value_and_the_cost_of_a_program() -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    outlook = ProgramOutlook(future_input_tokens=200, future_output_tokens=100)
    programs.expect("", "p", outlook)
    engine = StepTimeModel.known(STEP_S, prefill_s=1 / 1024)
    found = calls((60, 100), programs=programs, step_time=engine)
    assert found.whole_value.tolist() == [100 + 100 + 200 + 100]
    seconds = 12.5 + 12.5 + 200 / 1024
    assert density(found, 12.5) == pytest.approx([500 / seconds])


def test_the_stages_still_to_come_take_from_the_time_of_this_one() -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(future_stage_tokens=80))
    # 30 s hold 240 tokens, 160 of them before the stages to come.
    found = calls((30, 160), programs=programs)
    assert found.in_time_fraction.tolist() == [1]
    assert found.slack_s.tolist() == [0]
    assert calls((29, 160), programs=programs).in_time_fraction.tolist() == [0]


@pytest.mark.parametrize("stage_in_s", [5.0, 20.0, 500.0, -5.0])
def test_the_slack_of_a_call_is_up_to_its_programs_deadline_whenever_its_stage_is_due(
    stage_in_s: float,
) -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(stage_due_s=NOW_S + stage_in_s))
    found = calls((60, 100), programs=programs)
    assert found.slack_s.tolist() == [60 - 100 * STEP_S]
    assert found.in_time_fraction.tolist() == [1]


def test_tools_that_are_still_to_run_take_from_the_time_of_this_stage() -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(future_tool_s=10.0))
    # Of 30 s the tools take 10; the 160 tokens take the rest.
    found = calls((30, 160), programs=programs)
    assert found.in_time_fraction.tolist() == [1]
    assert found.slack_s.tolist() == [0]
    late = calls((29, 160), programs=programs)
    assert late.in_time_fraction.tolist() == [0]
    assert late.slack_s.tolist() == [-1]


def test_prompts_that_are_still_to_come_take_from_the_time_of_this_stage() -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(future_input_tokens=10_240))
    engine = StepTimeModel.known(STEP_S, prefill_s=1 / 1024)
    found = calls((30, 160), programs=programs, step_time=engine)
    assert found.in_time_fraction.tolist() == [1]
    assert found.slack_s == pytest.approx([0])
    assert calls((29, 160), programs=programs, step_time=engine).in_time_fraction.tolist() == [0]


def test_tool_time_costs_the_engine_nothing_and_is_worth_nothing() -> None:
    programs, plain = Programs(), Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(future_tool_s=10.0))
    plain.join("", "p", is_final=False)
    plain.expect("", "p", ProgramOutlook())
    with_tools, without = calls((60, 100), programs=programs), calls((60, 100), programs=plain)
    assert with_tools.whole_value.tolist() == without.whole_value.tolist()
    assert with_tools.full_value.tolist() == without.full_value.tolist()


def test_tools_of_one_program_keep_no_other_waiting() -> None:
    programs = Programs()
    asks = [
        Ask(
            slo=CompoundSlo(60, name),
            mean=80,
            bound=80,
            program=programs.join("", name, is_final=False),
            state=RUNNING,
        )
        for name in "ab"
    ]
    programs.expect("", "a", ProgramOutlook(future_tool_s=30.0))
    estimates = estimates_of(*asks, programs=programs)
    assert estimates.expected(STEP_S).slack_s.tolist() == [20, 50]


def test_the_straggler_of_a_stage_has_least_time_to_lose() -> None:
    found = calls((60, 8), (60, 80), (60, 40), programs=Programs())
    assert found.slack_s.tolist() == [59, 50, 55]
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(stage_due_s=NOW_S + 20))
    found = calls((60, 8), (60, 80), (60, 40), programs=programs)
    assert found.slack_s.tolist() == [59, 50, 55]
    assert found.in_time_fraction.tolist() == [1, 1, 1]


def test_a_stage_that_is_late_by_its_own_date_can_still_make_it() -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(future_tool_s=20.0, stage_due_s=NOW_S - 3))
    found = calls((60, 80), programs=programs)
    assert found.slack_s.tolist() == [30]
    assert found.in_time_fraction.tolist() == [1]


@pytest.mark.parametrize(
    ("due_in_s", "deviations"), [(30.0, 0.0), (35.0, 0.8), (25.0, -0.8), (42.5, 2.0)]
)
def test_where_the_rest_is_uncertain_a_call_is_as_likely_as_a_normal_of_both_spreads(
    due_in_s: float, deviations: float
) -> None:
    # 160 tokens to come of the call and 80 after it: 30 s. Spreads of 30 and 40 make 50 tokens.
    programs = Programs()
    program = programs.join("", "p", is_final=False)
    outlook = ProgramOutlook(future_stage_tokens=80, future_spread_tokens=40)
    programs.expect("", "p", outlook)
    points = tuple([130.0] * 16 + [190.0] * 16)
    ask = Ask(slo=CompoundSlo(due_in_s, "p"), points=points, program=program, state=RUNNING)
    found = expected(ask, programs=programs)
    normal = (1 + math.erf(deviations / math.sqrt(2))) / 2
    assert found.in_time_fraction == pytest.approx([normal], abs=0.01)
    # To the last digit the logistic curve.
    logistic = 1 / (1 + math.exp(-1.702 * deviations))
    assert found.in_time_fraction == pytest.approx([logistic])


def test_a_program_whose_end_nothing_tells_is_as_uncertain_as_its_stages() -> None:
    programs = Programs()
    first = programs.join("", "done", is_final=False, allowance_s=60.0)
    programs.leave(first, input_tokens=1, output_tokens=1)
    second = programs.join("", "done", is_final=False)
    programs.leave(second, input_tokens=1, output_tokens=1)
    programs.close("", "done")
    open_ended = programs.join("", "p", is_final=False, allowance_s=60.0)
    assert programs.stages_to_come.tolist() == [1]
    # 100 tokens of the call and a stage of 200: in 37.5 s by a half, and one of 200 in 25 s more.
    for due_in_s, deviations in ((37.5, 0), (62.5, 1)):
        ask = Ask(slo=CompoundSlo(due_in_s, "p"), program=open_ended, state=RUNNING)
        found = expected(ask, programs=programs, average_tokens=200.0)
        logistic = 1 / (1 + math.exp(-1.702 * deviations))
        assert found.in_time_fraction == pytest.approx([logistic])


@pytest.mark.parametrize("due_in_s", [-10.0, 0.0, STEP_S / 2])
def test_a_call_without_the_time_of_a_token_cannot_make_it_however_uncertain_the_rest(
    due_in_s: float,
) -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    outlook = ProgramOutlook(future_stage_tokens=80, future_spread_tokens=4000)
    programs.expect("", "p", outlook)
    assert calls((due_in_s, 1), programs=programs).in_time_fraction.tolist() == [0]


def test_of_a_closed_program_nothing_takes_from_its_last_stage() -> None:
    programs = Programs()
    programs.join("", "p", is_final=False)
    programs.expect("", "p", ProgramOutlook(future_tool_s=20.0, future_stage_tokens=80))
    programs.close("", "p")
    assert calls((60, 80), programs=programs).slack_s.tolist() == [50]


def test_other_requests_are_not_touched_by_programs() -> None:
    programs = Programs()
    program = programs.join("", "p", is_final=False)
    call = Ask(slo=CompoundSlo(60, "p"), mean=10, program=program)
    others = Ask(slo=DeadlineSlo(60), mean=10), stream(1.0, 0.25), Ask(mean=7)
    estimates = estimates_of(call, *others, programs=programs)
    before = estimates.expected(STEP_S)
    after = estimates.pool_programs(before)
    assert after.full_value[1:].tolist() == before.full_value[1:].tolist() == [110, 20, 7]
    assert after.slack_s[1:].tolist() == before.slack_s[1:].tolist()


def test_two_programs_do_not_share() -> None:
    programs = Programs()
    asks = [
        Ask(
            slo=CompoundSlo(60, name),
            mean=mean,
            program=programs.join("", name, is_final=False),
            state=RUNNING,
        )
        for name, mean in (("a", 40), ("b", 80))
    ]
    estimates = estimates_of(*asks, programs=programs)
    found = estimates.pool_programs(estimates.expected(STEP_S))
    assert found.whole_value.tolist() == [140, 180]


# Nonsense -----------------------------------------------------------------------------------------


def everything(estimates: Estimates, step_s: float) -> dict[str, Any]:
    """All that is estimated, by name."""
    names = "mean_tokens bound_tokens prefill_s token_s engine_s generation_s left_s bandwidth"
    found = {name: getattr(estimates, name) for name in (*names.split(), "frame_tokens")}
    plain = estimates.expected(step_s)
    for name, result in (("plain", plain), ("pooled", estimates.pool_programs(plain))):
        for field in ("full_value", "in_time_fraction", "slack_s", "whole_value"):
            found[f"{name} {field}"] = getattr(result, field)
    return found


coefficients = st.sampled_from([0.0, 1e-9, 1e-3, 3600.0])


@given(
    asks=st.lists(ABSURD.asks(num_programs=2), max_size=5),
    engine=st.tuples(coefficients, coefficients, coefficients, coefficients),
    now_s=st.sampled_from([0.0, NOW_S, -1e9, 1e9]),
    future=st.sampled_from([0.0, 1.0, 1e300, math.inf, math.nan]),
    due_s=st.sampled_from([None, NOW_S, -1e300, 1e300, math.inf, math.nan]),
    objective=st.sampled_from([WeightedTokens(), WeightedTokens(0, 1), WholeRequests()]),
    information=st.sampled_from(Information),
)
def test_whatever_is_claimed_every_estimate_is_a_finite_number(
    asks: list[Ask],
    engine: tuple[float, float, float, float],
    now_s: float,
    future: float,
    due_s: float | None,
    objective: Any,
    information: Information,
) -> None:
    programs = Programs()
    for name in ("p", "q"):
        programs.join("", name, is_final=False)
    outlook = ProgramOutlook(
        future_input_tokens=future,
        future_output_tokens=future,
        future_stage_tokens=future,
        future_spread_tokens=future,
        future_tool_s=future,
        stage_due_s=due_s,
        next_call_s=due_s,
        next_input_tokens=future,
    )
    programs.expect("", "p", outlook)
    estimates = estimates_of(
        *asks,
        information=information,
        programs=programs,
        now_s=now_s,
        objective=objective,
        step_time=StepTimeModel.known(*engine),
    )
    context = estimates.context
    for step_s in (context.step_s, 1e-6, 3600.0):
        for name, values in everything(estimates, step_s).items():
            assert values.shape == (len(asks),), name
            assert np.isfinite(values).all(), name
            if name.endswith("fraction") or name == "bandwidth":
                assert ((values >= 0) & (values <= 1)).all(), name
    assert 0 <= estimates.load_shares.sum() <= len(asks)
    assert (estimates.engine_s > 0).all()
    assert (estimates.frame_tokens >= 1).all()
    assert (estimates.frame_tokens <= context.frame_tokens).all()
    assert math.isfinite(context.step_s)


@given(
    slack_s=st.integers(-64, 64).map(lambda eighths: eighths / 8),
    tbt_s=st.integers(1, 64).map(lambda parts: parts / 64),
    mean=st.integers(1, 200),
    step_s=st.integers(1, 64).map(lambda parts: parts / 64),
)
def test_the_share_of_a_stream_in_time_is_that_of_counting_its_tokens(
    slack_s: float, tbt_s: float, mean: int, step_s: float
) -> None:
    ask = stream(slack_s + step_s, tbt_s, mean=mean)
    found = float(expected(ask, step_s=step_s).in_time_fraction[0]) * mean
    counted = sum(slack_s + token * (tbt_s - step_s) >= 0 for token in range(mean))
    # A fraction of a token may be counted.
    assert found == pytest.approx(counted, abs=1.0)
