"""Learnt state on disk: comes back as it was, and a broken one is refused, never half used."""

from __future__ import annotations

import math
import random
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from quantile_forest import RandomForestQuantileRegressor

from core.checkpoint import CheckpointError, CheckpointStore, pack, unpack
from predictor import state
from predictor.calibration import Calibrator
from predictor.features import CUES_VERSION, NO_CUES, EngineFacts, cues_of, feature_row
from predictor.forest import LEAF, Forest, ForestParameters, fit, leaf_size
from predictor.model import COLUMNS, NUM_COLUMNS, LengthModel, Request
from predictor.progress import NUM_PROGRESS
from predictor.reservoir import CAPACITY as MOST_ROWS
from predictor.server import restored_model
from predictor.state import (
    FORMAT_VERSION,
    LEARNT_FROM,
    MAX_TREES,
    Prior,
    checked_forest,
    decode_into,
    decode_prior,
    encode,
    encode_prior,
    start_from_prior,
)
from predictor.tilt import TILTED_BUCKETS
from predictor.words import MAX_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARAMETERS = ForestParameters(num_trees=8, min_samples_leaf=5)
CAPACITY = 200
FACTS = EngineFacts(50, 500)
PLAIN = feature_row(NO_CUES, FACTS)


def fresh() -> LengthModel:
    """A model whose state is small: it is read hundreds of times here."""
    model = LengthModel(parameters=PARAMETERS, capacity=CAPACITY)
    model.calibrator = Calibrator(window=30)
    return model


def requests() -> list[Request]:
    found = [Request(PLAIN, 1, 2, 3, (4, 5, 6)), Request(PLAIN, 9, 9, 9), Request(PLAIN)]
    for column in range(0, len(PLAIN), 5):
        row = PLAIN.copy()
        row[column] += 1.5
        found.append(Request(row, 1, 2, 3, (column,)))
    return found


def taught(count: int = 120) -> LengthModel:
    model, rng = fresh(), np.random.default_rng(0)
    asked = requests()
    for index in range(count):
        one = model.forecast([asked[index % len(asked)]], 0.0)[0]
        model.learn(one, round(rng.exponential(200)) + 1, is_cut=index % 7 == 0)
    model.refit()
    model.calibrator.refresh()
    return model


def forecasts(model: LengthModel) -> list[list[float]]:
    return [asked.points.tolist() for asked in model.forecast(requests(), 40_000.0)]


def taught_to_tilt() -> LengthModel:
    """A model that has seen what makes answers longer while they grow."""
    model, rng = fresh(), np.random.default_rng(0)
    request = requests()[0]
    for _ in range(700):
        looks = np.zeros((TILTED_BUCKETS, NUM_PROGRESS), dtype=np.float32)
        looks[:, 0] = rng.normal()
        tokens = 50 + rng.exponential(300) * math.exp(0.8 * looks[0, 0])
        model.learn(model.forecast([request], 0.0)[0], round(tokens), is_cut=False, progress=looks)
    model.tilt.refresh()
    return model


def is_sane(model: LengthModel) -> bool:
    """Forecasts can be made and learnt from."""
    for asked in model.forecast(requests(), 0.0):
        points = asked.points
        if not (np.isfinite(points).all() and points[0] >= 0 and (np.diff(points) >= 0).all()):
            return False
    model.learn(model.forecast(requests()[:1], 0.0)[0], 50, is_cut=False)
    factors = model.calibrator.factors
    return bool(np.isfinite(factors).all() and (factors > 0).all())


@pytest.fixture(scope="module")
def model() -> LengthModel:
    return taught()


@pytest.fixture(scope="module")
def payload(model: LengthModel) -> bytes:
    return encode(model)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(tmp_path, "predictor", version=FORMAT_VERSION)
    yield opened
    opened.close()


# There and back -----------------------------------------------------------------------------------


def test_what_is_decoded_forecasts_as_what_was_encoded(model: LengthModel, payload: bytes) -> None:
    other = fresh()
    decode_into(payload, other)
    assert forecasts(other) == forecasts(model)
    assert other.calibrator.factors.tolist() == model.calibrator.factors.tolist()
    assert other.reservoir.num_added == model.reservoir.num_added
    assert other.fitted_at == model.fitted_at


def test_what_generated_text_says_comes_back_too() -> None:
    made, other = taught_to_tilt(), fresh()
    decode_into(encode(made), other)
    assert made.tilt.tilts.any()
    assert other.tilt.tilts.tolist() == made.tilt.tilts.tolist()


def test_what_answers_were_cut_at_comes_back_too(model: LengthModel, payload: bytes) -> None:
    other = fresh()
    decode_into(payload, other)
    for tokens in (10, 100, 1000):
        before = model.history.residual_tokens(1, tokens)
        assert other.history.residual_tokens(1, tokens) == before


def test_what_is_decoded_goes_on_as_what_was_encoded(payload: bytes) -> None:
    first, second = fresh(), fresh()
    decode_into(payload, first)
    decode_into(payload, second)
    for one in (first, second):
        for length in (5, 500, 50):
            one.learn(one.forecast(requests()[:1], 0.0)[0], length, is_cut=length == 500)
        one.refit()
    assert forecasts(first) == forecasts(second)


def test_encoding_again_gives_the_same_bytes(payload: bytes) -> None:
    other = fresh()
    decode_into(payload, other)
    assert encode(other) == payload


def test_a_model_without_a_forest_comes_back_without_one() -> None:
    other = fresh()
    decode_into(encode(fresh()), other)
    assert other.forest is None
    assert forecasts(other) == forecasts(fresh())


def test_a_forest_that_was_read_back_still_equals_the_library_s_own_forecast() -> None:
    rng = np.random.default_rng(2)
    rows = np.round(rng.normal(size=(150, NUM_COLUMNS)), 1).astype(np.float32)
    targets = np.round(rows[:, 0] + rng.normal(size=150), 1).astype(np.float64)
    model = fresh()
    model.reservoir.fill(rows, targets)
    data = model.training_data()
    model.adopt(fit(data.rows, data.targets, PARAMETERS, 6), data)
    other = fresh()
    decode_into(encode(model), other)
    new = rng.normal(size=(40, NUM_COLUMNS)).astype(np.float32)
    levels = [0.05, 0.5, 0.9, 0.99]
    assert other.forest is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = RandomForestQuantileRegressor(
            n_estimators=PARAMETERS.num_trees,
            min_samples_leaf=leaf_size(len(data.rows), PARAMETERS),
            max_features=PARAMETERS.max_features,
            max_depth=PARAMETERS.max_depth,
            max_samples_leaf=None,
            random_state=6,
        ).fit(data.rows, data.targets)
        expected = library.predict(new, quantiles=levels, weighted_quantile=False)
    assert other.forest.quantiles(new, levels).tolist() == np.asarray(expected).tolist()


def test_what_a_model_forgot_to_say_does_not_change_when_it_goes_on(model: LengthModel) -> None:
    # What was encoded does not change with the model.
    before = encode(model)
    kept = bytes(bytearray(before))
    other = fresh()
    decode_into(before, other)
    other.learn(other.forecast(requests()[:1], 0.0)[0], 999, is_cut=False)
    assert before == kept
    assert encode(model) == before


def test_no_plain_text_is_written() -> None:
    secret = "xylophonequartz"
    cues = cues_of({"prompt": f"{secret} please {secret}"})
    model = fresh()
    request = Request(feature_row(cues, FACTS), 1, 2, 3, cues.words)
    for _ in range(50):
        model.learn(model.forecast([request], 0.0)[0], 10, is_cut=False)
    assert secret.encode() not in encode(model)


# Damage -------------------------------------------------------------------------------------------


def test_a_checkpoint_cut_at_every_kilobyte_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, model: LengthModel, caplog: pytest.LogCaptureFixture
) -> None:
    good = encode(taught(60))
    whole = pack(encode(model), FORMAT_VERSION)
    expected = None
    for length in range(0, len(whole), 1024):
        folder = tmp_path / str(length)
        store = CheckpointStore(folder, "predictor", version=FORMAT_VERSION)
        store.save(good)
        (folder / "predictor-00000002.checkpoint").write_bytes(whole[:length])
        caplog.clear()
        found, source = restored_model(fresh, store)
        store.close()
        assert source == "checkpoint"
        assert len(caplog.records) == 1
        assert (folder / "predictor-00000002.bad").exists()
        expected = expected or forecasts(found)
        assert forecasts(found) == expected


def test_a_checkpoint_of_full_size_cut_at_every_kilobyte_is_refused() -> None:
    whole = pack(encode(LengthModel()), FORMAT_VERSION)
    assert len(whole) > 1 << 20
    for length in range(0, len(whole), 1024):
        with pytest.raises(CheckpointError):
            unpack(whole[:length], FORMAT_VERSION)


def test_a_payload_cut_anywhere_is_refused(payload: bytes) -> None:
    # As if the checksum had been right.
    for length in [*range(0, len(payload), 1024), *range(40), len(payload) - 1]:
        with pytest.raises(ValueError, match=r"."):
            decode_into(payload[:length], fresh())


def test_random_bytes_changed_in_a_checkpoint_never_crash(
    tmp_path: Path, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(3)
    known = taught(60)
    good = encode(known)
    for number in range(60):
        folder = tmp_path / str(number)
        store = CheckpointStore(folder, "predictor", version=FORMAT_VERSION)
        store.save(good)
        damaged = bytearray(pack(payload, FORMAT_VERSION))
        for _ in range(rng.choice([1, 1, 3, 50])):
            damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
        (folder / "predictor-00000002.checkpoint").write_bytes(bytes(damaged))
        caplog.clear()
        found, source = restored_model(fresh, store)
        store.close()
        assert source == "checkpoint"
        assert found.reservoir.num_added == known.reservoir.num_added > 50
        assert len(caplog.records) == 1


def test_random_damage_behind_a_right_checksum_is_refused_or_harmless(payload: bytes) -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(400):
        damaged = bytearray(payload)
        # Half of it in the structure, which the first bytes are rich in.
        for _ in range(rng.choice([1, 2, 20])):
            end = len(damaged) if rng.random() < 0.5 else 3000
            damaged[rng.randrange(end)] = rng.randrange(256)
        other = fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numbers beyond all measure
            try:
                decode_into(bytes(damaged), other)
            except ValueError:
                refused += 1
                continue
            assert is_sane(other)
    assert refused > 50


def test_a_checkpoint_of_an_older_format_is_set_aside(
    store: CheckpointStore, tmp_path: Path, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    old = pack(payload, FORMAT_VERSION + 1)
    (tmp_path / "predictor-00000009.checkpoint").write_bytes(old)
    _, source = restored_model(fresh, store)
    assert source != "checkpoint"
    assert (tmp_path / "predictor-00000009.bad").exists()
    assert sum("checkpoint" in record.getMessage() for record in caplog.records) == 1


def test_a_state_of_other_features_is_refused(payload: bytes) -> None:
    body = msgspec.msgpack.decode(payload)
    assert body["columns"] == list(LEARNT_FROM) == [*COLUMNS, f"cues {CUES_VERSION}"]
    cues = LEARNT_FROM[-1]
    for columns in (
        [],
        list(COLUMNS),
        [*COLUMNS, f"cues {CUES_VERSION + 1}"],
        [*COLUMNS[:-1], cues],
        [*COLUMNS[:-1], "other", cues],
        [*reversed(COLUMNS), cues],
    ):
        with pytest.raises(ValueError, match="features"):
            decode_into(msgspec.msgpack.encode({**body, "columns": columns}), fresh())


@pytest.mark.parametrize(
    "item",
    [
        ["<O", [1], b"x" * 8],
        ["|O", [1], b"x" * 8],
        ["<U1", [2], b"x" * 8],
        ["<f4", [-1], b""],
        ["<f4", [-1, -1], b"x" * 4],
        ["<f4", [2], b"x" * 4],
        ["<f4", [1 << 40], b""],
        ["<f4", [1 << 62, 4], b""],
        ["<f4", [0, 1 << 62], b""],
        ["<f4", [1, 1, 1, 1], b"x" * 4],
        ["|b1", [1], b"\x07"],
        ["", [1], b"x"],
        ["<f4,<f4", [1], b"x" * 8],
    ],
)
def test_an_array_of_a_strange_type_or_shape_is_refused(payload: bytes, item: list[Any]) -> None:
    body = msgspec.msgpack.decode(payload)
    for name in body["model"]:
        changed = {**body, "model": {**body["model"], name: item}}
        with pytest.raises(ValueError, match=r"."):
            decode_into(msgspec.msgpack.encode(changed), fresh())


def with_model_array(payload: bytes, name: str, place: int, value: float) -> bytes:
    """A state with one number of one of its arrays changed."""
    body = msgspec.msgpack.decode(payload)
    dtype, shape, data = body["model"][name]
    array = np.frombuffer(data, dtype=dtype).copy()
    array[place] = value
    body["model"][name] = [dtype, shape, array.tobytes()]
    return msgspec.msgpack.encode(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("words.weights", 1.01 * MAX_WEIGHT),
        ("words.weights", -1e300),
        ("words.weights", math.nan),
        ("calibration.num_seen", (1 << 53) + 1),
        ("calibration.num_seen", -1),
        ("calibration.scores", math.inf),
        ("history.groups", math.nan),
        ("reservoir.rows", math.inf),
        ("reservoir.targets", math.nan),
        ("tilt.moments", math.nan),
        ("tilt.products", math.inf),
        ("tilt.losses", -math.inf),
        ("prior_mean", math.nan),
        ("prior_mean", math.inf),
    ],
)
def test_a_number_that_cannot_be_is_refused(payload: bytes, name: str, value: float) -> None:
    decode_into(with_model_array(payload, name, 0, 1), fresh())
    with pytest.raises(ValueError, match=r"."):
        decode_into(with_model_array(payload, name, 0, value), fresh())


@pytest.mark.parametrize("fitted_at", [-5, -(1 << 63), 0, 10**6, (1 << 63) - 1])
def test_a_forest_is_never_older_than_nothing_or_newer_than_what_was_learnt(
    payload: bytes, fitted_at: int
) -> None:
    body = msgspec.msgpack.decode(payload)
    other = fresh()
    decode_into(msgspec.msgpack.encode({**body, "fitted_at": fitted_at}), other)
    assert other.fitted_at == min(max(fitted_at, 0), other.reservoir.num_added)
    # So the next forest comes when it is due.
    for _ in range(70):
        other.learn(other.forecast(requests()[:1], 0.0)[0], 50, is_cut=False)
    assert other.is_fit_due()


def test_a_state_without_one_of_its_arrays_is_refused(payload: bytes) -> None:
    body = msgspec.msgpack.decode(payload)
    for part in ("model", "forest"):
        for name in body[part]:
            rest = {key: value for key, value in body[part].items() if key != name}
            with pytest.raises(ValueError, match=r"."):
                decode_into(msgspec.msgpack.encode({**body, part: rest}), fresh())


def test_an_array_without_a_length_is_refused(payload: bytes) -> None:
    body = msgspec.msgpack.decode(payload)
    for part in ("model", "forest"):
        for name, (dtype, _, data) in body[part].items():
            single = [dtype, [], data[: np.dtype(dtype).itemsize]]
            changed = {**body, part: {**body[part], name: single}}
            with pytest.raises(ValueError, match=r"."):
                decode_into(msgspec.msgpack.encode(changed), fresh())


# Forests ------------------------------------------------------------------------------------------


def arrays_of(forest: Forest) -> dict[str, Any]:
    fields = msgspec.structs.asdict(forest)
    return {name: array.copy() for name, array in fields.items() if isinstance(array, np.ndarray)}


@pytest.fixture
def arrays(model: LengthModel) -> dict[str, Any]:
    assert model.forest is not None
    return arrays_of(model.forest)


def inner_node(arrays: dict[str, Any], place: int = 0) -> int:
    return int(np.flatnonzero(arrays["feature"] != LEAF)[place])


def leaf_node(arrays: dict[str, Any], place: int = 0) -> int:
    return int(np.flatnonzero(arrays["feature"] == LEAF)[place])


def test_a_good_forest_passes(arrays: dict[str, Any], model: LengthModel) -> None:
    assert model.forest is not None
    rows = np.random.default_rng(0).normal(size=(20, NUM_COLUMNS)).astype(np.float32)
    assert checked_forest(arrays).points(rows).tolist() == model.forest.points(rows).tolist()


@pytest.mark.parametrize("name", ["left", "right"])
@pytest.mark.parametrize("child", [-1, -(2**31), 2**31 - 1, "self", "root", "before", "end"])
def test_a_child_that_leads_nowhere_or_in_a_circle_is_refused(
    arrays: dict[str, Any], name: str, child: int | str
) -> None:
    node = inner_node(arrays, -1)
    where = {"self": node, "root": 0, "before": node - 1, "end": len(arrays["feature"])}
    arrays[name][node] = where[child] if isinstance(child, str) else child
    with pytest.raises(ValueError, match="forest"):
        checked_forest(arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feature", NUM_COLUMNS),
        ("feature", -2),
        ("feature", 2**31 - 1),
        ("threshold", math.nan),
        ("roots", -1),
        ("roots", 2**31 - 1),
        ("leaf_starts", -5),
        ("leaf_starts", 2**31 - 1),
        ("leaf_ranks", -1),
        ("leaf_ranks", 2**31 - 1),
        ("targets", math.nan),
        ("targets", math.inf),
        ("targets", -1e9),
    ],
)
@pytest.mark.parametrize("place", [0, 3, -1])
def test_one_number_out_of_range_is_refused(
    arrays: dict[str, Any], name: str, value: float, place: int
) -> None:
    if (name, value, place) == ("targets", -1e9, 0):
        pytest.skip("the first target may be as small as it likes")
    arrays[name][place] = value
    with pytest.raises(ValueError, match="forest"):
        checked_forest(arrays)


def test_a_forest_has_only_so_many_trees(arrays: dict[str, Any]) -> None:
    root = arrays["roots"][:1]
    assert len(checked_forest({**arrays, "roots": np.repeat(root, MAX_TREES)}).roots) == MAX_TREES
    with pytest.raises(ValueError, match="forest"):
        checked_forest({**arrays, "roots": np.repeat(root, MAX_TREES + 1)})


def test_a_forest_has_only_so_many_targets(arrays: dict[str, Any]) -> None:
    def with_targets(count: int) -> dict[str, Any]:
        spare = np.full(count - len(arrays["targets"]), arrays["targets"][-1])
        return {**arrays, "targets": np.append(arrays["targets"], spare)}

    checked_forest(with_targets(2 * MOST_ROWS))
    with pytest.raises(ValueError, match="forest"):
        checked_forest(with_targets(2 * MOST_ROWS + 1))


def test_a_forest_whose_leaves_hold_more_than_there_is_is_refused(arrays: dict[str, Any]) -> None:
    most = len(arrays["roots"]) * len(arrays["targets"])
    ranks = np.resize(arrays["leaf_ranks"], most + 1)
    starts = arrays["leaf_starts"].copy()
    starts[-1] = most + 1
    with pytest.raises(ValueError, match="forest"):
        checked_forest({**arrays, "leaf_ranks": ranks, "leaf_starts": starts})
    starts[-1] = most
    checked_forest({**arrays, "leaf_ranks": ranks[:-1], "leaf_starts": starts})


@pytest.mark.parametrize("number", [-1, 2**31 - 1, "leaves"])
def test_a_leaf_that_is_none_is_refused(arrays: dict[str, Any], number: int | str) -> None:
    leaves = len(arrays["leaf_starts"]) - 1
    arrays["left"][leaf_node(arrays, 2)] = leaves if isinstance(number, str) else number
    with pytest.raises(ValueError, match="forest"):
        checked_forest(arrays)


def test_a_leaf_of_nothing_is_refused(arrays: dict[str, Any]) -> None:
    arrays["leaf_starts"][3] = arrays["leaf_starts"][2]
    with pytest.raises(ValueError, match="forest"):
        checked_forest(arrays)


@pytest.mark.parametrize(
    "name",
    ["feature", "threshold", "left", "right", "roots", "leaf_starts", "leaf_ranks", "targets"],
)
@pytest.mark.parametrize("change", ["missing", "empty", "shorter", "longer", "square", "scalar"])
def test_an_array_that_does_not_belong_to_the_others_is_refused(
    arrays: dict[str, Any], name: str, change: str
) -> None:
    array = arrays[name]
    if (name, change) in {("roots", "shorter"), ("roots", "longer"), ("targets", "longer")}:
        pytest.skip("a forest of fewer or more trees, or one with targets to spare, is one")
    match change:
        case "missing":
            del arrays[name]
        case "empty":
            arrays[name] = array[:0]
        case "shorter":
            arrays[name] = array[:-1]
        case "longer":
            arrays[name] = np.append(array, array[-1:])
        case "square":
            arrays[name] = array[None]
        case _:
            arrays[name] = np.array(array[0])
    with pytest.raises(ValueError, match="forest"):
        checked_forest(arrays)


def test_numbers_that_only_fit_after_being_cut_to_size_are_refused(arrays: dict[str, Any]) -> None:
    arrays["roots"] = arrays["roots"].astype(np.int64) + (1 << 32)
    with pytest.raises(ValueError, match="forest"):
        checked_forest(arrays)


def test_random_damage_to_a_forest_is_refused_or_harmless(arrays: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(5, NUM_COLUMNS)).astype(np.float32)
    refused = 0
    for _ in range(300):
        damaged = {name: array.copy() for name, array in arrays.items()}
        name = str(rng.choice(list(damaged)))
        raw = damaged[name].view(np.uint8)
        raw[rng.integers(len(raw))] = rng.integers(256)
        try:
            forest = checked_forest(damaged)
        except ValueError:
            refused += 1
            continue
        points = forest.points(rows)
        assert np.isfinite(points).all()
        assert (np.diff(points, axis=1) >= 0).all()
    assert refused > 50


# The prior ----------------------------------------------------------------------------------------


def prior(**changes: Any) -> Prior:
    rng = np.random.default_rng(0)
    made = Prior(
        rows=rng.normal(size=(80, NUM_COLUMNS)).astype(np.float32),
        targets=rng.normal(size=80),
        prior_mean=5.2,
        sources=("one", "two"),
        source_of=np.arange(80) % 2,
        words=fresh().words.state(),
    )
    return msgspec.structs.replace(made, **changes)


def test_a_prior_comes_back_as_it_was() -> None:
    made, found = prior(), decode_prior(encode_prior(prior()))
    assert found.rows.tolist() == made.rows.tolist()
    assert found.targets == pytest.approx(made.targets)
    assert found.prior_mean == 5.2
    assert found.sources == ("one", "two")
    assert found.source_of.tolist() == made.source_of.tolist()
    assert set(found.words) == set(made.words)


def test_a_model_starts_from_the_prior_and_can_be_fitted_at_once() -> None:
    model = fresh()
    start_from_prior(model, prior())
    assert model.reservoir.num_prior == len(model.reservoir) == 80
    assert model.reservoir.num_added == 0
    assert model.is_fit_due()
    model.refit()
    assert is_sane(model)
    assert model.history.outlook(1, 2, 3).expected != 5.0


def test_a_broken_prior_file_is_refused() -> None:
    data = encode_prior(prior())
    for length in range(0, len(data), 997):
        with pytest.raises(ValueError, match=r"."):
            decode_prior(data[:length])


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": np.zeros((80, NUM_COLUMNS - 1), dtype=np.float32)},
        {"targets": np.zeros(79)},
        {"source_of": np.zeros(79, dtype=np.int64)},
        {"rows": np.full((80, NUM_COLUMNS), math.nan, dtype=np.float32)},
        {"rows": np.full((80, NUM_COLUMNS), math.inf, dtype=np.float32)},
        {"targets": np.full(80, math.inf)},
        {"targets": np.append(np.zeros(79), math.nan)},
        {"prior_mean": math.nan},
        {"prior_mean": -math.inf},
        {"words": {**fresh().words.state(), "weights": np.full(2048, 1e3)}},
        {"words": {"weights": np.zeros(5)}},
        {"words": {"weights": fresh().words.state()["weights"]}},
    ],
    ids=[
        "narrow-rows",
        "few-targets",
        "few-sources",
        "nan-rows",
        "infinite-rows",
        "infinite-targets",
        "nan-target",
        "nan-mean",
        "infinite-mean",
        "heavy-words",
        "short-words",
        "half-of-the-words",
    ],
)
def test_a_prior_that_cannot_be_is_refused_before_it_is_used(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        start_from_prior(fresh(), decode_prior(encode_prior(prior(**changes))))


def test_the_prior_that_ships_is_good_and_small() -> None:
    data = state.PRIOR_PATH.read_bytes()
    assert len(data) < 4 << 20
    found = decode_prior(data)
    assert np.isfinite(found.rows).all()
    assert len(found.sources) >= 1
    model = LengthModel(parameters=PARAMETERS)
    start_from_prior(model, found)
    assert model.is_fit_due()
    assert is_sane(model)


def test_without_a_checkpoint_the_prior_is_where_it_starts(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prior.bin"
    path.write_bytes(encode_prior(prior()))
    monkeypatch.setattr(state, "PRIOR_PATH", path)
    for one in (None, store):
        model, source = restored_model(fresh, one)
        assert source == "prior"
        assert model.reservoir.num_prior == 80


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 100])
def test_without_a_good_prior_it_starts_from_nothing_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    path = tmp_path / "prior.bin"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(state, "PRIOR_PATH", path)
    model, source = restored_model(fresh, None)
    assert source == "nothing"
    assert len(caplog.records) == 1
    assert is_sane(model)


@pytest.mark.parametrize("content", ["half-of-the-words", "nan-rows"])
def test_a_prior_that_was_made_wrongly_does_not_keep_the_predictor_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    wrong = {"words": {"weights": np.zeros(5)}}
    if content == "half-of-the-words":
        wrong = {"words": {"weights": fresh().words.state()["weights"]}}
    path = tmp_path / "prior.bin"
    changes: dict[str, Any] = wrong
    if content == "nan-rows":
        changes = {"rows": np.full((80, NUM_COLUMNS), math.nan, dtype=np.float32)}
    path.write_bytes(encode_prior(prior(**changes)))
    monkeypatch.setattr(state, "PRIOR_PATH", path)
    _, source = restored_model(fresh, None)
    assert source == "nothing"


def test_a_checkpoint_counts_for_more_than_the_prior(
    store: CheckpointStore, model: LengthModel, payload: bytes
) -> None:
    store.save(payload)
    found, source = restored_model(fresh, store)
    assert source == "checkpoint"
    assert found.reservoir.num_added == model.reservoir.num_added > 100
    assert found.reservoir.num_prior == 0
