"""What a policy is: an assessment of the live requests, and how a batch is made of it."""

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.cutoff import CutoffTuner
from scheduler.estimates import Estimates
from scheduler.lengths import Information
from scheduler.table import Bools, Floats, Ints

MOST_SCORE = 1e300
NO_LIMIT = 1 << 40
"""More requests than there can be."""


class PrefillRule(enum.StrEnum):
    """How prompts and decoding share the engine."""

    BOUNDED_PAUSE = "bounded_pause"
    """Prompts go first, but decoding pauses for no longer than ``max_decode_pause_s``."""
    STALL_FREE = "stall_free"
    """Decoding goes first: between two decode steps at most one chunk of prompts."""


class DisplaceRule(enum.StrEnum):
    """When a better request may take a running one's place at a frame boundary."""

    NEVER = "never"
    BETTER_SCORE = "better_score"
    """Better by ``displace_margin``."""
    BETTER_VALUE = "better_value"
    """A better score, and a goodput larger by ``displace_margin``: the rule of the paper's
    appendix (preemption threshold delta)."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the frame manager must know about a policy beside its scores."""

    displace: DisplaceRule = DisplaceRule.BETTER_SCORE
    information: Information = Information.FORECAST
    prefill: PrefillRule = PrefillRule.BOUNDED_PAUSE
    is_just_in_time: bool = False
    """Requests get the tokens that they need in a frame; then others have a turn."""
    is_starvation_free: bool = False
    """A request passed over for ``starvation_frames`` goes first."""
    foresees: bool = False
    """Best-effort work leaves KV for calls that are expected within the frame."""
    late_fraction: float | None = None
    """Up to which share of the batch work whose deadline has passed may fill it beside what can
    still be in time; None: no limit."""
    blends_fairness: bool = False
    """``fairness`` of the configuration counts."""
    cancels_expired: bool = False
    """Deadline and compound work whose deadline has passed stops, as by on_miss=cancel."""

    @property
    def may_displace(self) -> bool:
        return self.displace is not DisplaceRule.NEVER

    def places_for_late(self, max_batch: int, num_in_time: int) -> int:
        """How many of those whose deadline has passed may run beside those that can make it."""
        if self.late_fraction is None or num_in_time == 0:
            return NO_LIMIT
        return max(0, int(max_batch * self.late_fraction) - num_in_time)


@dataclass(frozen=True)
class Assessment:
    """A policy's view of some rows. Shapes (n,); only ``scores`` decides."""

    scores: Floats
    """Higher runs first; ties keep arrival order. Need not be finite: see ``finite``."""
    values: Floats
    """Expected goodput, in the objective's unit; 0 where the policy has no notion of it."""
    in_time_fraction: Floats | None = None
    slack_s: Floats | None = None
    is_strict: bool = False
    """The scores are an order, not amounts: a margin has no meaning."""


def finite(scores: Floats) -> Floats:
    """Scores that can be compared: NaN is the worst, infinities are bounded."""
    # False for NaN as well.
    if scores.size and scores.max() <= MOST_SCORE and scores.min() >= -MOST_SCORE:
        return scores.copy()
    return np.nan_to_num(np.clip(scores, -MOST_SCORE, MOST_SCORE), nan=-MOST_SCORE)


class Policy(Protocol):
    """Ranks live requests and groups the best. No clock, no randomness, no I/O."""

    source: str
    """Where it comes from."""
    approximates: str
    """In what it differs from its source."""
    traits: Traits

    @property
    def tuner(self) -> CutoffTuner | None:
        """Where there is one, the manager feeds it the goodput of every frame."""
        ...

    def assess(self, estimates: Estimates) -> Assessment:
        """Score every row."""
        ...

    def group(
        self, ranked: Ints, scores: Floats, estimates: Estimates, slots: int, beside: Ints
    ) -> Ints:
        """Whom to run, best first: at most ``slots`` of ``ranked``.

        Args:
            ranked: indices into the rows, best first.
            scores: of all rows, finite, with what the manager adds to them.
            estimates: of all rows.
            slots: places in the batch, at least 1.
            beside: indices of those that run in any case.
        """
        ...


def arrival_order(serial: Ints) -> Floats:
    """Scores that are the order of arrival."""
    return -serial.astype(np.float64)


def best_first(scores: Floats, serial: Ints, most: int, among: Bools | None = None) -> Ints:
    """Indices of the ``most`` best scores, best first, ties in order of arrival. O(n)."""
    index = np.arange(len(scores)) if among is None else np.flatnonzero(among)
    if most <= 0 or not index.size:
        return index[:0]
    values = scores[index]
    if index.size > most:
        threshold = np.partition(values, index.size - most)[index.size - most]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)
        need = most - above.size
        if equal.size > need:
            order = np.argpartition(serial[index[equal]], need - 1)[:need]
            equal = equal[order]
        index = index[np.concatenate([above, equal])]
        values = scores[index]
    best: Ints = index[np.lexsort((serial[index], -values))]
    return best
