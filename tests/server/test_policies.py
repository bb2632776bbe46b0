"""Every policy by its name on the real server: the same tokens, and nothing is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from calls import Json, new_name, num_live, poll, scheduler_state

from scheduler.policies import CANCEL_SUFFIX, POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

NAMES = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
NUM_REQUESTS = 10


def slo_of(index: int, program: str) -> Json:
    """One of each class, with time to spare."""
    return (
        {"deadline": 60},
        {"target_ttft": 30, "target_tbt": 2},
        {},
        {"program_id": program, "deadline": 60},
        {"deadline": 60, "target_tbt": 2},
    )[index % 5]


def answers(http: httpx.Client) -> list[Any]:
    """The tokens of ten requests sent at once."""
    program = new_name("policies")

    def ask(index: int) -> Any:
        params = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
        body = {"text": f"Number {index} is", "sampling_params": params, "priority": index % 3}
        response = http.post("/generate", json={**body, **slo_of(index, program)})
        assert response.status_code == 200, response.text
        assert response.json()["metadata"]["slo"]["met"]
        return response.json()["output_ids"]

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return list(pool.map(ask, range(NUM_REQUESTS)))


@pytest.fixture(scope="module")
def reference(http: httpx.Client) -> list[Any]:
    """What is answered where nobody is moved."""
    return answers(http)


@pytest.fixture
def restored(http: httpx.Client) -> Iterator[None]:
    """Afterwards the server is as the other tests expect it."""
    before = scheduler_state(http)
    yield
    body = {"policy": before["policy"], "force_moves_every": before["force_moves_every"]}
    assert http.post("/slo/policy", json=body).status_code == 200


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("policy", [*NAMES, "gmax+cancel", "fcfs+cancel"])
def test_a_policy_by_its_name_gives_the_same_tokens_and_leaks_nothing(
    http: httpx.Client, reference: list[Any], policy: str
) -> None:
    before = scheduler_state(http)
    body = {"policy": policy, "force_moves_every": 3}
    assert http.post("/slo/policy", json=body).status_code == 200
    assert answers(http) == reference
    after = poll(lambda: scheduler_state(http), lambda state: num_live(state) == 0)
    assert after["policy"] == policy
    assert after["num_parks"] > before["num_parks"]
    assert after["arrived"] == before["arrived"] + NUM_REQUESTS
    assert after["free_kv_tokens"] + after["evictable_kv_tokens"] == after["total_kv_tokens"]
    assert after["free_request_slots"] == after["total_request_slots"]
