"""Means over seeds with their uncertainty, and ratios paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import t as student

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval; None of a single value."""

    mean: float
    half: float | None

    def text(self, digits: int = 3) -> str:
        """For a table."""
        if not math.isfinite(self.mean):
            return "inf"
        shown = _rounded(self.mean, digits)
        if self.half is None:
            return shown
        return f"{shown} ±{_rounded(self.half, 2)}"


def _rounded(value: float, digits: int) -> str:
    places = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{min(max(places, 0), 4)}f}"


def interval(values: Sequence[float]) -> Interval:
    """Of independent runs, by Student's t. Raises ValueError for none."""
    if not values:
        raise ValueError("an interval needs at least one value")
    num = len(values)
    mean = sum(values) / num
    if num == 1 or not math.isfinite(mean):
        return Interval(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (num - 1)
    factor = float(student.ppf(0.5 + LEVEL / 2, num - 1))
    return Interval(mean, factor * math.sqrt(variance / num))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs run by run; both had the same workloads. 0/0 is 1, x/0 infinite."""
    return [_over(our, their) for our, their in zip(ours, theirs, strict=True)]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The interval of ``ratios``."""
    return interval(ratios(ours, theirs))


def _over(our: float, their: float) -> float:
    if their:
        return our / their
    return math.inf if our else 1.0
