"""The predictor beside the real server: it may die, and nobody's answer waits for it."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from calls import CHAT, Json, ask, new_name, poll, scheduler_state

from predictor.client import PredictorProbe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving import RunServer, Server

pytestmark = [pytest.mark.slow_server, pytest.mark.timeout(600)]

NUM_REQUESTS = 50
BACK_LIMIT_S = 90.0


@pytest.fixture(scope="module")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictor-state")


@pytest.fixture(scope="module")
def learning_server(run_server: RunServer, state_folder: Path) -> Iterator[Server]:
    """A server whose predictor keeps what it learns."""
    with run_server("--predictor-state", str(state_folder)) as server:
        yield server


@pytest.fixture(scope="module")
def web(learning_server: Server) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=NUM_REQUESTS + 8)
    with httpx.Client(
        base_url=learning_server.base_url, timeout=400, trust_env=False, limits=limits
    ) as client:
        yield client


def predictor_of(server: Server) -> psutil.Process | None:
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            if "predictor" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.Error:
            continue
    return None


def address_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("--address") + 1]


def seen(web: httpx.Client) -> Json:
    found: Json = scheduler_state(web)["predictor"]
    return found


def wait_until_alive(web: httpx.Client) -> None:
    poll(lambda: seen(web)["is_alive"], bool, limit_s=BACK_LIMIT_S)


def send_many(
    web: httpx.Client, count: int = NUM_REQUESTS, *, max_tokens: int = 24
) -> list[Future[int]]:
    """Requests of every kind, under way."""
    kinds: list[Json] = [
        {"deadline": 60.0},
        {"stream": True, "target_ttft": 30.0, "target_tbt": 1.0},
        {},
    ]

    def one(number: int) -> int:
        answer = ask(
            web,
            CHAT,
            prompt=f"Tell me fact number {number} about rain.",
            max_tokens=max_tokens,
            **kinds[number % len(kinds)],
        )
        assert answer.status == 200, answer.text
        assert answer.is_complete
        return int(answer.slo["output_tokens"])

    executor = ThreadPoolExecutor(count)
    futures = [executor.submit(one, number) for number in range(count)]
    executor.shutdown(wait=False)
    return futures


def all_answered(futures: list[Future[int]]) -> None:
    lengths = [future.result(timeout=400) for future in futures]
    assert all(length >= 1 for length in lengths), lengths


def teach(web: httpx.Client, count: int = 12) -> None:
    """Answers that end by themselves, most of them: those that are cut early teach nothing."""
    all_answered(send_many(web, count, max_tokens=200))


def learnt(process: psutil.Process) -> int:
    probe = PredictorProbe(address_of(process))
    try:
        status = poll(lambda: probe.status(2.0), lambda found: found is not None, limit_s=30.0)
        return int(status.counters["learnt"])
    finally:
        probe.close()


def test_every_request_is_forecast_and_its_length_is_learnt(
    learning_server: Server, web: httpx.Client
) -> None:
    wait_until_alive(web)
    before = seen(web)["num_forecasts"]
    teach(web)
    state = poll(
        lambda: seen(web),
        lambda now: now["num_forecasts"] >= before + 12 and not now["num_held"],
        limit_s=30.0,
    )
    assert state["channel"]["bad"] == 0
    process = predictor_of(learning_server)
    assert process is not None
    poll(lambda: learnt(process), lambda count: count >= 3, limit_s=30.0)


def test_killed_while_fifty_requests_run_it_costs_none_of_them(
    learning_server: Server, web: httpx.Client, state_folder: Path
) -> None:
    wait_until_alive(web)
    teach(web)
    poll(lambda: list(state_folder.glob("*.checkpoint")), bool, limit_s=90.0)
    first = predictor_of(learning_server)
    assert first is not None
    running = send_many(web)
    poll(
        lambda: scheduler_state(web)["num_running"],
        lambda count: count > 0,
        limit_s=60.0,
    )
    first.send_signal(signal.SIGKILL)
    all_answered(running)
    second = poll(
        lambda: predictor_of(learning_server),
        lambda found: found is not None and found.pid != first.pid,
        limit_s=BACK_LIMIT_S,
    )
    wait_until_alive(web)
    assert learnt(second) >= 1, "what it had learnt is gone"
    forecasts = seen(web)["num_forecasts"]
    all_answered(send_many(web, 4))
    poll(
        lambda: seen(web)["num_forecasts"],
        lambda now: now >= forecasts + 4,
        limit_s=30.0,
    )


def test_stopped_while_fifty_requests_run_it_costs_none_of_them(
    learning_server: Server, web: httpx.Client
) -> None:
    wait_until_alive(web)
    first = predictor_of(learning_server)
    assert first is not None
    running = send_many(web)
    first.send_signal(signal.SIGSTOP)
    all_answered(running)
    poll(
        lambda: predictor_of(learning_server),
        lambda found: found is not None and found.pid != first.pid,
        limit_s=BACK_LIMIT_S,
    )
    wait_until_alive(web)
    all_answered(send_many(web, 4))


def test_forecasts_can_be_switched_off_while_it_runs(web: httpx.Client) -> None:
    for is_used in (False, True):
        answer = web.post("/slo/policy", json={"forecasts": is_used})
        assert answer.status_code == 200
        assert seen(web)["is_used"] is is_used
        assert ask(web, CHAT, prompt=f"Say {new_name()}.", max_tokens=4).status == 200
