"""The orders in which the policies put requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from scheduler.lengths import OnlineClassLengths
from scheduler.lifecycle import RequestState
from scheduler.policies import POLICIES, Policy, PolicyContext
from scheduler.policies.gmax import Gmax
from scheduler.policies.orders import EarliestDeadlineFirst, FirstComeFirstServed, ShortestJobFirst
from scheduler.request import Request
from scheduler.step_time import StepTimeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 8
STEP_S = 0.02
"""What the untaught step-time model says of the batch in `context()`."""


class KnownLengths:
    """Every answer is known: so many tokens in all, by request id."""

    def __init__(self, total: dict[str, int] | None = None, default: int = 100) -> None:
        self._total = total or {}
        self._default = default

    def remaining_mean(self, request: Request) -> float:
        total = self._total.get(request.request_id, self._default + request.generated_tokens)
        return float(max(total - request.generated_tokens, 1))

    remaining_bound = remaining_mean

    def fits_fraction(self, request: Request, tokens: float) -> float:
        return float(tokens >= self.remaining_mean(request))

    def learn(self, request: Request, *, is_censored: bool) -> None:
        raise AssertionError("a policy does not learn lengths")


def context(now_s: float = 0.0, lengths: Any = None) -> PolicyContext:
    """A frame in which eight requests of 500 tokens run, 20 ms a step."""
    return PolicyContext(
        now_s=now_s,
        lengths=lengths or KnownLengths(),
        step_time=StepTimeModel(),
        batch_size=BATCH,
        mean_context_tokens=500,
    )


def request_of(
    name: str,
    slo: Slo,
    *,
    serial: int = 0,
    arrival_s: float = 0.0,
    input_tokens: int = 100,
    generated: int = 0,
    frames_waited: int = 0,
    running: bool = False,
) -> Request:
    """A request in the state that the test needs."""
    request = Request(
        name,
        serial,
        RequestTerms(arrival_s, slo),
        input_tokens=input_tokens,
        max_output_tokens=100_000,
    )
    if running or generated:
        request.move_to(RequestState.RUNNING)
    request.generated_tokens = generated
    request.frames_waited = frames_waited
    return request


def order(policy: Policy, requests: Sequence[Request], where: PolicyContext) -> list[str]:
    """The names, best first; ties as the frame manager resolves them."""
    scored = zip(policy.scores(requests, where), requests, strict=True)
    ranked = sorted(scored, key=lambda item: (-item[0], item[1].serial))
    return [request.request_id for _, request in ranked]


def score(request: Request, where: PolicyContext | None = None) -> float:
    """The score that gmax gives one request."""
    return Gmax().scores([request], where or context())[0]


STREAM = LatencySlo(5.0, 0.2)


def test_the_context_of_these_tests_has_the_step_time_they_count_with() -> None:
    assert context().step_s == pytest.approx(STEP_S)


# GMAX: one request against another ----------------------------------------------------------------


# With the 20 ms of a step a batch of 8 gives 400 tokens a second, so the 100 tokens of an answer
# cost 0.25 s of the engine, and a prompt of 100 tokens another 0.01 s.


def test_the_score_of_a_stream_in_time_by_hand() -> None:
    # Due in 5 s: 4.97 s of slack after 0.01 s of prefill and a step.
    expected = 100 / (1 + 4.97 / 10) / 0.26
    assert score(request_of("r", STREAM)) == pytest.approx(expected, rel=1e-3)


def test_the_score_of_a_late_stream_by_hand() -> None:
    # Its next token was due at 7 and takes until 8.02; each token wins back 0.18 s.
    late = request_of("r", STREAM, generated=10)
    assert score(late, context(8.0)) == pytest.approx((100 - 1.02 / 0.18) / 0.25, rel=1e-3)


def test_the_score_of_a_deadline_by_hand() -> None:
    # Due in 10 s, 2.01 s of work: 7.99 s of slack; input and output count.
    expected = 200 / (1 + 7.99 / 10) / 0.26
    assert score(request_of("r", DeadlineSlo(10))) == pytest.approx(expected, rel=1e-3)


def test_the_scores_without_an_objective_by_hand() -> None:
    waited = request_of("r", BestEffortSlo(600), frames_waited=3)
    assert score(waited) == pytest.approx(0.05 * 100 / 0.26 + 3 * 0.002 * 400, rel=1e-3)
    expired = request_of("r", DeadlineSlo(5))
    assert score(expired, context(6.0)) == pytest.approx(0.02 * 100 / 0.26, rel=1e-3)


def test_a_tight_deadline_comes_before_a_loose_one_of_the_same_size() -> None:
    tight, loose = (
        request_of("tight", DeadlineSlo(10), serial=1),
        request_of("loose", DeadlineSlo(60)),
    )
    assert order(Gmax(), [loose, tight], context()) == ["tight", "loose"]


def test_a_program_call_ranks_like_a_deadline_with_the_same_time_left() -> None:
    call = request_of("call", CompoundSlo(10, "p"))
    assert score(call) == score(request_of("deadline", DeadlineSlo(10)))


def test_a_stream_without_slack_comes_before_one_far_ahead_of_its_timeline() -> None:
    now_s = 7.1
    due = request_of("due", STREAM, serial=1, generated=10)  # token 10 was due at 7.0
    ahead = request_of("ahead", STREAM, generated=100)  # token 100 is due at 25.0
    assert order(Gmax(), [ahead, due], context(now_s)) == ["due", "ahead"]


def test_a_stream_whose_remaining_tokens_are_all_late_is_worth_next_to_nothing() -> None:
    lost = request_of("lost", LatencySlo(1.0, 0.02), generated=10)
    assert 0 < score(lost, context(500.0)) < score(request_of("be", BestEffortSlo(600)))


def test_a_late_stream_that_can_still_catch_up_keeps_most_of_its_worth() -> None:
    late = request_of("late", STREAM, generated=10)
    on_time = score(late, context(6.97))
    a_second_late = score(late, context(8.0))
    assert on_time > a_second_late > 0.9 * on_time


def test_the_shorter_of_two_equal_deadlines_comes_first_when_input_does_not_matter() -> None:
    lengths = KnownLengths({"short": 20, "long": 200})
    short, long = (
        request_of("short", STREAM, serial=1, input_tokens=1),
        request_of("long", STREAM, input_tokens=1000),
    )
    assert order(Gmax(), [long, short], context(lengths=lengths)) == ["short", "long"]


def test_expired_work_comes_last() -> None:
    now_s = 100.0
    requests = [
        request_of("expired", DeadlineSlo(50)),
        request_of("expired call", CompoundSlo(-1, "p"), serial=1, arrival_s=99),
        request_of("best effort", BestEffortSlo(600), serial=2, arrival_s=99),
        request_of("stream", STREAM, serial=3, arrival_s=99),
        request_of("deadline", DeadlineSlo(20), serial=4, arrival_s=99),
    ]
    ranked = order(Gmax(), requests, context(now_s))
    assert ranked[-2:] == ["expired", "expired call"]
    assert ranked[-3] == "best effort"
    assert all(value > 0 for value in Gmax().scores(requests, context(now_s)))


def test_a_best_effort_request_past_its_default_deadline_loses_nothing() -> None:
    request = request_of("be", BestEffortSlo(10))
    assert score(request, context(5.0)) == score(request, context(5000.0))


def test_a_deadline_that_cannot_be_made_is_demoted_but_not_to_nothing() -> None:
    infeasible = request_of("infeasible", DeadlineSlo(1.0))  # 100 tokens take 2 s
    feasible = request_of("feasible", DeadlineSlo(3.0))
    assert 0 < score(infeasible) < score(request_of("be", BestEffortSlo(600))) < score(feasible)


def test_a_deadline_counts_with_the_chance_that_its_answer_fits() -> None:
    def worth(*finished: int) -> float:
        lengths = OnlineClassLengths()
        for length in finished:
            seen = request_of("seen", DeadlineSlo(1), generated=length)
            lengths.learn(seen, is_censored=False)
        return score(request_of("r", DeadlineSlo(6)), context(lengths=lengths))

    # The same mean; 6 s hold 300 steps, so both answers or one of the two.
    assert worth(50, 500) == pytest.approx(worth(274, 276) / 2)


def test_prefill_that_must_be_done_again_makes_a_request_worth_less() -> None:
    running = request_of("running", DeadlineSlo(30), input_tokens=4000, generated=50)
    preempted = request_of("preempted", DeadlineSlo(30), input_tokens=4000, generated=50)
    preempted.move_to(RequestState.PREEMPTED)
    assert score(running) > score(preempted) > 0


def test_best_effort_rises_with_every_frame_it_waits_until_it_passes_a_stream() -> None:
    waits = [0, 1, 10, 100, 1000]
    scores = [score(request_of("be", BestEffortSlo(600), frames_waited=frames)) for frames in waits]
    assert scores == sorted(set(scores))
    stream = score(request_of("stream", STREAM))
    assert scores[0] < stream < scores[-1]


def test_expired_work_rises_too_so_that_it_does_not_starve() -> None:
    now = context(100.0)
    fresh = score(request_of("fresh", DeadlineSlo(5)), now)
    waited = score(request_of("waited", DeadlineSlo(5), frames_waited=1000), now)
    assert waited > score(request_of("be", BestEffortSlo(600)), now) > fresh


# GMAX: the group ----------------------------------------------------------------------------------


def scored(*items: tuple[str, float, int]) -> list[tuple[float, Request]]:
    """Requests by name, score and input length, best first."""
    ranked = [
        (value, request_of(name, BestEffortSlo(600), serial=serial, input_tokens=length))
        for serial, (name, value, length) in enumerate(items)
    ]
    return sorted(ranked, key=lambda item: (-item[0], item[1].serial))


def chosen(ranked: list[tuple[float, Request]], slots: int) -> list[str]:
    """Names of the group that gmax takes."""
    return [request.request_id for _, request in Gmax().choose(ranked, slots)]


def test_when_all_fit_all_are_taken_in_their_order() -> None:
    ranked = scored(("a", 3, 10), ("b", 2, 9000), ("c", 1, 10))
    assert chosen(ranked, 3) == chosen(ranked, 99) == ["a", "b", "c"]
    assert chosen(ranked, 0) == []


def test_among_near_equals_the_group_is_of_like_length() -> None:
    ranked = scored(("long", 10, 1000), ("a", 10, 100), ("b", 9.9, 110))
    assert chosen(ranked, 2) == ["a", "b"]


def test_below_the_cutoff_no_likeness_helps() -> None:
    # Its score is 0.94 of the second best: 0.95 is needed.
    ranked = scored(("long", 10, 1000), ("a", 10, 100), ("b", 9.4, 110))
    assert chosen(ranked, 2) == ["long", "a"]


def test_of_two_groups_of_like_length_the_one_of_more_score_is_taken() -> None:
    ranked = scored(("a", 10, 10), ("b", 9.6, 12), ("c", 9.9, 1000), ("d", 9.95, 1010))
    assert chosen(ranked, 2) == ["d", "c"]


def test_the_group_is_given_best_first_and_ties_in_order_of_arrival() -> None:
    ranked = scored(("a", 10, 30), ("b", 10, 20), ("c", 10.1, 10), ("d", 9.9, 5000))
    assert chosen(ranked, 3) == ["c", "a", "b"]


@given(
    items=st.lists(st.tuples(st.floats(0, 1e12), st.integers(1, 10**5)), max_size=12),
    slots=st.integers(0, 12),
)
def test_the_group_has_as_many_as_fit_and_nobody_twice(
    items: list[tuple[float, int]], slots: int
) -> None:
    ranked = scored(*((f"r{i}", value, length) for i, (value, length) in enumerate(items)))
    group = chosen(ranked, slots)
    assert len(group) == min(slots, len(items))
    assert len(set(group)) == len(group)


# The baselines ------------------------------------------------------------------------------------


def test_fcfs_is_the_order_of_arrival_whatever_is_due() -> None:
    requests = [
        request_of("third", DeadlineSlo(1), serial=3),
        request_of("first", BestEffortSlo(600), serial=1),
        request_of("second", STREAM, serial=2),
    ]
    assert order(FirstComeFirstServed(), requests, context()) == ["first", "second", "third"]


def test_edf_is_the_order_of_what_is_due_next_a_token_or_an_answer() -> None:
    requests = [
        request_of("best effort", BestEffortSlo(600), serial=0),
        request_of("stream", STREAM, serial=1, generated=20),  # token 20 is due at 9
        request_of("call", CompoundSlo(12, "p"), serial=2),
        request_of("deadline", DeadlineSlo(8), serial=3),
    ]
    ranked = order(EarliestDeadlineFirst(), requests, context(5.0))
    assert ranked == ["deadline", "stream", "call", "best effort"]


def test_sjf_is_the_order_of_what_is_expected_to_remain() -> None:
    lengths = KnownLengths({"long": 300, "nearly done": 301, "short": 50})
    requests = [
        request_of("long", STREAM, serial=0),
        request_of("nearly done", DeadlineSlo(60), serial=1, generated=300),
        request_of("short", DeadlineSlo(1), serial=2),
    ]
    ranked = order(ShortestJobFirst(), requests, context(lengths=lengths))
    assert ranked == ["nearly done", "short", "long"]


@pytest.mark.parametrize("name", POLICIES)
def test_ties_keep_the_order_of_arrival(name: str) -> None:
    requests = [request_of(f"r{serial}", DeadlineSlo(9), serial=serial) for serial in (2, 0, 1)]
    assert order(POLICIES[name](), requests, context()) == ["r0", "r1", "r2"]


def test_only_fcfs_and_sjf_leave_everybody_where_he_runs() -> None:
    displacing = {name for name, make in POLICIES.items() if make().may_displace}
    assert displacing == {"gmax", "edf"}


# Whatever comes -----------------------------------------------------------------------------------

times = st.floats(5e-324, 3.2e7) | st.sampled_from([5e-324, 1e-300, 1.0, 3.2e7])
slos = st.one_of(
    st.builds(LatencySlo, times, times),
    st.builds(DeadlineSlo, times),
    st.builds(lambda left_s: CompoundSlo(left_s, "p"), st.floats(-3.2e7, 3.2e7)),
    st.builds(BestEffortSlo, times),
)
counts = st.integers(0, 100) | st.integers(0, 2**62)


@pytest.mark.parametrize("name", POLICIES)
@given(
    slo=slos,
    arrival_s=st.floats(-1e9, 1e9),
    now_s=st.floats(-1e9, 1e9),
    input_tokens=counts,
    generated=counts,
    max_output_tokens=counts,
    frames_waited=counts,
    state=st.sampled_from([None, RequestState.RUNNING, RequestState.PREEMPTED]),
    batch_size=st.integers(1, 10**6),
    mean_context_tokens=st.floats(0, 1e12),
)
def test_scores_are_finite_for_absurd_requests(
    name: str,
    slo: Slo,
    arrival_s: float,
    now_s: float,
    input_tokens: int,
    generated: int,
    max_output_tokens: int,
    frames_waited: int,
    state: RequestState | None,
    batch_size: int,
    mean_context_tokens: float,
) -> None:
    request = Request(
        "r",
        0,
        RequestTerms(arrival_s, slo),
        input_tokens=input_tokens,
        max_output_tokens=max_output_tokens,
    )
    if state is not None:
        request.move_to(RequestState.RUNNING)
    if state is RequestState.PREEMPTED:
        request.move_to(state)
    request.generated_tokens = generated
    request.frames_waited = frames_waited
    where = PolicyContext(
        now_s, OnlineClassLengths(), StepTimeModel(), batch_size, mean_context_tokens
    )
    values = POLICIES[name]().scores([request], where)
    assert len(values) == 1
    assert math.isfinite(values[0])
