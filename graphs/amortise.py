"""A program's deadline, shared out to its stages.

The paper's accumulated share, phi(s) = t_<=s / t_total, and the two alternatives of its
appendix (Pattern-Graph Matching Alternatives). Times are execution times of a pattern or
expectations of them; only their proportions count.
"""

import enum
from typing import assert_never

_SMALLEST_S = 1e-9


class Amortisation(enum.StrEnum):
    """How a stage's sub-deadline follows from the shares of the deadline."""

    ACCUMULATED = "accumulated"
    """phi(s) of the whole; where a stage was early or late, what is left is shared out anew."""
    STAGE_SHARE = "stage_share"
    """t_s / t_total of the whole deadline, from the stage's start."""
    REMAINING_SHARE = "remaining_share"
    """t_s / t_>=s of what is left of the deadline, from the stage's start."""


def share(how: Amortisation, *, before_s: float, stage_s: float, later_s: float) -> float:
    """The share that an amortisation is about, 0 to 1.

    Args:
        before_s, stage_s, later_s: execution times of the stages before, of this one, after it.
    """
    total_s = max(before_s + stage_s + later_s, _SMALLEST_S)
    match how:
        case Amortisation.ACCUMULATED:
            return (before_s + stage_s) / total_s
        case Amortisation.STAGE_SHARE:
            return stage_s / total_s
        case Amortisation.REMAINING_SHARE:
            return stage_s / max(stage_s + later_s, _SMALLEST_S)
        case _:
            assert_never(how)


def stage_due_s(
    how: Amortisation,
    *,
    opened_s: float,
    deadline_at_s: float,
    started_s: float,
    before_s: float,
    stage_s: float,
    later_s: float,
) -> float:
    """D_s, absolute: when the stage that began at ``started_s`` should be over.

    On time, the accumulated share gives ``opened_s + phi(s) * D``. A stage that began early or
    late has what is left of the deadline, in the proportion that phi gives it of the rest:
    (phi(s) - phi(s - 1)) / (1 - phi(s - 1)).
    """
    if deadline_at_s <= started_s:
        return deadline_at_s
    times = {"before_s": before_s, "stage_s": stage_s, "later_s": later_s}
    match how:
        case Amortisation.ACCUMULATED:
            phi = share(how, **times)
            before = share(how, before_s=0.0, stage_s=before_s, later_s=stage_s + later_s)
            part = (phi - before) / max(1.0 - before, _SMALLEST_S)
            due_s = started_s + min(part, 1.0) * (deadline_at_s - started_s)
        case Amortisation.STAGE_SHARE:
            due_s = started_s + share(how, **times) * (deadline_at_s - opened_s)
        case Amortisation.REMAINING_SHARE:
            due_s = started_s + share(how, **times) * (deadline_at_s - started_s)
        case _:
            assert_never(how)
    return min(due_s, deadline_at_s)
