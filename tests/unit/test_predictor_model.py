"""The length model: sane from the start, learns, follows drift, is not fooled by cut answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from predictor.calibration import MARKS, bucket_of, calibrated
from predictor.distribution import NUM_POINTS, at_level, remaining_at_levels
from predictor.features import FEATURES, NO_CUES, NUM_FEATURES, EngineFacts, feature_row
from predictor.forest import ForestParameters
from predictor.model import MIN_SHARE_SEEN, NUM_COLUMNS, Asked, LengthModel, Request
from predictor.progress import NUM_PROGRESS
from predictor.state import PRIOR_PATH, decode_prior, start_from_prior
from predictor.tilt import TILT_MARKS, TILTED_BUCKETS, no_tilts

if TYPE_CHECKING:
    from collections.abc import Callable

M, T, T2, N = 11, 21, 22, 31
PLAIN = feature_row(NO_CUES, EngineFacts(50, 4096))
FEW_TREES = ForestParameters(num_trees=12)
LONG_COLUMN = FEATURES.index("task_long_form")


def model_of(**options: object) -> LengthModel:
    return LengthModel(**{"parameters": FEW_TREES, "capacity": 1500, **options})  # type: ignore[arg-type]


def plain(model: int = M, tenant: int = T, node: int = N) -> Request:
    return Request(PLAIN, model, tenant, node)


def marked(value: float) -> Request:
    """A request whose prompt asks for something long, or does not."""
    row = PLAIN.copy()
    row[LONG_COLUMN] = value
    return Request(row, M, T, N)


def ask(model: LengthModel, request: Request) -> Asked:
    return model.forecast([request], 3600.0)[0]


def quantile_of(model: LengthModel, request: Request, level: float) -> float:
    return float(np.quantile(ask(model, request).points, level))


def bound(model: LengthModel, asked: Asked, generated: int, level: float) -> float:
    """As the serving side works it out."""
    factors = model.calibrator.factors[bucket_of(generated)]
    remaining = calibrated(remaining_at_levels(asked.points, generated), factors)
    return generated + float(at_level(remaining, level))


def teach(
    model: LengthModel,
    length: Callable[[], float],
    count: int,
    *,
    limit: float = math.inf,
    request: Request | None = None,
) -> None:
    """Answers that end by themselves or at ``limit``; a new forest as often as one is due."""
    for _ in range(count):
        asked = ask(model, request or plain())
        tokens = max(round(length()), 1)
        model.learn(asked, int(min(tokens, limit)), is_cut=tokens > limit)
        if model.is_fit_due():
            model.refit()


# Cold ---------------------------------------------------------------------------------------------


def test_before_anything_is_learnt_a_forecast_is_wide_and_sane() -> None:
    asked = ask(model_of(), plain())
    assert asked.points.shape == (NUM_POINTS,)
    assert asked.points.dtype == np.float32
    assert (np.diff(asked.points) >= 0).all()
    assert np.isfinite(asked.points).all()
    assert 20 < np.median(asked.points) < 1000
    assert np.quantile(asked.points, 0.9) > 2 * np.median(asked.points)


def test_nobody_asked_is_nobody_answered() -> None:
    assert model_of().forecast([], 0.0) == []


def test_a_batch_is_answered_as_one_by_one_and_in_order() -> None:
    model = model_of()
    teach(model, lambda: 50, 60)
    requests = [plain(), plain(99, 0, 0), marked(1.0)]
    together = model.forecast(requests, 100.0)
    for request, asked in zip(requests, together, strict=True):
        alone = model.forecast([request], 100.0)[0]
        assert asked.points.tolist() == alone.points.tolist()
        assert asked.request == request


@pytest.mark.parametrize("time_of_day_s", [-1.0, 0.0, 86_400.0, 1e12])
def test_any_time_of_day_is_taken(time_of_day_s: float) -> None:
    assert np.isfinite(model_of().forecast([plain()], time_of_day_s)[0].row).all()


def test_equal_seeds_and_answers_make_equal_models() -> None:
    def run() -> list[float]:
        model, rng = model_of(seed=4), np.random.default_rng(1)
        teach(model, lambda: rng.exponential(200), 300, limit=250)
        found: list[float] = ask(model, plain()).points.tolist()
        return found

    assert run() == run()


# Learning -----------------------------------------------------------------------------------------


def test_it_learns_how_long_answers_are() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: math.exp(rng.normal(math.log(300), 0.4)), 1200)
    assert quantile_of(model, plain(), 0.5) == pytest.approx(300, rel=0.12)
    assert quantile_of(model, plain(), 0.9) == pytest.approx(300 * math.exp(1.2816 * 0.4), rel=0.2)


def test_it_learns_what_the_prompt_says() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    for _ in range(1500):
        is_long = rng.random() < 0.5
        length = math.exp(rng.normal(math.log(800 if is_long else 60), 0.3))
        model.learn(ask(model, marked(float(is_long))), round(length), is_cut=False)
        if model.is_fit_due():
            model.refit()
    assert quantile_of(model, marked(1.0), 0.5) == pytest.approx(800, rel=0.25)
    assert quantile_of(model, marked(0.0), 0.5) == pytest.approx(60, rel=0.25)


def test_it_learns_from_words_that_no_column_knows() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    long, short = (Request(PLAIN, M, T, N, (word, 7, 8)) for word in (100, 200))
    for _ in range(800):
        request, middle = (long, 600) if rng.random() < 0.5 else (short, 80)
        length = math.exp(rng.normal(math.log(middle), 0.3))
        model.learn(ask(model, request), round(length), is_cut=False)
        if model.is_fit_due():
            model.refit()
    assert quantile_of(model, long, 0.5) > 2 * quantile_of(model, short, 0.5)


def test_new_nodes_tenants_and_models_are_forecast_from_what_is_above_them() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: math.exp(rng.normal(math.log(1000), 0.2)), 500)
    known = quantile_of(model, plain(), 0.5)
    for request in (plain(M, T, 999), plain(M, 999, 0), plain(M, 999, 998)):
        assert quantile_of(model, request, 0.5) == pytest.approx(known, rel=0.35)
    stranger = ask(model, plain(999, 998, 997)).points
    assert np.isfinite(stranger).all()
    assert 20 < np.median(stranger) < 3000


def test_all_lengths_grown_by_a_third_are_followed_within_a_thousand_answers() -> None:
    model, rng = model_of(), np.random.default_rng(0)

    def length() -> float:
        return scale * math.exp(rng.normal(math.log(300), 0.5))

    scale = 1.0
    teach(model, length, 1000)
    scale = 1.35
    teach(model, length, 1000)
    covered = {mark: [] for mark in (0, 50, 100, 200, 400)}
    for _ in range(1500):
        asked, tokens = ask(model, plain()), max(round(length()), 1)
        for mark, cases in covered.items():
            if tokens > mark:
                cases.append(tokens <= math.ceil(bound(model, asked, mark, 0.9)))
        model.learn(asked, tokens, is_cut=False)
    for mark, cases in covered.items():
        if len(cases) >= 1000:
            assert np.mean(cases) == pytest.approx(0.9, abs=0.025), mark


# Cut answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_answers_cut_at_max_tokens_are_not_learnt_as_truth(seed: int) -> None:
    # Of answers with a mean of 400, three in five are cut at 200. All that can be known is that
    # so many are longer; the true median is 277 and the true 0.9 quantile 921.
    model, rng = model_of(seed=seed), np.random.default_rng(seed)
    teach(model, lambda: rng.exponential(400), 1700, limit=200)
    # A single forecast follows the last sixty answers: many, taken over the next 800, are judged.
    taken = []
    for _ in range(20):
        teach(model, lambda: rng.exponential(400), 40, limit=200)
        taken.append(ask(model, plain()).points)
    for points in taken:
        assert (points > 200).mean() == pytest.approx(math.exp(-0.5), abs=0.25)
        assert 400 < np.quantile(points, 0.9) < 5000
    points = np.concatenate(taken)
    assert (points > 200).mean() == pytest.approx(math.exp(-0.5), abs=0.08)
    assert np.quantile(points, 0.75) > 400
    assert np.quantile(points, 0.9) == pytest.approx(921, rel=0.25)
    # What was seen in full is learnt as it was.
    for tokens in (50, 100, 150):
        assert (points <= tokens).mean() == pytest.approx(1 - math.exp(-tokens / 400), abs=0.06)


def test_when_nearly_all_are_cut_forecasts_go_beyond_the_cut() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: rng.exponential(4000), 1500, limit=100)
    points = ask(model, plain()).points
    assert np.median(points) > 100
    assert (points > 100).mean() > 0.85
    assert points.max() <= 1e9
    assert np.isfinite(points).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_of_an_answer_beyond_the_usual_cut_stays_sane(seed: int) -> None:
    model, rng = model_of(seed=seed), np.random.default_rng(seed)
    teach(model, lambda: rng.exponential(400), 1500, limit=200)
    asked = ask(model, plain())
    for generated in (200, 400, 800, 1600):
        assert generated + 1 < bound(model, asked, generated, 0.9) < 20 * generated


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_aborted_at_random_are_learnt_as_if_they_had_not_been(seed: int) -> None:
    model, rng = model_of(seed=seed), np.random.default_rng(seed)
    for _ in range(2500):
        asked, tokens = ask(model, plain()), max(round(rng.exponential(400)), 1)
        aborted_at = round(rng.exponential(400))
        model.learn(asked, min(tokens, aborted_at), is_cut=tokens > aborted_at)
        if model.is_fit_due():
            model.refit()
    points = ask(model, plain()).points
    assert np.median(points) == pytest.approx(277, rel=0.25)
    assert np.quantile(points, 0.9) == pytest.approx(921, rel=0.4)


def test_a_cut_where_hardly_an_answer_has_ended_says_nothing() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: math.exp(rng.normal(math.log(500), 0.3)), 300)
    points = ask(model, plain()).points
    before = model.reservoir.num_added
    tokens = int(np.quantile(points, MIN_SHARE_SEEN)) - 1
    model.learn(ask(model, plain()), tokens, is_cut=True)
    assert model.reservoir.num_added == before
    # One that ended there by itself, and one cut a little later, do.
    model.learn(ask(model, plain()), tokens, is_cut=False)
    assert model.reservoir.num_added == before + 1
    tokens = int(np.quantile(ask(model, plain()).points, MIN_SHARE_SEEN)) + 5
    model.learn(ask(model, plain()), tokens, is_cut=True)
    assert model.reservoir.num_added == before + 2


def test_what_a_cut_answer_would_have_become_is_drawn_around_the_mean_of_what_is_left() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: rng.exponential(400), 600)
    asked = ask(model, plain())
    mean = model.history.residual_tokens(M, 200)
    drawn = np.array([model.whole_length(asked, 200, is_cut=True) for _ in range(4000)]) - 200
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(mean, rel=0.08)
    assert np.median(drawn) == pytest.approx(mean * math.log(2), rel=0.08)
    assert model.whole_length(asked, 200, is_cut=False) == 200


def test_five_hundred_cuts_after_one_token_leave_the_prior_and_the_forecast_as_they_were() -> None:
    model = LengthModel(parameters=FEW_TREES)
    start_from_prior(model, decode_prior(PRIOR_PATH.read_bytes()))
    model.refit()
    rows, before = model.reservoir.num_prior, ask(model, plain()).points.tolist()
    factors = model.calibrator.factors.tolist()
    for _ in range(500):
        model.learn(ask(model, plain()), 1, is_cut=True)
    assert rows > 500
    assert model.reservoir.num_prior == len(model.reservoir) == rows
    assert not model.is_fit_due()
    assert ask(model, plain()).points.tolist() == before
    assert model.calibrator.factors.tolist() == factors


def test_an_answer_cut_before_its_first_token_teaches_nothing() -> None:
    model = model_of()
    model.learn(ask(model, plain()), 0, is_cut=True)
    assert model.reservoir.num_added == 0
    assert model.history.outlook(M, T, N).features[1] == 0


def test_an_answer_of_no_tokens_that_ended_by_itself_counts() -> None:
    model = model_of()
    model.learn(ask(model, plain()), 0, is_cut=False)
    assert model.reservoir.num_added == 1


def test_a_negative_length_teaches_nothing() -> None:
    model = model_of()
    model.learn(ask(model, plain()), -5, is_cut=False)
    assert model.reservoir.num_added == 0


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("tokens", [1, 10**6, 1 << 30])
def test_lengths_beyond_all_measure_leave_the_model_sane(tokens: int, is_cut: bool) -> None:
    model = model_of()
    for _ in range(100):
        model.learn(ask(model, plain()), tokens, is_cut=is_cut)
    if is_cut and tokens == 1:
        # Hardly an answer ends so early: that one is cut there says nothing.
        assert len(model.reservoir) == 0
        assert not model.is_fit_due()
    else:
        # Once answers are expected to be as long, cuts there say nothing more.
        assert len(model.reservoir) >= (2 if is_cut else 100)
        model.refit()
    points = ask(model, plain()).points
    assert np.isfinite(points).all()
    assert (np.diff(points) >= 0).all()
    assert points[0] >= 0
    assert np.isfinite(model.calibrator.factors).all()


def test_a_limit_of_tokens_beyond_all_measure_is_learnt_from() -> None:
    model = model_of()
    looks = np.ones((TILTED_BUCKETS, NUM_PROGRESS), dtype=np.float32)
    for value in (800.0, 1e6, -1e6, 0.0):
        row = PLAIN.copy()
        row[FEATURES.index("log_max_tokens")] = value
        for is_cut in (False, True):
            asked = ask(model, Request(row, M, T, N))
            model.learn(asked, 5000, is_cut=is_cut, progress=looks)
    assert model.reservoir.num_added == 8
    assert all(np.isfinite(array).all() for array in model.tilt.state().values())


# Tilts --------------------------------------------------------------------------------------------


def test_what_answers_look_like_tilts_those_to_come_and_is_published_with_the_calibration() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    published, version = no_tilts(), model.calibrator.version
    for _ in range(900):
        looks = np.zeros((TILTED_BUCKETS, NUM_PROGRESS), dtype=np.float32)
        looks[:, 0] = rng.normal()
        tokens = 50 + rng.exponential(300) * math.exp(0.8 * looks[0, 0])
        passed = int((tokens > TILT_MARKS).sum())
        model.learn(ask(model, plain()), round(tokens), is_cut=False, progress=looks[:passed])
        if model.is_fit_due():
            model.refit()
        if model.calibrator.version == version:
            assert (model.tilt.tilts == published).all()
        published, version = model.tilt.tilts.copy(), model.calibrator.version
    assert model.tilt.tilts[0, 0] > 0.2


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_forest", [False, True])
def test_a_survivor_of_a_large_batch_does_not_hold_the_whole_batch(*, has_forest: bool) -> None:
    model = model_of()
    if has_forest:
        teach(model, lambda: 50, 60)
        assert model.forest is not None
    survivor = model.forecast([plain()] * 256, 0.0)[100]
    for array in (survivor.points, survivor.row):
        assert array.base is None or array.base.nbytes == array.nbytes


# Forests ------------------------------------------------------------------------------------------


def test_a_forest_is_due_after_some_answers_and_the_next_after_a_share_of_new_ones() -> None:
    model = model_of()
    assert not model.is_fit_due()
    first = None
    for count in range(1, 400):
        model.learn(ask(model, plain()), count, is_cut=False)
        if model.is_fit_due():
            first = first or count
            model.refit()
            assert not model.is_fit_due()
    assert first is not None
    assert first < 100


def test_fitting_changes_nothing_until_the_forest_is_adopted() -> None:
    model = model_of()
    for count in range(60):
        model.learn(ask(model, plain()), count, is_cut=False)
    before = ask(model, plain()).points.tolist()
    data = model.training_data()
    forest = model.fit_forest(data)
    # Meanwhile more is learnt; the data to fit on does not change under the fit.
    copy = data.rows.copy()
    model.learn(ask(model, plain()), 5000, is_cut=False)
    assert (data.rows == copy).all()
    assert model.forest is None
    model.adopt(forest, data)
    assert ask(model, plain()).points.tolist() != before
    assert model.fitted_at == 60


def test_a_row_has_the_features_and_what_is_known_beside_them() -> None:
    asked = ask(model_of(), marked(1.0))
    assert asked.row.shape == (NUM_COLUMNS,)
    assert asked.row[:NUM_FEATURES].tolist() == marked(1.0).features.tolist()
    assert np.isfinite(asked.row).all()


def test_a_forecast_is_refined_along_all_progress_marks() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: math.exp(rng.normal(6, 0.8)), 800)
    asked = ask(model, plain())
    bounds = [bound(model, asked, int(mark), 0.9) for mark in MARKS]
    assert all(found > mark for found, mark in zip(bounds, MARKS, strict=True))


# State --------------------------------------------------------------------------------------------


def test_state_restores_a_model_that_forecasts_alike() -> None:
    model, rng = model_of(), np.random.default_rng(0)
    teach(model, lambda: rng.exponential(300), 300, limit=400)
    model.calibrator.refresh()
    other = model_of(seed=99)
    other.restore(model.state())
    assert model.forest is not None
    other.adopt(model.forest, model.training_data())
    for request in (plain(), plain(1, 2, 3), marked(1.0)):
        first, second = ask(model, request), ask(other, request)
        assert first.points.tolist() == second.points.tolist()
        assert first.row.tolist() == second.row.tolist()
    assert other.calibrator.factors == pytest.approx(model.calibrator.factors)


@pytest.mark.parametrize("name", sorted(LengthModel(capacity=5).state()))
@pytest.mark.parametrize("change", ["missing", "empty", "scalar", "flat"])
def test_a_state_with_a_part_missing_or_misshapen_is_refused(name: str, change: str) -> None:
    model = model_of(capacity=50)
    for count in range(10):
        model.learn(ask(model, plain()), count + 5, is_cut=False)
    state = dict(model.state())
    if change == "missing":
        del state[name]
    elif change == "empty":
        state[name] = np.zeros((0, 0, 0), dtype=np.float32)
    elif change == "scalar":
        state[name] = np.array(1.0)
    else:
        state[name] = np.ones(3, dtype=np.float32)
    if change == "flat" and name == "prior_mean":
        pytest.skip("its first number counts")
    with pytest.raises(ValueError, match=r"."):
        model_of(capacity=50).restore(state)
