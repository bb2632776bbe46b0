"""How long a request is waited for, and the reason that its sender gets."""

from __future__ import annotations

import math

from core.slo import BestEffortSlo, OnMiss, RequestTerms

REASON_WAITING_TIME = "waiting_time_exceeded"
REASON_DEADLINE = "deadline_passed"
"""Machine-readable reasons of a drop, as their senders get them."""


def is_cancelled_late(terms: RequestTerms, *, cancels_expired: bool) -> bool:
    """Whether it stops once its deadline has passed.

    Args:
        cancels_expired: the policy gives up whatever is late.
    """
    has_slo = not isinstance(terms.slo, BestEffortSlo)
    return has_slo and (terms.on_miss is OnMiss.CANCEL or cancels_expired)


def patience(
    terms: RequestTerms, *, deadline_at_s: float, has_started: bool, cancels_expired: bool
) -> tuple[float, str] | None:
    """Until when it is waited for, and why it ends then; None: for ever.

    Args:
        deadline_at_s: as it is now; infinite for a stream.
        cancels_expired: as in ``is_cancelled_late``.
    """
    waiting_s = due_s = math.inf
    if terms.waiting_time_s is not None and not has_started:
        waiting_s = terms.arrival_s + terms.waiting_time_s
    if is_cancelled_late(terms, cancels_expired=cancels_expired):
        due_s = deadline_at_s
    if not math.isfinite(min(waiting_s, due_s)):
        return None
    return (due_s, REASON_DEADLINE) if due_s <= waiting_s else (waiting_s, REASON_WAITING_TIME)
