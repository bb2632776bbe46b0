"""The only place that reads a clock; everything else is handed a ``Clock`` or a ``now_s``."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. Its zero has no meaning; differences are seconds."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock, the same for every process of one boot."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move by ``seconds``; negative values go back, as a broken clock may."""
        self._now_s += seconds


_: tuple[type[Clock], ...] = (MonotonicClock, ManualClock)


def time_of_day_s() -> float:
    """Seconds since midnight UTC by the wall clock: a feature of requests, never a timer."""
    return time.time() % 86_400.0
