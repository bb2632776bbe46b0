"""What the two gmax policies prefer, on an engine whose every step takes an eighth of a second."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD, BEST_EFFORT, NOW_S, STEP_S, Ask, estimates_of, steps

from core.slo import CompoundSlo, DeadlineSlo, LatencySlo
from scheduler.lengths import Information
from scheduler.objective import WeightedTokens, WholeRequests
from scheduler.policies import POLICIES, gmax
from scheduler.policies.base import Policy, best_first, finite
from scheduler.policies.gmax import Gmax, GmaxParts, PaperGmax
from scheduler.programs import ProgramOutlook, Programs
from scheduler.step_time import StepTimeModel
from scheduler.table import PARKED, RUNNING

STREAM = LatencySlo(5.0, 0.25)
both = pytest.mark.parametrize("make", [Gmax, PaperGmax], ids=["gmax", "gmax-paper"])


def scores(policy: Policy, *asks: Ask, is_overload: bool = True, **context: object) -> list[float]:
    """Their scores where not even one more fits, or where as many fit as may."""
    estimates = estimates_of(*asks, information=policy.traits.information, **context)
    fitting_load = 0.0 if is_overload else gmax.FITTING_LOAD
    with patch.object(gmax, "FITTING_LOAD", fitting_load):
        return finite(policy.assess(estimates).scores).tolist()


def order(policy: Policy, *asks: Ask, is_overload: bool = True, **context: object) -> list[int]:
    """Their places, best first."""
    values = np.array(scores(policy, *asks, is_overload=is_overload, **context))
    return best_first(values, np.arange(len(asks)), len(asks)).tolist()


AVERAGE_TOKENS = 256.0
"""Of a request and of an answer, before any has finished."""


def if_met(tokens_value: float) -> float:
    """With what the request itself is worth: a request of average size, ten times it at most."""
    return tokens_value + min(10 * tokens_value, AVERAGE_TOKENS)


# By hand -----------------------------------------------------------------------------------------


def test_the_score_of_a_deadline_by_hand() -> None:
    # 100 tokens of input and 40 to come, held: 40 steps of 1/8 s are 5 s of the engine.
    ask = Ask(slo=DeadlineSlo(15), input_tokens=100, mean=40, state=PARKED)
    assert scores(Gmax(), ask) == pytest.approx([if_met(140) / 5])


def test_the_score_of_a_stream_in_time_by_hand() -> None:
    # Input does not count.
    ask = Ask(slo=STREAM, mean=40, state=PARKED)
    assert scores(Gmax(), ask) == pytest.approx([if_met(40) / 5])


@pytest.mark.parametrize(
    ("ask", "value"),
    [
        (Ask(slo=DeadlineSlo(15), input_tokens=100, mean=40, state=PARKED), 140 + 700),
        (Ask(slo=DeadlineSlo(15), input_tokens=10, mean=40, state=PARKED), 50 + 500),
        (Ask(slo=STREAM, mean=80, state=PARKED), 80 + 700),
        (Ask(slo=STREAM, mean=40, state=PARKED), 40 + 400),
        (Ask(slo=CompoundSlo(60, "p"), program=0, mean=60, state=PARKED), 160 + 700),
        (Ask(slo=CompoundSlo(60, "p"), program=0, mean=1, state=PARKED, input_tokens=9), 10 + 100),
    ],
)
def test_a_request_is_worth_one_of_average_size_beside_its_tokens_and_ten_times_them_at_most(
    ask: Ask, value: float
) -> None:
    found = scores(Gmax(), ask, average_request=(400.0, 300.0), programs=program())
    assert found == pytest.approx([value / (ask.mean * STEP_S)])


def test_one_of_average_size_is_worth_what_the_objective_says() -> None:
    ask = Ask(slo=DeadlineSlo(15), input_tokens=100, mean=40, state=PARKED)
    context = {"average_request": (50.0, 30.0), "objective": WeightedTokens(1.0, 2.0)}
    assert scores(Gmax(), ask, **context) == pytest.approx([(180 + 110) / 5])
    assert scores(Gmax(), ask, objective=WholeRequests()) == pytest.approx([(1 + 1) / 5])


def test_a_stream_that_was_late_once_is_worth_its_tokens_alone() -> None:
    # Both are in time from now on: of 64 and 256 for the request a fifth is left, squared.
    late, even = (Ask(slo=STREAM, mean=64, state=PARKED, was_late=late) for late in (True, False))
    assert scores(Gmax(), late, even) == pytest.approx([320 / 8 * (1 / 5) ** 2, 320 / 8])


def test_who_asks_for_whole_requests_gets_nothing_for_a_stream_that_was_late_once() -> None:
    late = Ask(slo=STREAM, mean=40, state=PARKED, was_late=True)
    # Not quite: what is late already is served as well, 0.02 of an average stream's 1 in 32 s.
    served = 0.02 * 1 / 32 * 256 / (256 + 40)
    assert scores(Gmax(), late, objective=WholeRequests()) == pytest.approx([served])


def test_the_score_of_best_effort_by_hand() -> None:
    assert scores(Gmax(), Ask(mean=40, state=PARKED)) == pytest.approx([0.05 * 40 / 5])


def test_the_papers_priority_by_hand() -> None:
    # Goodput (input and the upper bound of the output) over t_gen.
    ask = Ask(slo=DeadlineSlo(60), input_tokens=100, bound=80, mean=40, state=PARKED)
    assert scores(PaperGmax(), ask) == pytest.approx([(100 + 40) / (80 * STEP_S)])


# What is preferred --------------------------------------------------------------------------------


@both
def test_more_value_for_the_same_time_goes_first(make: type[Policy]) -> None:
    poor, rich = (
        Ask(slo=DeadlineSlo(60), input_tokens=tokens, state=PARKED) for tokens in (10, 900)
    )
    assert order(make(), poor, rich) == [1, 0]


@both
def test_what_cannot_make_its_deadline_goes_behind_what_can(make: type[Policy]) -> None:
    hopeless = Ask(slo=DeadlineSlo(5), input_tokens=5000, mean=100, bound=100, state=PARKED)
    possible = Ask(slo=DeadlineSlo(20), input_tokens=100, mean=100, bound=100, state=PARKED)
    assert order(make(), hopeless, possible) == [1, 0]


@both
def test_late_work_is_last_but_not_nothing(make: type[Policy]) -> None:
    late = Ask(slo=DeadlineSlo(5), arrival_s=NOW_S - 10, state=PARKED)
    possible = Ask(slo=DeadlineSlo(60), state=PARKED)
    assert order(make(), late, possible) == [1, 0]
    assert scores(make(), late)[0] > 0


def test_of_equals_the_more_urgent_goes_first_but_not_in_an_overload() -> None:
    loose, tight = (
        Ask(slo=DeadlineSlo(due_s), mean=40, bound=40, state=PARKED) for due_s in (100, 15)
    )
    assert order(Gmax(), loose, tight, is_overload=False) == [1, 0]
    assert len(set(scores(Gmax(), loose, tight))) == 1
    assert order(Gmax(), loose, tight) == [0, 1]


def test_while_everything_fits_the_score_is_that_of_the_time_to_spare_by_hand() -> None:
    # An average stream earns 16 tokens a second in a batch of two. 40 steps are 5 s: 10 s to spare
    # of 15, 0 of 5; and a sixteenth of a second less than none, where the longest does not fit.
    points = (*([39.0] * 31), 71.0)
    for due_s, length, slack_s in ((15.0, {}, 10.0), (5.0, {"points": points}, 0.0)):
        ask = Ask(slo=DeadlineSlo(due_s), **{"mean": 40, "state": PARKED} | length)
        found = scores(Gmax(), ask, is_overload=False, batch_size=2)
        assert found == pytest.approx([16 * (1 + 10 / (10 + slack_s))])


def test_while_everything_fits_worth_counts_for_nothing_against_time() -> None:
    rich = Ask(slo=DeadlineSlo(400), input_tokens=50_000, mean=40, bound=40, state=PARKED)
    tight = Ask(slo=STREAM, mean=40, bound=40, state=PARKED)
    assert order(Gmax(), rich, tight, is_overload=False) == [1, 0]
    assert order(Gmax(), rich, tight) == [0, 1]


def test_while_everything_fits_what_has_no_time_to_lose_goes_last() -> None:
    asks = (
        Ask(slo=BEST_EFFORT, mean=1, state=PARKED),
        Ask(slo=DeadlineSlo(5), arrival_s=NOW_S - 9, mean=1, state=PARKED),
        Ask(slo=DeadlineSlo(4), points=(40.0,) * 31 + (1.0,), state=PARKED),  # a chance of 1/32
        Ask(slo=DeadlineSlo(4000), mean=40, state=PARKED),
    )
    assert order(Gmax(), *asks, is_overload=False, batch_size=2) == [2, 3, 0, 1]
    two = (Ask(slo=DeadlineSlo(4), mean=40, state=PARKED), Ask(slo=BEST_EFFORT, state=PARKED))
    assert order(Gmax(), *two, is_overload=False, batch_size=2) == [1, 0]


@pytest.mark.parametrize(("due_in_s", "is_light"), [(25.0 / 0.41, False), (25.0 / 0.39, True)])
def test_everything_fits_up_to_four_fifths_of_the_engine(due_in_s: float, is_light: bool) -> None:
    # 12.5 s in so many, and in twice as many: 0.41 + 0.41 and 0.39 + 0.39 of the engine.
    one = Ask(slo=DeadlineSlo(due_in_s), input_tokens=900, mean=200, bound=200, state=PARKED)
    other = Ask(slo=DeadlineSlo(due_in_s / 2), input_tokens=1, mean=100, bound=100, state=PARKED)
    assert order(Gmax(), one, other, is_overload=False) == ([1, 0] if is_light else [0, 1])


def needs_a_third(due_in_s: float, input_tokens: int, state: int = PARKED) -> Ask:
    """One that needs a third of the engine until then, worth the more the longer its prompt."""
    mean = due_in_s / 3 / STEP_S
    return Ask(
        slo=DeadlineSlo(due_in_s), input_tokens=input_tokens, mean=mean, bound=mean, state=state
    )


def test_in_overload_the_best_that_fit_go_by_their_time_and_the_others_behind_by_worth() -> None:
    asks = (
        needs_a_third(30, 4000),
        needs_a_third(12, 20),  # worth least
        needs_a_third(24, 3600),
        needs_a_third(18, 1000),
    )
    assert order(Gmax(), *asks, is_overload=False) == [2, 0, 3, 1]


def test_who_runs_gives_its_place_among_those_that_fit_only_to_who_is_worth_much_more() -> None:
    best = needs_a_third(30, 4000)
    for rival, first in ((1100, 1), (2000, 2)):
        asks = (best, needs_a_third(24, 1000, RUNNING), needs_a_third(24, rival))
        assert order(Gmax(), *asks, is_overload=False)[0] == first


def test_a_deadline_counts_with_the_square_of_the_chance_that_its_answer_fits() -> None:
    # Lengths of 10, 20, … 320; 160 steps fit into 20 s: half of them.
    sure = Ask(slo=DeadlineSlo(400), points=steps(10), state=PARKED)
    half = Ask(slo=DeadlineSlo(20), points=steps(10), state=PARKED)
    full, chance = scores(Gmax(), sure, half)
    assert chance == pytest.approx(full / 4)


def test_a_stream_is_worth_the_tokens_that_can_still_be_in_time() -> None:
    # 10 s late; each step of 1/8 s wins back 1/8 s of a TBT of 1/4 s: 81 tokens until then.
    late = Ask(slo=LatencySlo(1.0, 0.25), arrival_s=NOW_S - 11, mean=300, state=PARKED)
    now = Ask(slo=LatencySlo(0.125, 0.25), mean=300, state=PARKED)
    behind, even = scores(Gmax(), late, now)
    # 219 of the 300 and the 256 that the request itself would be worth.
    assert even == pytest.approx(if_met(300) / 37.5)
    assert behind == pytest.approx(even * (219 / 556) ** 2)


@both
def test_a_stream_that_can_never_catch_up_goes_last(make: type[Policy]) -> None:
    never = Ask(slo=LatencySlo(1.0, 0.01), arrival_s=NOW_S - 60, state=PARKED)
    even = Ask(slo=STREAM, state=PARKED)
    assert order(make(), never, even) == [1, 0]


def test_kv_that_must_be_built_again_makes_a_request_dearer() -> None:
    model = StepTimeModel.known(STEP_S, prefill_s=0.01)
    held, lost = (Ask(slo=DeadlineSlo(60), state=state) for state in (PARKED, 0))
    assert order(Gmax(), lost, held, step_time=model) == [1, 0]


@both
def test_best_effort_rises_with_every_frame_until_it_passes_a_stream(make: type[Policy]) -> None:
    # gmax: 0.05 of 1 token per step, against 1 and the request's 1; and 0.002 of that a frame.
    stream = Ask(slo=LatencySlo(0.125, 0.25), mean=256, state=PARKED)
    beaten_at = 976 if make is PaperGmax else 488
    fresh, old = (Ask(slo=BEST_EFFORT, waited=num, state=PARKED) for num in (0, beaten_at))
    assert order(make(), fresh, stream) == [1, 0]
    assert order(make(), old, stream) == [0, 1]
    if make is Gmax:
        almost = Ask(slo=BEST_EFFORT, waited=487, state=PARKED)
        assert order(make(), almost, stream) == [1, 0]


def test_what_is_late_rises_a_fiftieth_as_fast() -> None:
    # An average stream earns 8 tokens a second; 100 tokens are shorter than its 256.
    def score(waited: float) -> float:
        late = Ask(slo=DeadlineSlo(5), arrival_s=NOW_S - 10, waited=waited, state=PARKED)
        return scores(Gmax(), late, Ask(slo=STREAM, mean=256, state=PARKED))[0]

    assert score(0) == pytest.approx(0.02 * 8 * 256 / 356)
    # The best that does not fit is the stream, and earns 16 with the request's own worth.
    assert score(500) - score(0) == pytest.approx(0.02 * 0.002 * 16 * 500)


def test_under_another_objective_the_weights_keep_their_meaning() -> None:
    asks = (
        Ask(slo=BEST_EFFORT, mean=100, state=PARKED),
        Ask(slo=DeadlineSlo(5), arrival_s=NOW_S - 9, mean=100, state=PARKED),
        Ask(slo=STREAM, mean=100, state=PARKED),
        Ask(slo=DeadlineSlo(30), mean=50, state=PARKED),
    )
    assert order(Gmax(), *asks, objective=WholeRequests()) == [3, 2, 0, 1]


# Programs -----------------------------------------------------------------------------------------


def program(*stages: tuple[float, float], is_final: bool = True) -> Programs:
    """One program, with calls of so many input and output tokens behind it."""
    programs = Programs()
    for input_tokens, output_tokens in stages:
        index = programs.join("", "p", is_final=False)
        programs.leave(index, input_tokens=input_tokens, output_tokens=output_tokens)
    programs.join("", "p", is_final=is_final)
    return programs


def call(**changes: object) -> Ask:
    fields = {"slo": CompoundSlo(60, "p"), "program": 0, "state": PARKED}
    return Ask(**fields | changes)


@both
def test_what_a_program_has_got_already_counts(make: type[Policy]) -> None:
    begun, fresh = program((500, 500)), program()
    assert scores(make(), call(), programs=begun)[0] > scores(make(), call(), programs=fresh)[0]


def test_all_live_calls_of_a_program_have_one_score() -> None:
    calls = call(mean=10), call(mean=200), call(input_tokens=3000)
    assert len({round(score, 9) for score in scores(Gmax(), *calls, programs=program())}) == 1


def test_the_rest_of_a_program_that_is_not_certain_makes_it_less_likely() -> None:
    # 480 steps fit into 60 s: 100 of the call, 360 expected after it, and 20 to spare.
    def score(spread: float) -> float:
        programs = program(is_final=False)
        outlook = ProgramOutlook(future_stage_tokens=360, future_spread_tokens=spread)
        programs.expect("", "p", outlook)
        return scores(Gmax(), call(), programs=programs)[0]

    sure = score(0)
    # One deviation to spare: 0.846 by the logistic curve; none: a half.
    assert score(20) == pytest.approx(sure * 0.8458**2, rel=1e-3)
    assert score(1e6) == pytest.approx(sure * 0.5**2, rel=1e-3)


def test_a_program_is_as_likely_as_its_unlikeliest_call() -> None:
    short, long = call(points=steps(1)), call(points=steps(30))  # 480 steps fit into 60 s
    alone = Gmax().assess(estimates_of(short, programs=program())).in_time_fraction
    pair = Gmax().assess(estimates_of(short, long, programs=program())).in_time_fraction
    assert alone is not None
    assert pair is not None
    assert alone.tolist() == [1.0]
    assert pair.tolist() == [0.5, 0.5]


def test_what_a_pattern_match_expects_makes_the_rest_dearer() -> None:
    expected, open_ended = program(is_final=False), program(is_final=False)
    expected.expect("", "p", ProgramOutlook(future_output_tokens=5000.0))
    dearer = scores(Gmax(), call(), programs=expected)[0]
    assert dearer < scores(Gmax(), call(), programs=open_ended)[0]


def test_where_nothing_fits_any_more_an_expectation_is_taken_back() -> None:
    programs = program(is_final=False)
    before = scores(Gmax(), call(), programs=programs)
    programs.expect("", "p", ProgramOutlook(future_output_tokens=5000.0, stage_due_s=NOW_S + 1))
    assert scores(Gmax(), call(), programs=programs) != before
    programs.expect("", "p", None)
    assert scores(Gmax(), call(), programs=programs) == before


# Which parts are on -------------------------------------------------------------------------------


def test_the_oracle_goes_by_the_true_length_where_it_is_known() -> None:
    # Forecasts say that both are alike; the second is really short.
    asks = (
        Ask(slo=DeadlineSlo(60), known=400, state=PARKED),
        Ask(slo=DeadlineSlo(60), known=10, state=PARKED),
    )
    assert order(Gmax(information=Information.KNOWN), *asks) == [1, 0]
    assert order(Gmax(), *asks) == [0, 1]


def test_without_the_analyzer_all_answers_are_of_average_length() -> None:
    asks = Ask(slo=DeadlineSlo(60), mean=10), Ask(slo=DeadlineSlo(60), mean=400)
    plain = Gmax(information=Information.AVERAGE)
    assert len(set(scores(plain, *asks))) == 1


def test_without_gmax_the_shortest_job_goes_first() -> None:
    asks = (
        Ask(slo=DeadlineSlo(60), mean=50, input_tokens=5000),
        Ask(slo=DeadlineSlo(60), mean=20, input_tokens=1),
    )
    assert order(Gmax(GmaxParts(has_gmax=False)), *asks) == [1, 0]
    assert order(Gmax(), *asks) == [0, 1]


@given(asks=st.lists(ABSURD.asks(), min_size=1, max_size=6), name=st.sampled_from(list(POLICIES)))
def test_scores_are_finite_numbers_for_absurd_requests(asks: list[Ask], name: str) -> None:
    policy = POLICIES[name]()
    assessment = policy.assess(estimates_of(*asks))
    assert np.isfinite(assessment.scores).all()
    assert np.isfinite(assessment.values).all()


def test_equals_do_not_take_turns_until_one_has_waited_for_long() -> None:
    runs = Ask(slo=BEST_EFFORT, state=RUNNING)
    for waited, first in ((0, 0), (20, 0), (30, 1)):
        assert order(Gmax(), runs, Ask(slo=BEST_EFFORT, waited=waited, state=PARKED))[0] == first


def test_the_load_is_that_of_all_that_is_live_and_not_of_the_few_that_are_looked_at() -> None:
    # Held, 40 steps to come: both fit by themselves. The first is tighter, the second richer.
    tight = Ask(slo=DeadlineSlo(15), input_tokens=10, mean=40, bound=40, state=PARKED)
    rich = Ask(slo=DeadlineSlo(90), input_tokens=5000, mean=40, bound=40, state=PARKED)
    policy = Gmax()
    assert order(policy, tight, rich, is_overload=False, is_whole=True) == [0, 1]
    assert order(policy, tight, rich, is_overload=True, is_whole=True) == [1, 0]
    # Inside the frame only these two are looked at.
    assert order(policy, tight, rich, is_overload=False, is_whole=False) == [1, 0]
