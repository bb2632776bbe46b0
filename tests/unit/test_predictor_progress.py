"""What is seen of an answer while it grows, and what the rest of it is multiplied by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.distribution import NUM_POINTS, Points
from predictor.progress import NUM_PROGRESS, PROGRESS_FEATURES, classes_of, progress_row
from predictor.tilt import (
    MAX_TILT,
    TILT_MARKS,
    TILTED_BUCKETS,
    TiltLearner,
    no_tilts,
    tilt_of,
)

WORDS = ("the", "Ġcat", "Ċ", "-", "1", "```", ".", "Ġconclusion", "<0x0A>", "▁dog")
VOCABULARY = {word: index for index, word in enumerate(WORDS)}
THE, CAT, LINE, DASH, ONE, FENCE, STOP, CLOSE, RAW_LINE, DOG = range(len(WORDS))
CLASSES = classes_of(VOCABULARY)


def seen(*ids: int) -> dict[str, float]:
    return dict(zip(PROGRESS_FEATURES, progress_row(ids, CLASSES).tolist(), strict=True))


def test_items_of_a_list_are_counted_where_a_line_begins() -> None:
    listed = seen(DASH, CAT, LINE, DASH, DOG, RAW_LINE, ONE, STOP, CAT)
    assert listed["log_list_items"] == pytest.approx(np.log1p(3))
    assert seen(CAT, DASH, CAT)["log_list_items"] == 0


def test_an_open_code_block_is_told_from_a_closed_one() -> None:
    assert (seen(FENCE, CAT)["is_fence_open"], seen(FENCE, CAT)["has_fence"]) == (1, 1)
    assert (seen(FENCE, CAT, FENCE)["is_fence_open"], seen(CAT)["has_fence"]) == (0, 0)


def test_an_answer_that_loops_is_seen() -> None:
    assert seen(*([THE, CAT, STOP, DOG, LINE] * 20))["repeated_share"] == 1
    assert seen(*range(10))["repeated_share"] == 0


def test_closing_words_count_while_they_are_recent() -> None:
    assert seen(CLOSE, CAT)["recent_closing"] == 1
    assert seen(CLOSE, *([CAT] * 60))["recent_closing"] == 0


def test_both_spellings_of_a_line_break_are_one() -> None:
    assert seen(CAT, LINE, CAT)["newline_rate"] == seen(CAT, RAW_LINE, CAT)["newline_rate"] > 0


@given(st.lists(st.integers(-5, 1 << 40), max_size=300))
def test_any_ids_give_a_finite_row(ids: list[int]) -> None:
    row = progress_row(ids, CLASSES)
    assert row.shape == (NUM_PROGRESS,)
    assert np.isfinite(row).all()


def test_without_a_vocabulary_nothing_is_seen() -> None:
    assert not progress_row([1, 2, 3], classes_of({})).any()


# Tilts --------------------------------------------------------------------------------------------

LIMIT = 100_000.0


def spread(rng: np.random.Generator) -> Points:
    sample: Points = np.sort(rng.exponential(300.0, NUM_POINTS)).astype(np.float32)
    return sample


def taught(num_answers: int, effect: float, seed: int = 1) -> TiltLearner:
    """A learner of answers whose first feature makes what is to come longer by exp(effect · x)."""
    rng = np.random.default_rng(seed)
    learner = TiltLearner()
    points = np.quantile(rng.exponential(300.0, 20_000), (np.arange(512) + 0.5) / 512)
    for index in range(num_answers):
        progress = rng.normal(size=(TILTED_BUCKETS, NUM_PROGRESS)).astype(np.float32)
        progress[:, 0] = progress[0, 0]
        tokens = 50 + rng.exponential(300.0) * np.exp(effect * progress[0, 0])
        learner.learn(points.astype(np.float32), tokens, LIMIT, progress)
        if index % 32 == 31:
            learner.refresh()
    return learner


def test_what_makes_answers_longer_tilts_those_to_come() -> None:
    learner = taught(1500, 0.6)
    high, low = np.zeros(NUM_PROGRESS), np.zeros(NUM_PROGRESS)
    high[0], low[0] = 1.0, -1.0
    assert tilt_of(learner.tilts, 1, high.astype(np.float32)) > 1.2
    assert tilt_of(learner.tilts, 1, low.astype(np.float32)) < 0.9


def test_what_says_nothing_is_not_used() -> None:
    assert not taught(1500, 0.0).tilts.any()


def test_a_few_answers_are_not_enough() -> None:
    assert not taught(60, 0.6).tilts.any()


def test_no_bucket_but_the_tilted_ones_is_touched() -> None:
    tilts = no_tilts() + 1
    row = np.ones(NUM_PROGRESS, dtype=np.float32)
    assert tilt_of(tilts, 0, row) == tilt_of(tilts, TILTED_BUCKETS + 1, row) == 1.0
    assert tilt_of(tilts, 1, row) == pytest.approx(np.exp(MAX_TILT))


def test_an_answer_teaches_only_the_marks_that_it_passed() -> None:
    rng = np.random.default_rng(0)
    progress = rng.normal(size=(TILTED_BUCKETS, NUM_PROGRESS)).astype(np.float32)
    learner = TiltLearner()
    assert len(learner.learn(spread(rng), float(TILT_MARKS[1] + 1), LIMIT, progress)) == 2
    assert len(learner.learn(spread(rng), 20.0, LIMIT, progress)) == 0


def test_a_learner_goes_on_from_its_state() -> None:
    learner, restored = taught(600, 0.6), TiltLearner()
    restored.restore(learner.state())
    learner.refresh()
    assert np.array_equal(learner.tilts, restored.tilts)


@pytest.mark.parametrize("name", ["moments", "products", "losses"])
def test_a_state_that_cannot_be_is_refused(name: str) -> None:
    for wrong in (np.zeros(3), np.full_like(TiltLearner().state()[name], np.nan)):
        state = TiltLearner().state() | {name: wrong}
        with pytest.raises(ValueError, match="tilts"):
            TiltLearner().restore(state)
