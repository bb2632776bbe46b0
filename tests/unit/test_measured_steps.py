"""A CSV of measured steps: read, written, fitted to; what is wrong in it is named."""

import random
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls

from engine.simulator import measured
from engine.simulator.measured import Measurement
from engine.simulator.steps import LinearSteps, Step

TRUTH = LinearSteps(
    constant_s=9e-3,
    decode_s=40e-6,
    context_s=60e-9,
    padding_s=2e-9,
    prefill_s=90e-6,
    pair_s=3e-9,
    prefill_constant_s=1e-3,
)
HEADER = "num_decodes,context_tokens,prefill_tokens,duration_s\n"


def some_steps(count: int, seed: int = 1) -> list[Step]:
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        decodes = rng.randint(0, 200)
        prompt = rng.choice([0, rng.randint(1, 2048)])
        pairs = prompt * rng.randint(1, 4000)
        context = decodes * rng.randint(1, 4000)
        padding = decodes * rng.randint(0, 2000)
        steps.append(Step(decodes, context, padding, max(prompt, int(decodes == 0)), pairs))
    return steps


def some_rows(count: int, noise: float = 0.0) -> list[Measurement]:
    rng = random.Random(2)
    return [
        Measurement(step, TRUTH.seconds(step) * rng.uniform(1 - noise, 1 + noise))
        for step in some_steps(count)
    ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = some_rows(50, noise=0.1)
    measured.write(tmp_path / "steps.csv", rows)
    assert measured.read(tmp_path / "steps.csv") == rows


def test_linear_steps_are_found_from_their_measurements(tmp_path: Path) -> None:
    measured.write(tmp_path / "steps.csv", some_rows(200))
    found = measured.load(tmp_path / "steps.csv")
    for name in LinearSteps.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-5)


def test_errors_of_a_fit_are_those_of_the_noise() -> None:
    rows = some_rows(400, noise=0.1)
    off = measured.fit_error(measured.fit(rows), rows)
    assert off.num_steps == 400
    assert 0.03 < off.median < 0.07
    assert off.median < off.p90 < off.worst < 0.15
    assert measured.fit_error(TRUTH, some_rows(10)).worst == pytest.approx(0, abs=1e-12)


def test_one_stall_hardly_moves_the_fit() -> None:
    rows = some_rows(200)
    rows[0] = rows[0]._replace(duration_s=60.0)
    assert measured.fit_error(measured.fit(rows), rows[1:]).median < 0.03


def test_no_coefficient_is_negative_where_steps_got_faster_with_work() -> None:
    rows = [Measurement(Step(n, 0, 0, 0), 0.02 - 1e-4 * n) for n in range(1, 100)]
    found = measured.fit(rows)
    assert found.decode_s == 0
    assert 0.01 < found.constant_s < 0.02


def test_the_constant_stays_above_0() -> None:
    found = measured.fit([Measurement(Step(n, 0, 0, 0), 1e-3 * n) for n in range(1, 50)])
    assert found.decode_s == pytest.approx(1e-3, rel=0.01)
    assert found.constant_s > 0


def test_a_single_measurement_is_met() -> None:
    rows = [Measurement(Step(4, 4000, 0, 0), 0.02)]
    assert measured.fit_error(measured.fit(rows), rows).worst < 1e-3


def test_nothing_to_fit_to() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        measured.fit([])
    with pytest.raises(ValueError, match="no measurements"):
        measured.fit_error(TRUTH, [])


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_are_those_of_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(30, 7)) * 10.0 ** rng.integers(-6, 6, size=7)
    matrix[:, 2] = 0.0
    if seed % 3 == 0:
        matrix[:, 5] = matrix[:, 4]
    target = rng.normal(size=30)
    found = measured.non_negative_least_squares(matrix, target)
    _, least = nnls(matrix, target)
    assert (found >= 0).all()
    assert found[2] == 0
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"steps.csv:1: missing columns: num_decodes, context_tokens, prefill_tokens, dura"),
        (
            "num_decodes,context_tokens,duration_s\n",
            r"steps.csv:1: missing columns: prefill_tokens",
        ),
        (HEADER.strip() + ",colour\n", r"steps.csv:1: columns must be of"),
        (HEADER.strip() + ",num_decodes\n", r"steps.csv:1: columns must be of"),
        (HEADER, r"steps.csv: no measurements"),
        (HEADER + "1,100,0,0.01\n1,100,0\n", r"steps.csv:3: not as many values as columns"),
        (HEADER + "1,100,0,0.01,7\n", r"steps.csv:2: not as many values as columns"),
        (HEADER + "1.5,100,0,0.01\n", r"steps.csv:2: num_decodes must be a whole .* got '1.5'"),
        (HEADER + "1,-4,0,0.01\n", r"steps.csv:2: context_tokens must be a whole number, 0 or"),
        (HEADER + "1,100,,0.01\n", r"steps.csv:2: prefill_tokens must be .* got ''"),
        (HEADER + "0,0,0,0.01\n", r"steps.csv:2: a step has at least one decode or prefill"),
        (HEADER + "1,100,0,0\n", r"steps.csv:2: duration_s must be a number above 0, got '0'"),
        (HEADER + "1,100,0,nan\n", r"steps.csv:2: duration_s must be a number above 0"),
        (HEADER + "1,100,0,inf\n", r"steps.csv:2: duration_s must be a number above 0"),
        (HEADER + "1,100,0,fast\n", r"steps.csv:2: duration_s must be .* got 'fast'"),
        (HEADER + '1,100,0,"0.01\n', r"steps.csv: not CSV"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        measured.read(path)


def test_text_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_bytes(HEADER.encode() + b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        measured.read(tmp_path / "steps.csv")


def test_optional_columns_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    text = (
        "\ufeffduration_s,prefill_pairs,prefill_tokens,context_tokens,num_decodes\n\n.5,6,3,20,2\n"
    )
    path.write_text(text, encoding="utf-8")
    assert measured.read(path) == [Measurement(Step(2, 20, 0, 3, 6), 0.5)]
