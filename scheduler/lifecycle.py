"""The states of a request and the moves between them."""

import enum
from collections.abc import Mapping


class RequestState(enum.StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Arrived, never scheduled: it holds no KV."""
    RUNNING = "running"
    """In the running batch, or being prefilled."""
    PARKED = "parked"
    """Rests with its KV resident; free to resume."""
    PREEMPTED = "preempted"
    """Had to give up its KV; resumes by prefill."""
    FINISHED = "finished"
    DROPPED = "dropped"
    """Never scheduled, ended by us with a reason."""
    ABORTED = "aborted"
    """Ended early: by its sender, by on_miss or by the engine."""


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {
            RequestState.RUNNING,
            RequestState.DROPPED,
            RequestState.ABORTED,
        }
    ),
    RequestState.RUNNING: frozenset(
        {
            RequestState.PARKED,
            RequestState.PREEMPTED,
            RequestState.FINISHED,
            RequestState.ABORTED,
        }
    ),
    RequestState.PARKED: frozenset(
        {
            RequestState.RUNNING,
            RequestState.PREEMPTED,
            # Its last step was in flight when it was parked.
            RequestState.FINISHED,
            RequestState.ABORTED,
        }
    ),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.ABORTED}),
    RequestState.FINISHED: frozenset(),
    RequestState.DROPPED: frozenset(),
    RequestState.ABORTED: frozenset(),
}

ENDED = frozenset({RequestState.FINISHED, RequestState.DROPPED, RequestState.ABORTED})


class TransitionError(RuntimeError):
    """A move that the table does not have: a defect of the caller."""


def check_transition(request_id: str, old: RequestState, new: RequestState) -> None:
    """Raise ``TransitionError`` unless a request may go from ``old`` to ``new``."""
    if new not in TRANSITIONS[old]:
        raise TransitionError(f"request {request_id!r} cannot go from {old} to {new}")
