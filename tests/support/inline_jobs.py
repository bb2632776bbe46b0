"""Stands in for ``core.background.Job``: work is done when the test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class InlineJob:
    """A job that is done when the test says so; nothing is left to chance."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._is_done = False
        self._value: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except Exception as error:
            self._error = error
        self._is_done = True

    def is_done(self) -> bool:
        return self._is_done

    def result(self) -> Any:
        assert self._is_done
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self, limit_s: float) -> bool:
        assert 0 <= limit_s < 10
        return self._is_done


class Desk:
    """Takes the jobs of a server: done at once, or held back until ``work``."""

    def __init__(self) -> None:
        self.held: list[InlineJob] = []
        self.holds = False

    def __call__(self, work: Callable[[], Any]) -> InlineJob:
        job = InlineJob(work)
        self.held.append(job)
        if not self.holds:
            self.work()
        return job

    def work(self) -> None:
        """Do what is held back."""
        for job in self.held:
            job.run()
        self.held.clear()
