"""Reading a request's SLO from its body and headers, against the server's defaults.

The one public function, ``read_terms``, is pure: it gets the decoded body and the headers
and returns ``RequestTerms`` or raises ``FieldError`` with the field's name and what it takes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from core.programs import ProgramBook
from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    ReasoningSlo,
    RequestTerms,
    Slo,
)
from core.tools import tool_names

MAX_TIME_S = 366 * 24 * 3600.0
"""Longest time a field takes: a year. Beyond that a unit was mistaken."""
MAX_NAME_CHARS = 256
MAX_PARENTS = 256

SLO_FIELDS: dict[str, dict[str, Any]] = {
    "target_ttft": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_TIME_S,
        "description": "Seconds from arrival to the first token. Makes the request "
        "latency-sensitive: token i (from 0) is on time if sent by "
        "arrival + target_ttft + i * target_tbt.",
    },
    "target_tbt": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_TIME_S,
        "description": "Seconds between tokens of a latency-sensitive answer. With deadline: "
        "the thinking must be done by the deadline, and the visible answer then streams at "
        "this pace.",
    },
    "deadline": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_TIME_S,
        "description": "Seconds from arrival by which the whole answer must be complete. "
        "With program_id: the deadline of the whole program, set by its first call.",
    },
    "program_id": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_NAME_CHARS,
        "description": "Calls that share an id form one request with one deadline. "
        "POST /slo/programs/end or /slo/programs/cancel ends it.",
    },
    "parents": {
        "type": "array",
        "maxItems": MAX_PARENTS,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
        "description": "Nodes of the program whose answers this call needed.",
    },
    "node": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_NAME_CHARS,
        "description": "This call's name inside its program. What comes before a # is its role: "
        "calls of the same role do the same in their programs.",
    },
    "application": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_NAME_CHARS,
        "description": "What the program is an instance of: its shape is foretold from programs "
        "of the same application.",
    },
    "tools_run": {
        "type": "array",
        "maxItems": MAX_PARENTS,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
        "description": "Names of the tools that ran before this call. Where messages carry tool "
        "results, it is read from them.",
    },
    "final": {
        "type": "boolean",
        "description": "True for the last call of a program. It may be latency-sensitive "
        "(target_ttft, target_tbt) in place of sharing the program's deadline.",
    },
    "waiting_time": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_TIME_S,
        "description": "Seconds; the request is dropped (503) if not first scheduled by then.",
    },
    "on_miss": {
        "type": "string",
        "enum": [choice.value for choice in OnMiss],
        "description": "What becomes of a deadline or compound request whose deadline has "
        "passed: finish (served as best-effort) or cancel (ends with what it has).",
    },
}
"""JSON schemas of the body fields, by name: what is validated and what OpenAPI shows."""

_MS_HEADERS: dict[str, str] = {
    "x-llm-d-slo-ttft-ms": "target_ttft",
    "x-slo-ttft-ms": "target_ttft",
    "x-llm-d-slo-tpot-ms": "target_tbt",
    "x-slo-tpot-ms": "target_tbt",
    # The gateway's limit on the time in the queue, not on the answer.
    "x-llm-d-inference-ttl": "waiting_time",
}
_NAME_HEADERS: dict[str, str] = {"x-dynamo-session-id": "program_id"}
TENANT_HEADER = "x-llm-d-inference-fairness-id"
HEADERS: tuple[str, ...] = (*_MS_HEADERS, *_NAME_HEADERS, TENANT_HEADER)


class FieldError(ValueError):
    """A field of a request is wrong. ``field`` is its name as the sender wrote it."""

    def __init__(self, field: str, takes: str) -> None:
        super().__init__(f"{field}: {takes}")
        self.field = field
        self.takes = takes


class SloDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request without SLO fields gets. Times in seconds."""

    target_ttft: float = 5.0
    """Time to first token of a latency-sensitive request that gives only target_tbt."""
    target_tbt: float = 0.2
    """Time between tokens of a latency-sensitive request that gives only target_ttft."""
    deadline: float = 60.0
    """Deadline of a program's first call that gives none."""
    best_effort_deadline: float = 600.0
    """By when a best-effort request should be done; it is never dropped for it."""
    waiting_time: float | None = None
    """Drop a request not first scheduled within this time; none by default."""
    on_miss: OnMiss = OnMiss.FINISH
    streaming_is_latency_sensitive: bool = True
    """Whether a streamed request without SLO fields is latency-sensitive or best-effort."""

    def __post_init__(self) -> None:
        for name in ("target_ttft", "target_tbt", "deadline", "best_effort_deadline"):
            _seconds(name, getattr(self, name))
        if self.waiting_time is not None:
            _seconds("waiting_time", self.waiting_time)


class _Named(NamedTuple):
    """A value and the name under which the sender gave it."""

    name: str
    value: Any


def read_terms(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    defaults: SloDefaults,
    programs: ProgramBook,
    now_s: float,
    tenant: str = "",
) -> RequestTerms:
    """The terms of the request that arrived at ``now_s``.

    Args:
        body: the decoded JSON body; only names in ``SLO_FIELDS``, ``stream`` and ``user`` count.
        headers: lower-case names; the aliases in ``HEADERS`` win over the body.
        tenant: who is asking, where neither a header nor ``user`` says.

    Raises:
        FieldError: a value is not what its field takes, or two fields contradict each other.
        ProgramCancelledError: a call of a program that its client has cancelled.
    """
    given = _gather(body, headers)
    tenant = _tenant(body, headers, tenant)
    waiting = given.get("waiting_time")
    waiting_time_s = defaults.waiting_time if waiting is None else _seconds(*waiting)
    miss = given.get("on_miss")
    on_miss = defaults.on_miss if miss is None else _on_miss(*miss)
    # Last: a refused call must not open or close a program.
    slo = _slo(
        given,
        is_stream=bool(body.get("stream")),
        defaults=defaults,
        programs=programs,
        now_s=now_s,
        tenant=tenant,
    )
    # A last call that streams has no deadline of the program's any more, but it ends it.
    is_last_stream = isinstance(slo, LatencySlo) and "program_id" in given
    closes_program = given["program_id"].value if is_last_stream else ""
    return RequestTerms(now_s, slo, waiting_time_s, on_miss, tenant, closes_program)


def read_program(
    body: Mapping[str, Any], headers: Mapping[str, str], tenant: str
) -> tuple[str, str]:
    """Tenant and id of the program that a request to end one is about. Raises FieldError.

    Args:
        tenant: who is asking, where neither a header nor ``user`` says.
    """
    for header, field in _NAME_HEADERS.items():
        if header in headers and field == "program_id":
            return _tenant(body, headers, tenant), _name(header, headers[header])
    return _tenant(body, headers, tenant), _name("program_id", body.get("program_id"))


def _gather(body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, _Named]:
    given = {name: _Named(name, body[name]) for name in SLO_FIELDS if body.get(name) is not None}
    for header, field in _MS_HEADERS.items():
        if header in headers:
            given[field] = _Named(header, _milliseconds(header, headers[header]) / 1000)
    for header, field in _NAME_HEADERS.items():
        if header in headers:
            given[field] = _Named(header, headers[header])
    if "program_id" in given and (tools := tool_names(body)):
        given.setdefault("tools_run", _Named("tools_run", tools))
    return given


def _slo(
    given: Mapping[str, _Named],
    *,
    is_stream: bool,
    defaults: SloDefaults,
    programs: ProgramBook,
    now_s: float,
    tenant: str,
) -> Slo:
    latency = given.get("target_ttft") or given.get("target_tbt")
    deadline = given.get("deadline")
    program = given.get("program_id")
    for name in ("parents", "node", "final", "application", "tools_run"):
        if name in given and program is None:
            raise FieldError(name, "belongs to a program; give program_id too")
    if latency is not None and deadline is not None and program is None:
        return _reasoning(given, deadline)
    if latency is not None and program is not None:
        return _last_stream(given, defaults, programs, now_s, tenant)
    if program is not None:
        return _compound(given, defaults, programs, now_s, tenant)
    if deadline is not None:
        return DeadlineSlo(_seconds(*deadline))
    if latency is not None or (is_stream and defaults.streaming_is_latency_sensitive):
        return _latency(given, defaults)
    return BestEffortSlo(defaults.best_effort_deadline)


def _latency(given: Mapping[str, _Named], defaults: SloDefaults) -> LatencySlo:
    ttft = given.get("target_ttft", _Named("target_ttft", defaults.target_ttft))
    tbt = given.get("target_tbt", _Named("target_tbt", defaults.target_tbt))
    return LatencySlo(_seconds(*ttft), _seconds(*tbt))


def _reasoning(given: Mapping[str, _Named], deadline: _Named) -> ReasoningSlo:
    """Thinking by a deadline, then a streamed answer: ``deadline`` with ``target_tbt``."""
    if "target_ttft" in given:
        raise FieldError(
            given["target_ttft"].name,
            f"cannot be combined with {deadline.name}: a request is either latency-sensitive "
            "(target_ttft, target_tbt) or has a deadline; thinking by a deadline and then "
            "streaming takes deadline and target_tbt",
        )
    return ReasoningSlo(_seconds(*deadline), _seconds(*given["target_tbt"]))


def _last_stream(
    given: Mapping[str, _Named],
    defaults: SloDefaults,
    programs: ProgramBook,
    now_s: float,
    tenant: str,
) -> LatencySlo:
    """The last call of a program may be latency-sensitive: its answer is what people read."""
    latency = given.get("target_ttft") or given["target_tbt"]
    is_final = _boolean(*given["final"]) if "final" in given else False
    other = given.get("deadline") or (None if is_final else given["program_id"])
    if other is not None:
        raise FieldError(
            latency.name,
            f"cannot be combined with {other.name}: a call of a program shares the program's "
            "deadline; only its last call (final: true) may be latency-sensitive instead",
        )
    slo = _latency(given, defaults)
    program_id = _name(*given["program_id"])
    checks = (
        ("parents", _names),
        ("node", _name),
        ("application", _name),
        ("tools_run", _names),
    )
    for name, check in checks:
        if name in given:
            check(*given[name])
    programs.check(tenant, program_id, now_s)
    programs.close(tenant, program_id)
    return slo


def _compound(
    given: Mapping[str, _Named],
    defaults: SloDefaults,
    programs: ProgramBook,
    now_s: float,
    tenant: str,
) -> CompoundSlo:
    program_id = _name(*given["program_id"])
    deadline = given.get("deadline", _Named("deadline", defaults.deadline))
    parents = _names(*given["parents"]) if "parents" in given else ()
    application = _name(*given["application"]) if "application" in given else ""
    tools = _names(*given["tools_run"]) if "tools_run" in given else ()
    node = _name(*given["node"]) if "node" in given else ""
    is_final = _boolean(*given["final"]) if "final" in given else False
    clock = programs.join(tenant, program_id, now_s, _seconds(*deadline))
    if is_final:
        programs.close(tenant, program_id)
    return CompoundSlo(
        clock.deadline_at_s - now_s,
        program_id,
        parents,
        node,
        is_final,
        program_age_s=now_s - clock.opened_s,
        application=application,
        tools=tools,
    )


def _tenant(body: Mapping[str, Any], headers: Mapping[str, str], fallback: str) -> str:
    if TENANT_HEADER in headers:
        return _name(TENANT_HEADER, headers[TENANT_HEADER])
    user = body.get("user")
    if not isinstance(user, str) or not user:
        return fallback
    # Half of a surrogate pair is a string to JSON and to nobody else.
    return user[:MAX_NAME_CHARS].encode("utf-8", "replace").decode()


def _seconds(name: str, value: Any) -> float:
    takes = f"takes a number of seconds above 0 and at most {MAX_TIME_S:.0f}"
    return _bounded(name, value, MAX_TIME_S, takes)


def _milliseconds(name: str, text: str) -> float:
    takes = f"takes a number of milliseconds above 0 and at most {MAX_TIME_S * 1000:.0f}"
    try:
        # Python's digit groups (1_000) are no number to anybody else.
        value = float(text.replace("_", "?"))
    except ValueError:
        raise FieldError(name, f"{takes}, got {shown(text)}") from None
    return _bounded(name, value, MAX_TIME_S * 1000, takes)


def _bounded(name: str, value: Any, most: float, takes: str) -> float:
    # A bool is an int to Python, never a time to a sender.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(name, f"{takes}, got {shown(value)}")
    if not (math.isfinite(value) if isinstance(value, float) else True) or not 0 < value <= most:
        raise FieldError(name, f"{takes}, got {shown(value)}")
    return float(value)


def _name(name: str, value: Any) -> str:
    takes = f"takes a string of 1 to {MAX_NAME_CHARS} characters"
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise FieldError(name, f"{takes}, got {shown(value)}")
    if not is_text(value):
        raise FieldError(name, f"{takes}, got half of a surrogate pair")
    return value


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PARENTS:
        raise FieldError(name, f"takes a list of at most {MAX_PARENTS} names")
    return tuple(_name(f"{name}[{index}]", parent) for index, parent in enumerate(value))


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(name, f"takes true or false, got {shown(value)}")
    return value


def _on_miss(name: str, value: Any) -> OnMiss:
    try:
        return OnMiss(value)
    except ValueError:
        choices = " or ".join(f'"{choice.value}"' for choice in OnMiss)
        raise FieldError(name, f"takes {choices}, got {shown(value)}") from None


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8; JSON can spell ones that cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A value in an error message: short, and printable whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a huge integer"  # Python refuses to print the hugest
    text = f"{value!r:.200}"
    return text if len(text) <= 60 else f"{text[:57]}..."
