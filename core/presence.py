"""Whether a service is there, told from what it sends: the client's half of staying in touch."""

import logging

from core.clock import Clock

HELLO_EVERY_S = 1.0
"""How often a client says that it is there: by then a new process has been noticed."""
SILENT_AFTER_S = 5.0


class Presence:
    """When to say hello, and whether the other side was heard lately.

    Args:
        logger: gets one warning about each silence.
        warning: a format that takes the seconds of silence.
    """

    def __init__(self, clock: Clock, logger: logging.Logger, warning: str) -> None:
        self._clock = clock
        self._logger = logger
        self._warning = warning
        self._next_hello_s = -float("inf")
        self._heard_s: float | None = None
        self._is_silence_told = False

    def is_hello_due(self, now_s: float) -> bool:
        """Whether it is time to say hello; the next time is then a while later."""
        has_jumped_back = now_s < self._next_hello_s - 2 * HELLO_EVERY_S
        if now_s < self._next_hello_s and not has_jumped_back:
            return False
        self._next_hello_s = now_s + HELLO_EVERY_S
        return True

    def heard(self, now_s: float) -> None:
        """Something has come."""
        self._heard_s = now_s
        self._is_silence_told = False

    def not_heard(self, now_s: float) -> None:
        """Nothing has come: warn once of each silence."""
        if self._heard_s is None or self._is_silence_told:
            return
        self._heard_s = min(self._heard_s, now_s)
        silent_s = now_s - self._heard_s
        if silent_s >= SILENT_AFTER_S:
            self._is_silence_told = True
            self._logger.warning(self._warning, silent_s)

    def is_alive(self) -> bool:
        """Whether it was heard in the last seconds."""
        if self._heard_s is None:
            return False
        return 0 <= self._clock.now_s() - self._heard_s < SILENT_AFTER_S
