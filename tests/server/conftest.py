"""One real server for the whole session: `python launch.py` with the demo model, on a free port."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

# Plain modules beside this file, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))

from calls import CALL_TIMEOUT_S
from serving import SHARED_FLAGS, RunServer, Server, start_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

HERE = Path(__file__).resolve().parent
TEST_LIMIT_S = 180
SHARED_SERVER_STOP_SIGNAL = signal.SIGINT
"""Ctrl-C; test_launch.py covers SIGTERM on a server of its own."""


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
    with httpx.Client(base_url=server.base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as shared:
        yield shared


@pytest.fixture(autouse=True)
def _the_shared_server_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """A dead server is the fault of the test that killed it, with its last words."""
    is_used = bool({"server", "http", "client"} & set(request.fixturenames))
    shared: Server | None = request.getfixturevalue("server") if is_used else None
    yield
    if shared is not None and (code := shared.process.poll()) is not None:
        pytest.fail(f"the shared server died with {code}:\n{shared.log_tail()}")
