"""Step times from one's own measurements: a CSV of steps, and the linear model nearest to it.

Columns: ``num_decodes``, ``context_tokens``, ``prefill_tokens``, ``duration_s``; optional:
``prefill_pairs``, ``padding_tokens``. One row per step, in any order.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.simulator.steps import LinearSteps, Step, StepTime

DURATION = "duration_s"
REQUIRED = ("num_decodes", "context_tokens", "prefill_tokens", DURATION)
OPTIONAL = ("prefill_pairs", "padding_tokens")
COLUMNS = REQUIRED + OPTIONAL

Floats = npt.NDArray[np.float64]


class Measurement(NamedTuple):
    """A step, and how long it took."""

    step: Step
    duration_s: float


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of a model of step times: |model - measured| / measured."""

    num_steps: int
    median: float
    p90: float
    worst: float


def read(path: Path) -> list[Measurement]:
    """The measurements in a CSV; ValueError with file and line for what is not one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, reader.fieldnames or ())
            rows = [_parse(path, reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error
    except csv.Error as error:
        raise ValueError(f"{path}: not CSV: {error}") from error
    if not rows:
        raise ValueError(f"{path}: no measurements")
    return rows


def write(path: Path, rows: Iterable[Measurement]) -> None:
    """Write measurements as ``read`` reads them, every column."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for step, duration_s in rows:
            values = {**step._asdict(), DURATION: duration_s}
            writer.writerow([values[name] for name in COLUMNS])


def load(path: Path) -> LinearSteps:
    """The step times nearest to the measurements in a CSV."""
    return fit(read(path))


def fit(rows: Sequence[Measurement], *, with_prefill_constant: bool = True) -> LinearSteps:
    """The linear step times nearest to ``rows``, no coefficient below 0.

    Least squares of relative errors: short steps count as much as long ones, and a stall
    counts as one step. What never varies in ``rows`` cannot be told apart; what is 0 in all of
    them costs nothing. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("no measurements to fit to")
    names = [*_TERMS] if with_prefill_constant else [*_TERMS][:-1]
    inputs = np.array([[_TERMS[name](step) for name in names] for step, _ in rows], dtype=float)
    durations = np.array([duration_s for _, duration_s in rows])
    found = non_negative_least_squares(inputs / durations[:, None], np.ones(len(rows)))
    coefficients = {name: float(value) for name, value in zip(names, found, strict=True)}
    coefficients["constant_s"] = max(coefficients["constant_s"], _LEAST_CONSTANT_S)
    return LinearSteps(**coefficients)


def fit_error(steps: StepTime, rows: Sequence[Measurement]) -> FitError:
    """How far ``steps`` is from ``rows``; ValueError without rows."""
    if not rows:
        raise ValueError("no measurements to compare with")
    errors = np.array([abs(steps.seconds(step) / measured - 1.0) for step, measured in rows])
    return FitError(
        num_steps=len(rows),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(errors.max()),
    )


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x of 0 or more that minimises |matrix x - target|.

    An active set: coefficients enter while that lowers the error, and leave where the least
    squares of those present would make them negative. Columns of zeros get 0.
    """
    norms = np.linalg.norm(matrix, axis=0)
    # Columns differ by orders of magnitude (a constant, millions of pairs): one scale for all.
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    size = scaled.shape[1]
    present = np.zeros(size, dtype=bool)
    found = np.zeros(size)
    tolerance = 1e-10 * float(np.linalg.norm(target))
    for _ in range(10 * size):
        gain = np.where(present, -np.inf, scaled.T @ (target - scaled @ found))
        entering = int(np.argmax(gain))
        if gain[entering] <= tolerance:
            break
        present[entering] = True
        found = _feasible(scaled, target, found, present)
    return np.where(norms > 0, found / np.where(norms > 0, norms, 1.0), 0.0)


def _feasible(
    matrix: Floats, target: Floats, found: Floats, present: npt.NDArray[np.bool_]
) -> Floats:
    """Least squares of the columns ``present``, from which those that turn negative leave."""
    while True:
        wanted = np.zeros_like(found)
        wanted[present] = np.linalg.lstsq(matrix[:, present], target, rcond=None)[0]
        negative = present & (wanted <= 0)
        if not negative.any():
            return wanted
        # As far towards it as none turns negative; what reaches 0 leaves.
        step = float(np.min(found[negative] / (found[negative] - wanted[negative])))
        found = found + step * (wanted - found)
        present &= found > 1e-12
        found = np.where(present, found, 0.0)


_TERMS: Mapping[str, Callable[[Step], int]] = {
    "constant_s": lambda step: 1,
    "decode_s": lambda step: step.num_decodes,
    "context_s": lambda step: step.context_tokens,
    "padding_s": lambda step: step.padding_tokens,
    "prefill_s": lambda step: step.prefill_tokens,
    "pair_s": lambda step: step.prefill_pairs,
    "prefill_constant_s": lambda step: int(step.prefill_tokens > 0),
}
"""Coefficients of ``LinearSteps``, and what of a step each multiplies."""

_LEAST_CONSTANT_S = 1e-6


def _check_columns(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ValueError(f"{path}:1: missing columns: {', '.join(missing)}")
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"{path}:1: columns must be of {', '.join(COLUMNS)}, each once")


def _parse(path: Path, line: int, row: Mapping[str, str | None]) -> Measurement:
    if None in row or None in row.values():
        raise ValueError(f"{path}:{line}: not as many values as columns")
    counts = {
        name: _count(path, line, name, text) for name, text in row.items() if name != DURATION
    }
    step = Step(**{"padding_tokens": 0, **counts})
    if step.num_decodes + step.prefill_tokens == 0:
        raise ValueError(f"{path}:{line}: a step has at least one decode or prefill token")
    text = row[DURATION]
    try:
        duration_s = float(text or "")
    except ValueError:
        duration_s = math.nan
    if not 0 < duration_s < math.inf:
        raise ValueError(f"{path}:{line}: {DURATION} must be a number above 0, got {text!r}")
    return Measurement(step, duration_s)


def _count(path: Path, line: int, name: str, text: str | None) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError(f"{path}:{line}: {name} must be a whole number, 0 or more, got {text!r}")
    return value
