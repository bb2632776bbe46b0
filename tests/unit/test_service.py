"""The watcher of a process: started, listened to, killed when silent, started again."""

from __future__ import annotations

import itertools
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from core import service
from core.clock import ManualClock
from core.service import (
    FIRST_PAUSE_S,
    HEALTHY_AFTER_S,
    MAX_PAUSE_S,
    SILENCE_LIMIT_S,
    START_LIMIT_S,
    STOP_LIMIT_S,
    RestartPause,
    SupervisedService,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PIDS = itertools.count(1000)


class Process:
    """Stands in for a child process."""

    made: list[Process]

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_options: object) -> None:
        if command[0] == "missing":
            raise FileNotFoundError(2, "No such file or directory", command[0])
        self.command = list(command)
        self.env = dict(env)
        self.pid = next(PIDS)
        self.code: int | None = None
        self.signals: list[int] = []
        self.obeys = True
        Process.made.append(self)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL or self.obeys:
            self.code = -number

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            assert timeout is not None, "waits for ever"
            raise subprocess.TimeoutExpired(self.command, timeout)
        return self.code


class Probe:
    """Hears what the test puts into it, as a socket's queue would: until it is read."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.is_closed = False

    def heard(self) -> bool:
        assert not self.is_closed
        found, self.num_answers = self.num_answers > 0, 0
        return found

    def close(self) -> None:
        self.is_closed = True


class Watched:
    """A service and everything around it."""

    def __init__(self, command: Sequence[str] = ("run", "me"), **environment: str) -> None:
        self.clock = ManualClock(1000.0)
        self.probe = Probe()
        self.said: list[str] = []
        self.service = SupervisedService(
            "thing", command, lambda: self.probe, self.clock, self.said.append, environment
        )

    @property
    def process(self) -> Process:
        return Process.made[-1]

    def pass_time(self, seconds: float) -> None:
        """Tick four times a second."""
        for _ in range(round(seconds * 4)):
            self.clock.advance(0.25)
            self.service.tick()

    def answer(self) -> None:
        self.probe.num_answers += 1
        self.service.tick()

    def start(self) -> None:
        """Run until it is ready."""
        self.service.tick()
        self.answer()

    def end(self, code: int = 1) -> None:
        self.process.code = code
        self.service.tick()

    def live(self, seconds: float) -> None:
        """Answer every half second."""
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            self.answer()


@pytest.fixture(autouse=True)
def _no_real_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Process.made = []
    monkeypatch.setattr(service.subprocess, "Popen", Process)


# Pauses -------------------------------------------------------------------------------------------


def test_each_early_end_makes_the_next_pause_longer_up_to_a_limit() -> None:
    pause = RestartPause()
    pauses = [pause.after(1.0) for _ in range(12)]
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S


def test_who_ran_for_long_begins_with_a_short_pause_again() -> None:
    pause = RestartPause()
    for _ in range(8):
        pause.after(0.0)
    assert pause.after(HEALTHY_AFTER_S) == FIRST_PAUSE_S
    assert pause.after(0.0) == 2 * FIRST_PAUSE_S


# Starting -----------------------------------------------------------------------------------------


def test_the_first_tick_starts_the_process() -> None:
    watched = Watched()
    assert watched.service.pid is None
    watched.service.tick()
    assert watched.process.command == ["run", "me"]
    assert watched.service.pid == watched.process.pid
    assert watched.service.num_starts == 1


def test_the_environment_is_ours_and_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PARENT", "1")
    watched = Watched(OF_THE_CHILD="2")
    watched.service.tick()
    assert watched.process.env["OF_THE_PARENT"] == "1"
    assert watched.process.env["OF_THE_CHILD"] == "2"


def test_its_first_answer_is_told_once() -> None:
    watched = Watched()
    watched.service.tick()
    watched.pass_time(4)
    watched.answer()
    watched.live(20)
    assert len(watched.said) == 1
    assert "thing is ready after 4 s" in watched.said[0]


def test_a_slow_start_is_waited_for() -> None:
    watched = Watched()
    watched.service.tick()
    watched.pass_time(START_LIMIT_S - 1)
    assert watched.service.num_starts == 1
    assert watched.process.signals == []


def test_a_start_that_never_ends_is_killed_and_tried_again() -> None:
    watched = Watched()
    watched.service.tick()
    watched.pass_time(START_LIMIT_S + 2)
    assert Process.made[0].signals == [signal.SIGKILL]
    assert watched.service.num_starts == 2


def test_a_command_that_does_not_exist_is_told_and_tried_again_ever_more_rarely() -> None:
    watched = Watched(["missing"])
    watched.service.tick()
    assert watched.service.pid is None
    assert "could not be started" in watched.said[0]
    watched.pass_time(20)
    early = watched.service.num_starts
    assert 4 <= early <= 10
    watched.pass_time(120)
    assert watched.service.num_starts - early <= 7


# Ending -------------------------------------------------------------------------------------------


def test_an_end_is_told_with_its_code_and_followed_by_a_start() -> None:
    watched = Watched()
    watched.start()
    watched.end(3)
    assert "exit code 3" in watched.said[-1]
    assert watched.service.pid is None
    watched.pass_time(FIRST_PAUSE_S)
    assert watched.service.num_starts == 2


def test_no_start_happens_within_the_pause() -> None:
    watched = Watched()
    watched.start()
    watched.end()
    watched.clock.advance(FIRST_PAUSE_S * 0.9)
    watched.service.tick()
    assert watched.service.num_starts == 1


def test_a_process_that_always_dies_is_started_ever_more_rarely() -> None:
    watched = Watched()
    for _ in range(20 * 60 * 4):
        watched.pass_time(0.25)
        if watched.service.pid is not None:
            watched.end()
    # Twenty minutes at a pause of half a minute, and a few before.
    assert 30 <= watched.service.num_starts <= 60


def test_a_process_that_lived_for_long_is_started_again_at_once() -> None:
    watched = Watched()
    for _ in range(6):
        watched.service.tick()
        watched.end()
        watched.clock.advance(MAX_PAUSE_S)
    watched.start()
    starts = watched.service.num_starts
    watched.live(HEALTHY_AFTER_S + 1)
    watched.end()
    watched.pass_time(FIRST_PAUSE_S)
    assert watched.service.num_starts == starts + 1


# Silence ------------------------------------------------------------------------------------------


def test_who_answers_is_left_alone() -> None:
    watched = Watched()
    watched.start()
    watched.live(600)
    assert watched.service.num_starts == 1
    assert watched.process.signals == []


def test_a_short_silence_is_borne() -> None:
    watched = Watched()
    watched.start()
    for _ in range(10):
        watched.pass_time(SILENCE_LIMIT_S - 1)
        watched.answer()
    assert watched.service.num_starts == 1


def test_who_falls_silent_is_killed_and_started_again() -> None:
    watched = Watched()
    watched.start()
    watched.live(30)
    watched.pass_time(SILENCE_LIMIT_S + 2)
    assert Process.made[0].signals == [signal.SIGKILL]
    assert "silent" in watched.said[1]
    assert watched.service.num_starts == 2


def test_a_process_started_again_has_the_time_of_a_start() -> None:
    watched = Watched()
    watched.start()
    watched.pass_time(SILENCE_LIMIT_S + 2)
    watched.pass_time(START_LIMIT_S / 2)
    assert watched.service.num_starts == 2
    watched.answer()
    assert "ready" in watched.said[-1]


def test_the_last_words_of_a_dead_process_are_not_taken_for_those_of_the_next() -> None:
    watched = Watched()
    watched.start()
    # It answers once more and dies: nobody has read that answer yet.
    watched.probe.num_answers += 1
    watched.end()
    watched.pass_time(1)
    assert watched.service.num_starts == 2
    assert sum("ready" in line for line in watched.said) == 1
    # The next one loads for longer than a silence may last.
    watched.pass_time(3 * SILENCE_LIMIT_S)
    assert watched.service.num_starts == 2
    assert watched.process.signals == []


def test_a_watcher_that_was_held_up_itself_kills_nobody_who_has_answered() -> None:
    watched = Watched()
    watched.start()
    watched.clock.advance(3600)
    watched.answer()
    assert watched.process.signals == []


def test_a_clock_that_jumps_back_kills_nobody() -> None:
    watched = Watched()
    watched.start()
    watched.clock.advance(-500)
    watched.live(10)
    assert watched.service.num_starts == 1
    assert watched.process.signals == []


# Stopping -----------------------------------------------------------------------------------------


def test_stopping_asks_politely_first() -> None:
    watched = Watched()
    watched.start()
    watched.service.stop()
    assert watched.process.signals == [signal.SIGTERM]
    assert watched.probe.is_closed
    assert watched.service.pid is None


def test_who_does_not_end_when_asked_is_killed() -> None:
    watched = Watched()
    watched.start()
    watched.process.obeys = False
    watched.service.stop()
    assert watched.process.signals == [signal.SIGTERM, signal.SIGKILL]


def test_stopping_gives_time_to_save() -> None:
    assert STOP_LIMIT_S >= 5


def test_stopping_what_was_never_started_is_no_error() -> None:
    watched = Watched()
    watched.service.stop()
    assert Process.made == []


def test_stopping_between_two_starts_starts_nothing_more() -> None:
    watched = Watched()
    watched.start()
    watched.end()
    watched.service.stop()
    watched.clock.advance(1000)
    watched.service.tick()
    assert watched.service.num_starts == 1


def test_a_process_that_ended_just_before_it_was_stopped_is_no_error() -> None:
    watched = Watched()
    watched.start()
    watched.process.code = 0

    def gone() -> None:
        raise ProcessLookupError

    watched.process.terminate = gone  # type: ignore[method-assign]
    watched.service.stop()
    assert watched.service.pid is None
