"""A storm of everything clients do to a server; afterwards nothing is held and all is counted."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
from calls import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    RESPONSES,
    ROUTES,
    Json,
    Route,
    ask,
    new_name,
    num_live,
    poll,
    scheduler_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving import Server

SEED = 20_260_301
NUM_REQUESTS = 300
NUM_THREADS = 24
PROMPTS = (
    "Name a colour.",
    "Count to twenty.",
    "Why is the sky blue?",
    "Write one line about rain.",
    "One, two, three,",
)
BAD_FIELDS: tuple[Json, ...] = (
    {"deadline": -1},
    {"target_ttft": "soon"},
    {"waiting_time": 0},
    {"deadline": 5, "target_ttft": 1},
    {"on_miss": "explode"},
    {"program_id": ""},
)


def slo_fields(rng: random.Random) -> Json:
    """One of the classes, with targets from hopeless to generous."""
    match rng.randrange(5):
        case 0:
            return {"target_ttft": rng.uniform(0.1, 10), "target_tbt": rng.uniform(0.02, 0.5)}
        case 1:
            return {"deadline": rng.uniform(0.2, 60)}
        case 2:
            return {"deadline": rng.uniform(0.2, 5), "on_miss": "cancel"}
        case 3:
            program = f"storm-{SEED}-{rng.randrange(12)}"
            return {"program_id": program, "deadline": 30, "final": rng.random() < 0.3}
        case _:
            return {}


class Client:
    """One of 300 clients; what it asks and how it treats the answer follow from its number."""

    def __init__(self, number: int, storm: str, base_url: str) -> None:
        """Draw its request."""
        self.rng = random.Random(SEED * 1000 + number)
        self.storm = storm
        self.rid = f"{storm}-{number}"
        self.base_url = base_url
        self.route: Route = self.rng.choice(ROUTES)
        self.body = self.route.body(
            prompt=self.rng.choice(PROMPTS),
            max_tokens=self.rng.randint(1, 16),
            sampling={"temperature": self.rng.choice([0.0, 0.8])},
            **slo_fields(self.rng),
        )
        if self.route != RESPONSES:
            self.body["rid"] = self.rid

    def run(self) -> str:
        """Do one thing and say what came of it: a status, or `left`."""
        behaviours: dict[Callable[[httpx.Client], str], int] = {
            self.read_plain: 30,
            self.read_stream: 22,
            self.leave_mid_stream: 14,
            self.leave_before_the_answer: 8,
            self.abort_itself_mid_stream: 8,
            self.abort_someone: 6,
            self.wait_hardly_at_all: 7,
            self.ask_for_nonsense: 5,
        }
        act = self.rng.choices(list(behaviours), weights=list(behaviours.values()))[0]
        with httpx.Client(base_url=self.base_url, timeout=120.0, trust_env=False) as http:
            return act(http)

    def read_plain(self, http: httpx.Client) -> str:
        """Send it and read the whole answer."""
        return str(http.post(self.route.path, json=self.body).status_code)

    def read_stream(self, http: httpx.Client) -> str:
        """Send it and read the whole stream."""
        body = self.body | {"stream": True}
        return str(http.post(self.route.path, json=body).status_code)

    def leave_mid_stream(self, http: httpx.Client) -> str:
        """Hang up after some lines."""
        return self._stream(http, self.rng.randint(1, 12), lambda: None)

    def abort_itself_mid_stream(self, http: httpx.Client) -> str:
        """Abort by rid after some lines; then hang up, or leave it to the server to end."""
        return self._stream(http, self.rng.randint(1, 8), lambda: self._abort(http, self.rid))

    def leave_before_the_answer(self, http: httpx.Client) -> str:
        """Have less patience than the answer needs."""
        try:
            answer = http.post(self.route.path, json=self.body, timeout=self.rng.uniform(0.02, 0.6))
        except httpx.TimeoutException:
            return "left"
        return str(answer.status_code)

    def abort_someone(self, http: httpx.Client) -> str:
        """Abort a random rid of this storm: waiting, running, ended or not yet born."""
        self._abort(http, f"{self.storm}-{self.rng.randrange(NUM_REQUESTS)}")
        return self.read_plain(http)

    def wait_hardly_at_all(self, http: httpx.Client) -> str:
        """Be dropped, most likely."""
        body = self.body | {"waiting_time": self.rng.uniform(0.001, 0.1)}
        return str(http.post(self.route.path, json=body).status_code)

    def ask_for_nonsense(self, http: httpx.Client) -> str:
        """Send what must be refused."""
        body = self.route.body(**self.rng.choice(BAD_FIELDS))
        status = http.post(self.route.path, json=body).status_code
        assert status == 400, f"nonsense got {status}: {body}"
        return "400"

    def _stream(self, http: httpx.Client, num_lines: int, then: Callable[[], None]) -> str:
        body = self.body | {"stream": True}
        with http.stream("POST", self.route.path, json=body) as response:
            for line_number, _ in enumerate(response.iter_lines(), start=1):
                if line_number == num_lines:
                    then()
                    return "left"
            return str(response.status_code)

    @staticmethod
    def _abort(http: httpx.Client, rid: str) -> None:
        assert http.post("/abort_request", json={"rid": rid}).status_code == 200


def is_at_rest(state: Json) -> bool:
    """Nothing lives, nothing is held, everything that came has ended."""
    return (
        num_live(state) == 0
        and state["free_kv_tokens"] + state["evictable_kv_tokens"] == state["total_kv_tokens"]
        and state["free_request_slots"] == state["total_request_slots"]
        and state["arrived"] == sum(state["ended"].values())
    )


@pytest.mark.timeout(400, func_only=True)
def test_after_a_storm_all_is_released_and_accounted_for(
    server: Server, http: httpx.Client
) -> None:
    before = poll(lambda: scheduler_state(http), is_at_rest)
    storm = new_name("storm")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        clients = [Client(number, storm, server.base_url) for number in range(NUM_REQUESTS)]
        outcomes = Counter(pool.map(Client.run, clients))

    assert outcomes.keys() <= {"200", "400", "503", "left"}, outcomes
    for kind in ("200", "400", "left"):
        assert outcomes[kind] > 0, outcomes

    for route in (CHAT, COMPLETIONS, RESPONSES, GENERATE):
        assert ask(http, route).status == 200
    after = poll(lambda: scheduler_state(http), is_at_rest, limit_s=30.0)
    assert after["total_kv_tokens"] == before["total_kv_tokens"]
    assert after["total_request_slots"] == before["total_request_slots"]
    assert after["arrived"] > before["arrived"] + NUM_REQUESTS // 2
    assert all(after["ended"][how] > before["ended"][how] for how in ("finished", "aborted"))
    assert "memory leak" not in server.log()
