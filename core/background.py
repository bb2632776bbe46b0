"""Work beside a loop: one job in a thread of its own that never keeps the process alive."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

NICENESS = 15


class Job(Generic[T]):
    """A function running in a daemon thread of low priority; ask ``is_done``, then ``result``."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> T:
        """What the function returned, or its exception raised; only once it is done."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set where there was no error

    def wait(self, limit_s: float) -> bool:
        """Whether it is done within ``limit_s``; for shutting down."""
        self._thread.join(limit_s)
        return self.is_done()

    def _run(self) -> None:
        # On Linux a thread has a niceness of its own: the loop and the engine come first.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._value = self._work()
        except Exception as error:
            self._error = error
