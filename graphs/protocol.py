"""What the serving side and the graphs process say to each other.

Every message is one member of a tagged union in msgpack, behind a magic and the schema
version (``core.channel``). Programs, nodes, models, tools and applications travel as hashes
(``core.names``). Times are those of the machine's monotonic clock.
"""

import math
from collections.abc import Iterable
from typing import Annotated, assert_never

import msgspec

from core.channel import Codec
from graphs.shape import Call, Pace

MAGIC = b"JSG"
SCHEMA_VERSION = 2
MAX_BATCH = 256
"""Most events in one message."""
MAX_OUTLOOKS = 64
"""Most outlooks in one message."""
MAX_NAMES = 256
"""Most parents or tools of a call."""
MAX_TOKENS = 1 << 30
MAX_TIME_S = 1e12

_Hash = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """A call of a program has arrived.

    Attributes:
        program, application: hashes; the application's is its tenant's own where it has no name.
        place: how many calls of this program the sender has seen before.
        call: see ``graphs.shape``.
        opened_s, deadline_at_s: of the whole program.
        is_final: no stage follows this one.
        tenant: hash.
    """

    program: _Hash
    application: _Hash
    place: _Tokens
    call: Call
    opened_s: float
    deadline_at_s: float
    is_final: bool
    tenant: _Hash = 0


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """A call has ended.

    Attributes:
        has_failed: in another way than by finishing.
        cached_tokens: of its input what was in the prefix cache.
    """

    program: _Hash
    node: _Hash
    output_tokens: _Tokens
    at_s: float
    has_failed: bool
    cached_tokens: _Tokens = 0


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """A program is over by its client's word; ``is_cancelled``: it was not finished."""

    program: _Hash
    is_cancelled: bool


Event = Arrived | Finished | Closed


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A client is there; it may say so again at any time."""


class Events(msgspec.Struct, frozen=True, tag="events"):
    """What has happened, in order, and what work costs where it happened."""

    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=MAX_BATCH)]
    pace: Pace


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """Asks for a ``Status``."""


ToGraphs = Hello | Events | AskStatus


class Outlook(msgspec.Struct, frozen=True, array_like=True):
    """What is expected of a program after the calls that have arrived.

    Attributes:
        num_calls: of the program that had arrived when this was said.
        stage: the stage that is live, or was last.
        is_known: False: nothing fits (any more), and the rest says nothing.
        calls, stages, input_tokens, output_tokens: still to come; the first and the last two
            include calls of this stage that have not arrived yet.
        stage_tokens: the longest call of each stage to come, added up.
        spread_tokens: standard deviation of that: how sure it is.
        tool_s: tool time before those stages, added up.
        stage_due_s: absolute sub-deadline of the live stage; None between two stages.
        next_call_s: absolute: when the next stage is expected to begin; None during a stage or
            where none is expected.
        next_input_tokens: of that stage's calls together.
        new_tokens: of the input still to come what will not be in the prefix cache.
    """

    program: int
    num_calls: int
    stage: int
    is_known: bool
    calls: float = 0.0
    stages: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    stage_tokens: float = 0.0
    tool_s: float = 0.0
    stage_due_s: float | None = None
    next_call_s: float | None = None
    next_input_tokens: float = 0.0
    new_tokens: float = 0.0
    spread_tokens: float = 0.0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process is there. Another ``session`` than before: it has lost what is running."""

    session: int


class Outlooks(msgspec.Struct, frozen=True, tag="outlooks"):
    """Answers to ``Events``: the newest outlook of each program that they were about."""

    outlooks: Annotated[tuple[Outlook, ...], msgspec.Meta(max_length=MAX_BATCH)]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """How the process is doing: liveness, and counts since it started."""

    session: int
    counters: dict[str, int]


FromGraphs = Ready | Outlooks | Status


def client_codec() -> Codec[ToGraphs, FromGraphs]:
    """How the serving side reads and writes."""
    return Codec(magic=MAGIC, version=SCHEMA_VERSION, takes=FromGraphs)


def server_codec() -> Codec[FromGraphs, ToGraphs]:
    """How the graphs process reads and writes."""
    return Codec(magic=MAGIC, version=SCHEMA_VERSION, takes=ToGraphs)


def check_event(event: Event) -> None:
    """Raise ValueError for what no client of ours sends."""
    match event:
        case Arrived(call=call):
            names = (call.node, call.role, call.model, *call.parents, *call.tools)
            is_sane = (
                all(0 <= name < 1 << 63 for name in names)
                and len(call.parents) <= MAX_NAMES
                and len(call.tools) <= MAX_NAMES
                and 0 <= call.input_tokens <= MAX_TOKENS
                and _are_times((call.at_s, event.opened_s, event.deadline_at_s))
            )
        case Finished():
            is_sane = _are_times((event.at_s,))
        case Closed():
            is_sane = True
        case _:
            assert_never(event)
    if not is_sane:
        raise ValueError("not an event")


def check_pace(pace: Pace) -> None:
    """Raise ValueError unless it is seconds per token and step."""
    if not all(0 <= cost_s <= 1e6 for cost_s in (pace.prefill_s, pace.step_s, pace.token_s)):
        raise ValueError("not a pace")


def check_outlook(outlook: Outlook) -> None:
    """Raise ValueError for what no process of ours sends."""
    amounts = (
        outlook.calls,
        outlook.stages,
        outlook.input_tokens,
        outlook.output_tokens,
        outlook.stage_tokens,
        outlook.spread_tokens,
        outlook.tool_s,
        outlook.next_input_tokens,
        outlook.new_tokens,
    )
    counts = (outlook.num_calls, outlook.stage)
    times = [at for at in (outlook.stage_due_s, outlook.next_call_s) if at is not None]
    is_sane = all(0 <= amount <= MAX_TIME_S for amount in (*amounts, *counts))
    if not (is_sane and _are_times(times)):
        raise ValueError("not an outlook")


def _are_times(times: Iterable[float]) -> bool:
    return all(math.isfinite(at_s) and abs(at_s) <= MAX_TIME_S for at_s in times)
