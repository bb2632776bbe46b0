"""The cutoff p of GMAX, adapted online to what it earns.

Paper, section Grouped Margin Goodput Maximization: p is automated "by exploring different
thresholds and converging to those that maximize end-to-end goodput". How is left open. Here:
every candidate is tried for one epoch, in an order that changes sides; the best is kept; the
runner-up is tried again now and then; and when what the kept one earns moves away from what
it earned, the load has changed and all are tried again. No randomness.
"""

import math
from collections.abc import Sequence

CANDIDATES = (0.95, 0.5, 0.8, 1.0)
"""The first is the paper's default and what is used before anything is known."""
MAX_GOODPUT = 1e18
MIN_ELAPSED_S = 1e-9


class CutoffTuner:
    """Explores, converges, and explores again when the load changes."""

    def __init__(
        self,
        candidates: Sequence[float] = CANDIDATES,
        *,
        epoch_frames: int = 20,
        check_every_epochs: int = 12,
        change_fraction: float = 0.35,
        memory: float = 0.5,
    ) -> None:
        if not candidates or not all(0 < candidate <= 1 for candidate in candidates):
            raise ValueError("cutoff candidates must be above 0 and at most 1")
        self._candidates = tuple(candidates)
        self._epoch_frames = epoch_frames
        self._check_every = check_every_epochs
        self._change_fraction = change_fraction
        self._memory = memory
        self._rate: dict[float, float] = {}
        self._plan: list[float] = list(self._candidates)
        self._frames = 0
        self._earned = 0.0
        self._elapsed_s = 0.0
        self._epochs_kept = 0
        self._surprises = 0
        self._checking = False
        self.cutoff = self._candidates[0]
        """p to use now."""
        self.num_explorations = 1

    @property
    def is_exploring(self) -> bool:
        return bool(self._plan)

    @property
    def rates(self) -> dict[float, float]:
        """Goodput per second seen under each candidate, as remembered."""
        return dict(self._rate)

    def frame(self, goodput: float, elapsed_s: float, *, is_contended: bool) -> None:
        """A frame ended that earned so much in so many seconds.

        Only frames in which more waited than fitted count: in others p makes no difference.
        """
        if not (is_contended and MIN_ELAPSED_S <= elapsed_s < math.inf):
            return
        if not 0 <= goodput <= MAX_GOODPUT:
            return
        self._earned += goodput
        self._elapsed_s += elapsed_s
        self._frames += 1
        if self._frames >= self._epoch_frames:
            self._end_epoch(self._earned / self._elapsed_s)
            self._frames, self._earned, self._elapsed_s = 0, 0.0, 0.0

    def _end_epoch(self, rate: float) -> None:
        known = self._rate.get(self.cutoff)
        is_surprise = known is not None and self._differs(rate, known)
        if self._checking:
            # A runner-up that earns another amount than it did: the load has changed.
            self._checking = False
            self._plan.pop(0)
            self._rate[self.cutoff] = rate
            if is_surprise:
                self._explore()
        elif self._plan:
            self._plan.pop(0)
            self._rate[self.cutoff] = rate
        else:
            self._keep(rate, is_surprise=is_surprise)
        self.cutoff = self._plan[0] if self._plan else self._best()

    def _keep(self, rate: float, *, is_surprise: bool) -> None:
        """An epoch under the kept cutoff. Two surprising ones in a row are no noise."""
        if is_surprise:
            # What is known stands until then, or a lasting change would hide itself.
            self._surprises += 1
            if self._surprises >= 2:
                self._explore()
            return
        self._surprises = 0
        known = self._rate.get(self.cutoff, rate)
        self._rate[self.cutoff] = self._memory * known + (1 - self._memory) * rate
        self._epochs_kept += 1
        others = [value for value in self._candidates if value != self.cutoff]
        if self._epochs_kept >= self._check_every and others:
            self._epochs_kept = 0
            self._checking = True
            self._plan = [max(others, key=lambda value: self._rate.get(value, math.inf))]

    def _explore(self) -> None:
        self._surprises = self._epochs_kept = 0
        self.num_explorations += 1
        self._rate.clear()
        self._plan = list(self._candidates)

    def _differs(self, rate: float, known: float) -> bool:
        return abs(rate - known) > self._change_fraction * max(known, 1e-9)

    def _best(self) -> float:
        return max(self._candidates, key=lambda value: self._rate.get(value, 0.0))
