"""A process of ours that must be there: started, watched, and started again when it is not.

The watcher owns nothing of what the process does. It asks ``probe`` whether the process
answers, kills what is silent, and restarts what has ended, each time after a longer pause.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from core.clock import Clock

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 30.0
HEALTHY_AFTER_S = 60.0
"""Who has run so long starts with a short pause again."""
START_LIMIT_S = 120.0
SILENCE_LIMIT_S = 6.0
STOP_LIMIT_S = 10.0


class Probe(Protocol):
    """Says whether a process answers; no call of it may wait."""

    def heard(self) -> bool:
        """Ask again, and whether anything has come in since the last call."""
        ...

    def close(self) -> None: ...


class RestartPause:
    """How long to wait before the next start: twice as long after each early end."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def after(self, ran_s: float) -> float:
        """The pause after a process that has run for ``ran_s``."""
        if ran_s >= HEALTHY_AFTER_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
        return pause_s


class SupervisedService:
    """One process and its watcher. Call ``tick`` a few times a second.

    Args:
        say: gets one line about each start, end and kill.
        make_probe: opens a connection to the process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        make_probe: Callable[[], Probe],
        clock: Clock,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._clock = clock
        self._say = say
        self._probe = make_probe()
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = RestartPause()
        self._start_at_s = clock.now_s()
        self._started_s = 0.0
        self._heard_s: float | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two."""
        return None if self._process is None else self._process.pid

    def tick(self) -> None:
        """Start, listen, kill or note the end, whatever it is time for."""
        now_s = self._clock.now_s()
        process = self._process
        if process is None:
            if now_s >= self._start_at_s:
                self._start(now_s)
            return
        code = process.poll()
        if code is not None:
            self._note_end(now_s, f"ended (exit code {code})")
            return
        if self._probe.heard():
            if self._heard_s is None:
                self._say(f"the {self._name} is ready after {now_s - self._started_s:.0f} s")
            self._heard_s = now_s
            return
        since_s, limit_s = self._heard_s, SILENCE_LIMIT_S
        if since_s is None:
            since_s, limit_s = self._started_s, START_LIMIT_S
        if now_s - since_s > limit_s:
            self._kill()
            self._note_end(now_s, f"was silent for {now_s - since_s:.0f} s and is killed")

    def stop(self) -> None:
        """Let it save what it knows and end; kill it after ``STOP_LIMIT_S``."""
        process, self._process = self._process, None
        self._start_at_s = float("inf")
        self._probe.close()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()

    def _start(self, now_s: float) -> None:
        self._started_s = now_s
        self._heard_s = None
        # What is still in the queue was said by the one before.
        self._probe.heard()
        self.num_starts += 1
        try:
            # A session of its own: Ctrl-C reaches only the launcher, which stops it in order.
            self._process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True
            )
        except OSError as error:
            self._note_end(now_s, f"could not be started ({error})")

    def _note_end(self, now_s: float, what: str) -> None:
        self._process = None
        pause_s = self._pause.after(now_s - self._started_s)
        self._start_at_s = now_s + pause_s
        self._say(f"the {self._name} {what}: serving goes on; started again in {pause_s:g} s")

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
