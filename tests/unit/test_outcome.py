"""How an answer went, against examples computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OutcomeTracker,
    ReasoningSlo,
    RequestTerms,
    Slo,
    SloOutcome,
    deadline_at_s,
    slo_type,
    token_due_at_s,
)

ARRIVAL_S = 100.0
LATENCY = LatencySlo(target_ttft_s=2.0, target_tbt_s=0.5)


def outcome(
    slo: Slo,
    sent: list[tuple[int, float]],
    *,
    input_tokens: int = 10,
    ends_s: float | None = None,
    reason: str | None = None,
) -> SloOutcome:
    """The outcome of an answer of which so many tokens were sent so long after its arrival."""
    tracker = OutcomeTracker(RequestTerms(ARRIVAL_S, slo))
    for total_tokens, after_s in sent:
        tracker.sent(total_tokens, ARRIVAL_S + after_s)
    end_s = ends_s if ends_s is not None else sent[-1][1] if sent else 0.0
    return tracker.finish(input_tokens, ARRIVAL_S + end_s, reason)


# When things are due ------------------------------------------------------------------------------


def test_a_class_has_the_name_that_answers_show() -> None:
    assert slo_type(LATENCY) == "latency"
    assert slo_type(DeadlineSlo(1)) == "deadline"
    assert slo_type(CompoundSlo(1, "p")) == "compound"
    assert slo_type(BestEffortSlo(1)) == "best_effort"


def test_deadlines_count_from_the_arrival_and_a_stream_has_none() -> None:
    due = [
        deadline_at_s(RequestTerms(ARRIVAL_S, slo))
        for slo in (LATENCY, DeadlineSlo(5), CompoundSlo(-3, "p"), BestEffortSlo(600))
    ]
    assert due == [math.inf, 105, 97, 700]


def test_token_i_is_due_ttft_plus_i_times_tbt_after_the_arrival() -> None:
    terms = RequestTerms(ARRIVAL_S, LATENCY)
    assert [token_due_at_s(terms, LATENCY, i) for i in (0, 1, 4)] == [102.0, 102.5, 104.0]


# Latency ------------------------------------------------------------------------------------------


def test_a_stream_on_time_counts_every_output_token_and_no_input() -> None:
    result = outcome(LATENCY, [(1, 1.5), (2, 2.25), (3, 2.5)])
    assert result.type == "latency"
    assert result.met is True
    assert result.goodput_tokens == 3
    assert result.output_tokens == 3
    assert result.ttft_s == 1.5
    assert result.e2el_s == 2.5
    # Token 1 was due at 2.5 and came at 2.25: the closest call.
    assert result.worst_lateness_s == -0.25
    assert (result.target_ttft, result.target_tbt) == (2.0, 0.5)
    assert (result.deadline, result.program_id, result.reason) == (None, None, None)


def test_a_token_exactly_when_due_is_on_time() -> None:
    result = outcome(LATENCY, [(1, 2.0), (2, 2.5), (3, 3.0)])
    assert (result.met, result.goodput_tokens, result.worst_lateness_s) == (True, 3, 0.0)


def test_late_tokens_do_not_count_and_later_ones_in_time_again_do() -> None:
    # Due at 2.0, 2.5, 3.0, 3.5: the second is late by 0.4, the others are not.
    result = outcome(LATENCY, [(1, 1.0), (2, 2.9), (3, 2.95), (4, 3.5)])
    assert result.met is False
    assert result.goodput_tokens == 3
    assert result.worst_lateness_s == pytest.approx(0.4)


def test_tokens_sent_together_in_time_all_count() -> None:
    assert outcome(LATENCY, [(5, 1.9)]).goodput_tokens == 5


def test_of_tokens_sent_together_the_first_may_be_late_and_the_rest_early() -> None:
    # Tokens 0 to 5, all at 3.2: due at 2, 2.5, 3 (late) and 3.5, 4, 4.5 (in time).
    result = outcome(LATENCY, [(6, 3.2)])
    assert result.goodput_tokens == 3
    assert result.met is False
    assert result.worst_lateness_s == pytest.approx(1.2)


def test_tokens_sent_together_exactly_when_one_of_them_is_due() -> None:
    # At 3.0: tokens 0 and 1 are late, token 2 is just in time.
    assert outcome(LATENCY, [(4, 3.0)]).goodput_tokens == 2


def test_a_second_batch_of_tokens_is_judged_by_its_own_first_token() -> None:
    # Tokens 0, 1 at 1.0 in time; tokens 2, 3, 4 at 3.7: due at 3.0, 3.5 (late), 4.0 (in time).
    result = outcome(LATENCY, [(2, 1.0), (5, 3.7)])
    assert result.goodput_tokens == 3
    assert result.worst_lateness_s == pytest.approx(0.7)


def test_tokens_later_than_all_their_due_times_count_nothing() -> None:
    assert outcome(LATENCY, [(3, 1000.0)]).goodput_tokens == 0


def test_calls_without_new_tokens_change_nothing() -> None:
    result = outcome(LATENCY, [(0, 0.5), (2, 1.0), (2, 50.0), (1, 60.0)], ends_s=60.0)
    assert (result.met, result.goodput_tokens, result.output_tokens) == (True, 2, 2)
    assert result.ttft_s == 1.0
    assert result.e2el_s == 60.0


def test_a_stream_ended_with_a_reason_keeps_its_tokens_but_is_not_met() -> None:
    result = outcome(LATENCY, [(2, 1.0)], reason="aborted")
    assert (result.met, result.goodput_tokens, result.reason) == (False, 2, "aborted")


def test_a_stream_without_a_token_has_no_ttft_and_no_lateness() -> None:
    result = outcome(LATENCY, [], ends_s=9.0)
    assert (result.ttft_s, result.worst_lateness_s, result.goodput_tokens) == (None, None, 0)
    assert result.met is True
    assert outcome(LATENCY, [], reason="dropped").met is False


def test_a_target_as_small_as_a_float_can_be_makes_everything_late_and_nothing_fail() -> None:
    slo = LatencySlo(target_ttft_s=5e-324, target_tbt_s=5e-324)
    assert outcome(slo, [(3, 1.0)]).goodput_tokens == 0
    assert outcome(LatencySlo(2.0, 5e-324), [(3, 1.0), (4, 3.0)]).goodput_tokens == 3


@given(
    ttft_s=st.floats(1e-3, 100),
    tbt_s=st.floats(1e-3, 10),
    sends=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 30)), min_size=1, max_size=20),
)
def test_goodput_of_a_stream_is_the_number_of_tokens_sent_by_their_due_times(
    ttft_s: float, tbt_s: float, sends: list[tuple[int, float]]
) -> None:
    slo = LatencySlo(ttft_s, tbt_s)
    tracker = OutcomeTracker(RequestTerms(ARRIVAL_S, slo))
    now_s, total, sent_at = ARRIVAL_S, 0, []
    for num_tokens, pause_s in sends:
        now_s += pause_s
        total += num_tokens
        sent_at += [now_s] * num_tokens
        tracker.sent(total, now_s)
    lateness = [at_s - (ARRIVAL_S + ttft_s + i * tbt_s) for i, at_s in enumerate(sent_at)]
    assume(all(abs(late_s) > 1e-6 for late_s in lateness))  # rounding decides such ties
    result = tracker.finish(7, now_s)
    assert result.goodput_tokens == sum(late_s < 0 for late_s in lateness)
    assert result.met is all(late_s < 0 for late_s in lateness)
    assert result.worst_lateness_s == pytest.approx(max(lateness), abs=1e-5)


# Deadlines ----------------------------------------------------------------------------------------


def test_a_deadline_made_counts_input_and_output() -> None:
    result = outcome(DeadlineSlo(5.0), [(1, 1.0), (4, 4.5)], input_tokens=20)
    assert (result.type, result.met, result.goodput_tokens) == ("deadline", True, 24)
    assert result.worst_lateness_s == -0.5
    assert (result.ttft_s, result.e2el_s, result.deadline) == (1.0, 4.5, 5.0)
    assert (result.target_ttft, result.target_tbt) == (None, None)


def test_a_deadline_missed_by_the_last_token_counts_nothing() -> None:
    result = outcome(DeadlineSlo(5.0), [(3, 1.0), (4, 5.5)])
    assert (result.met, result.goodput_tokens, result.worst_lateness_s) == (False, 0, 0.5)


def test_a_deadline_made_to_the_moment_is_met() -> None:
    assert outcome(DeadlineSlo(5.0), [(4, 5.0)]).met is True


def test_a_deadline_is_about_the_end_and_not_about_the_last_token() -> None:
    assert outcome(DeadlineSlo(5.0), [(4, 4.0)], ends_s=6.0).met is False


def test_an_answer_ended_with_a_reason_before_its_deadline_counts_nothing() -> None:
    result = outcome(DeadlineSlo(5.0), [(4, 1.0)], reason="aborted")
    assert (result.met, result.goodput_tokens, result.reason) == (False, 0, "aborted")


# Compound and best effort -------------------------------------------------------------------------


def test_a_call_of_a_program_is_judged_by_what_is_left_of_the_programs_deadline() -> None:
    result = outcome(CompoundSlo(3.0, "trip", node="plan"), [(2, 2.0)], input_tokens=5)
    assert (result.type, result.met, result.goodput_tokens) == ("compound", True, 7)
    assert (result.program_id, result.deadline) == ("trip", 3.0)
    late = outcome(CompoundSlo(-1.0, "trip"), [(2, 2.0)])
    assert (late.met, late.goodput_tokens, late.worst_lateness_s) == (False, 0, 3.0)


def test_a_later_call_reports_the_deadline_that_the_first_call_set() -> None:
    slo = CompoundSlo(40.0, "trip", program_age_s=20.0)
    result = outcome(slo, [(2, 30.0)])
    assert (result.deadline, result.met, result.worst_lateness_s) == (60.0, True, -10.0)


def test_best_effort_has_nothing_to_miss_and_nothing_to_count() -> None:
    result = outcome(BestEffortSlo(1.0), [(2, 50.0)])
    assert (result.type, result.met, result.goodput_tokens) == ("best_effort", True, 0)
    assert (result.worst_lateness_s, result.deadline, result.output_tokens) == (None, 1.0, 2)


def test_best_effort_ended_with_a_reason_is_not_met() -> None:
    assert outcome(BestEffortSlo(1.0), [(2, 50.0)], reason="aborted").met is False


# Thinking and then streaming ----------------------------------------------------------------------


REASONING = ReasoningSlo(deadline_s=10.0, target_tbt_s=0.5)


def thought(thinking_tokens: int, sent: list[tuple[int, float]], **more: str) -> SloOutcome:
    """The outcome of an answer whose first tokens are thinking."""
    tracker = OutcomeTracker(RequestTerms(ARRIVAL_S, REASONING))
    for total_tokens, after_s in sent:
        if total_tokens > thinking_tokens:
            tracker.answer_began(thinking_tokens)
        tracker.sent(total_tokens, ARRIVAL_S + after_s)
    return tracker.finish(7, ARRIVAL_S + sent[-1][1], **more)


def test_thinking_and_input_count_whole_where_the_answer_begins_in_time() -> None:
    result = thought(100, [(50, 4), (100, 9), (101, 9.5), (102, 10.2)])
    assert (result.met, result.goodput_tokens) == (True, 7 + 100 + 2)
    assert (result.type, result.deadline, result.target_tbt) == ("reasoning", 10.0, 0.5)
    assert result.worst_lateness_s == pytest.approx(-0.3)


def test_a_late_token_of_the_visible_answer_does_not_count() -> None:
    result = thought(100, [(100, 9), (101, 9.5), (102, 11)])
    assert (result.met, result.goodput_tokens) == (False, 7 + 100 + 1)


def test_nothing_counts_where_the_answer_begins_too_late() -> None:
    result = thought(100, [(100, 9), (101, 10.1), (140, 10.2)])
    assert (result.met, result.goodput_tokens) == (False, 0)


def test_the_chunk_that_ends_the_thinking_may_carry_tokens_of_both() -> None:
    result = thought(100, [(90, 5), (103, 9.9)])
    assert (result.met, result.goodput_tokens) == (True, 7 + 103)


def test_an_answer_without_a_visible_part_is_judged_by_its_deadline() -> None:
    assert thought(100, [(60, 9)]).goodput_tokens == 7 + 60
    assert thought(100, [(60, 11)]).goodput_tokens == 0


def test_an_aborted_answer_keeps_what_was_in_time_but_is_not_met() -> None:
    result = thought(10, [(10, 1), (15, 2)], reason="abort")
    assert (result.met, result.goodput_tokens) == (False, 7 + 15)
