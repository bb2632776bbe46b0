"""Taking turns: a machine is not equally fast all the time, so what is compared alternates."""

import statistics
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """All of them in the order of a round: who begins moves on by one each round, from 0."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of ours to theirs, round by round. Raises ValueError for unequal numbers of rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
