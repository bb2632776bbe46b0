"""Starts servers for a benchmark through ``launch.py`` and stops them again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

from core.clock import MonotonicClock

REPOSITORY = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300.0
FLUSH_LIMIT_S = 60.0
BUSY = 400
"""What SGLang answers to a flush while requests are live."""
POLL_S = 0.5


class ServerFailedError(RuntimeError):
    """A server did not start; the message ends with its log's tail."""


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(policy: str, flags: list[str], model: str = "demo") -> Iterator[str]:
    """A running server's base URL; it sleeps while idle, so that two can share a machine."""
    port = free_port()
    command = [sys.executable, "launch.py", "--model", model, "--port", str(port)]
    command += ["--policy", policy, "--sleep-on-idle", "--log-level", "warning"]
    # What one run has learnt must not help the next.
    command += ["--predictor-state", "none", "--graphs-state", "none", *flags]
    with tempfile.NamedTemporaryFile("w+", suffix=".log", prefix=f"bench-{policy}-") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, Path(log.name))
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    clock = MonotonicClock()
    end_s = clock.now_s() + START_LIMIT_S
    while clock.now_s() < end_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=2).status_code == httpx.codes.OK:
                return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise ServerFailedError(f"a server did not start:\n{tail}")


def use_policy(url: str, policy: str, *, forecasts: bool = True) -> None:
    """Switch one of our servers to another policy while it runs, with or without forecasts."""
    body = {"policy": policy, "forecasts": forecasts}
    response = httpx.post(f"{url}/slo/policy", json=body, timeout=30)
    response.raise_for_status()


def use_outlooks(url: str, *, is_used: bool) -> None:
    """Let one of our servers use what the graphs process foresees, or not."""
    response = httpx.post(f"{url}/slo/policy", json={"outlooks": is_used}, timeout=30)
    response.raise_for_status()


def flush(url: str, limit_s: float = FLUSH_LIMIT_S) -> None:
    """Empty the prefix cache, so that no run profits from the one before.

    The server refuses for as long as what a client has given up is still being ended. Raises
    httpx.HTTPStatusError where it still does after ``limit_s``.
    """
    clock = MonotonicClock()
    end_s = clock.now_s() + limit_s
    while (response := httpx.post(f"{url}/flush_cache", timeout=60)).status_code == BUSY:
        if clock.now_s() >= end_s:
            break
        threading.Event().wait(POLL_S)
    response.raise_for_status()
