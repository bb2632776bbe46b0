"""The learnt state as bytes and back: named arrays of a few known types, nothing executable.

Whatever is read is checked before it is used: the compiled loop of a forest follows its
indices blindly.
"""

import zlib
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from core import checkpoint
from predictor.features import CUES_VERSION
from predictor.forest import LEAF, Forest
from predictor.model import COLUMNS, NUM_COLUMNS, LengthModel
from predictor.reservoir import CAPACITY

FORMAT_VERSION = 1
T = TypeVar("T")
Arrays = dict[str, npt.NDArray[np.generic]]

LEARNT_FROM = (*COLUMNS, f"cues {CUES_VERSION}")
"""What a state was learnt from: it is of no use to a version that sees other things."""
MAX_TREES = 1000
_TYPES = ("<f4", "<f8", "<i4", "<i8", "|b1")
_MAX_SIZE = 64 << 20
PRIOR_PATH = Path(__file__).with_name("prior.bin")
"""What ships with the project; ``python -m bench prior`` makes it."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _State(msgspec.Struct, frozen=True):
    columns: tuple[str, ...]
    model: dict[str, _Packed]
    forest: dict[str, _Packed]
    fitted_at: int


class Prior(msgspec.Struct, frozen=True):
    """Rows to start from. ``rows``: (n, NUM_COLUMNS); ``targets``: (n,) log deviations.

    Attributes:
        prior_mean: the log length to expect of a model of which nothing is known.
        sources: names of where the rows are from; ``source_of`` has an index for each row.
    """

    rows: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float64]
    prior_mean: float
    sources: tuple[str, ...]
    source_of: npt.NDArray[np.int64]
    words: Arrays


class _PriorFile(msgspec.Struct, frozen=True):
    columns: tuple[str, ...]
    sources: tuple[str, ...]
    prior_mean: float
    arrays: dict[str, _Packed]


def encode(model: LengthModel) -> bytes:
    """All that a model has learnt."""
    state = _State(
        LEARNT_FROM,
        _pack(model.state()),
        {} if model.forest is None else _pack(_arrays_of(model.forest)),
        model.fitted_at,
    )
    return msgspec.msgpack.encode(state)


def decode_into(data: bytes, model: LengthModel) -> None:
    """Give a fresh model what ``encode`` wrote.

    Raises:
        ValueError: it is not the state of a model of this version; drop the model then.
    """
    state = _decoded(data, _State)
    _check_columns(state.columns)
    model.restore(_unpack(state.model))
    if state.forest:
        data_of = model.training_data()
        forest = checked_forest(_unpack(state.forest))
        fitted_at = min(max(state.fitted_at, 0), data_of.num_added)
        model.adopt(forest, msgspec.structs.replace(data_of, num_added=fitted_at))


def encode_prior(prior: Prior) -> bytes:
    """The file of the shipped prior, header and checksum included."""
    arrays: Arrays = {
        "rows": prior.rows,
        "targets": prior.targets.astype(np.float32),
        "source_of": prior.source_of.astype(np.int32),
        **{f"words.{name}": array for name, array in prior.words.items()},
    }
    body = _PriorFile(LEARNT_FROM, prior.sources, prior.prior_mean, _pack(arrays))
    return checkpoint.pack(zlib.compress(msgspec.msgpack.encode(body), 9), FORMAT_VERSION)


def decode_prior(data: bytes) -> Prior:
    """The prior in a file's bytes. Raises ValueError."""
    body = _decoded(_inflated(checkpoint.unpack(data, FORMAT_VERSION)), _PriorFile)
    _check_columns(body.columns)
    arrays = _unpack(body.arrays)
    try:
        rows, targets = arrays["rows"].astype(np.float32), arrays["targets"].astype(np.float64)
        source_of = arrays["source_of"].astype(np.int64)
    except KeyError as error:
        raise ValueError(f"a prior without {error}") from error
    if rows.shape != (len(targets), NUM_COLUMNS) or source_of.shape != targets.shape:
        raise ValueError("rows, targets and sources of a prior do not belong together")
    is_finite = np.isfinite(rows).all() and np.isfinite(targets).all()
    if not (is_finite and np.isfinite(body.prior_mean)):
        raise ValueError("a prior with numbers that are not finite")
    words = {name[6:]: a for name, a in arrays.items() if name.startswith("words.")}
    return Prior(rows, targets, body.prior_mean, body.sources, source_of, words)


def _inflated(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, _MAX_SIZE)
    except zlib.error as error:
        raise ValueError(f"a prior that cannot be unpacked: {error}") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError("a prior that is too long or cut short")
    return inflated


def start_from_prior(model: LengthModel, prior: Prior) -> None:
    """Give a fresh model the prior; its forest is not fitted yet. Raises ValueError."""
    if prior.words:
        try:
            model.words.restore(prior.words)
        except KeyError as error:
            raise ValueError(f"a prior without {error} of its words") from error
    model.reservoir.fill(prior.rows, prior.targets)
    model.history.prior_mean = prior.prior_mean


def checked_forest(arrays: Arrays) -> Forest:
    """A forest whose every index leads somewhere, and every walk to a leaf. Raises ValueError."""
    forest = Forest(
        feature=_indices(arrays, "feature"),
        threshold=_numbers(arrays, "threshold"),
        left=_indices(arrays, "left"),
        right=_indices(arrays, "right"),
        roots=_indices(arrays, "roots"),
        leaf_starts=_indices(arrays, "leaf_starts"),
        leaf_ranks=_indices(arrays, "leaf_ranks"),
        targets=_numbers(arrays, "targets"),
        num_features=NUM_COLUMNS,
    )
    nodes, leaves = len(forest.feature), len(forest.leaf_starts) - 1
    if not (nodes == len(forest.threshold) == len(forest.left) == len(forest.right)):
        raise ValueError("a forest whose nodes are not all there")
    is_leaf = forest.feature == LEAF
    inner = np.flatnonzero(~is_leaf)
    starts = forest.leaf_starts.astype(np.int64)
    is_good = (
        0 < len(forest.roots) <= MAX_TREES
        # What one forecast may have to pool.
        and len(forest.leaf_ranks) <= len(forest.roots) * len(forest.targets)
        and len(forest.targets) <= 2 * CAPACITY
        and leaves > 0
        and _is_within(forest.roots, 0, nodes)
        and _is_within(forest.feature, LEAF, NUM_COLUMNS)
        # A child stands behind its parent, so that no walk goes in a circle.
        and bool((forest.left[inner] > inner).all() and (forest.right[inner] > inner).all())
        and _is_within(forest.left[inner], 0, nodes)
        and _is_within(forest.right[inner], 0, nodes)
        and _is_within(forest.left[is_leaf], 0, leaves)
        and bool(starts[0] == 0 and (np.diff(starts) > 0).all())
        and starts[-1] == len(forest.leaf_ranks)
        and _is_within(forest.leaf_ranks, 0, len(forest.targets))
        and bool((np.diff(forest.targets) >= 0).all())
    )
    if not is_good:
        raise ValueError("not a forest")
    return forest


def _indices(arrays: Arrays, name: str) -> npt.NDArray[np.int32]:
    array = arrays.get(name)
    if array is None or array.ndim != 1 or array.dtype.kind != "i":
        raise ValueError(f"a forest without a list of whole numbers as {name}")
    wide = array.astype(np.int64)
    if not ((wide >= -(1 << 31)) & (wide < 1 << 31)).all():
        raise ValueError(f"a forest with a number in {name} that is out of range")
    return wide.astype(np.int32)


def _numbers(arrays: Arrays, name: str) -> npt.NDArray[np.float64]:
    array = arrays.get(name)
    if array is None or array.ndim != 1 or array.dtype.kind != "f":
        raise ValueError(f"a forest without a list of numbers as {name}")
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(f"a forest with a number in {name} that is not finite")
    return numbers


def _is_within(values: npt.NDArray[np.int32], least: int, below: int) -> bool:
    return bool(((values >= least) & (values < below)).all())


def _arrays_of(forest: Forest) -> Arrays:
    fields = msgspec.structs.asdict(forest)
    return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}


def _check_columns(columns: tuple[str, ...]) -> None:
    if columns != LEARNT_FROM:
        raise ValueError("it was learnt from other features than this version has")


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _pack(arrays: Arrays) -> dict[str, _Packed]:
    packed = {}
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        packed[name] = _Packed(little.dtype.str, little.shape, little.tobytes())
    return packed


def _unpack(packed: dict[str, _Packed]) -> Arrays:
    arrays: Arrays = {}
    for name, item in packed.items():
        if item.dtype not in _TYPES or len(item.shape) > 3 or any(n < 0 for n in item.shape):
            raise ValueError(f"array {name} has type {item.dtype} and shape {item.shape}")
        size = 1
        for n in item.shape:
            size *= n
        dtype = np.dtype(item.dtype)
        if size > _MAX_SIZE or size * dtype.itemsize != len(item.data):
            raise ValueError(f"array {name} has {len(item.data)} bytes for shape {item.shape}")
        if dtype.kind == "b" and item.data.strip(b"\x00\x01"):
            raise ValueError(f"array {name} is not one of truth values")
        arrays[name] = np.frombuffer(item.data, dtype=dtype).reshape(item.shape).copy()
    return arrays
