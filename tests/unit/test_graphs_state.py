"""Learnt patterns as bytes: they come back as they were, and what is broken is refused."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from program_shapes import PACE, Part, chain, shape_of

from core.checkpoint import CheckpointStore, pack
from graphs.matcher import Match
from graphs.server import restored_store
from graphs.shape import ProgramShape
from graphs.state import FORMAT_VERSION, MAX_PATTERNS, decode_into, encode
from graphs.store import MAX_WEIGHT, PatternStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def learnt(count: int = 60, seed: int = 0) -> PatternStore:
    rng = np.random.default_rng(seed)
    store = PatternStore()
    for number in range(count):
        parts = [
            Part(
                tuple(rng.integers(1, 3000, rng.integers(1, 5)).tolist()),
                int(rng.integers(10, 20_000)),
                tool_s=float(rng.exponential(4)),
                tools=(3,) * int(rng.integers(0, 2)),
                role=int(rng.integers(0, 1 << 62)),
            )
            for _ in range(rng.integers(1, 8))
        ]
        store.restore(shape_of(*parts, application=number % 3), float(rng.uniform(0.02, 500)))
    return store


def is_sane(store: PatternStore) -> bool:
    """Whether it can be matched against, learnt with, forgotten and clustered."""
    weight = store.pack.weight
    if not (np.isfinite(weight).all() and (weight >= 0).all() and (weight <= MAX_WEIGHT).all()):
        return False
    match = Match(store.pack)
    for stage in chain(100, 200).stages:
        for found in (match.outlook(PACE), match.outlook(PACE, stage)):
            if found is not None and not all(
                math.isfinite(value) and value >= 0 for value in msgspec.structs.astuple(found)
            ):
                return False
        match.close_stage(stage)
    index = store.add(chain(100, 200), 10.0)
    store.used(index, 10.0)
    store.decay(4000.0)
    store.adopt(store.clustering().run())
    return len(encode(store)) > 0


@pytest.fixture(scope="module")
def payload() -> bytes:
    return encode(learnt())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(tmp_path, "graphs", version=FORMAT_VERSION)
    yield opened
    opened.close()


# There and back -----------------------------------------------------------------------------------


def test_what_is_decoded_is_what_was_encoded(payload: bytes) -> None:
    store, other = learnt(), PatternStore(now_s=77.0)
    decode_into(payload, other)
    assert other.shapes == store.shapes
    assert other.pack.weight.tolist() == store.pack.weight.tolist()
    for shape in store.shapes[::5]:
        first, second = Match(store.pack, shape.application), Match(other.pack, shape.application)
        for stage in shape.stages:
            assert first.outlook(PACE, stage) == second.outlook(PACE, stage)
            first.close_stage(stage)
            second.close_stage(stage)
            assert first.best() == second.best()


def test_encoding_again_gives_the_same_bytes(payload: bytes) -> None:
    other = PatternStore()
    decode_into(payload, other)
    assert encode(other) == payload


def test_what_is_encoded_does_not_change_with_the_store() -> None:
    store = learnt(5)
    before = encode(store)
    kept = bytes(bytearray(before))
    store.add(chain(1, 2, 3), 0.0)
    assert before == kept
    assert encode(store) != before


def test_a_store_without_patterns_comes_back_without_patterns() -> None:
    other = PatternStore()
    decode_into(encode(PatternStore()), other)
    assert len(other) == 0
    assert is_sane(other)


def test_after_it_was_read_an_hour_is_an_hour() -> None:
    # What it was written at says nothing: the clock may be another machine's.
    other = PatternStore(now_s=1e6)
    decode_into(encode(learnt(10)), other)
    before = other.pack.weight.copy()
    other.decay(1e6 + 3600)
    assert other.pack.weight == pytest.approx(0.9 * before, rel=0.003)


def test_a_full_store_is_small() -> None:
    store = learnt(500)
    assert len(encode(store)) < 500 * 1000


# Damage -------------------------------------------------------------------------------------------


def refused_or_sane(data: bytes) -> bool:
    """Whether it was refused; what was not must be good."""
    store = PatternStore()
    try:
        decode_into(data, store)
    except ValueError:
        return True
    assert is_sane(store)
    return False


def test_a_payload_cut_anywhere_is_refused(payload: bytes) -> None:
    # As if the checksum had been right.
    for length in [*range(0, len(payload), 1024), *range(60), len(payload) - 1]:
        with pytest.raises(ValueError, match=r"."):
            decode_into(payload[:length], PatternStore())


def test_bytes_behind_a_payload_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_into(payload + b"\x00", PatternStore())


def test_bits_that_were_flipped_are_refused_or_another_good_state() -> None:
    small, rng = bytearray(encode(learnt(4))), random.Random(1)
    refused = 0
    for _ in range(500):
        data = bytearray(small)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        refused += refused_or_sane(bytes(data))
    assert refused > 50


def test_every_single_bit_flipped_in_a_small_state_is_no_trouble() -> None:
    store = PatternStore()
    store.restore(chain(100, 200, application=5), 1.5)
    small = encode(store)
    for place in range(len(small)):
        for bit in range(8):
            data = bytearray(small)
            data[place] ^= 1 << bit
            refused_or_sane(bytes(data))


@pytest.mark.parametrize("data", [b"", b"\x00", b"nonsense" * 100, b"\x91" * 100_000, b"\xc0"])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_into(data, PatternStore())


def changed(change: Any) -> bytes:
    """A payload one number of which is another."""

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        return change(value)

    store = PatternStore()
    store.restore(chain(123, 456), 7.5)
    return msgspec.msgpack.encode(walk(msgspec.msgpack.decode(encode(store))))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e300, "x", None, b"", []])
@pytest.mark.parametrize("of", [123.0, 7.5, 200.0])
def test_a_number_that_cannot_be_is_refused(of: float, bad: Any) -> None:
    data = changed(lambda value: bad if value == of else value)
    assert data != changed(lambda value: value)
    with pytest.raises(ValueError, match=r"."):
        decode_into(data, PatternStore())


@pytest.mark.parametrize("bad", [-1, 1 << 64, 1 << 63])
def test_a_name_that_cannot_be_is_refused(bad: int) -> None:
    identity = chain(1).stages[0].identity
    found = PatternStore()
    try:
        data = changed(lambda value: bad if value == identity else value)
    except OverflowError:
        return
    with pytest.raises(ValueError, match=r"."):
        decode_into(data, found)


def test_more_patterns_than_there_can_be_are_refused() -> None:
    many = msgspec.msgpack.decode(encode(learnt(1)))

    def multiplied(value: Any) -> Any:
        # The one list of patterns has one entry for the one pattern.
        if isinstance(value, list) and len(value) == 1:
            return value * (MAX_PATTERNS + 1)
        if isinstance(value, dict):
            return {key: multiplied(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [multiplied(inner) for inner in value]
        return value

    with pytest.raises(ValueError, match=r"."):
        decode_into(msgspec.msgpack.encode(multiplied(many)), PatternStore())


def test_a_program_without_a_stage_or_with_very_many_is_refused_or_no_trouble() -> None:
    for stages in ((), chain(*[5] * 5000).stages):
        store = PatternStore()
        store.restore(chain(100), 1.0)
        store.shapes[0] = ProgramShape(0, stages)
        refused_or_sane(encode(store))


# Checkpoints --------------------------------------------------------------------------------------


def test_the_newest_good_checkpoint_is_where_it_starts(checkpoints: CheckpointStore) -> None:
    checkpoints.save(encode(learnt(5)))
    checkpoints.save(encode(learnt(9)))
    store, source = restored_store(PatternStore, checkpoints)
    assert source == "checkpoint"
    assert store.shapes == learnt(9).shapes


def test_without_one_it_starts_with_nothing(checkpoints: CheckpointStore) -> None:
    for one in (None, checkpoints):
        store, source = restored_store(PatternStore, one)
        assert (len(store), source) == (0, "nothing")


def test_a_checkpoint_cut_at_every_kilobyte_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, whole = encode(learnt(5)), pack(encode(learnt(300)), FORMAT_VERSION)
    assert len(whole) > 20_000
    for length in range(0, len(whole), 1024):
        folder = tmp_path / str(length)
        checkpoints = CheckpointStore(folder, "graphs", version=FORMAT_VERSION)
        checkpoints.save(good)
        (folder / "graphs-00000002.checkpoint").write_bytes(whole[:length])
        caplog.clear()
        store, source = restored_store(PatternStore, checkpoints)
        checkpoints.close()
        assert source == "checkpoint"
        assert len(caplog.records) == 1
        assert (folder / "graphs-00000002.bad").exists()
        assert store.shapes == learnt(5).shapes


def test_of_a_broken_state_nothing_is_half_used(
    checkpoints: CheckpointStore, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    # Its checksum is right: it was written so.
    checkpoints.save(payload[:-40])
    store, source = restored_store(PatternStore, checkpoints)
    assert (len(store), source) == (0, "nothing")
    assert len(caplog.records) == 1


def test_a_state_of_another_version_is_set_aside(
    tmp_path: Path, checkpoints: CheckpointStore, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "graphs-00000001.checkpoint").write_bytes(pack(payload, FORMAT_VERSION + 1))
    _, source = restored_store(PatternStore, checkpoints)
    assert source == "nothing"
    assert len(caplog.records) == 1
