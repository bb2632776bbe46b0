"""The middleware, around a small ASGI application in place of SGLang's."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from core.clock import ManualClock
from core.programs import ProgramBook
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo
from core.terms import HEADERS, SLO_FIELDS, SloDefaults
from engine.runtime import answers, http_layer
from engine.runtime.drops import drop_message
from engine.runtime.http_layer import ROUTES, SloMiddleware
from engine.runtime.settings import SloConfig
from predictor.features import NO_CUES, Cues, cues_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from core.slo import RequestTerms

Message = dict[str, Any]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
every_route = pytest.mark.parametrize("route", sorted(ROUTES))
JSON_TYPE, SSE_TYPE = "application/json", "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class FakeSglang:
    """Reads the request as SGLang would, then acts out a script of steps.

    A step is bytes (a part of the answer's body, the last one closes it) or an output of the
    engine (a dict), reported as the hook around `generate_request` reports it.
    """

    def __init__(self, *steps: bytes | Message, content_type: str = JSON_TYPE) -> None:
        self._steps = steps
        self._content_type = content_type
        self.status = 200
        self.calls = 0
        self.scope: Message = {}
        self.body = b""
        self.terms: RequestTerms | None = None
        self.cues: Cues | None = None
        self.num_received_after: list[int] = []
        """How many messages the client had after each part of the body was sent."""
        self.client: list[Message] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.calls += 1
        self.scope = scope
        self.body = b"".join([part async for part in read(receive)])
        log = answers.current.get()
        self.terms = log.terms if log is not None else None
        self.cues = log.cues if log is not None else None
        parts = [step for step in self._steps if isinstance(step, bytes)]
        headers = [(b"content-type", self._content_type.encode()), (b"x-kept", b"yes")]
        if not self._content_type.startswith("text/event-stream"):
            headers.append((b"content-length", str(sum(map(len, parts))).encode()))
        is_started = False
        for step in self._steps:
            if isinstance(step, dict):
                assert log is not None
                log.observe(step)
                continue
            if not is_started:
                is_started = True
                await send(
                    {"type": "http.response.start", "status": self.status, "headers": headers}
                )
            await send({"type": "http.response.body", "body": step, "more_body": True})
            self.num_received_after.append(len(self.client))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read(receive: Callable[[], Awaitable[Message]]) -> Any:
    """The parts of a request's body."""
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


class Answer:
    """What the client got."""

    def __init__(self, messages: list[Message]) -> None:
        assert [message["type"] for message in messages[:1]] == ["http.response.start"]
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        assert len(self.headers) == len(messages[0]["headers"]), "a header came twice"
        self.parts: list[bytes] = [message["body"] for message in messages[1:]]
        self.body = b"".join(self.parts)
        is_last = [not message.get("more_body", False) for message in messages[1:]]
        assert is_last == [False] * (len(is_last) - 1) + [True], "not closed, or not at its end"

    def json(self) -> Any:
        if "content-length" in self.headers:
            assert int(self.headers["content-length"]) == len(self.body)
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of all data lines."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line[6:]) for line in lines]


class Client:
    """Sends requests through the middleware to the application behind it."""

    def __init__(
        self,
        app: Any,
        *,
        slo: SloConfig | None = None,
        draining: bool = False,
        reads_cues: bool = False,
        programs: ProgramBook | None = None,
    ) -> None:
        self.app = app
        self.clock = ManualClock(1000.0)
        self.middleware = SloMiddleware(
            app,
            slo=slo or SloConfig(),
            clock=self.clock,
            model="served-model",
            is_draining=lambda: draining,
            reads_cues=reads_cues,
            programs=programs,
        )

    def send(
        self,
        body: Any,
        *,
        route: str = CHAT,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        parts: list[Message] | None = None,
    ) -> list[Message]:
        """All messages that the client gets for a request; `body` is JSON or bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope: Message = {
            "type": "http",
            "method": method,
            "path": route,
            "headers": [(b"content-length", str(len(raw)).encode()), (b"x-other", b"1"), *head],
        }
        incoming = parts or [{"type": "http.request", "body": raw, "more_body": False}]
        received: list[Message] = []
        self.app.client = received

        async def receive() -> Message:
            return incoming.pop(0)

        async def take(message: Message) -> None:
            received.append(message)

        asyncio.run(self.middleware(scope, receive, take))
        assert answers.current.get() is None
        return received

    def ask(self, body: Any, **more: Any) -> Answer:
        return Answer(self.send(body, **more))


def output(
    tokens: int, finish: Any = None, *, answer_id: str = "a", prompt_tokens: int = 7
) -> Message:
    """An output of the engine, as SGLang's tokenizer manager yields it."""
    meta = {
        "id": answer_id,
        "completion_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "finish_reason": finish,
    }
    return {"text": "…", "meta_info": meta}


STOP = {"type": "stop", "matched": 2}


def dropped(reason: str = "waiting_time_exceeded") -> Message:
    """The output that tells of a drop."""
    return output(0, {"type": "abort", "message": drop_message(reason), "status_code": 503})


def event(value: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def accepted(body: Any, **more: Any) -> FakeSglang:
    """The application after it got this request."""
    app = FakeSglang(b"{}")
    answer = Client(app, slo=more.pop("slo", None)).ask(body, **more)
    assert answer.status == 200, answer.body
    return app


def refused(body: Any, **more: Any) -> Any:
    """The error of a request that never reaches the application."""
    app = FakeSglang(b"{}")
    answer = Client(app).ask(body, **more)
    assert answer.status == 400
    assert app.calls == 0
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(answer.body))
    return answer.json()["error"]


# Requests on their way in -------------------------------------------------------------------------


@every_route
def test_our_fields_are_taken_out_and_the_length_fits(route: str) -> None:
    body = {"model": "m", "deadline": 5, "max_tokens": 3, "waiting_time": 2, "on_miss": "cancel"}
    app = accepted(body, route=route)
    assert json.loads(app.body) == {"model": "m", "max_tokens": 3}
    headers = app.scope["headers"]
    assert [value for name, value in headers if name == b"content-length"] == [
        str(len(app.body)).encode()
    ]
    assert (b"x-other", b"1") in headers
    assert app.terms is not None
    assert app.terms.slo == DeadlineSlo(5.0)
    assert app.terms.arrival_s == 1000.0


def test_none_of_our_fields_reaches_sglang_not_even_as_null() -> None:
    latency = {"target_ttft": 1, "target_tbt": 1, **dict.fromkeys(("deadline", "program_id"))}
    program = {"program_id": "p", "parents": ["a"], "node": "b", "final": True}
    for fields in (latency, program, dict.fromkeys(SLO_FIELDS)):
        assert json.loads(accepted({"kept": 1, **fields}).body) == {"kept": 1}


def test_a_body_without_our_fields_passes_byte_for_byte() -> None:
    raw = b' {"model" : "m", "temperature": 1.50, "seed": 123456789012345678901234567890} '
    app = accepted(raw)
    assert app.body == raw
    assert app.terms is not None
    assert app.terms.slo == BestEffortSlo(600.0)


def test_what_stays_in_a_body_stays_as_it_was_written() -> None:
    raw = (
        b'{"seed": 123456789012345678901234567890, "deadline": 5, "temperature": 1.50,'
        b' "user": "J\\u00f6rg \xc3\xbc", "max_tokens": 1e400}'
    )
    assert accepted(raw).body == (
        b'{"seed":123456789012345678901234567890,"temperature":1.50,'
        b'"user":"J\\u00f6rg \xc3\xbc","max_tokens":1e400}'
    )


@pytest.mark.parametrize(
    ("value", "written"), [(b"NaN", b"NaN"), (b"-Infinity", b"-Infinity"), (b'"\\ud800"',) * 2]
)
def test_odd_values_of_fields_that_are_not_ours_are_left_for_sglang_to_judge(
    value: bytes, written: bytes
) -> None:
    app = accepted(b'{"temperature": ' + value + b', "deadline": 5}')
    assert app.body == b'{"temperature": ' + written + b"}"


def test_a_body_in_several_parts_is_put_together() -> None:
    raw = json.dumps({"deadline": 5, "prompt": "x" * 100}).encode()
    parts = [
        {"type": "http.request", "body": raw[:30], "more_body": True},
        {"type": "http.request", "more_body": True},
        {"type": "http.request", "body": raw[30:], "more_body": False},
    ]
    assert json.loads(accepted(raw, parts=parts).body) == {"prompt": "x" * 100}


def test_a_client_that_leaves_while_sending_the_body_reaches_nobody() -> None:
    app = FakeSglang(b"{}")
    parts = [
        {"type": "http.request", "body": b'{"dead', "more_body": True},
        {"type": "http.disconnect"},
    ]
    assert Client(app).send(b"", parts=parts) == []
    assert app.calls == 0


def test_sglang_hears_of_a_client_that_leaves_after_sending_the_body() -> None:
    heard: list[str] = []

    class Listener(FakeSglang):
        async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
            heard.extend([(await receive())["type"] for _ in range(2)])

    parts = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]
    Client(Listener()).send(b"{}", parts=parts)
    assert heard == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("raw", [b"", b"not json", b"[1, 2]", b"5", b"\xff\xfe\x00", b'{"a":'])
def test_a_body_that_is_no_json_object_is_passed_on_as_it_is(raw: bytes) -> None:
    app = FakeSglang(b"as it was")
    answer = Client(app).ask(raw)
    assert app.body == raw
    assert app.terms is None
    assert answer.body == b"as it was"


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/chat/completions/more"),
        ("POST", "/abort_request"),
        ("GET", "/generate"),
        ("OPTIONS", CHAT),
    ],
)
def test_other_routes_and_methods_are_not_touched(method: str, route: str) -> None:
    raw = b'{"deadline": NaN, "n": -1}'
    app = FakeSglang(b'{"a" :', b"1}")
    answer = Client(app, draining=True).ask(raw, method=method, route=route)
    assert app.body == raw
    assert (b"content-length", str(len(raw)).encode()) in app.scope["headers"]
    assert app.terms is None
    assert answer.parts == [b'{"a" :', b"1}", b""]


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_what_is_no_http_request_is_handed_on(kind: str) -> None:
    seen: list[Any] = []

    async def app(*args: Any) -> None:
        seen.append(args)

    scope: Message = {"type": kind, "path": CHAT}
    receive: Any = object()
    send: Any = object()
    asyncio.run(Client(app).middleware(scope, receive, send))
    assert seen == [(scope, receive, send)]


def test_a_slash_at_the_end_and_put_are_the_same_route() -> None:
    assert json.loads(accepted({"deadline": 5}, route=CHAT + "/").body) == {}
    assert json.loads(accepted({"deadline": 5}, route="/generate", method="PUT").body) == {}


# Refusals -----------------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"0", b'"5"'])
@pytest.mark.parametrize("field", [b"deadline", b"target_ttft", b"target_tbt", b"waiting_time"])
def test_a_bad_time_gets_a_400_that_names_the_field(route: str, field: bytes, text: bytes) -> None:
    error = refused(b'{"' + field + b'": ' + text + b"}", route=route)
    assert error["param"] == field.decode()
    assert error["message"].startswith(f"{field.decode()}: takes a number of seconds")
    assert (error["type"], error["code"]) == ("invalid_request_error", "400")


def test_a_bad_header_gets_a_400_that_names_the_header() -> None:
    error = refused({}, headers={"X-SLO-TTFT-MS": "soon"})
    assert error["param"] == "x-slo-ttft-ms"


@pytest.mark.parametrize(
    ("field", "values", "takes"),
    [
        ("n", [0, -1, 129, 100_000, 1.5, "2", True, [1]], "from 1 to 128"),
        ("top_k", [-2, 2**31, 2**40, 10**400, 1.5, "2", True], f"from -1 to {2**31 - 1}"),
    ],
)
def test_a_senseless_number_is_refused_by_name_on_every_kind_of_body(
    field: str, values: list[Any], takes: str
) -> None:
    for value in values:
        bodies: list[Any] = [
            {field: value},
            {"sampling_params": {field: value}},
            {"sampling_params": [{field: 1}, {field: value}]},
        ]
        for body in bodies:
            error = refused(body)
            assert error["param"] == field
            assert f"takes a whole number {takes}" in error["message"]
            assert len(error["message"]) < 150


@pytest.mark.parametrize(
    "body",
    [
        {"n": None},
        {"n": 1, "top_k": -1},
        {"n": 128, "top_k": 2**31 - 1},
        {"sampling_params": [{"n": 2}, None]},
        {"sampling_params": "odd"},
    ],
)
def test_a_sensible_number_passes_and_what_is_no_object_is_for_sglang_to_judge(body: Any) -> None:
    assert json.loads(accepted(body).body) == body


def test_a_server_that_is_shutting_down_answers_503_without_reading() -> None:
    app = FakeSglang(b"{}")
    answer = Client(app, draining=True).ask({"deadline": -1})
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["message"] == "the server is shutting down"
    assert app.calls == 0


# Defaults, tenants, programs ----------------------------------------------------------------------


def default_of(ttft: float) -> SloDefaults:
    """Defaults that a test can tell apart."""
    return SloDefaults(target_ttft=ttft)


CONFIG = SloConfig(
    default=default_of(1),
    models={"served-model": default_of(2), "big": default_of(3)},
    tenants={"ann": default_of(4)},
    routes={"/generate": default_of(6)},
)


@pytest.mark.parametrize(
    ("body", "headers", "route", "ttft"),
    [
        ({"model": "unknown"}, {}, CHAT, 1),
        ({}, {}, CHAT, 2),
        ({"model": "big"}, {}, CHAT, 3),
        ({"model": "big", "user": "ann"}, {}, CHAT, 4),
        ({"user": "bob"}, {"x-llm-d-inference-fairness-id": "ann"}, CHAT, 4),
        ({"user": "ann"}, {}, "/generate", 6),
        ({"user": "ann"}, {}, "/generate/", 6),
    ],
)
def test_the_most_specific_defaults_apply(
    body: Message, headers: Mapping[str, str], route: str, ttft: float
) -> None:
    app = accepted({"stream": True, **body}, headers=headers, route=route, slo=CONFIG)
    assert app.terms is not None
    assert app.terms.slo == LatencySlo(ttft, 0.2)


def test_the_tenant_is_the_header_or_the_user_or_a_digest_of_the_key() -> None:
    def tenant(body: Message, **headers: str) -> str:
        terms = accepted(body, headers=headers).terms
        assert terms is not None
        return terms.tenant

    assert tenant({"user": "ann"}, authorization="Bearer secret") == "ann"
    assert tenant({"user": "ann"}, **{"X-LLM-D-Inference-Fairness-ID": "fair"}) == "fair"
    by_key = tenant({}, authorization="Bearer secret")
    assert by_key
    assert "secret" not in by_key
    assert tenant({"user": ""}, authorization="Bearer secret") == by_key
    assert tenant({}, authorization="Bearer other") != by_key
    assert tenant({}) == ""


def test_calls_of_one_program_share_the_first_ones_deadline() -> None:
    client = Client(FakeSglang(b"{}"))
    client.ask({"program_id": "p", "deadline": 60})
    client.clock.advance(20)
    client.ask({"deadline": 5}, headers={"X-Dynamo-Session-ID": "p"}, route=RESPONSES)
    assert client.app.terms.slo == CompoundSlo(40.0, "p", program_age_s=20.0)


# Programs as a whole ------------------------------------------------------------------------------


class Changing:
    """Hands each request on to the application of that moment."""

    now: Any = FakeSglang(b"{}")

    async def __call__(self, *request: Any) -> None:
        await self.now(*request)


class ProgramClient(Client):
    """Makes calls of programs; what SGLang does with them changes from call to call."""

    def __init__(self) -> None:
        self.programs = ProgramBook(timeout_s=60.0)
        super().__init__(Changing(), programs=self.programs)

    def reported(self, *steps: bytes | Message, after_s: float = 0.0, **fields: Any) -> Any:
        """The report of a call that arrives so long after the one before."""
        self.clock.advance(after_s)
        self.app.now = FakeSglang(*steps)
        return self.ask({"program_id": "p", **fields}).json()["metadata"]["slo"]

    def num_live(self) -> int:
        record = self.programs.get("", "p")
        return 0 if record is None else record.num_live


def test_every_call_of_a_program_says_how_the_whole_program_goes() -> None:
    client = ProgramClient()
    # 7 tokens of input each.
    first = client.reported(output(3, STOP), b"{}", deadline=60)
    assert first["program"] == {"calls": 1, "tokens": 10, "goodput_tokens": 10}
    second = client.reported(output(5, STOP), b"{}", after_s=20)
    assert second["program"] == {"calls": 2, "tokens": 22, "goodput_tokens": 22}
    late = client.reported(output(1, STOP), b"{}", after_s=50)
    assert late["program"] == {"calls": 3, "tokens": 30, "goodput_tokens": 0}
    assert (late["met"], late["goodput_tokens"]) == (False, 0)


def test_a_request_of_no_program_says_nothing_of_one() -> None:
    for fields in ({}, {"deadline": 5}, {"target_ttft": 1, "target_tbt": 1}):
        app = FakeSglang(output(3, STOP), b"{}")
        assert "program" not in Client(app).ask(fields).json()["metadata"]["slo"]


def test_programs_of_other_ids_and_tenants_do_not_count() -> None:
    client = ProgramClient()
    client.reported(output(30, STOP), b"{}", deadline=60, user="ann")
    client.reported(output(30, STOP), b"{}", deadline=60, program_id="q")
    report = client.reported(output(3, STOP), b"{}", deadline=60)
    assert report["program"] == {"calls": 1, "tokens": 10, "goodput_tokens": 10}


def test_all_answers_to_one_call_count_and_the_report_shows_them_together() -> None:
    client = ProgramClient()
    outputs = (output(3, STOP, answer_id="a"), output(4, STOP, answer_id="b"))
    report = client.reported(*outputs, b'{"choices": []}', deadline=60, n=2)
    assert report["goodput_tokens"] == 21
    assert report["program"]["tokens"] == report["program"]["goodput_tokens"] == 21


@pytest.mark.parametrize("how", ["abort", "late"])
def test_a_call_that_failed_does_not_count_and_its_report_says_what_does(how: str) -> None:
    client = ProgramClient()
    client.reported(output(3, STOP), b"{}", deadline=30)
    message = {"abort": "client asked", "late": drop_message("deadline_passed")}[how]
    failed = output(9, {"type": "abort", "message": message})
    report = client.reported(failed, b"{}", after_s=50)
    assert report["reason"] in ("client asked", "deadline_passed")
    assert report["program"] == {"calls": 1, "tokens": 10, "goodput_tokens": 10}


def test_where_one_of_several_answers_failed_the_others_count() -> None:
    client = ProgramClient()
    abort = {"type": "abort", "message": "client asked"}
    outputs = (output(3, STOP, answer_id="a"), output(4, abort, answer_id="b"))
    report = client.reported(*outputs, b'{"choices": []}', deadline=60, n=2)
    assert report["met"] is False
    assert report["program"]["tokens"] == 10


def test_a_stream_says_at_its_end_how_the_program_went() -> None:
    client = ProgramClient()
    client.reported(output(3, STOP), b"{}", deadline=60)
    client.app.now = stream_of(
        output(1), chat_event("a"), output(2, STOP), chat_event("b", "stop"), DONE
    )
    answer = client.ask({"program_id": "p", "stream": True})
    report = answer.events()[-1]["metadata"]["slo"]
    assert report["program"] == {"calls": 2, "tokens": 19, "goodput_tokens": 19}


def test_the_final_call_reports_the_whole_program_and_closes_it() -> None:
    client = ProgramClient()
    client.reported(output(3, STOP), b"{}", deadline=60)
    last = client.reported(output(5, STOP), b"{}", after_s=20, final=True)
    assert last["program"] == {"calls": 2, "tokens": 22, "goodput_tokens": 22}
    assert len(client.programs) == 0
    anew = client.reported(output(1, STOP), b"{}", after_s=20, deadline=30)
    assert anew["program"]["calls"] == 1
    assert anew["deadline"] == 30


def test_the_last_call_with_targets_of_its_own_reports_the_whole_program_too() -> None:
    client = ProgramClient()
    client.reported(output(3, STOP), b"{}", deadline=60)
    last = client.reported(
        output(5, STOP), b"{}", after_s=20, final=True, target_ttft=9, target_tbt=1
    )
    assert last["type"] == "latency"
    # It is judged and counted by targets of its own.
    assert last["program"] == {"calls": 1, "tokens": 10, "goodput_tokens": 10}
    assert len(client.programs) == 0


def test_a_call_is_live_for_as_long_as_its_answer_takes() -> None:
    client = ProgramClient()
    seen: list[int] = []

    class Looking(FakeSglang):
        async def __call__(self, *request: Any) -> None:
            seen.append(client.num_live())
            await super().__call__(*request)
            seen.append(client.num_live())

    client.app.now = Looking(output(3, STOP), b"{}")
    client.ask({"program_id": "p", "deadline": 60})
    assert [*seen, client.num_live()] == [1, 1, 0]


class Gone(ConnectionError):
    """The client has hung up."""


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("where", ["sending", "in the engine"])
def test_a_client_that_goes_away_half_way_leaves_no_live_call(where: str, *, final: bool) -> None:
    client = ProgramClient()

    class Breaking(FakeSglang):
        async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
            if where == "in the engine":
                raise Gone

            async def hang_up(message: Message) -> None:
                raise Gone

            await super().__call__(scope, receive, hang_up)

    client.app.now = Breaking(output(3), b"{}")
    with pytest.raises(Gone):
        client.send({"program_id": "p", "deadline": 60, "final": final})
    assert client.num_live() == 0
    assert len(client.programs) == 1


def test_a_last_call_that_came_to_nothing_may_be_tried_again_by_the_same_deadline() -> None:
    client = ProgramClient()
    client.app.now = FakeSglang(output(3, STOP), b"{}")
    client.ask({"program_id": "p", "deadline": 60})
    client.app.now = FakeSglang(output(0, {"type": "abort", "message": "no room"}), b"{}")
    client.ask({"program_id": "p", "final": True})
    record = client.programs.get("", "p")
    assert record is not None
    assert not record.is_closed
    client.app.now = FakeSglang(output(3, STOP), b"{}")
    client.ask({"program_id": "p", "final": True})
    assert len(client.programs) == 0


def test_a_client_that_goes_away_before_its_body_is_here_opens_no_program() -> None:
    client = ProgramClient()
    raw = json.dumps({"program_id": "p", "deadline": 60}).encode()
    parts = [
        {"type": "http.request", "body": raw, "more_body": True},
        {"type": "http.disconnect"},
    ]
    assert client.send(b"", parts=parts) == []
    assert len(client.programs) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"top_k": -7},
        {"rid": "HEALTH_CHECK_1"},
        {"waiting_time": 0},
        {"application": 1},
        {"tools_run": "search"},
        {"tools_run": ["x" * 300]},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_a_refused_call_opens_no_program_and_is_never_live(bad: Message) -> None:
    client = ProgramClient()
    client.app.now = FakeSglang(b"{}")
    answer = client.ask({"program_id": "p", "deadline": 60, **bad})
    assert answer.status == 400
    assert answer.json()["error"]["param"].startswith(next(iter(bad)))
    assert len(client.programs) == 0
    assert client.app.now.calls == 0


@every_route
@pytest.mark.parametrize("last", [{}, {"final": True}], ids=["a call", "the last call"])
def test_a_call_of_a_cancelled_program_gets_a_409_and_reaches_nobody(
    route: str, last: Message
) -> None:
    programs = ProgramBook()
    programs.join("", "trip", 1000.0, 60.0)
    programs.cancel("", "trip")
    app = FakeSglang(b"{}")
    client = Client(app, programs=programs)
    answer = client.ask({"program_id": "trip", **last}, route=route)
    assert answer.status == 409
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("program_cancelled", "program_id")
    assert "'trip'" in error["message"]
    assert "program_id" in error["message"]
    assert app.calls == 0
    assert programs.get("", "trip").num_live == 0


def test_the_last_stream_of_a_cancelled_program_gets_a_409_as_well() -> None:
    programs = ProgramBook()
    programs.join("", "p", 1000.0, 60.0)
    programs.cancel("", "p")
    app = FakeSglang(b"{}")
    body = {"program_id": "p", "final": True, "target_ttft": 2, "stream": True}
    assert Client(app, programs=programs).ask(body).status == 409
    assert app.calls == 0


def test_a_program_that_another_tenant_has_cancelled_goes_on() -> None:
    programs = ProgramBook()
    programs.join("ann", "p", 1000.0, 60.0)
    programs.cancel("ann", "p")
    client = Client(FakeSglang(b"{}"), programs=programs)
    assert client.ask({"program_id": "p", "user": "bob"}).status == 200
    assert client.ask({"program_id": "p", "user": "ann"}).status == 409


def test_none_of_the_fields_of_a_program_reaches_sglang() -> None:
    fields = {
        "program_id": "p",
        "parents": ["a"],
        "node": "b",
        "final": False,
        "application": "agent",
        "tools_run": ["search"],
        "deadline": 5,
    }
    app = accepted({"kept": 1, **fields})
    assert json.loads(app.body) == {"kept": 1}
    assert app.terms is not None
    assert app.terms.slo == CompoundSlo(
        5.0, "p", ("a",), "b", application="agent", tools=("search",)
    )


# Answers on their way out -------------------------------------------------------------------------


def test_a_json_answer_gets_the_report_and_the_right_length() -> None:
    app = FakeSglang(output(0), output(3, STOP), b'{"id": "x", "choi', b'ces": []}')
    answer = Client(app).ask({"deadline": 5})
    value = answer.json()
    report = value.pop("metadata")["slo"]
    assert value == {"id": "x", "choices": []}
    assert report == {
        "type": "deadline",
        "met": True,
        "goodput_tokens": 10,
        "ttft_s": 0.0,
        "worst_lateness_s": -5.0,
        "e2el_s": 0.0,
        "output_tokens": 3,
        "deadline": 5.0,
    }
    assert answer.headers["x-kept"] == "yes"
    assert answer.status == 200


def test_the_callers_own_metadata_stays_beside_the_report() -> None:
    app = FakeSglang(output(3, STOP), b'{"metadata": {"ticket": "7"}}')
    assert set(Client(app).ask({}).json()["metadata"]) == {"ticket", "slo"}
    app = FakeSglang(output(3, STOP), b'{"metadata": null}')
    assert set(Client(app).ask({}).json()["metadata"]) == {"slo"}


def test_several_answers_share_one_report_with_their_tokens_added_up() -> None:
    app = FakeSglang(
        output(3, answer_id="a"),
        output(3, STOP, answer_id="a"),
        output(4, STOP, answer_id="b"),
        b'{"choices": []}',
    )
    report = Client(app).ask({"n": 2, "deadline": 5}).json()["metadata"]["slo"]
    assert (report["output_tokens"], report["goodput_tokens"]) == (7, 21)


@pytest.mark.parametrize("raw", [b'{"error": "bad prompt"}', b"not even json", b"[1]", b""])
def test_an_answer_to_a_request_that_never_ran_stays_as_it_is(raw: bytes) -> None:
    app = FakeSglang(raw)
    app.status = 400
    answer = Client(app).ask({"deadline": 5})
    assert (answer.status, answer.body) == (400, raw)


def test_a_list_of_answers_is_not_touched() -> None:
    raw = b'[{"text": "a"}, {"text": "b"}]'
    app = FakeSglang(output(1, STOP), output(1, STOP, answer_id="b"), raw)
    assert Client(app).ask({}, route="/generate").body == raw


def test_an_answer_of_another_type_passes_part_by_part() -> None:
    app = FakeSglang(output(1, STOP), b"plain ", b"text", content_type="text/plain")
    answer = Client(app).ask({})
    assert answer.parts == [b"plain ", b"text", b""]
    assert app.num_received_after == [2, 3]


# Streams ------------------------------------------------------------------------------------------


def chat_event(text: str, finish: str | None = None) -> bytes:
    """A chunk of a chat answer."""
    return event({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})


def stream_of(*steps: bytes | Message) -> FakeSglang:
    """An application that streams."""
    return FakeSglang(*steps, content_type=SSE_TYPE)


def reports_of(answer: Answer) -> list[bool]:
    """Which events carry the report."""
    return [
        "slo" in (value.get("response", value).get("metadata") or {}) for value in answer.events()
    ]


def test_events_are_not_held_back() -> None:
    app = stream_of(
        *[step for i in range(50) for step in (output(i + 1), chat_event(f"t{i}"))],
        output(51, STOP),
        chat_event("end", "stop"),
        DONE,
    )
    answer = Client(app).ask({"stream": True})
    # The head and the first event, then one more message with every event but the last.
    assert app.num_received_after[:50] == list(range(2, 52))
    assert reports_of(answer) == [False] * 50 + [True]
    assert answer.body.endswith(b"\n\n" + DONE)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, "/generate"])
@pytest.mark.parametrize("is_apart", [True, False], ids=["done apart", "done in the last part"])
def test_the_last_event_before_done_carries_the_report(route: str, is_apart: bool) -> None:
    first, last = event({"text": "a"}), event({"text": "b", "metadata": {"mine": 1}})
    ending = (last, DONE) if is_apart else (last + DONE,)
    app = stream_of(output(1), first, output(2, STOP), *ending)
    answer = Client(app).ask({"stream": True}, route=route)
    assert reports_of(answer) == [False, True]
    assert answer.events()[1]["metadata"].keys() == {"mine", "slo"}
    assert answer.events()[1]["text"] == "b"
    report = answer.events()[1]["metadata"]["slo"]
    assert (report["type"], report["output_tokens"]) == ("latency", 2)
    assert answer.body.endswith(b"}\n\n" + DONE)
    assert answer.headers["content-type"] == SSE_TYPE


def test_a_usage_event_after_the_last_token_is_the_one_that_carries_the_report() -> None:
    usage = event({"choices": [], "usage": {"completion_tokens": 2}})
    app = stream_of(
        output(1), chat_event("a"), output(2, STOP), chat_event("b", "stop"), usage, DONE
    )
    answer = Client(app).ask({"stream": True})
    assert reports_of(answer) == [False, False, True]
    assert answer.events()[2]["usage"] == {"completion_tokens": 2}


def test_several_events_in_one_part_keep_their_order_and_the_last_gets_the_report() -> None:
    app = stream_of(
        output(2, STOP), chat_event("a") + chat_event("b"), chat_event("c", "stop"), DONE
    )
    answer = Client(app).ask({"stream": True})
    texts = [value["choices"][0]["delta"]["content"] for value in answer.events()]
    assert texts == ["a", "b", "c"]
    assert reports_of(answer) == [False, False, True]
    # Only the event that may be the last was held.
    assert app.num_received_after[0] == 2


def test_the_responses_api_has_its_report_in_the_response_of_the_completed_event() -> None:
    delta = event(
        {"type": "response.output_text.delta", "delta": "a"}, "response.output_text.delta"
    )
    done = event({"type": "response.output_text.done", "text": "ab"}, "response.output_text.done")
    response = {"id": "resp", "status": "completed", "metadata": {"ticket": "7"}}
    completed = event({"type": "response.completed", "response": response}, "response.completed")
    app = stream_of(output(1), delta, output(2, STOP), done, completed)
    answer = Client(app).ask({"stream": True}, route=RESPONSES)
    assert reports_of(answer) == [False, False, True]
    last = answer.events()[-1]
    assert last["response"]["metadata"].keys() == {"ticket", "slo"}
    assert "metadata" not in last
    assert b"event: response.completed\ndata: {" in answer.body


def test_a_stream_of_several_answers_has_one_report_at_its_end() -> None:
    app = stream_of(
        output(1, STOP, answer_id="a"),
        chat_event("a", "stop"),
        output(1, answer_id="b"),
        chat_event("b"),
        output(2, STOP, answer_id="b"),
        chat_event("b", "stop"),
        DONE,
    )
    answer = Client(app).ask({"stream": True, "n": 2})
    assert reports_of(answer) == [False, False, True]
    assert answer.events()[2]["metadata"]["slo"]["output_tokens"] == 3


def test_an_answer_that_speaks_of_the_end_mark_does_not_end_the_stream() -> None:
    app = stream_of(
        output(1),
        chat_event("data: [DONE]"),
        output(2, STOP),
        chat_event("\n\ndata: [DONE]\n\n"),
        chat_event("", "stop"),
        DONE,
    )
    answer = Client(app).ask({"stream": True})
    assert reports_of(answer) == [False, False, True]


def test_a_stream_that_breaks_off_has_no_report_and_nothing_missing() -> None:
    app = stream_of(output(1), chat_event("a"), chat_event("b"))
    answer = Client(app).ask({"stream": True})
    assert answer.body == chat_event("a") + chat_event("b")


def test_lateness_is_measured_where_the_answer_leaves() -> None:
    app = FakeSglang(output(1), output(2, STOP), b"{}")
    client = Client(app)
    observe = answers.AnswerLog.observe

    def slowly(log: answers.AnswerLog, item: Message) -> None:
        client.clock.advance(2.0)
        observe(log, item)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers.AnswerLog, "observe", slowly)
        report = client.ask({"target_ttft": 2.5, "target_tbt": 1.0}).json()["metadata"]["slo"]
    assert (report["ttft_s"], report["worst_lateness_s"]) == (2.0, 0.5)
    assert (report["met"], report["goodput_tokens"]) == (False, 1)


# Drops --------------------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize("content_type", [JSON_TYPE, SSE_TYPE])
def test_a_drop_before_the_first_byte_is_a_503_also_where_a_stream_was_asked_for(
    route: str, content_type: str
) -> None:
    body = event({"error": {"message": "Abort"}}) if content_type == SSE_TYPE else b'{"error": 1}'
    app = FakeSglang(dropped(), body, DONE, content_type=content_type)
    answer = Client(app).ask({"stream": content_type == SSE_TYPE, "waiting_time": 1}, route=route)
    assert answer.status == 503
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["x-llm-d-request-dropped-reason"] == "waiting_time_exceeded"
    value = answer.json()
    assert value["error"]["code"] == "waiting_time_exceeded"
    assert "waiting_time_exceeded" in value["error"]["message"]
    report = value["metadata"]["slo"]
    assert (report["met"], report["reason"]) == (False, "waiting_time_exceeded")


def test_an_abort_that_is_no_drop_of_ours_stays_what_it_was() -> None:
    abort = output(2, {"type": "abort", "message": "client asked"})
    app = FakeSglang(abort, b'{"choices": []}')
    answer = Client(app).ask({"deadline": 5})
    assert answer.status == 200
    report = answer.json()["metadata"]["slo"]
    assert (report["reason"], report["met"], report["goodput_tokens"]) == ("client asked", False, 0)


def test_a_stream_that_has_begun_ends_as_a_stream_with_the_reason_in_its_report() -> None:
    app = stream_of(
        output(1),
        chat_event("a"),
        output(1, {"type": "abort", "message": drop_message("late")}),
        chat_event("", "abort"),
        DONE,
    )
    answer = Client(app).ask({"stream": True})
    assert answer.status == 200
    assert reports_of(answer) == [False, True]
    assert answer.events()[-1]["metadata"]["slo"]["reason"] == "late"


# The OpenAPI page ---------------------------------------------------------------------------------


def test_the_openapi_page_gets_our_fields_and_headers_once() -> None:
    def operation(schema: Message) -> Message:
        return {"requestBody": {"content": {"application/json": {"schema": schema}}}}

    page: Message = {
        "paths": {
            CHAT: {"post": operation({"$ref": "#/components/schemas/Chat"})},
            "/generate": {"post": operation({"properties": {"text": {}}})},
            "/v1/models": {"get": {}},
        },
        "components": {"schemas": {"Chat": {"properties": {"model": {}}}}},
    }
    for _ in range(2):  # the page is made once and asked for often
        page = http_layer.extend_openapi(page)
    assert set(page["components"]["schemas"]["Chat"]["properties"]) == {"model", *SLO_FIELDS}
    generate = page["paths"]["/generate"]["post"]
    inline = generate["requestBody"]["content"]["application/json"]["schema"]
    assert set(inline["properties"]) == {"text", *SLO_FIELDS}
    assert [parameter["name"] for parameter in generate["parameters"]] == list(HEADERS)
    assert page["paths"]["/v1/models"] == {"get": {}}


# Hostile input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_x", ["a", "HEALTH_CHECK"]])
def test_an_id_that_sglang_takes_for_a_health_check_is_refused(rid: Any) -> None:
    answer = Client(FakeSglang(b"{}")).ask({"rid": rid})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "rid"


@pytest.mark.parametrize("field", ["program_id", "node"])
def test_half_of_a_surrogate_pair_is_refused_before_any_work_is_done(field: str) -> None:
    app = FakeSglang(b"{}")
    answer = Client(app).ask({"program_id": "p", field: "\ud800"})
    assert (answer.status, app.calls) == (400, 0)
    assert answer.json()["error"]["param"] == field


def test_half_of_a_surrogate_pair_in_the_user_is_replaced() -> None:
    app = FakeSglang(b"{}")
    assert Client(app).ask({"user": "a\ud800"}).status == 200
    assert app.terms is not None
    assert app.terms.tenant == "a?"


@pytest.mark.parametrize("field", ["n", "top_k"])
def test_a_whole_number_written_with_a_point_is_a_whole_number(field: str) -> None:
    assert Client(FakeSglang(b"{}")).ask({field: 1.0}).status == 200
    assert Client(FakeSglang(b"{}")).ask({field: 1.5}).status == 400


def test_a_proxys_prefix_does_not_hide_the_route() -> None:
    assert http_layer.route_of({"path": "/x/generate", "root_path": "/x"}) == "/generate"
    assert http_layer.route_of({"path": "/generate/", "root_path": ""}) == "/generate"


# Cues for the length predictor --------------------------------------------------------------------


def test_the_prompt_is_read_for_cues_only_where_a_predictor_wants_them() -> None:
    body = {"messages": [{"role": "user", "content": "Write 300 words about rain."}]}
    for reads_cues in (True, False):
        app = FakeSglang(b"{}")
        Client(app, reads_cues=reads_cues).ask(body)
        assert (app.cues == cues_of(body)) is reads_cues
        assert (app.cues == NO_CUES) is not reads_cues
