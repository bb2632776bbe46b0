"""One line on how far a grid is, and when it will be done."""

from __future__ import annotations

from typing import TextIO

from core.clock import Clock, MonotonicClock

PLAIN_EVERY_S = 30.0
"""Where lines cannot be written over."""


class Progress:
    """Written over on a terminal; elsewhere a plain line now and then.

    Args:
        out: None says nothing.
    """

    def __init__(self, out: TextIO | None, name: str = "", clock: Clock | None = None) -> None:
        self._out = out
        self._name = name
        self._clock = clock or MonotonicClock()
        self._total = self._done = 0.0
        self._num_done = 0
        self._begin_s = self._said_s = 0.0

    def begin(self, total: float, *, num_known: int) -> None:
        """So much is to be done, in any unit; ``num_known`` were there already."""
        self._total, self._done, self._num_done = total, 0.0, 0
        self._begin_s = self._said_s = self._clock.now_s()
        if num_known and total and self._out is not None:
            print(f"{self._name}: {num_known} known already", file=self._out, flush=True)

    def done(self, weight: float) -> None:
        """One of them is."""
        self._done += weight
        self._num_done += 1
        now_s = self._clock.now_s()
        if self._out is None:
            return
        if self._out.isatty():
            print(f"\r{self.line(now_s)}\033[K", end="", file=self._out, flush=True)
        elif now_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = now_s
            print(self.line(now_s), file=self._out, flush=True)

    def line(self, now_s: float) -> str:
        """How far it is."""
        share = self._done / self._total if self._total else 1.0
        elapsed_s = now_s - self._begin_s
        left_s = elapsed_s * (1 / share - 1) if share else 0.0
        return (
            f"{self._name}: {100 * share:.0f} %, {self._num_done} runs in {_minutes(elapsed_s)}, "
            f"{_minutes(left_s)} left"
        )

    def end(self) -> None:
        """That was all."""
        if self._out is not None and self._num_done and self._out.isatty():
            print(file=self._out, flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
