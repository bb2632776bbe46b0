"""The states of a request and the moves between them."""

from __future__ import annotations

import itertools

import pytest

from scheduler.lifecycle import (
    ENDED,
    TRANSITIONS,
    RequestState,
    TransitionError,
    check_transition,
)

S = RequestState
ALLOWED = {
    (S.WAITING, S.RUNNING),
    (S.WAITING, S.DROPPED),
    (S.WAITING, S.ABORTED),
    (S.RUNNING, S.PARKED),
    (S.RUNNING, S.PREEMPTED),
    (S.RUNNING, S.FINISHED),
    (S.RUNNING, S.ABORTED),
    (S.PARKED, S.RUNNING),
    (S.PARKED, S.PREEMPTED),
    (S.PARKED, S.FINISHED),
    (S.PARKED, S.ABORTED),
    (S.PREEMPTED, S.RUNNING),
    (S.PREEMPTED, S.ABORTED),
}
PAIRS = list(itertools.product(S, S))


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair in ALLOWED])
def test_a_move_of_the_table_is_allowed(old: RequestState, new: RequestState) -> None:
    check_transition("r", old, new)


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair not in ALLOWED])
def test_every_other_move_is_refused_naming_the_request_and_both_states(
    old: RequestState, new: RequestState
) -> None:
    with pytest.raises(TransitionError, match=f"'r7' cannot go from {old} to {new}"):
        check_transition("r7", old, new)


def test_nothing_leads_out_of_an_ended_state_and_something_out_of_every_other() -> None:
    assert {state for state in S if not TRANSITIONS[state]} == ENDED


def test_only_a_request_that_never_ran_can_be_dropped() -> None:
    assert {old for old, new in ALLOWED if new is S.DROPPED} == {S.WAITING}
    assert S.DROPPED not in TRANSITIONS[S.PREEMPTED]


def test_every_state_can_be_left_by_the_senders_abort_until_it_has_ended() -> None:
    assert all(S.ABORTED in TRANSITIONS[state] for state in set(S) - ENDED)
