"""Our own routes on SGLang's HTTP server."""

from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from engine.runtime import http_layer
from engine.runtime.settings import KNOB_FORCE_MOVES, KNOB_FORECASTS, KNOB_POLICY
from scheduler.policies import CHOICES, POLICIES


def add_routes(app: FastAPI) -> None:
    """Add ``/slo/state`` and ``/slo/policy``, and our fields to the OpenAPI page."""
    stock_openapi = app.openapi
    app.openapi = lambda: http_layer.extend_openapi(stock_openapi())
    app.get("/slo/state")(slo_state)
    app.post("/slo/policy")(auth_level(AuthLevel.ADMIN_OPTIONAL)(slo_policy))


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
) -> JSONResponse:
    """Change the policy while the server runs.

    ``forecasts``: whether the predictor's forecasts are used for requests that arrive from
    now on. ``force_moves_every`` is for tests.
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
    manager = http_server.get_global_state().tokenizer_manager
    updated = await manager.set_internal_state(SetInternalStateReq(server_args=knobs))
    if not all(updated):
        return _error(409, "SGLang's own scheduler decides here (--policy sglang)")
    return await slo_state()


def _error(status: int, message: str) -> JSONResponse:
    error: dict[str, Any] = {"message": message, "type": "invalid_request_error"}
    return JSONResponse({"error": error}, status)
