"""The routes that end and cancel programs, with SGLang's tokenizer manager faked."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from core.clock import ManualClock
from core.programs import ProgramBook, ProgramCancelledError, ProgramRecord

if TYPE_CHECKING:
    from collections.abc import Callable

# Importing SGLang takes a quarter of a minute on two idle cores, and it warns of missing GPUs.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

Json = dict[str, Any]
START_S = 1000.0
both = pytest.mark.parametrize("how", ["end", "cancel"])


class FakeSchedulers:
    """What the schedulers are told, and what they answer."""

    def __init__(self) -> None:
        self.told: list[Json] = []
        self.answers = [True]
        self.meanwhile: Callable[[], None] = lambda: None
        """Happens while they are told."""

    async def set_internal_state(self, message: Any) -> list[bool]:
        self.told.append(message.server_args)
        self.meanwhile()
        return self.answers


class World:
    def __init__(self, routes: Any, schedulers: FakeSchedulers) -> None:
        self.schedulers = schedulers
        self.programs = ProgramBook(timeout_s=60.0)
        self.clock = ManualClock(START_S)
        self.routes = routes.ProgramRoutes(self.programs)

    def begin(self, name: str = "p", tenant: str = "") -> ProgramRecord:
        """A call of a program, 20 s of time given."""
        self.programs.join(tenant, name, self.clock.now_s(), 20.0)
        record = self.programs.get(tenant, name)
        assert record is not None
        record.begin(self.clock.now_s())
        return record

    def finish(self, record: ProgramRecord, tokens: int) -> None:
        record.finished(tokens, self.clock.now_s())
        record.leave(self.clock.now_s())

    def ask(self, how: str, body: Any, **headers: str) -> tuple[int, Json]:
        """The status and the JSON of the answer."""
        from starlette.requests import Request

        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = [(key.replace("_", "-").encode(), text.encode()) for key, text in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": named}

        async def receive() -> Json:
            return {"type": "http.request", "body": raw, "more_body": False}

        answer = asyncio.run(getattr(self.routes, how)(Request(scope, receive)))
        return answer.status_code, json.loads(answer.body)


@pytest.fixture(scope="module")
def routes() -> Any:
    from engine.runtime import routes

    return routes


@pytest.fixture
def world(routes: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    schedulers = FakeSchedulers()
    state = SimpleNamespace(tokenizer_manager=schedulers)
    monkeypatch.setattr(routes.http_server, "get_global_state", lambda: state)
    return World(routes, schedulers)


def test_ending_tells_how_the_program_went_and_the_schedulers_that_it_is_over(
    world: World,
) -> None:
    record = world.begin()
    world.clock.advance(5)
    world.finish(record, 30)
    status, report = world.ask("end", {"program_id": "p"})
    assert status == 200
    assert report == {
        "program_id": "p",
        "calls": 1,
        "tokens": 30,
        "goodput_tokens": 30,
        "met": True,
        "deadline": 20.0,
        "elapsed_s": 5.0,
    }
    assert len(world.programs) == 0
    assert len(world.schedulers.told) == 1


def test_a_program_without_a_finished_call_has_not_made_it(world: World) -> None:
    world.begin().leave(START_S)
    _, report = world.ask("end", {"program_id": "p"})
    assert (report["met"], report["calls"], report["elapsed_s"]) == (False, 0, 0.0)


def test_the_schedulers_know_the_program_by_its_number(world: World) -> None:
    from engine.runtime.programs import hash_of_program
    from engine.runtime.settings import KNOB_CANCEL_PROGRAM, KNOB_END_PROGRAM

    for name in "ab":
        world.begin(name, "ann")
    world.ask("end", {"program_id": "a", "user": "ann"})
    world.ask("cancel", {"program_id": "b", "user": "ann"})
    assert world.schedulers.told == [
        {KNOB_END_PROGRAM: hash_of_program("ann", "a")},
        {KNOB_CANCEL_PROGRAM: hash_of_program("ann", "b")},
    ]


def test_a_program_with_a_live_call_is_forgotten_with_it(world: World) -> None:
    record = world.begin()
    assert world.ask("end", {"program_id": "p"})[0] == 200
    assert world.programs.get("", "p") is record
    world.finish(record, 30)
    world.programs.tidy("", "p")
    assert world.programs.get("", "p") is None


def test_cancelling_refuses_what_follows_and_counts_what_is_live(world: World) -> None:
    world.finish(world.begin(), 30)
    world.begin()
    world.begin()
    status, report = world.ask("cancel", {"program_id": "p"})
    assert status == 200
    assert (report["cancelled_calls"], report["calls"], report["tokens"]) == (2, 1, 30)
    assert (report["met"], report["goodput_tokens"]) == (False, 0)
    with pytest.raises(ProgramCancelledError):
        world.programs.join("", "p", START_S + 1, 20.0)


def test_calls_are_refused_before_the_schedulers_have_answered(world: World) -> None:
    world.begin()
    refused = []

    def another_call_arrives() -> None:
        try:
            world.programs.join("", "p", START_S, 20.0)
        except ProgramCancelledError:
            refused.append(True)

    world.schedulers.meanwhile = another_call_arrives
    world.ask("cancel", {"program_id": "p"})
    assert refused == [True]


def test_a_cancelled_program_is_not_there_to_be_ended(world: World) -> None:
    world.begin()
    world.ask("cancel", {"program_id": "p"})
    assert world.ask("end", {"program_id": "p"})[0] == 404


@both
@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["stock", "one rank of two"])
def test_sglangs_own_scheduler_can_end_a_program_but_no_live_call(
    world: World, how: str, answers: list[bool]
) -> None:
    world.begin()
    world.schedulers.answers = answers
    status, answer = world.ask(how, {"program_id": "p"})
    assert status == (200 if how == "end" else 409)
    if how == "cancel":
        assert "--policy sglang" in answer["error"]["message"]


@both
def test_a_program_that_is_not_there_is_nobodys_business(world: World, how: str) -> None:
    world.begin("p", "ann")
    for body in ({"program_id": "q", "user": "ann"}, {"program_id": "p"}):
        status, answer = world.ask(how, body)
        assert status == 404
        assert answer["error"]["param"] == "program_id"
    assert world.schedulers.told == []
    assert len(world.programs) == 1


@both
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"p"', {}, {"program_id": 7}, {"program_id": "x" * 300}]
)
def test_who_names_no_program_is_told_what_to_give(world: World, how: str, body: Any) -> None:
    world.begin()
    status, answer = world.ask(how, body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "program_id", "400")
    assert error["message"].startswith("program_id: takes ")
    assert len(error["message"]) < 200
    assert world.schedulers.told == []


@both
def test_the_header_and_the_tenant_of_a_call_name_the_program_here_too(
    world: World, how: str
) -> None:
    world.begin("session", "fair")
    headers = {"x_dynamo_session_id": "session", "x_llm_d_inference_fairness_id": "fair"}
    status, report = world.ask(how, {"program_id": "other", "user": "ann"}, **headers)
    assert (status, report["program_id"]) == (200, "session")


def test_an_api_key_is_a_tenant_here_too(world: World) -> None:
    from engine.runtime.http_layer import tenant_of

    key = {"authorization": "Bearer secret"}
    world.begin("p", tenant_of({}, key))
    assert world.ask("end", {"program_id": "p"}, authorization="Bearer other")[0] == 404
    assert world.ask("end", {"program_id": "p"}, authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("value", [0.5, 1e300, -1, 2**63, True + 1.5, float("nan")])
def test_a_number_that_names_no_program_is_refused_at_once(value: float) -> None:
    # Anybody may send one by SGLang's own route; the scheduler must not look for it.
    from engine.runtime.frame_scheduler import FrameScheduler
    from engine.runtime.settings import KNOB_CANCEL_PROGRAM, KNOB_END_PROGRAM

    for knob in (KNOB_END_PROGRAM, KNOB_CANCEL_PROGRAM):
        message = SimpleNamespace(server_args={knob: value})
        answer = FrameScheduler.set_internal_state(SimpleNamespace(), message)
        assert answer.updated is False
