"""A service as a process: its arguments, its loop, and how it ends.

The services differ in what they answer; how one listens, is told to stop, notices that whoever
started it is gone, and keeps its state is the same for all.
"""

import argparse
import logging
import os
import secrets
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Generic, Protocol, TypeVar

import zmq

from core.channel import Codec, RouterChannel
from core.checkpoint import CheckpointStore

Out = TypeVar("Out")
In = TypeVar("In")

EXIT_FAILED = 1
MESSAGES_PER_PASS = 16
IDLE_S = 0.25
TAKEN_LIMIT_S = 0.3


class Server(Protocol[In]):
    """What a service does, without its socket."""

    counters: "Counter[str]"

    @property
    def is_behind(self) -> bool:
        """Whether there is work that does not wait for messages."""
        ...

    def handle(self, messages: list[tuple[bytes, In]]) -> None:
        """Take in messages, each with its sender."""
        ...

    def tend(self) -> None:
        """Do a little of what else is to be done; called in every pass."""
        ...

    def close(self) -> None: ...


class StatusProbe(Protocol):
    """Asks a service how it is."""

    def status(self, timeout_s: float) -> object | None: ...

    def close(self) -> None: ...


class Loop(Generic[Out, In]):
    """The socket, the server and when to end."""

    def __init__(
        self, channel: RouterChannel[Out, In], server: Server[In], is_over: Callable[[], bool]
    ) -> None:
        self._channel = channel
        self._server = server
        self._is_over = is_over

    def run(self) -> None:
        """Until ``is_over``, which is asked at least every quarter of a second."""
        server = self._server
        while not self._is_over():
            if self._channel.wait(0.0 if server.is_behind else IDLE_S):
                server.handle(self._channel.receive(MESSAGES_PER_PASS))
            for kind in ("garbage", "version", "size", "unsent"):
                server.counters[f"wire_{kind}"] = self._channel.counters[kind]
            server.tend()
        server.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every service takes."""
    parser.add_argument("--address", required=True, help="ipc://PATH or tcp://HOST:PORT")
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=None,
        help="folder of the checkpoints (default: nothing is kept)",
    )
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0)
    parser.add_argument(
        "--parent", type=int, default=0, help="end when the parent process is no longer this one"
    )
    parser.add_argument(
        "--owned-folder",
        type=Path,
        default=None,
        help="a folder to remove when the parent process is gone",
    )


class Host:
    """One service process: it ends at SIGTERM or SIGINT, or when its parent is gone.

    Args:
        name: of the service, for logs and checkpoints.
        args: with what ``add_arguments`` asks for.
        version: of the checkpoints' format.
    """

    def __init__(self, name: str, args: argparse.Namespace, version: int) -> None:
        self._name = name
        self._args = args
        self._logger = logging.getLogger(name)
        self._is_told_to_stop = False
        logging.basicConfig(level=logging.INFO, format=f"[{name}] %(levelname)s %(message)s")
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self.session = secrets.randbits(62)
        """Differs from that of every other start."""
        self.store = self._open_store(version)

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has told it to end."""
        return self._is_told_to_stop

    def listen(
        self, codec: Codec[Out, In], make_probe: Callable[[str], StatusProbe]
    ) -> RouterChannel[Out, In] | None:
        """The socket; None, after a line that says why, where it cannot be had."""
        address = self._args.address
        if _is_taken(address, make_probe):
            self._logger.error("another %s answers at %s", self._name, address)
            return None
        try:
            return RouterChannel(address, codec)
        except (ValueError, zmq.ZMQError) as error:
            self._logger.error("cannot listen on %s: %s", address, error)
            return None

    def run(self, channel: RouterChannel[Out, In], server: Server[In], ready: str) -> int:
        """Serve until it is over; the exit code.

        Args:
            ready: what there is to say when serving begins.
        """
        if self._is_told_to_stop:
            # While it was starting: nothing has been learnt, nothing is to be said.
            channel.close()
            return 0
        self._logger.info("ready address=%s %s", self._args.address, ready)
        Loop(channel, server, lambda: self._is_told_to_stop or self._is_orphan()).run()
        channel.close()
        if self._args.owned_folder is not None and self._is_orphan():
            # Whoever made it for us is gone and cannot take it away.
            shutil.rmtree(self._args.owned_folder, ignore_errors=True)
        return 0

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_told_to_stop = True

    def _is_orphan(self) -> bool:
        parent: int = self._args.parent
        return parent != 0 and os.getppid() != parent

    def _open_store(self, version: int) -> CheckpointStore | None:
        folder = self._args.state_dir
        if folder is None:
            return None
        try:
            store = CheckpointStore(folder, self._name, version=version)
        except OSError as error:
            self._logger.warning(
                "state_unusable folder=%s error=%s: nothing is kept", folder, error
            )
            return None
        if not store.is_owner:
            self._logger.warning(
                "state_shared folder=%s: another %s keeps its state there", folder, self._name
            )
        return store


def _is_taken(address: str, make_probe: Callable[[str], StatusProbe]) -> bool:
    """Whether a service answers there: ZeroMQ would take its socket away without a word."""
    try:
        probe = make_probe(address)
    except ValueError:
        return False
    try:
        return probe.status(TAKEN_LIMIT_S) is not None
    finally:
        probe.close()
