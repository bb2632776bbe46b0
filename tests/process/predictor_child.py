"""A real predictor process and a real client of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from core.clock import MonotonicClock
from predictor.client import PredictorClient, PredictorProbe
from predictor.features import EngineFacts, cues_of, feature_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from predictor.distribution import Points
    from predictor.protocol import Status

REPOSITORY = Path(__file__).resolve().parents[2]
PAUSE_S = 0.02
CUES = cues_of({"messages": [{"role": "user", "content": "Write a poem in 50 words."}]})
ROW = feature_row(CUES, EngineFacts(20, 400))


def wait_until(condition: Callable[[], Any]) -> None:
    """Until it holds; the time limit of the test ends what never does."""
    while not condition():
        time.sleep(PAUSE_S)


def command(address: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "predictor", "--address", address, *options]


class Child:
    """One predictor in a folder of its own, started as often as a test likes."""

    def __init__(self, *options: str) -> None:
        # Not tmp_path: that is too long for the path of a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="jp", dir="/tmp"))
        self.state = self.folder / "state"
        self.address = f"ipc://{self.folder}/s"
        self.options = ["--state-dir", str(self.state), *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        """What the process has said since it was started last."""
        return (self.folder / f"log{self.num_starts}").read_text()

    def warnings(self) -> list[str]:
        return [line for line in self.log.splitlines() if " WARNING " in line]

    def start(self, *options: str) -> None:
        self.num_starts += 1
        with (self.folder / f"log{self.num_starts}").open("wb") as log:
            self.process = subprocess.Popen(
                command(self.address, *self.options, *options),
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_and_wait(self, *options: str) -> None:
        self.start(*options)
        self.status()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code after a signal."""
        assert self.process is not None
        self.send(number)
        return self.process.wait()

    def status(self) -> Status:
        return status_of(self.address, self.is_running)

    def counter(self, name: str) -> int:
        return self.status().counters.get(name, 0)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.state.glob("*.checkpoint"))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def status_of(address: str, is_running: Callable[[], bool] = lambda: True) -> Status:
    """The status of the predictor there, as soon as one answers."""
    probe = PredictorProbe(address)
    try:
        while True:
            status = probe.status(0.05)
            if status is not None:
                return status
            assert is_running(), "the predictor has ended"
    finally:
        probe.close()


class Serving:
    """A client as the scheduler has one, and all that it has heard."""

    def __init__(self, address: str) -> None:
        self.client = PredictorClient(address, MonotonicClock(), model="test")
        self.points: dict[str, list[Points]] = {}
        self.num_calibrations = 0

    def poll(self) -> None:
        news = self.client.poll()
        for name, points in news.forecasts:
            self.points.setdefault(name, []).append(points)
        self.num_calibrations += news.factors is not None

    def until(self, condition: Callable[[], Any]) -> None:
        """Poll as the scheduler does in every pass."""
        while not condition():
            self.poll()
            self.client.wait(PAUSE_S)

    def ask(self, names: Iterable[str], **whose: Any) -> None:
        for name in names:
            self.client.ask(name, ROW, words=CUES.words, **whose)

    def forecast(self, names: Iterable[str], **whose: Any) -> None:
        """Ask and wait for all the answers."""
        wanted = list(names)
        self.ask(wanted, **whose)
        self.until(lambda: all(name in self.points for name in wanted))

    def teach(self, names: Iterable[str], tokens: int = 100) -> None:
        """Requests from their beginning to their end."""
        taught = list(names)
        self.forecast(taught)
        for name in taught:
            self.client.ended(name, tokens, is_cut=False)
        self.poll()

    def close(self) -> None:
        self.client.close()


class Stranger:
    """A peer that sends whatever it likes."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()
