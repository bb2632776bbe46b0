"""A request's length distribution as equal-mass points, and its refinement.

``NUM_POINTS`` ascending points stand for the whole conditional distribution. What is still
possible after g tokens is L given L > g (survival refinement): the points above g, found by
binary search. They are read at ``NUM_LEVELS`` levels, scaled by the calibration factor of
each level, and handed to the scheduler.
"""

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_POINTS = 512
"""Fewer lose coverage late in an answer, where only the upper few are left."""
NUM_LEVELS = 32
LEVELS: Floats = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
POINT_LEVELS: Floats = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
PINBALL_LEVELS: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9)
MIN_AHEAD = 4
"""With fewer points left the distribution says nothing of what is to come."""
MIN_DENSE = 4 * NUM_LEVELS
MIN_LINDY_TOKENS = 16.0
MAX_TOKENS = 1e9


def _tail_places() -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """For k points left: between which points each level lies, and how far. (k+1, NUM_LEVELS)."""
    k = np.arange(NUM_POINTS + 1)[:, None]
    places = np.clip(LEVELS[None, :] * k - 0.5, 0, np.maximum(k - 1, 0)) + (NUM_POINTS - k)
    # Where points stand closer than a quarter of a level the nearest one is as good.
    places = np.where(k >= MIN_DENSE, np.rint(places), places)
    low = np.minimum(places.astype(np.int64), NUM_POINTS - 1)
    high = np.minimum(low + 1, NUM_POINTS - 1)
    return low, high, (places - low).astype(np.float32)


_LOW, _HIGH, _FRACTION = _tail_places()
_LOW_ROWS, _HIGH_ROWS, _FRACTION_ROWS = list(_LOW), list(_HIGH), list(_FRACTION)
# Longer than all but a few answers like it: as the Lindy rule has it, about half as long
# again on average, with an exponential's spread.
_LINDY: Points = (-np.log1p(-LEVELS) * 0.5).astype(np.float32)


def remaining_at_levels(points: Points, generated_tokens: int) -> Points:
    """Tokens still to come at each of ``LEVELS``, given that so many have been generated.

    Args:
        points: shape (NUM_POINTS,), ascending.

    Returns:
        Shape (NUM_LEVELS,), ascending, more than 0 unless nothing has been generated.
    """
    g = np.float32(generated_tokens)
    ahead = NUM_POINTS - points.searchsorted(g, "right")
    if ahead < MIN_AHEAD:
        lindy: Points = _LINDY * np.float32(max(generated_tokens, MIN_LINDY_TOKENS))
        return lindy
    low: Points = points.take(_LOW_ROWS[ahead])
    if ahead >= MIN_DENSE:
        low -= g
        return low
    remaining: Points = points.take(_HIGH_ROWS[ahead])
    remaining -= low
    remaining *= _FRACTION_ROWS[ahead]
    remaining += low
    remaining -= g
    return remaining


def remaining_of_many(points: Points, generated_tokens: Ints) -> Points:
    """``remaining_at_levels`` of many requests: (n, NUM_POINTS), (n,) to (n, NUM_LEVELS)."""
    g = generated_tokens.astype(np.float32)[:, None]
    ahead = (points > g).sum(axis=1)
    low = np.take_along_axis(points, _LOW[ahead], axis=1)
    high = np.take_along_axis(points, _HIGH[ahead], axis=1)
    remaining = low + (high - low) * _FRACTION[ahead] - g
    lindy = _LINDY * np.maximum(g, np.float32(MIN_LINDY_TOKENS))
    result: Points = np.asarray(
        np.where((ahead < MIN_AHEAD)[:, None], lindy, remaining), dtype=np.float32
    )
    return result


def at_level(values: npt.NDArray[np.floating], level: float) -> Floats:
    """Read values given at ``LEVELS`` (last axis) at any other level; the ends are held."""
    place = float(np.clip(level * NUM_LEVELS - 0.5, 0.0, NUM_LEVELS - 1.0))
    low = min(int(place), NUM_LEVELS - 2)
    fraction = place - low
    result: Floats = np.asarray(
        values[..., low] * (1.0 - fraction) + values[..., low + 1] * fraction, dtype=np.float64
    )
    return result


def pinball_loss(values: Points, truth: float) -> float:
    """Mean loss of quantiles given at ``LEVELS``, read at ``PINBALL_LEVELS``; in tokens.

    At level l an error e = truth - quantile costs max(l e, (l - 1) e).
    """
    errors = [(level, truth - float(at_level(values, level))) for level in PINBALL_LEVELS]
    return sum(max(level * e, (level - 1.0) * e) for level, e in errors) / len(errors)


def points_of_sample(lengths: npt.ArrayLike) -> Points:
    """``NUM_POINTS`` equal-mass points of a sample, shape (NUM_POINTS,).

    Raises:
        ValueError: the sample is empty or has a length that is not a number of 0 or more.
    """
    sample = np.sort(np.asarray(lengths, dtype=np.float64).ravel())
    if not sample.size or not np.isfinite(sample).all() or sample[0] < 0:
        raise ValueError("takes one or more finite lengths of 0 or more tokens")
    quantiles: Floats = np.asarray(np.quantile(sample, POINT_LEVELS), dtype=np.float64)
    return np.minimum(quantiles, MAX_TOKENS).astype(np.float32)
