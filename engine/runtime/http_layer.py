"""The request API on SGLang's HTTP server: one ASGI middleware, innermost in SGLang's app.

Requests: reads the SLO fields and headers of the four generation routes, answers bad ones
with a 400 that names the field, and takes the fields out of the body before SGLang parses it.
Answers: writes ``metadata.slo`` into them and turns drops into 503s with ``Retry-After``.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from core.clock import Clock
from core.programs import ProgramBook, ProgramCancelledError, ProgramRecord
from core.slo import is_final, program_of
from core.terms import (
    HEADERS,
    SLO_FIELDS,
    TENANT_HEADER,
    FieldError,
    read_terms,
    shown,
)
from engine.runtime import answers, sampling_guard
from engine.runtime.answers import AnswerLog
from engine.runtime.drops import REASON_CANCELLED
from engine.runtime.settings import SloConfig
from predictor.features import NO_CUES, cues_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"})
DROP_HEADER = b"x-llm-d-request-dropped-reason"
RETRY_AFTER_S = 1
HEALTH_CHECK_PREFIX = "HEALTH_CHECK"
"""SGLang's ``HEALTH_CHECK_RID_PREFIX``; the contract test compares the two."""


class SloMiddleware:
    """Wraps the ASGI app; other routes pass untouched.

    ``reads_cues``: whether the length predictor wants to know what the prompts look like.
    """

    def __init__(
        self,
        app: Any,
        *,
        slo: SloConfig,
        clock: Clock,
        model: str,
        is_draining: Callable[[], bool],
        reads_cues: bool = False,
        programs: ProgramBook | None = None,
    ) -> None:
        self._app = app
        self._slo = slo
        self._clock = clock
        self._model = model
        self._programs = ProgramBook() if programs is None else programs
        self._is_draining = is_draining
        self._reads_cues = reads_cues

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and route_of(scope) in ROUTES
        if not is_ours or scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        arrival_s = self._clock.now_s()
        if self._is_draining():
            await send_error(send, 503, "the server is shutting down", "unavailable", None)
            return
        raw = await read_body(receive)
        if raw is None:
            return
        try:
            body, log = self._accept(scope, raw, arrival_s)
        except FieldError as error:
            await send_error(send, 400, str(error), "invalid_request_error", error.field)
            return
        except ProgramCancelledError as error:
            await send_error(
                send,
                409,
                f"program_id: the program {shown(str(error))} has been cancelled; calls of a new "
                "one need another id",
                "invalid_request_error",
                "program_id",
                REASON_CANCELLED,
            )
            return
        token = answers.current.set(log)
        program = self._enter_program(log)
        try:
            answer = SloAnswer(send, log)
            await self._app(with_length(scope, body), replay(body, receive), answer.send)
        finally:
            answers.current.reset(token)
            if program is not None and log is not None:
                self._leave_program(program, log)

    def _enter_program(self, log: AnswerLog | None) -> ProgramRecord | None:
        """The program that the request is a call of, with one live call more."""
        program = None if log is None else log.program
        if program is not None:
            program.begin(self._clock.now_s())
        return program

    def _leave_program(self, program: ProgramRecord, log: AnswerLog) -> None:
        program.leave(self._clock.now_s(), has_failed=not log.has_finished)
        tenant, program_id = log.terms.tenant, program_of(log.terms)
        if is_final(log.terms) and not log.has_finished:
            # Dropped, refused or left: its client may try again, by the same deadline.
            self._programs.reopen(tenant, program_id)
        self._programs.tidy(tenant, program_id)

    def _accept(self, scope: Scope, raw: bytes, arrival_s: float) -> tuple[bytes, AnswerLog | None]:
        """The body for SGLang and the log of the request; raises FieldError.

        A body that is no JSON object goes on as it is: SGLang has its own answer to it.
        """
        body = decode(raw)
        if body is None:
            return raw, None
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        route = route_of(scope)
        check_request_id(body.get("rid"))
        for params in (body, *_sampling_params(body)):
            check_integers(params)
        tenant = tenant_of(body, headers)
        model = body.get("model")
        defaults = self._slo.defaults_for(
            model if isinstance(model, str) else self._model, tenant, route
        )
        terms = read_terms(body, headers, defaults, self._programs, arrival_s, tenant)
        if any(field in body for field in SLO_FIELDS):
            raw = without_slo_fields(raw, body)
        cues = cues_of(body) if self._reads_cues else NO_CUES
        program = self._programs.get(terms.tenant, program_of(terms))
        return raw, AnswerLog(terms, self._clock, cues, program)


def route_of(scope: Scope) -> str:
    """The path without a trailing slash and without a proxy's prefix (ASGI ``root_path``)."""
    path = str(scope["path"])
    return path.removeprefix(scope.get("root_path", "")).rstrip("/")


def check_request_id(rid: Any) -> None:
    """Refuse ids that SGLang takes for its own health checks: it would never answer them."""
    for item in rid if isinstance(rid, list) else [rid]:
        if isinstance(item, str) and item.startswith(HEALTH_CHECK_PREFIX):
            raise FieldError("rid", f"must not start with {HEALTH_CHECK_PREFIX}")


def tenant_of(body: dict[str, Any], headers: dict[str, str]) -> str:
    """Who is asking: its header, ``user``, else a digest of the API key (never the key)."""
    if headers.get(TENANT_HEADER):
        return headers[TENANT_HEADER]
    user = body.get("user")
    if isinstance(user, str) and user:
        return user.encode("utf-8", "replace").decode()
    key = headers.get("authorization", "")
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}" if key else ""


INTEGER_FIELDS: Mapping[str, tuple[int, int]] = {
    "n": (1, answers.MAX_N),
    "top_k": (-1, sampling_guard.MAX_TOP_K),
}
"""Fields whose senseless values SGLang accepts, or refuses without naming them."""


def check_integers(params: Any) -> None:
    """The fields of ``INTEGER_FIELDS`` where OpenAI's and SGLang's bodies have them."""
    if not isinstance(params, dict):
        return
    for name, (least, most) in INTEGER_FIELDS.items():
        value = params.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value == value // 1 and least <= value <= most):
            takes = f"takes a whole number from {least} to {most}"
            raise FieldError(name, f"{takes}, got {shown(value)}")


def _sampling_params(body: dict[str, Any]) -> list[Any]:
    params = body.get("sampling_params")
    return params if isinstance(params, list) else [params]


def decode(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in ``raw``, or None. NaN and infinities are kept for a clear refusal."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def without_slo_fields(raw: bytes, body: dict[str, Any]) -> bytes:
    """``raw``, which holds ``body``, without our fields; all else stays as the client wrote it."""
    kept = [name for name in body if name not in SLO_FIELDS]
    try:
        values = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        # What only Python's parser takes (NaN, half a surrogate pair) is for SGLang to judge.
        return json.dumps({name: body[name] for name in kept}).encode()
    return msgspec.json.encode({name: values[name] for name in kept})


async def read_body(receive: Receive) -> bytes | None:
    """The whole request body; None where the client left before sending it."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives ``body`` first and then listens for the disconnect."""
    is_sent = False

    async def receive_body() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


def with_length(scope: Scope, body: bytes) -> Scope:
    """The scope with a Content-Length that fits ``body``."""
    headers = [item for item in scope["headers"] if item[0].lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return {**scope, "headers": headers}


class SloAnswer:
    """Writes the outcome into the answer on its way out.

    The head of the answer is held until the first part of the body: a request that was
    dropped gets a 503 then, also where it asked for a stream. Of a stream only the event
    that ends it is held, until it is known to be the last.
    """

    def __init__(self, send: Send, log: AnswerLog | None) -> None:
        self._send = send
        self._log = log
        self._head: Message | None = None
        self._is_stream = False
        self._is_replaced = False
        self._json: list[bytes] = []
        self._held = b""

    async def send(self, message: Message) -> None:
        if self._log is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._head = message
            kind = header(message, b"content-type")
            self._is_stream = kind.startswith(b"text/event-stream")
            if not self._is_stream and not kind.startswith(b"application/json"):
                self._log = None
                await self._send(message)
        elif message["type"] == "http.response.body" and not self._is_replaced:
            await self._send_body(message, self._log)
        elif not self._is_replaced:
            await self._send(message)

    async def _send_body(self, message: Message, log: AnswerLog) -> None:
        if log.drop_reason is not None and self._head is not None:
            self._is_replaced = True
            await send_drop(self._send, log.drop_reason, log.summary())
        elif self._is_stream:
            await self._send_events(message, log)
        else:
            self._json.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._send_json(b"".join(self._json), log)

    async def _send_json(self, raw: bytes, log: AnswerLog) -> None:
        body = add_outcome(raw, log)
        head = self._head or {"type": "http.response.start", "status": 200, "headers": []}
        headers = [item for item in head["headers"] if item[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**head, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _send_events(self, message: Message, log: AnswerLog) -> None:
        chunk = self._held + message.get("body", b"")
        self._held = b""
        has_more = message.get("more_body", False)
        if self._head is not None:
            if has_more and not log.has_output:
                # The Responses API has events for before the first token; after them a drop
                # could not become a 503 any more.
                self._held = chunk
                return
            head, self._head = self._head, None
            await self._send(head)
        if log.is_complete and has_more and not is_last_event(chunk):
            # Possibly the last event that carries data: it may have to carry the outcome.
            cut = chunk.rstrip().rfind(b"\n\n")
            start = cut + 2 if cut >= 0 else 0
            self._held, chunk = chunk[start:], chunk[:start]
        elif log.is_complete:
            chunk = add_outcome_to_events(chunk, log)
        if chunk or not has_more:
            await self._send({**message, "body": chunk})


def add_outcome(raw: bytes, log: AnswerLog) -> bytes:
    """``raw`` with ``metadata.slo``, if it is a JSON object and something has ended."""
    outcome = log.summary()
    if outcome is None:
        return raw
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw
    if not isinstance(value, dict) or not _merge(value, outcome):
        return raw
    return msgspec.json.encode(value)


def _merge(value: dict[str, Any], outcome: dict[str, Any]) -> bool:
    """Put the outcome where this kind of answer has its metadata."""
    target = value
    if isinstance(value.get("response"), dict):
        # An event of the Responses API carries the response inside.
        if value.get("type") not in ("response.completed", "response.incomplete"):
            return False
        target = value["response"]
    metadata = target.get("metadata")
    target["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "slo": outcome}
    return True


def is_last_event(chunk: bytes) -> bool:
    """Whether the mark that ends a stream is in ``chunk``, on a line of its own."""
    return b"\ndata: [DONE]" in b"\n" + chunk


def add_outcome_to_events(chunk: bytes, log: AnswerLog) -> bytes:
    """Put the outcome into the last data event of ``chunk`` that is JSON."""
    events = chunk.split(b"\n\n")
    for index in range(len(events) - 1, -1, -1):
        lines = events[index].split(b"\n")
        for position, line in enumerate(lines):
            if line.startswith(b"data: {"):
                lines[position] = b"data: " + add_outcome(line[6:], log)
                events[index] = b"\n".join(lines)
                return b"\n\n".join(events)
    return chunk


def header(message: Message, name: bytes) -> bytes:
    """The value of a response header, or an empty string."""
    for key, value in message.get("headers", []):
        if key.lower() == name:
            return bytes(value)
    return b""


async def send_drop(send: Send, reason: str, outcome: dict[str, Any] | None) -> None:
    """503 with the reason in the body and the headers."""
    headers = [
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        (DROP_HEADER, reason.encode()),
    ]
    message = f"the request was dropped: {reason}"
    extra = {"metadata": {"slo": outcome}} if outcome else {}
    await send_error(send, 503, message, "dropped", None, reason, headers, extra)


async def send_error(
    send: Send,
    status: int,
    message: str,
    kind: str,
    field: str | None,
    code: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """An error in the form OpenAI's clients read."""
    error = {"message": message, "type": kind, "param": field, "code": code or str(status)}
    body = msgspec.json.encode({"error": error, **(extra or {})})
    head = [(b"content-type", b"application/json"), *(headers or [])]
    if status == 503 and not headers:
        head.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    head.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def extend_openapi(schema: dict[str, Any]) -> dict[str, Any]:
    """Add our body fields and headers to SGLang's OpenAPI document, in place."""
    schemas = schema.get("components", {}).get("schemas", {})
    for route in ROUTES:
        for operation in schema.get("paths", {}).get(route, {}).values():
            _extend_operation(operation, schemas)
    return schema


def _extend_operation(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    known = {parameter.get("name") for parameter in operation.get("parameters", [])}
    operation.setdefault("parameters", []).extend(
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": "SLO header of the serving ecosystem; wins over the body. "
            "Names ending in -ms and the TTL take milliseconds.",
        }
        for name in HEADERS
        if name not in known
    )
    content = operation.get("requestBody", {}).get("content", {})
    for media in content.values():
        body = media.get("schema", {})
        reference = body.get("$ref", "").rsplit("/", 1)[-1]
        target = schemas.get(reference, body)
        target.setdefault("properties", {}).update(SLO_FIELDS)
