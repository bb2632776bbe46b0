"""A real process of ours in a folder of its own, and a peer that sends it whatever it likes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parents[2]
PAUSE_S = 0.02


def wait_until(condition: Callable[[], Any]) -> None:
    """Until it holds; the time limit of the test ends what never does."""
    while not condition():
        time.sleep(PAUSE_S)


def command_of(service: str, address: str, *options: str) -> list[str]:
    return [sys.executable, "-m", service, "--address", address, *options]


def asked_status(probe: Any, is_running: Callable[[], bool] = lambda: True) -> Any:
    """The status that a probe hears, as soon as somebody answers; the probe is closed."""
    try:
        while True:
            status = probe.status(0.05)
            if status is not None:
                return status
            assert is_running(), "the process has ended"
    finally:
        probe.close()


class ServiceChild:
    """One process in a folder of its own, started as often as a test likes."""

    service: ClassVar[str]
    """What ``python -m`` starts."""

    def __init__(self, *options: str) -> None:
        # Not tmp_path: that is too long for the path of a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="jp", dir="/tmp"))
        self.state = self.folder / "state"
        self.address = f"ipc://{self.folder}/s"
        self.options = ["--state-dir", str(self.state), *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def status(self) -> Any:
        raise NotImplementedError

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
                command_of(self.service, self.address, *self.options, *options),
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

    def counter(self, name: str) -> int:
        found: int = self.status().counters.get(name, 0)
        return found

    def dropped(self) -> int:
        """Messages that the socket's side has counted as no messages."""
        counters = self.status().counters
        return sum(counters.get(f"wire_{kind}", 0) for kind in ("garbage", "version", "size"))

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.state.glob("*.checkpoint"))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


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
