"""How many run, and which of near equals: the two choices that turn a ranking into a batch."""

from collections.abc import Callable

import numpy as np

from scheduler.estimates import Estimates
from scheduler.step_time import StepTimeModel
from scheduler.table import Floats, Ints

CANDIDATES_PER_SLOT = 8
"""At most so many candidates per place in the batch are looked at: the best ranked ones."""
STEP_TIME_POWER = 0.25
"""What the time of a step costs, in the choice of how many run. 0 counts a step whatever it
takes, and the batch grows until tokens are late; 1 is value per second, which is short-sighted:
the best ranked are worth more than what follows them, so it runs few and others run out of time."""
_KEEP = 1.02
"""Another batch size must earn this much more than the current one: no to and fro."""
_ALL = 1.05
"""Fewer than all must earn this much more: below capacity, where all can be served, a smaller
batch only wastes steps (2 % of the goodput at 0.9 times capacity)."""


def best_batch_size(
    earned: Callable[[int, float], float],
    near: Estimates,
    *,
    slots: int,
    current: int,
    beside: tuple[int, float] = (0, 0.0),
) -> int:
    """The number of requests to run that earns the most.

    More in the batch means slower tokens for all, so fewer of them in time. The step time is
    the one between two tokens of a request, with the prompts that so many bring with them.

    Args:
        earned: value of a step of the first ``size`` requests at a step time.
        near: estimates of the best ranked requests, best first.
        slots: places in the batch.
        current: the size chosen last.
        beside: how many run in any case, and their context tokens.
    """
    most = min(slots, near.rows.size)
    if most <= 1:
        return most
    context_tokens = np.cumsum(near.rows.context_tokens)
    power = STEP_TIME_POWER if near.rows.size >= slots else 0.0
    best, best_worth = most, -1.0
    # From the largest: of equal ones the one that serves more.
    for size in reversed(_sizes(most, current)):
        step_s = near.context.step_time.pace_s(
            beside[0] + size, beside[1] + float(context_tokens[size - 1])
        )
        worth = earned(size, step_s) / step_s**power
        if size == current:
            worth *= _KEEP
        if size == most:
            worth *= _ALL
        if worth > best_worth:
            best, best_worth = size, worth
    return best


def _sizes(most: int, current: int) -> list[int]:
    """Sizes worth a look: all small ones, else steps around the current one and shares of all."""
    if most <= 8:
        return list(range(1, most + 1))
    near = {current, round(current * 0.8), round(current * 1.25), current - 1, current + 1}
    shares = {round(most * share) for share in (0.125, 0.25, 0.5, 0.75, 1.0)}
    return sorted(size for size in near | shares if 1 <= size <= most)


def best_window(
    ranked: Ints,
    scores: Floats,
    *,
    lengths: Floats,
    serial: Ints,
    size: int,
    cutoff: float,
    step_time: StepTimeModel | None = None,
) -> Ints:
    """Of the requests near or above the last score that fits, the best group of like length.

    Paper, section Grouped Margin Goodput Maximization: candidates reach ``cutoff`` times the
    ``size``-th best score; sorted by length, the window of ``size`` with the largest sum of
    scores wins, and of equal ones the one of shorter requests. With ``step_time`` a window's
    sum is divided by the step time with its padding, and the plain top of the ranking is one
    of the groups. Only padding is saved by likeness: a long context that waits costs its time
    later, so all groups are charged the candidates' mean context.

    Returns:
        Indices, best score first.
    """
    if size <= 0:
        return ranked[:0]
    if len(ranked) <= size:
        return ranked
    floor = scores[ranked[size - 1]]
    floor = floor * cutoff if floor >= 0 else floor / cutoff
    candidates = ranked[: size * CANDIDATES_PER_SLOT]
    candidates = candidates[scores[candidates] >= floor]
    if len(candidates) <= size:
        return ranked[:size]
    by_length = candidates[np.lexsort((serial[candidates], lengths[candidates]))]
    sums = _window_sums(scores[by_length], size)
    worth, mean = sums, float(lengths[by_length].mean())
    if step_time is not None:
        worth = sums / _window_step_s(lengths[by_length], size, step_time, mean)
    start = int(np.argmax(worth >= worth.max() - 1e-12 * abs(worth.max())))
    if step_time is not None:
        top = ranked[:size]
        top_s = _window_step_s(np.sort(lengths[top]), size, step_time, mean)[0]
        if scores[top].sum() / top_s >= worth[start] - 1e-12 * abs(worth[start]):
            return top
    group = by_length[start : start + size]
    best: Ints = group[np.lexsort((serial[group], -scores[group]))]
    return best


def _window_sums(values: Floats, size: int) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = total[size:] - total[:-size]
    return sums


def _window_step_s(
    lengths: Floats, size: int, step_time: StepTimeModel, mean_length: float
) -> Floats:
    """Step times of all windows of ascending lengths; the last one of each pads the rest."""
    constant, decode, context, _, padding = step_time.coefficients
    sums = _window_sums(lengths, size)
    pads = np.maximum(size * lengths[size - 1 :] - sums, 0.0)
    return np.maximum(
        constant + decode * size + context * size * mean_length + padding * pads, 1e-6
    )
