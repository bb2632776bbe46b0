"""What the words of a prompt say: learnt one answer at a time, bounded whatever comes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.features import WORD_BUCKETS
from predictor.words import MAX_WEIGHT, WordScores

WORDS = st.lists(st.integers(0, WORD_BUCKETS - 1), max_size=48)


def test_before_anything_is_learnt_words_say_nothing() -> None:
    assert WordScores().score([1, 2, 3]) == 0
    assert WordScores().score([]) == 0


def test_words_of_long_answers_score_higher_than_words_of_short_ones() -> None:
    scores = WordScores()
    rng = np.random.default_rng(0)
    for _ in range(500):
        common = rng.integers(100, 200, 5).tolist()
        scores.learn([1, *common], 1.0)
        scores.learn([2, *common], -1.0)
    common = [101, 115, 150, 160, 199]
    assert scores.score([1, *common]) > 0.5
    assert scores.score([2, *common]) < -0.5
    assert abs(scores.score(common)) < 0.4


def test_a_score_comes_near_what_is_always_seen() -> None:
    scores = WordScores()
    for _ in range(2000):
        scores.learn([5, 6, 7], 0.8)
    assert scores.score([5, 6, 7]) == pytest.approx(0.8, abs=0.1)


def test_no_words_teach_nothing() -> None:
    scores = WordScores()
    scores.learn([], 3.0)
    assert scores.score(range(WORD_BUCKETS)) == 0


def test_words_that_were_not_seen_keep_their_scores() -> None:
    scores = WordScores()
    scores.learn([1], 2.0)
    assert scores.score([2]) == 0
    assert scores.score([1]) > 0


@given(st.lists(st.tuples(WORDS, st.floats(-1e9, 1e9)), max_size=60))
def test_whatever_is_learnt_scores_stay_finite_and_small(
    answers: list[tuple[list[int], float]],
) -> None:
    scores = WordScores()
    for words, deviation in answers:
        scores.learn(words, deviation)
        score = scores.score(words)
        assert math.isfinite(score)
        assert abs(score) <= 10 * math.sqrt(48)


def test_no_weight_grows_beyond_what_a_state_may_hold() -> None:
    scores, other = WordScores(), WordScores()
    scores.restore({**scores.state(), "weights": np.full(WORD_BUCKETS, MAX_WEIGHT)})
    for _ in range(200):
        scores.learn([1], 1e9)
        scores.learn([2, 3], -1e9)
    assert np.abs(scores.state()["weights"]).max() <= MAX_WEIGHT
    other.restore(scores.state())


def test_one_odd_answer_does_not_count_for_more_than_a_few() -> None:
    scores = WordScores()
    scores.learn([1, 2], 1e6)
    assert scores.score([1, 2]) < 1


def test_state_restores_the_same_scores_and_goes_on_alike() -> None:
    scores, other = WordScores(), WordScores()
    for index in range(100):
        scores.learn([index, index + 1], math.sin(index))
    other.restore({name: array.copy() for name, array in scores.state().items()})
    assert other.score([5, 9]) == scores.score([5, 9])
    scores.learn([5, 9], 1.0)
    other.learn([5, 9], 1.0)
    assert other.score([5, 9]) == scores.score([5, 9])


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": np.zeros(5)},
        {"squares": np.ones(5)},
        {"weights": np.full(WORD_BUCKETS, math.nan)},
        {"squares": np.full(WORD_BUCKETS, math.inf)},
        {"squares": np.zeros(WORD_BUCKETS)},
        {"squares": -np.ones(WORD_BUCKETS)},
        {"weights": np.full(WORD_BUCKETS, 1.01 * MAX_WEIGHT)},
        {"weights": np.append(np.zeros(WORD_BUCKETS - 1), -1.01 * MAX_WEIGHT)},
    ],
)
def test_a_state_that_cannot_be_is_refused(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="word scores"):
        WordScores().restore({**WordScores().state(), **changes})
