"""How long an answer will be, until a forecaster says: quantiles of finished answers by class."""

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler.request import Request

Floats = npt.NDArray[np.float64]


class LengthEstimates(Protocol):
    """What the scheduler asks of a length forecast. All lengths are output tokens."""

    def remaining_mean(self, request: Request) -> float:
        """Expected tokens still to come; at least 1 and at most what max_tokens leaves."""
        ...

    def remaining_bound(self, request: Request) -> float:
        """Upper bound of the tokens still to come, at the configured quantile."""
        ...

    def fits_fraction(self, request: Request, tokens: float) -> float:
        """Probability that at most ``tokens`` are still to come."""
        ...

    def learn(self, request: Request, *, is_censored: bool) -> None:
        """A request ended after ``generated_tokens``; censored if it would have gone on."""
        ...


class OnlineClassLengths:
    """The empirical distribution of the last finished answers of each SLO class.

    Before any has finished, lengths are taken to be uniform up to min(max_tokens, 512).
    Given g tokens generated so far, the distribution is truncated to L > g (paper, section
    Request Analyzer; ``docs/metrics.md`` has the formulas).
    """

    def __init__(self, quantile: float = 0.9, window: int = 512) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, got {quantile}")
        self._quantile = quantile
        self._window = window
        self._recent: dict[str, deque[int]] = {}
        self._sorted: dict[str, Floats] = {}
        self._prior: Floats = np.linspace(1.0, 512.0, 64)

    def remaining_mean(self, request: Request) -> float:
        longer = self._longer_than_generated(request)
        room = self._room(request)
        if longer.size == 0:
            # Longer than every answer seen: as the Lindy rule has it, half as long again.
            return max(1.0, min(room, max(request.generated_tokens * 0.5, 16.0)))
        total = np.minimum(longer, request.max_output_tokens)
        return max(1.0, min(room, float(total.mean()) - request.generated_tokens))

    def remaining_bound(self, request: Request) -> float:
        longer = self._longer_than_generated(request)
        room = self._room(request)
        if longer.size == 0:
            return max(1.0, room)
        position = min(int(self._quantile * longer.size), longer.size - 1)
        return max(1.0, min(room, float(longer[position]) - request.generated_tokens))

    def fits_fraction(self, request: Request, tokens: float) -> float:
        if tokens >= self._room(request):
            return 1.0
        if tokens < 1:
            return 0.0
        longer = self._longer_than_generated(request)
        if longer.size == 0:
            return 0.5
        most = request.generated_tokens + tokens
        return float(np.searchsorted(longer, most, side="right")) / longer.size

    def learn(self, request: Request, *, is_censored: bool) -> None:
        if is_censored and request.generated_tokens < request.max_output_tokens:
            return
        key = request.slo_type
        recent = self._recent.setdefault(key, deque(maxlen=self._window))
        recent.append(request.generated_tokens)
        self._sorted.pop(key, None)

    def _longer_than_generated(self, request: Request) -> Floats:
        lengths = self._lengths(request.slo_type)
        first = int(np.searchsorted(lengths, request.generated_tokens, side="right"))
        return lengths[first:]

    def _lengths(self, key: str) -> Floats:
        lengths = self._sorted.get(key)
        if lengths is None:
            recent = self._recent.get(key)
            if not recent:
                return self._prior
            lengths = self._sorted[key] = np.sort(np.asarray(recent, dtype=np.float64))
        return lengths

    @staticmethod
    def _room(request: Request) -> float:
        return float(max(request.max_output_tokens - request.generated_tokens, 1))


_: type[LengthEstimates] = OnlineClassLengths
