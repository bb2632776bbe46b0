"""The bound covers the share of answers that it promises, also when the world drifts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.calibration import (
    MARKS,
    MAX_FACTOR,
    MAX_SEEN,
    NUM_BUCKETS,
    Calibrator,
    bucket_of,
    calibrated,
    no_factors,
)
from predictor.distribution import (
    LEVELS,
    NUM_LEVELS,
    Points,
    at_level,
    points_of_sample,
    remaining_of_many,
)

BELL = np.quantile(np.random.default_rng(0).normal(size=100_000), np.arange(0.5, 512) / 512)
MIN_CASES = 1500


def forecast(centre: float, spread: float) -> Points:
    """A log-normal forecast."""
    return np.exp(centre + spread * BELL).astype(np.float32)


class World:
    """Answers, forecasts of them that may be wrong, and an account of what was covered."""

    def __init__(self, seed: int, quantile: float = 0.9) -> None:
        self.rng = np.random.default_rng(seed)
        self.quantile = quantile
        self.calibrator = Calibrator()
        self.cases: list[list[bool]] = [[] for _ in range(NUM_BUCKETS)]

    def serve(
        self, count: int, *, scale: float = 1.0, bias: float = 0.0, spread: float = 0.8
    ) -> None:
        """``bias`` and ``spread`` are the forecast's; truth has 0 and 0.8."""
        for _ in range(count):
            centre = self.rng.normal(5.5, 0.7)
            length = max(round(scale * math.exp(centre + 0.8 * self.rng.normal())), 1)
            points = forecast(centre + bias, spread)
            self._note(points, length)
            self.calibrator.learn(points, length, self.quantile)

    def _note(self, points: Points, length: int) -> None:
        passed = int((length > MARKS).sum())
        marks = MARKS[:passed]
        remaining = remaining_of_many(np.broadcast_to(points, (passed, 512)), marks)
        factors = self.calibrator.factors[:passed]
        bounds = at_level(calibrated(remaining, factors), self.quantile)
        for bucket, bound in enumerate(bounds):
            self.cases[bucket].append(bool(length - marks[bucket] <= np.ceil(bound)))

    def coverage(self, since: int = 0) -> list[float]:
        """Of the buckets with many cases; ``since`` leaves out that many at the beginning."""
        counted = [cases[since:] for cases in self.cases]
        return [float(np.mean(cases)) for cases in counted if len(cases) >= MIN_CASES]

    def forget(self) -> None:
        self.cases = [[] for _ in range(NUM_BUCKETS)]


def errors(world: World, since: int = 0) -> np.ndarray:
    found = world.coverage(since)
    assert len(found) >= 5
    return np.abs(np.array(found) - world.quantile)


# Coverage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
@pytest.mark.parametrize(
    ("bias", "spread"),
    [(0.0, 0.8), (0.5, 0.8), (-0.5, 0.8), (0.0, 0.4), (0.0, 1.5)],
    ids=["right", "too-long", "too-short", "too-sure", "too-unsure"],
)
def test_every_progress_bucket_is_covered_within_two_points(
    quantile: float, bias: float, spread: float
) -> None:
    world = World(1, quantile)
    world.serve(1000, bias=bias, spread=spread)
    world.forget()
    world.serve(7000, bias=bias, spread=spread)
    assert errors(world).max() <= 0.02


def test_a_forecast_that_is_too_sure_is_not_covered_without_calibration() -> None:
    # The test above shows something: the same world without factors is far off.
    world = World(1)
    world.calibrator.learn = lambda *_args: None  # type: ignore[method-assign]
    world.serve(3000, spread=0.4)
    assert errors(world).max() > 0.1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_coverage_is_back_a_thousand_answers_after_all_have_become_longer(seed: int) -> None:
    world = World(seed)
    world.serve(3000)
    world.serve(1000, scale=1.35)
    world.forget()
    world.serve(6000, scale=1.35)
    assert errors(world).max() <= 0.02


def test_coverage_is_back_after_all_have_become_shorter() -> None:
    world = World(4)
    world.serve(3000)
    world.serve(1000, scale=1 / 1.35)
    world.forget()
    world.serve(7000, scale=1 / 1.35)
    assert errors(world).max() <= 0.02


def test_the_calibrator_s_own_account_of_coverage_is_right() -> None:
    world = World(5)
    world.serve(3000)
    for told, cases in zip(world.calibrator.coverage(), world.cases, strict=True):
        if len(cases) >= 1000:
            assert told == pytest.approx(np.mean(cases[-600:]), abs=0.03)


def test_coverage_of_too_few_answers_is_not_told() -> None:
    assert Calibrator().coverage() == (-1.0,) * NUM_BUCKETS
    world = World(6)
    world.serve(10)
    assert set(world.calibrator.coverage()) == {-1.0}


# Factors ------------------------------------------------------------------------------------------


def test_at_the_beginning_nothing_is_changed() -> None:
    assert (Calibrator().factors == 1).all()
    assert (no_factors() == 1).all()
    assert Calibrator().factors.shape == (NUM_BUCKETS, NUM_LEVELS)


def test_forecasts_that_are_too_short_get_factors_above_one() -> None:
    world = World(7)
    world.serve(2000, bias=-math.log(2))
    middle = world.calibrator.factors[0, NUM_LEVELS // 2]
    assert middle == pytest.approx(2, rel=0.2)


def test_the_version_rises_whenever_the_factors_change() -> None:
    world = World(8)
    for _ in range(200):
        before, version = world.calibrator.factors.copy(), world.calibrator.version
        world.serve(1)
        if (world.calibrator.factors != before).any():
            assert world.calibrator.version > version
        assert world.calibrator.version >= version
    assert 0 < world.calibrator.version < 200


def test_a_few_odd_answers_do_not_throw_the_factors_far() -> None:
    world = World(9)
    calibrator = world.calibrator
    for _ in range(3):
        calibrator.learn(forecast(5.5, 0.8), 20_000, 0.9)
    calibrator.refresh()
    assert calibrator.factors[0].max() < 3


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 1e9), min_size=1, max_size=4),
            st.floats(1, 1e9) | st.integers(0, 10_000),
        ),
        max_size=60,
    ),
    st.floats(0.01, 0.99),
)
def test_whatever_is_learnt_the_factors_stay_sane(
    answers: list[tuple[list[float], float]], quantile: float
) -> None:
    calibrator = Calibrator(window=20)
    for sample, length in answers:
        calibrator.learn(points_of_sample(sample), length, quantile)
    calibrator.refresh()
    assert np.isfinite(calibrator.factors).all()
    assert (calibrator.factors > 0).all()
    assert (calibrator.factors <= MAX_FACTOR).all()


@given(
    st.lists(st.floats(0, 1e5), min_size=NUM_LEVELS, max_size=NUM_LEVELS),
    st.lists(st.floats(0.02, 50), min_size=NUM_LEVELS, max_size=NUM_LEVELS),
)
def test_calibrated_levels_ascend_and_are_never_below_their_own_share(
    remaining: list[float], factors: list[float]
) -> None:
    tokens = np.sort(np.array(remaining, dtype=np.float32))
    scale = np.array(factors, dtype=np.float32)
    found = calibrated(tokens, scale)
    assert (np.diff(found) >= 0).all()
    assert (found >= tokens * scale).all()
    assert (calibrated(tokens, np.ones_like(scale)) == tokens).all()


def test_answers_that_stop_early_say_nothing_of_later_buckets() -> None:
    calibrator = Calibrator()
    for _ in range(500):
        calibrator.learn(forecast(3.0, 0.3), 20, 0.9)
    assert calibrator.coverage()[1:] == (-1.0,) * (NUM_BUCKETS - 1)


def test_an_answer_of_no_tokens_teaches_nothing() -> None:
    calibrator = Calibrator()
    calibrator.learn(forecast(5, 1), 0, 0.9)
    assert calibrator.version == 0


@pytest.mark.parametrize("bucket", range(NUM_BUCKETS))
def test_a_bucket_begins_at_its_mark(bucket: int) -> None:
    mark = int(MARKS[bucket])
    assert bucket_of(mark) == bucket_of(mark + 1) == bucket
    if bucket:
        assert bucket_of(mark - 1) == bucket - 1


def test_the_last_bucket_has_no_end() -> None:
    assert bucket_of(10**9) == NUM_BUCKETS - 1


# State --------------------------------------------------------------------------------------------


def test_state_restores_the_same_factors_and_goes_on_alike() -> None:
    world = World(10)
    world.serve(700)
    world.calibrator.refresh()
    other = Calibrator()
    other.restore({name: array.copy() for name, array in world.calibrator.state().items()})
    assert other.factors.tolist() == world.calibrator.factors.tolist()
    assert other.coverage() == world.calibrator.coverage()
    for length in (5, 300, 4000):
        world.calibrator.learn(forecast(5, 1), length, 0.9)
        other.learn(forecast(5, 1), length, 0.9)
    world.calibrator.refresh()
    other.refresh()
    assert other.factors.tolist() == world.calibrator.factors.tolist()


def changed(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    return {**Calibrator().state(), name: array}


def with_one(name: str, value: float) -> dict[str, np.ndarray]:
    array = Calibrator().state()[name].copy()
    array.flat[3] = value
    return changed(name, array)


SCORES = Calibrator().state()["scores"]


@pytest.mark.parametrize(
    "state",
    [
        with_one("scores", math.nan),
        with_one("scores", math.inf),
        with_one("scores", 0.0),
        with_one("scores", -1.0),
        with_one("num_seen", -1),
        with_one("num_seen", MAX_SEEN + 1),
        with_one("num_seen", (1 << 63) - 1),
        with_one("shift", math.nan),
        with_one("shift", 1e9),
        with_one("shift", -1e9),
        changed("scores", SCORES[:-1]),
        changed("scores", SCORES[:, :-1]),
        changed("scores", SCORES[:, :, :-1]),
        changed("scores", SCORES.ravel()),
        changed("num_seen", np.zeros(3, dtype=np.int64)),
        changed("covered", np.zeros((NUM_BUCKETS, 5), dtype=np.bool_)),
        changed("shift", np.zeros(2)),
        changed("shift", np.array(0.0)),
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict[str, np.ndarray]) -> None:
    calibrator = Calibrator()
    with pytest.raises(ValueError, match="calibration"):
        calibrator.restore(state)
    # What was there before is still good.
    calibrator.learn(forecast(5, 1), 100, 0.9)
    calibrator.refresh()
    assert np.isfinite(calibrator.factors).all()


def test_a_calibrator_that_has_seen_as_much_as_may_be_goes_on() -> None:
    calibrator = Calibrator()
    calibrator.restore(changed("num_seen", np.full(NUM_BUCKETS, MAX_SEEN)))
    for _ in range(100):
        calibrator.learn(forecast(5, 1), 100, 0.9)
    assert np.isfinite(calibrator.factors).all()
    assert 0 <= calibrator.coverage()[0] <= 1


def test_the_levels_are_those_of_the_forecast() -> None:
    assert len(LEVELS) == NUM_LEVELS
