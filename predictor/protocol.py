"""What the serving side and the predictor say to each other.

Every message is one member of a tagged union in msgpack, behind a magic and the schema
version (``core.channel``). Names of models, tenants and nodes travel as hashes, prompts as
numbers. Arrays are little-endian bytes: rows of ``float32``.
"""

from typing import Annotated

import msgspec
import numpy as np

from core.channel import Codec
from predictor.distribution import MAX_TOKENS, NUM_POINTS, Points
from predictor.features import MAX_VALUE, NUM_FEATURES, Row

MAGIC = b"JSP"
SCHEMA_VERSION = 1
MAX_BATCH = 256
"""Most requests in one message."""
MAX_ANSWERS = 64
"""Most forecasts in one message: what a scheduler takes in at once, a few milliseconds."""
MAX_ID_CHARS = 64
"""Ids are a client's own serial numbers, never a sender's names."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One request to forecast.

    Attributes:
        model, tenant, node: hashes (``name_hash``); 0 where there is none.
        features: ``NUM_FEATURES`` float32, see ``predictor.features``.
        words: hashed words of the prompt.
    """

    request_id: str
    model: int
    tenant: int
    node: int
    features: bytes
    words: tuple[int, ...]


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """How long an answer became.

    Attributes:
        is_cut: it would have gone on (aborted, max_tokens).
        progress: what it looked like at the first ``TILT_MARKS``, NUM_PROGRESS float32 each.
    """

    request_id: str
    output_tokens: int
    is_cut: bool
    progress: tuple[bytes, ...] = ()


class Forecast(msgspec.Struct, frozen=True, array_like=True):
    """The length distribution of one request: ``NUM_POINTS`` ascending float32 tokens."""

    request_id: str
    points: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A client is there; it may say so again at any time."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Requests to forecast, and which calibration the client has."""

    questions: Annotated[tuple[Question, ...], msgspec.Meta(max_length=MAX_BATCH)]
    calibration_version: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Answers that are over: what the predictor learns from."""

    endings: Annotated[tuple[Ending, ...], msgspec.Meta(max_length=MAX_BATCH)]


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """Asks for a ``Status``."""


ToPredictor = Hello | Ask | Ended | AskStatus


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The predictor is there. Another ``session`` than before: it has lost what it was asked."""

    session: int


class Forecasts(msgspec.Struct, frozen=True, tag="forecasts"):
    """Answers to an ``Ask``."""

    forecasts: Annotated[tuple[Forecast, ...], msgspec.Meta(max_length=MAX_BATCH)]


class CalibrationUpdate(msgspec.Struct, frozen=True, tag="calibration"):
    """New factors, see ``predictor.calibration``, and tilts, see ``predictor.tilt``."""

    version: int
    factors: bytes
    tilts: bytes


class Status(msgspec.Struct, frozen=True, tag="status"):
    """How the predictor is doing: liveness, and counts since it started."""

    session: int
    counters: dict[str, int]
    coverage: tuple[float, ...]
    """Share of the last answers that ended within the bound, by progress bucket; -1: too few."""


FromPredictor = Ready | Forecasts | CalibrationUpdate | Status


def client_codec() -> Codec[ToPredictor, FromPredictor]:
    """How the serving side reads and writes."""
    return Codec(magic=MAGIC, version=SCHEMA_VERSION, takes=FromPredictor)


def server_codec() -> Codec[FromPredictor, ToPredictor]:
    """How the predictor reads and writes."""
    return Codec(magic=MAGIC, version=SCHEMA_VERSION, takes=ToPredictor)


def floats_of(data: bytes, count: int) -> Row:
    """``count`` finite float32 in ``data``. Raises ValueError."""
    if len(data) != 4 * count:
        raise ValueError(f"{len(data)} bytes where {count} float32 were expected")
    values = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError("a number is not finite")
    return values


def features_of(question: Question) -> Row:
    """The feature row of a question. Raises ValueError."""
    row = floats_of(question.features, NUM_FEATURES)
    if (np.abs(row) > MAX_VALUE).any():
        raise ValueError("a feature is out of range")
    return row


def points_of(forecast: Forecast) -> Points:
    """The points of a forecast, ascending and not negative. Raises ValueError."""
    if len(forecast.points) != 4 * NUM_POINTS:
        raise ValueError(f"{len(forecast.points)} bytes where {NUM_POINTS} points were expected")
    points = np.frombuffer(forecast.points, dtype="<f4").astype(np.float32, copy=False)
    # No comparison with what is not a number is true.
    is_ascending = bool((points[1:] >= points[:-1]).all())
    if not (is_ascending and points[0] >= 0 and points[-1] <= MAX_TOKENS * 1.01):
        raise ValueError("points are not ascending lengths")
    return points
