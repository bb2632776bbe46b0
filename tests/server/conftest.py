"""One real server for the whole session: `python launch.py` with the demo model, on a free port."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest

# Plain modules beside this file, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))

from calls import CALL_TIMEOUT_S, CHUNKED_PREFILL_TOKENS, MAX_BATCH, Server, poll  # noqa: E402

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
TEST_LIMIT_S = 180
SHARED_FLAGS = (
    *("--model", "demo", "--policy", "gmax", "--dtype", "float32", "--frame-steps", "8"),
    *("--max-batch", str(MAX_BATCH), "--max-total-tokens", "16384"),
    *("--chunked-prefill-size", str(CHUNKED_PREFILL_TOKENS)),
)
SHARED_SERVER_STOP_SIGNAL = signal.SIGINT
"""Ctrl-C; test_launch.py covers SIGTERM on a server of its own."""

RunServer = Callable[..., AbstractContextManager[Server]]


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of this tier."""
    config.addinivalue_line(
        "markers", "slow_server: starts a server of its own, with another configuration"
    )
    # Clients that ask the environment for a proxy must not send 127.0.0.1 through it.
    os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit each test here; skip all where there is no engine to serve with."""
    engine_is_missing = importlib.util.find_spec("sglang") is None
    for item in items:
        if HERE not in item.path.parents:
            continue
        if engine_is_missing:
            item.add_marker(pytest.mark.skip(reason="sglang is not installed: `make setup`"))
        if item.get_closest_marker("timeout") is None:
            # Not the fixtures: the first test waits for the shared server.
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S, func_only=True))


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
        state = poll(
            look, lambda now: now in {"200", "exited"}, limit_s=START_LIMIT_S, pause_s=0.5
        )
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


@pytest.fixture(scope="session")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> RunServer:
    """`with run_server("--flag", ...) as server:` has the shared flags and then these."""

    def run(
        *flags: str,
        env: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> AbstractContextManager[Server]:
        log_path = tmp_path_factory.mktemp("server") / "server.log"
        return start_server((*SHARED_FLAGS, *flags), log_path, env or {}, stop_signal)

    return run


@pytest.fixture(scope="session")
def server(run_server: RunServer) -> Iterator[Server]:
    """The shared server."""
    with run_server(stop_signal=SHARED_SERVER_STOP_SIGNAL) as shared:
        yield shared


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The unmodified OpenAI client, pointed at the shared server."""
    with openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S
    ) as shared:
        yield shared


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    """Plain HTTP to the shared server."""
    with httpx.Client(
        base_url=server.base_url, timeout=CALL_TIMEOUT_S, trust_env=False
    ) as shared:
        yield shared


@pytest.fixture(autouse=True)
def _the_shared_server_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """A dead server is the fault of the test that killed it, with its last words."""
    is_used = bool({"server", "http", "client"} & set(request.fixturenames))
    shared: Server | None = request.getfixturevalue("server") if is_used else None
    yield
    if shared is not None and (code := shared.process.poll()) is not None:
        pytest.fail(f"the shared server died with {code}:\n{shared.log_tail()}")
