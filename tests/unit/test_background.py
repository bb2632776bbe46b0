"""Work beside a loop: done in a thread of its own, its result or error kept until asked for."""

from __future__ import annotations

import os
import threading

import pytest

from core.background import NICENESS, Job

WAIT_S = 20.0
"""How long a test waits for a thread that must end; it takes milliseconds."""


def test_what_a_job_returned_is_its_result() -> None:
    job = Job(lambda: 42)
    assert job.wait(WAIT_S)
    assert job.is_done()
    assert job.result() == job.result() == 42


def test_what_a_job_raised_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    job = Job(fail)
    assert job.wait(WAIT_S)
    for _ in range(2):
        with pytest.raises(OSError, match="space"):
            job.result()


def test_a_job_that_returns_nothing_has_a_result_too() -> None:
    job: Job[None] = Job(lambda: None)
    assert job.wait(WAIT_S)
    assert job.result() is None


def test_while_a_job_runs_nobody_waits_longer_than_they_like() -> None:
    release = threading.Event()
    job = Job(lambda: release.wait(WAIT_S))
    try:
        assert not job.is_done()
        assert not job.wait(0.0)
    finally:
        release.set()
    assert job.wait(WAIT_S)
    assert job.result() is True


def test_a_job_runs_in_a_thread_that_never_keeps_the_process_alive() -> None:
    job = Job(threading.current_thread)
    assert job.wait(WAIT_S)
    thread = job.result()
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_a_job_comes_behind_the_loop_and_the_loop_stays_as_it_was() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    job = Job(niceness)
    assert job.wait(WAIT_S)
    assert job.result() == max(NICENESS, before)
    assert niceness() == before


def test_without_priorities_a_job_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    job = Job(lambda: 42)
    assert job.wait(WAIT_S)
    assert job.result() == 42
    monkeypatch.delattr(os, "setpriority")
    job = Job(lambda: 43)
    assert job.wait(WAIT_S)
    assert job.result() == 43
