"""A server of our own as a process: started with `launch.py`, awaited, ended, and gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from calls import CHUNKED_PREFILL_TOKENS, MAX_BATCH, poll

REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
SHARED_FLAGS = (
    *("--model", "demo", "--policy", "gmax", "--dtype", "float32", "--frame-steps", "8"),
    *("--max-running-requests", str(MAX_BATCH), "--max-total-tokens", "16384"),
    *("--chunked-prefill-size", str(CHUNKED_PREFILL_TOKENS)),
    *("--predictor-state", "none"),
    *("--graphs-state", "none"),
)


@dataclass(frozen=True)
class Server:
    """A running server and where its output goes."""

    base_url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        """The process that `launch.py` runs in; it leads a process group of its own."""
        return self.process.pid

    def log_tail(self, num_lines: int = 40) -> str:
        """The last lines of its output, for a failure message."""
        return "\n".join(self.log().splitlines()[-num_lines:])

    def log(self) -> str:
        """All it has written so far, stdout and stderr together."""
        return self.log_path.read_text(errors="replace")


RunServer = Callable[..., AbstractContextManager[Server]]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_members(group: int) -> list[psutil.Process]:
    """Living processes of a process group; zombies wait for their parent only."""
    members = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and os.getpgid(process.pid) == group:
                members.append(process)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return members


def family(pid: int) -> list[psutil.Process]:
    """Everything a server has started, also what left its process group."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    return list({*children, *group_members(pid)})


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of them that run on."""
    living = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.Error:
            continue
    return living


def stop_server(server: Server, how: signal.Signals) -> None:
    """End it the way a user does, and insist that nothing of it is left."""
    members = family(server.pid)
    if server.process.poll() is None:
        if how is signal.SIGINT:
            os.killpg(server.pid, how)  # a terminal sends Ctrl-C to the whole group
        else:
            server.process.send_signal(how)
    try:
        server.process.wait(STOP_LIMIT_S)
        poll(
            lambda: still_alive([*members, *group_members(server.pid)]),
            lambda left: not left,
            limit_s=5.0,
        )
    except (subprocess.TimeoutExpired, AssertionError) as error:
        left = [f"{p.pid} {p.name()}" for p in still_alive([*members, *group_members(server.pid)])]
        pytest.fail(f"{how.name}: {error}; left: {left}; log ends with\n{server.log_tail()}")
    finally:
        for process in still_alive([*members, *group_members(server.pid)]):
            process.kill()


def wait_until_ready(server: Server) -> None:
    """Return when /health says 200; fail with the log's tail if it never does."""

    def look() -> str:
        if server.process.poll() is not None:
            return "exited"
        try:
            answer = httpx.get(f"{server.base_url}/health", timeout=30.0, trust_env=False)
        except httpx.TransportError as error:
            return type(error).__name__
        return str(answer.status_code)

    try:
        state = poll(look, lambda now: now in {"200", "exited"}, limit_s=START_LIMIT_S, pause_s=0.5)
    except AssertionError as error:
        pytest.fail(f"the server is not ready: {error}; log ends with\n{server.log_tail()}")
    if state == "exited":
        code = server.process.returncode
        pytest.fail(f"the server exited with {code} at start; log ends with\n{server.log_tail()}")


@contextmanager
def start_server(
    flags: tuple[str, ...],
    log_path: Path,
    env: Mapping[str, str],
    stop_signal: signal.Signals,
) -> Iterator[Server]:
    """Run `launch.py` in a process group of its own until the block ends."""
    port = free_port()
    command = [sys.executable, "launch.py", *flags, "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **env},
        )
    server = Server(f"http://127.0.0.1:{port}", process, log_path)
    try:
        wait_until_ready(server)
        yield server
    finally:
        stop_server(server, stop_signal)
