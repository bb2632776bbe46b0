"""What goes over the wire about programs: numbers and hashes, checked before they are used."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_shapes import PACE, call

from core.channel import WireError
from graphs.protocol import (
    MAGIC,
    MAX_BATCH,
    MAX_NAMES,
    MAX_TIME_S,
    MAX_TOKENS,
    SCHEMA_VERSION,
    Arrived,
    AskStatus,
    Closed,
    Event,
    Events,
    Finished,
    FromGraphs,
    Hello,
    Outlook,
    Outlooks,
    Ready,
    Status,
    ToGraphs,
    check_event,
    check_outlook,
    check_pace,
    client_codec,
    server_codec,
)
from predictor.protocol import MAGIC as PREDICTOR_MAGIC

HASH = (1 << 63) - 1
ARRIVED = Arrived(
    program=HASH,
    application=5,
    place=3,
    call=call(9, 50.0, role=4, parents=(1, 2), tools=(3,)),
    opened_s=40.0,
    deadline_at_s=100.0,
    is_final=True,
)
FINISHED = Finished(HASH, 9, 250, 51.5, has_failed=False)
CLOSED = Closed(HASH, is_cancelled=True)
OUTLOOK = Outlook(
    program=HASH,
    num_calls=3,
    stage=1,
    is_known=True,
    calls=2.5,
    stages=1.5,
    input_tokens=1000.0,
    output_tokens=300.0,
    stage_tokens=200.0,
    tool_s=3.0,
    stage_due_s=80.0,
    next_call_s=None,
)
TO_GRAPHS: list[ToGraphs] = [
    Hello(),
    Events((ARRIVED, FINISHED, CLOSED), PACE),
    Events((), PACE),
    AskStatus(),
]
FROM_GRAPHS: list[FromGraphs] = [
    Ready(2**62),
    Outlooks((OUTLOOK, Outlook(1, 2, 0, is_known=False))),
    Status(1, {"running": 3}),
]


def changed(message: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(message, **changes)


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", TO_GRAPHS, ids=lambda m: type(m).__name__)
def test_the_process_reads_what_the_client_writes(message: ToGraphs) -> None:
    assert server_codec().decode(client_codec().encode(message)) == message


@pytest.mark.parametrize("message", FROM_GRAPHS, ids=lambda m: type(m).__name__)
def test_the_client_reads_what_the_process_writes(message: FromGraphs) -> None:
    assert client_codec().decode(server_codec().encode(message)) == message


def test_frames_begin_with_a_magic_of_their_own_and_the_schema_version() -> None:
    assert client_codec().encode(Hello())[:4] == MAGIC + bytes([SCHEMA_VERSION])
    assert MAGIC != PREDICTOR_MAGIC


@pytest.mark.parametrize("message", TO_GRAPHS, ids=lambda m: type(m).__name__)
def test_a_message_cut_short_anywhere_is_a_wire_error(message: ToGraphs) -> None:
    frame = client_codec().encode(message)
    for length in range(len(frame)):
        with pytest.raises(WireError):
            server_codec().decode(frame[:length])


def test_a_message_of_another_schema_version_is_told_apart() -> None:
    frame = bytearray(client_codec().encode(Hello()))
    frame[3] += 1
    with pytest.raises(WireError) as caught:
        server_codec().decode(bytes(frame))
    assert caught.value.kind == "version"


@given(message=st.sampled_from(TO_GRAPHS), data=st.data())
def test_a_damaged_message_is_another_message_or_a_wire_error(
    message: ToGraphs, data: st.DataObject
) -> None:
    frame = bytearray(client_codec().encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = server_codec().decode(bytes(frame))
    except WireError:
        return
    assert isinstance(found, Hello | Events | AskStatus)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(WireError):
        client_codec().decode(client_codec().encode(Hello()))
    with pytest.raises(WireError):
        server_codec().decode(server_codec().encode(Ready(1)))


@pytest.mark.parametrize("count", [MAX_BATCH + 1, 10 * MAX_BATCH])
def test_a_message_of_more_than_a_batch_is_garbage(count: int) -> None:
    frames = [
        (server_codec(), client_codec().encode(Events((CLOSED,) * count, PACE))),
        (client_codec(), server_codec().encode(Outlooks((OUTLOOK,) * count))),
    ]
    for codec, frame in frames:
        with pytest.raises(WireError) as caught:
            codec.decode(frame)
        assert caught.value.kind == "garbage"


def test_a_full_batch_of_the_longest_events_fits_into_a_frame() -> None:
    names = tuple(HASH - number for number in range(MAX_NAMES))
    longest = changed(
        ARRIVED, call=call(HASH, 1e11, role=HASH, model=HASH, parents=names, tools=names)
    )
    check_event(longest)
    message = Events((longest,) * MAX_BATCH, PACE)
    assert server_codec().decode(client_codec().encode(message)) == message


def test_what_is_said_of_one_call_is_short() -> None:
    frame = client_codec().encode(Events((ARRIVED, FINISHED), PACE))
    assert len(frame) < 200


@pytest.mark.parametrize(
    "body",
    [
        {"type": "events", "events": "x", "pace": [1, 2, 3]},
        {"type": "events", "events": []},
        {"type": "unknown"},
        {},
        [],
        None,
        "hello",
    ],
)
def test_a_well_formed_body_that_is_no_message_is_garbage(body: object) -> None:
    frame = MAGIC + bytes([SCHEMA_VERSION]) + msgspec.msgpack.encode(body)
    with pytest.raises(WireError) as caught:
        server_codec().decode(frame)
    assert caught.value.kind == "garbage"


# Events -------------------------------------------------------------------------------------------


def passes(event: Event) -> bool:
    """Whether an event comes through the wire and its check."""
    try:
        message = server_codec().decode(client_codec().encode(Events((event,), PACE)))
        assert isinstance(message, Events)
        check_event(message.events[0])
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("event", [ARRIVED, FINISHED, CLOSED], ids=lambda e: type(e).__name__)
def test_a_good_event_passes(event: Event) -> None:
    check_event(event)
    assert passes(event)


@pytest.mark.parametrize(
    "event",
    [
        changed(ARRIVED, program=0, application=0, place=0),
        changed(ARRIVED, opened_s=0.0, deadline_at_s=0.0, call=call(0, 0.0, input_tokens=0)),
        changed(ARRIVED, opened_s=-5e5, deadline_at_s=-4e5),
        changed(ARRIVED, call=call(HASH, 1.0, input_tokens=1_000_000)),
        changed(FINISHED, output_tokens=0, at_s=0.0, has_failed=True),
    ],
)
def test_the_outermost_events_pass(event: Event) -> None:
    assert passes(event)


BAD_CALLS = {
    "negative-node": {"node": -1},
    "huge-node": {"node": 1 << 63},
    "negative-role": {"role": -1},
    "huge-role": {"role": 1 << 63},
    "negative-model": {"model": -1},
    "huge-model": {"model": 1 << 64},
    "negative-parent": {"parents": (1, -1)},
    "huge-parent": {"parents": (1 << 63,)},
    "many-parents": {"parents": (1,) * (MAX_NAMES + 1)},
    "negative-tool": {"tools": (-1,)},
    "huge-tool": {"tools": (1 << 63,)},
    "many-tools": {"tools": (1,) * (MAX_NAMES + 1)},
    "negative-tokens": {"input_tokens": -1},
    "many-tokens": {"input_tokens": MAX_TOKENS + 1},
    "nan": {"at_s": math.nan},
    "infinite": {"at_s": math.inf},
    "far": {"at_s": 2 * MAX_TIME_S},
    "long-ago": {"at_s": -2 * MAX_TIME_S},
}


@pytest.mark.parametrize("changes", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_call_that_no_client_tells_is_refused(changes: dict[str, Any]) -> None:
    fields = {"node": 1, **changes}
    try:
        event = changed(ARRIVED, call=call(**fields))
        frame = client_codec().encode(Events((event,), PACE))
    except OverflowError:
        pytest.skip("cannot be written")
    assert frame
    assert not passes(event)


@pytest.mark.parametrize(
    "changes",
    [
        {"program": -1},
        {"program": 1 << 63},
        {"application": -1},
        {"place": -1},
        {"opened_s": math.nan},
        {"opened_s": math.inf},
        {"opened_s": -2 * MAX_TIME_S},
        {"deadline_at_s": math.nan},
        {"deadline_at_s": -math.inf},
        {"deadline_at_s": 2 * MAX_TIME_S},
    ],
    ids=str,
)
def test_an_arrival_that_no_client_tells_is_refused(changes: dict[str, Any]) -> None:
    assert not passes(changed(ARRIVED, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"program": -1},
        {"node": -1},
        {"output_tokens": -1},
        {"output_tokens": MAX_TOKENS + 1},
        {"at_s": math.nan},
        {"at_s": math.inf},
        {"at_s": 2 * MAX_TIME_S},
    ],
    ids=str,
)
def test_an_end_that_no_client_tells_is_refused(changes: dict[str, Any]) -> None:
    assert not passes(changed(FINISHED, **changes))


@pytest.mark.parametrize("program", [-1, 1 << 63])
def test_a_closing_that_no_client_tells_is_refused(program: int) -> None:
    assert not passes(changed(CLOSED, program=program))


# Pace ---------------------------------------------------------------------------------------------


def test_a_good_pace_passes() -> None:
    check_pace(PACE)
    check_pace(changed(PACE, prefill_s=1e-9, step_s=5.0, token_s=1e-9))


@pytest.mark.parametrize("name", ["prefill_s", "step_s", "token_s"])
@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf, 1e30])
def test_a_pace_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_pace(changed(PACE, **{name: value}))


# Outlooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outlook",
    [
        OUTLOOK,
        changed(OUTLOOK, stage_due_s=None, next_call_s=90.0),
        Outlook(1, 1, 0, is_known=False),
        changed(OUTLOOK, calls=0.0, stages=0.0, tool_s=0.0, stage_due_s=-5.0),
    ],
)
def test_a_good_outlook_passes(outlook: Outlook) -> None:
    check_outlook(outlook)


AMOUNTS = ["calls", "stages", "input_tokens", "output_tokens", "stage_tokens", "tool_s"]


@pytest.mark.parametrize("name", AMOUNTS)
@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf, -math.inf, 1e300])
def test_an_outlook_with_an_amount_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_outlook(changed(OUTLOOK, **{name: value}))


@pytest.mark.parametrize("name", ["stage_due_s", "next_call_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2 * MAX_TIME_S])
def test_an_outlook_with_a_time_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_outlook(changed(OUTLOOK, **{name: value}))


@pytest.mark.parametrize("changes", [{"num_calls": -1}, {"stage": -1}], ids=str)
def test_an_outlook_with_a_count_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_outlook(changed(OUTLOOK, **changes))


FLOATS = st.floats() | st.just(0.0)


@given(st.lists(FLOATS, min_size=len(AMOUNTS), max_size=len(AMOUNTS)), st.none() | FLOATS)
def test_whatever_an_outlook_says_it_is_a_number_or_refused(
    amounts: list[float], due_s: float | None
) -> None:
    outlook = changed(OUTLOOK, stage_due_s=due_s, **dict(zip(AMOUNTS, amounts, strict=True)))
    try:
        check_outlook(outlook)
    except ValueError:
        return
    assert all(math.isfinite(value) and value >= 0 for value in amounts)
    assert due_s is None or math.isfinite(due_s)
