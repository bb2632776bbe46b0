"""What goes over the wire: numbers and hashes, checked before they are used."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.channel import WireError
from core.names import name_hash
from predictor.distribution import MAX_TOKENS, NUM_POINTS, points_of_sample
from predictor.features import MAX_VALUE, NUM_FEATURES
from predictor.protocol import (
    MAGIC,
    MAX_BATCH,
    SCHEMA_VERSION,
    Ask,
    AskStatus,
    CalibrationUpdate,
    Ended,
    Ending,
    Forecast,
    Forecasts,
    FromPredictor,
    Hello,
    Question,
    Ready,
    Status,
    ToPredictor,
    client_codec,
    features_of,
    floats_of,
    points_of,
    server_codec,
)

QUESTION = Question("r", 1, 2, 3, b"\x00" * 4 * NUM_FEATURES, (1, 2, 3))
TO_PREDICTOR: list[ToPredictor] = [
    Hello(),
    Ask((QUESTION, QUESTION), -1),
    Ask((), 2**40),
    Ended((Ending("r", 5, is_cut=True, progress=(b"abcd", b"")), Ending("é", 0, is_cut=False))),
    AskStatus(),
]
FROM_PREDICTOR: list[FromPredictor] = [
    Ready(2**62),
    Forecasts((Forecast("r", b"\x00" * 4 * NUM_POINTS),)),
    CalibrationUpdate(3, b"abc", b"de"),
    Status(1, {"learnt": 3}, (0.9, -1.0)),
]


def float_bytes(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", TO_PREDICTOR, ids=lambda m: type(m).__name__)
def test_the_predictor_reads_what_the_client_writes(message: ToPredictor) -> None:
    assert server_codec().decode(client_codec().encode(message)) == message


@pytest.mark.parametrize("message", FROM_PREDICTOR, ids=lambda m: type(m).__name__)
def test_the_client_reads_what_the_predictor_writes(message: FromPredictor) -> None:
    assert client_codec().decode(server_codec().encode(message)) == message


def test_frames_begin_with_the_magic_and_the_schema_version() -> None:
    assert client_codec().encode(Hello())[:4] == MAGIC + bytes([SCHEMA_VERSION])


@pytest.mark.parametrize("message", TO_PREDICTOR, ids=lambda m: type(m).__name__)
def test_a_message_cut_short_anywhere_is_a_wire_error(message: ToPredictor) -> None:
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


@given(message=st.sampled_from(TO_PREDICTOR), data=st.data())
def test_a_damaged_message_is_another_message_or_a_wire_error(
    message: ToPredictor, data: st.DataObject
) -> None:
    frame = bytearray(client_codec().encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = server_codec().decode(bytes(frame))
    except WireError:
        return
    assert isinstance(found, Hello | Ask | Ended | AskStatus)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "ask", "questions": "x", "calibration_version": 1},
        {"type": "ask", "questions": [[1, 2]], "calibration_version": 1},
        {"type": "ask", "questions": []},
        {"type": "ended", "endings": [["r", 1.5, True]]},
        {"type": "ended", "endings": [["r", True, True]]},
        {"type": "ended", "endings": [[b"r", 1, True]]},
        {"type": "unknown"},
        {"type": 5},
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


@pytest.mark.parametrize("count", [MAX_BATCH + 1, 10 * MAX_BATCH])
def test_a_message_of_more_than_a_batch_is_garbage(count: int) -> None:
    ending = Ending("1", 5, is_cut=False)
    frames = [
        (server_codec(), client_codec().encode(Ask((QUESTION,) * count, -1))),
        (server_codec(), client_codec().encode(Ended((ending,) * count))),
        (client_codec(), server_codec().encode(Forecasts((Forecast("1", b""),) * count))),
    ]
    for codec, frame in frames:
        with pytest.raises(WireError) as caught:
            codec.decode(frame)
        assert caught.value.kind == "garbage"


def test_a_full_batch_of_the_longest_questions_fits_into_a_frame() -> None:
    longest = msgspec.structs.replace(
        QUESTION, request_id="9" * 64, model=2**63 - 1, words=(2047,) * 64
    )
    message = Ask((longest,) * MAX_BATCH, -1)
    assert server_codec().decode(client_codec().encode(message)) == message


# Names --------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(), max_size=20)


@given(st.lists(NAMES, max_size=3))
def test_a_name_s_hash_is_a_number_that_any_integer_type_holds(names: list[str]) -> None:
    found = name_hash(*names)
    assert 0 <= found < 1 << 63
    assert found == name_hash(*names)
    if not names or not names[-1]:
        assert found == 0


def test_names_are_kept_apart() -> None:
    found = [
        name_hash("ab"),
        name_hash("a", "b"),
        name_hash("b", "a"),
        name_hash("", "ab"),
        name_hash("ab", "", "x"),
        name_hash("a", "b", "x"),
        name_hash("a", "bx"),
    ]
    assert len(set(found)) == len(found)


def test_no_name_is_zero() -> None:
    assert name_hash() == name_hash("") == name_hash("model", "") == name_hash("m", "t", "") == 0


def test_a_name_is_not_in_its_hash() -> None:
    assert b"tenant" not in msgspec.msgpack.encode(name_hash("model", "tenant"))


def test_every_process_hashes_alike() -> None:
    # Python's own hash differs from process to process.
    code = (
        "from core.names import name_hash; from predictor.features import cues_of;"
        "print(name_hash('m', 'tenant'), *cues_of({'prompt': 'write a poem'}).words)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert seen.pop().split()[0] == str(name_hash("m", "tenant")).encode()


# Numbers ------------------------------------------------------------------------------------------


def test_floats_come_back_as_they_went() -> None:
    assert floats_of(float_bytes(1.5, -2, 0), 3).tolist() == [1.5, -2, 0]


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\x00" * 4, b"\x00" * 12])
def test_another_number_of_floats_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="float32"):
        floats_of(data, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        floats_of(float_bytes(1, value), 2)


@given(st.binary(max_size=4 * NUM_FEATURES + 4))
def test_any_bytes_are_features_or_a_value_error(data: bytes) -> None:
    question = Question("r", 0, 0, 0, data, ())
    try:
        row = features_of(question)
    except ValueError:
        return
    assert row.shape == (NUM_FEATURES,)
    assert (np.abs(row) <= MAX_VALUE).all()


@pytest.mark.parametrize("value", [1.01 * MAX_VALUE, -1.01 * MAX_VALUE, 3e38])
def test_a_feature_that_no_client_sends_is_refused(value: float) -> None:
    row = float_bytes(*[0.0] * (NUM_FEATURES - 1), value)
    with pytest.raises(ValueError, match="range"):
        features_of(Question("1", 0, 0, 0, row, ()))


@pytest.mark.parametrize("value", [MAX_VALUE, -MAX_VALUE])
def test_the_outermost_feature_is_one(value: float) -> None:
    row = float_bytes(*[value] * NUM_FEATURES)
    assert features_of(Question("1", 0, 0, 0, row, ())).tolist() == [value] * NUM_FEATURES


def test_points_come_back_as_they_went() -> None:
    points = points_of_sample([1, 5, 70.5])
    assert points_of(Forecast("r", points.astype("<f4").tobytes())).tolist() == points.tolist()


@pytest.mark.parametrize(
    "kind",
    ["descending", "negative", "nan", "all-nan", "infinite", "beyond", "huge", "short", "long"],
)
def test_points_that_make_no_sense_are_refused(kind: str) -> None:
    points = np.linspace(1, 900, NUM_POINTS)
    if kind == "descending":
        points[300] = 2
    elif kind == "negative":
        points[0] = -1
    elif kind == "nan":
        points[5] = math.nan
    elif kind == "all-nan":
        points[:] = math.nan
    elif kind == "infinite":
        points[-1] = math.inf
    elif kind == "beyond":
        points[-1] = 1.1 * MAX_TOKENS
    elif kind == "huge":
        points[:] = 3e38
    elif kind == "short":
        points = points[:-1]
    else:
        points = np.append(points, 1000)
    with pytest.raises(ValueError, match=r"points|float32|finite"):
        points_of(Forecast("r", points.astype("<f4").tobytes()))


def test_the_longest_points_are_points() -> None:
    longest = float_bytes(*[MAX_TOKENS] * NUM_POINTS)
    assert points_of(Forecast("1", longest))[-1] == np.float32(MAX_TOKENS)


def test_equal_points_are_points() -> None:
    assert points_of(Forecast("r", float_bytes(*[7.0] * NUM_POINTS)))[-1] == 7
