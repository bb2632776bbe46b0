"""Our own routes on SGLang's HTTP server."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from core.names import hash_of_program
from core.programs import ProgramBook, ProgramRecord
from core.terms import SLO_FIELDS, FieldError, read_program, shown
from engine.runtime import http_layer
from engine.runtime.settings import (
    KNOB_CANCEL_PROGRAM,
    KNOB_END_PROGRAM,
    KNOB_FORCE_MOVES,
    KNOB_FORECASTS,
    KNOB_OUTLOOKS,
    KNOB_POLICY,
)
from scheduler.policies import CHOICES, POLICIES


def add_routes(app: FastAPI, programs: ProgramBook) -> None:
    """Add our routes, ``/slo/…``, and our fields to the OpenAPI page."""
    stock_openapi = app.openapi
    app.openapi = lambda: http_layer.extend_openapi(stock_openapi())
    app.get("/slo/state")(slo_state)
    app.post("/slo/policy")(auth_level(AuthLevel.ADMIN_OPTIONAL)(slo_policy))
    ends = ProgramRoutes(programs)
    for path, handler in (("end", ends.end), ("cancel", ends.cancel)):
        app.post(f"/slo/programs/{path}", openapi_extra=_PROGRAM_BODY)(handler)


async def slo_state() -> JSONResponse:
    """What the frame scheduler holds at this moment, one entry per data-parallel rank."""
    manager = http_server.get_global_state().tokenizer_manager
    states = [state.get("jitserve") for state in await manager.get_internal_state()]
    known = [state for state in states if state is not None]
    if not known:
        return _error(404, "SGLang's own scheduler decides here (--policy sglang)")
    return JSONResponse(known[0] if len(known) == 1 else {"ranks": known})


async def slo_policy(
    policy: Annotated[str | None, Body(embed=True)] = None,
    force_moves_every: Annotated[int | None, Body(embed=True)] = None,
    forecasts: Annotated[bool | None, Body(embed=True)] = None,
    outlooks: Annotated[bool | None, Body(embed=True)] = None,
) -> JSONResponse:
    """Change the policy while the server runs.

    ``forecasts``, ``outlooks``: whether the predictor's forecasts of lengths and the graphs
    process's of programs are used from now on. ``force_moves_every`` is for tests.
    """
    knobs: dict[str, int | float] = {}
    if policy is not None:
        if policy not in POLICIES:
            return _error(400, f"policy: takes one of {CHOICES}, got {policy!r:.40}")
        knobs[KNOB_POLICY] = list(POLICIES).index(policy)
    if force_moves_every is not None:
        if not 0 <= force_moves_every < 2**31:
            return _error(400, "force_moves_every: takes a number of steps, 0 for never")
        knobs[KNOB_FORCE_MOVES] = force_moves_every
    if forecasts is not None:
        knobs[KNOB_FORECASTS] = int(forecasts)
    if outlooks is not None:
        knobs[KNOB_OUTLOOKS] = int(outlooks)
    manager = http_server.get_global_state().tokenizer_manager
    updated = await manager.set_internal_state(SetInternalStateReq(server_args=knobs))
    if not all(updated):
        return _error(409, "SGLang's own scheduler decides here (--policy sglang)")
    return await slo_state()


_PROGRAM_BODY: dict[str, Any] = {
    "requestBody": {
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "program_id": SLO_FIELDS["program_id"],
                        "user": {"type": "string", "description": "The tenant, as of its calls."},
                    },
                }
            }
        },
        "description": "program_id here or in the header X-Dynamo-Session-ID.",
    }
}


class ProgramRoutes:
    """How a client says that a program is over: ``end``, or that it is not wanted: ``cancel``."""

    def __init__(self, programs: ProgramBook) -> None:
        self._programs = programs
        self._telling: set[asyncio.Task[bool]] = set()

    async def end(self, request: Request) -> JSONResponse:
        """No call of the program will follow; how it went. Calls that are live go on."""
        try:
            tenant, program_id = await _named_program(request)
        except FieldError as error:
            return _error(400, str(error), error.field)
        record = self._programs.close(tenant, program_id)
        if record is None:
            return _unknown(program_id)
        # How it went is known here; the schedulers hear of it when their loops come round.
        telling = asyncio.create_task(_tell_schedulers(KNOB_END_PROGRAM, tenant, program_id))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        self._programs.tidy(tenant, program_id)
        return JSONResponse(_report(program_id, record))

    async def cancel(self, request: Request) -> JSONResponse:
        """End all calls of the program with what they have, and refuse those that follow."""
        try:
            tenant, program_id = await _named_program(request)
        except FieldError as error:
            return _error(400, str(error), error.field)
        record = self._programs.cancel(tenant, program_id)
        if record is None:
            return _unknown(program_id)
        num_live = record.num_live
        is_done = await _tell_schedulers(KNOB_CANCEL_PROGRAM, tenant, program_id)
        if not is_done and num_live:
            return _error(
                409,
                "SGLang's own scheduler decides here (--policy sglang): calls that are live go "
                "on, those that follow are refused",
            )
        return JSONResponse({**_report(program_id, record), "cancelled_calls": num_live})


async def _named_program(request: Request) -> tuple[str, str]:
    """The tenant and the id of the program in the body or the header. Raises FieldError."""
    body = http_layer.decode(await request.body())
    if body is None:
        raise FieldError("program_id", 'takes a JSON object, {"program_id": "…"}')
    headers = {name.lower(): value for name, value in request.headers.items()}
    return read_program(body, headers, http_layer.tenant_of(body, headers))


async def _tell_schedulers(knob: str, tenant: str, program_id: str) -> bool:
    manager = http_server.get_global_state().tokenizer_manager
    program_hash = hash_of_program(tenant, program_id)
    updated = await manager.set_internal_state(
        SetInternalStateReq(server_args={knob: program_hash})
    )
    return all(updated)


def _report(program_id: str, record: ProgramRecord) -> dict[str, Any]:
    outcome = record.outcome()
    opened_s, deadline_at_s = record.clock
    return {
        "program_id": program_id,
        **msgspec.to_builtins(outcome),
        "met": record.met,
        "deadline": round(deadline_at_s - opened_s, 6),
        "elapsed_s": round(record.ended_s - opened_s, 6),
    }


def _unknown(program_id: str) -> JSONResponse:
    return _error(404, f"program_id: no such program is open: {shown(program_id)}", "program_id")


def _error(status: int, message: str, field: str | None = None) -> JSONResponse:
    error: dict[str, Any] = {
        "message": message,
        "type": "invalid_request_error",
        "param": field,
        "code": str(status),
    }
    return JSONResponse({"error": error}, status)
