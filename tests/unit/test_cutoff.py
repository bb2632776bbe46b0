"""The tuner of GMAX's cutoff: explores, converges, and explores again when the load changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cutoff import CANDIDATES, CutoffTuner

CHECK_EVERY = 5
Rates = Mapping[float, float]
FAVOURS_LOW: Rates = {0.95: 3.0, 0.5: 9.0, 0.8: 6.0, 1.0: 2.0}
FAVOURS_HIGH: Rates = {0.95: 9.0, 0.5: 3.0, 0.8: 6.0, 1.0: 7.0}


def tuner_of(candidates: Sequence[float] = CANDIDATES, *, epoch_frames: int = 1) -> CutoffTuner:
    """A tuner whose epochs are short."""
    return CutoffTuner(candidates, epoch_frames=epoch_frames, check_every_epochs=CHECK_EVERY)


def play(tuner: CutoffTuner, rates: Rates, num_frames: int) -> list[float]:
    """Frames of a second that earn what the cutoff in use earns; the cutoffs that were used."""
    used = []
    for _ in range(num_frames):
        used.append(tuner.cutoff)
        tuner.frame(rates[tuner.cutoff], 1.0, is_contended=True)
    return used


def converged(rates: Rates = FAVOURS_LOW) -> CutoffTuner:
    """A tuner that has just tried everything."""
    tuner = tuner_of()
    play(tuner, rates, len(CANDIDATES))
    return tuner


# Exploring and converging -------------------------------------------------------------------------


def test_before_anything_is_known_the_papers_default_is_used() -> None:
    tuner = CutoffTuner()
    assert tuner.cutoff == 0.95
    assert tuner.is_exploring
    assert tuner.rates == {}


def test_every_candidate_is_tried_for_one_epoch() -> None:
    used = play(tuner_of(epoch_frames=3), FAVOURS_LOW, 3 * len(CANDIDATES))
    assert used == [cutoff for cutoff in CANDIDATES for _ in range(3)]


@pytest.mark.parametrize("best", CANDIDATES)
def test_it_converges_to_the_candidate_that_earns_most(best: float) -> None:
    rates = {cutoff: 10.0 if cutoff == best else 7.0 for cutoff in CANDIDATES}
    tuner = converged(rates)
    assert not tuner.is_exploring
    assert tuner.cutoff == best
    assert tuner.rates == rates


def test_a_rate_is_goodput_per_second_and_not_per_frame() -> None:
    tuner = tuner_of((0.5, 1.0), epoch_frames=2)
    for goodput, elapsed_s in ((6.0, 1.0), (6.0, 3.0), (4.0, 0.5), (4.0, 0.5)):
        tuner.frame(goodput, elapsed_s, is_contended=True)
    assert tuner.rates == {0.5: 3.0, 1.0: 8.0}


def test_the_runner_up_is_tried_again_now_and_then_and_nobody_else_is() -> None:
    tuner = converged()
    used = play(tuner, FAVOURS_LOW, 3 * (CHECK_EVERY + 1))
    assert set(used) == {0.5, 0.8}
    assert used.count(0.8) in (2, 3)
    assert tuner.num_explorations == 1


def test_a_runner_up_that_has_become_the_better_one_is_kept() -> None:
    tuner = converged()
    # It is tried again, earns another amount than it did, and so all are.
    play(tuner, {**FAVOURS_LOW, 0.8: 10.0}, CHECK_EVERY + 1 + len(FAVOURS_LOW))
    assert tuner.cutoff == 0.8


def test_a_single_candidate_is_always_used() -> None:
    assert set(play(tuner_of((0.7,)), {0.7: 1.0}, 50)) == {0.7}


@pytest.mark.parametrize("candidates", [(), (0.0,), (-0.5,), (0.5, 1.1), (math.nan,)])
def test_a_cutoff_outside_0_to_1_is_refused(candidates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        CutoffTuner(candidates)


# A load that changes ------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.2, 4.0], ids=["much less", "much more"])
def test_when_the_load_changes_all_are_tried_again(factor: float) -> None:
    tuner = converged()
    play(tuner, {cutoff: rate * factor for cutoff, rate in FAVOURS_LOW.items()}, 3)
    assert tuner.is_exploring
    assert tuner.num_explorations == 2


@pytest.mark.parametrize("factor", [0.55, 1.8], ids=["45 % less", "80 % more"])
def test_a_lasting_change_beyond_the_threshold_is_seen(factor: float) -> None:
    tuner = converged()
    play(tuner, {cutoff: rate * factor for cutoff, rate in FAVOURS_LOW.items()}, 20)
    assert tuner.num_explorations == 2


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_small_change_starts_no_exploration(factor: float) -> None:
    tuner = converged()
    play(tuner, {cutoff: rate * factor for cutoff, rate in FAVOURS_LOW.items()}, 30)
    assert tuner.num_explorations == 1
    assert tuner.cutoff in (0.5, 0.8)


@pytest.mark.parametrize("odd", [30.0, 1.0])
def test_one_odd_epoch_is_noise(odd: float) -> None:
    tuner = converged()
    play(tuner, FAVOURS_LOW, 1)
    tuner.frame(odd, 1.0, is_contended=True)
    play(tuner, FAVOURS_LOW, 3)
    assert tuner.num_explorations == 1


def test_after_a_change_it_converges_to_what_is_best_then() -> None:
    tuner = converged(FAVOURS_LOW)
    assert tuner.cutoff == 0.5
    play(tuner, FAVOURS_HIGH, 20)
    assert tuner.rates[0.95] == pytest.approx(9.0)
    assert set(play(tuner, FAVOURS_HIGH, 40)) == {0.95, 1.0}
    assert play(tuner, FAVOURS_HIGH, 40).count(0.95) >= 30


def test_on_a_shifting_load_it_earns_more_than_any_fixed_cutoff() -> None:
    phases = [FAVOURS_LOW, FAVOURS_HIGH] * 3
    tuner = tuner_of()
    earned = sum(rates[cutoff] for rates in phases for cutoff in play(tuner, rates, 100))
    fixed = {cutoff: 100 * sum(rates[cutoff] for rates in phases) for cutoff in CANDIDATES}
    assert earned > 1.2 * max(fixed.values())


def test_a_change_that_only_other_cutoffs_feel_is_seen_when_the_runner_up_is_tried() -> None:
    tuner = converged()
    rates = {**FAVOURS_LOW, 0.8: 18.0, 0.95: 36.0}
    play(tuner, rates, 100)
    assert play(tuner, rates, 60).count(0.95) >= 45


@given(rates=st.tuples(*[st.floats(1, 100)] * len(CANDIDATES)))
def test_on_a_steady_load_it_is_never_far_from_the_best(rates: tuple[float, ...]) -> None:
    by_cutoff = dict(zip(CANDIDATES, rates, strict=True))
    tuner = converged(by_cutoff)
    earned = sum(by_cutoff[cutoff] for cutoff in play(tuner, by_cutoff, 60))
    # All but one epoch in six.
    assert earned >= 60 * max(rates) * CHECK_EVERY / (CHECK_EVERY + 1) * (1 - 1e-9)


# Frames that do not count -------------------------------------------------------------------------

NONSENSE = [
    (math.nan, 1.0),
    (math.inf, 1.0),
    (-1.0, 1.0),
    (1.0, math.nan),
    (1.0, math.inf),
    (1.0, 0.0),
    (1.0, -1.0),
]


@pytest.mark.parametrize(("goodput", "elapsed_s"), NONSENSE)
def test_a_frame_of_nonsense_is_ignored(goodput: float, elapsed_s: float) -> None:
    tuner, clean = tuner_of(epoch_frames=2), tuner_of(epoch_frames=2)
    for _ in range(10):
        tuner.frame(goodput, elapsed_s, is_contended=True)
        assert play(tuner, FAVOURS_LOW, 1) == play(clean, FAVOURS_LOW, 1)
    assert tuner.rates == clean.rates


def test_a_frame_in_which_all_that_waited_fitted_is_ignored() -> None:
    tuner = tuner_of()
    for _ in range(100):
        tuner.frame(1e6, 1.0, is_contended=False)
    assert tuner.cutoff == CANDIDATES[0]
    assert tuner.rates == {}


def test_a_cutoff_that_earns_nothing_is_no_trouble() -> None:
    nothing = dict.fromkeys(CANDIDATES, 0.0)
    tuner = tuner_of()
    play(tuner, nothing, 50)
    assert tuner.cutoff in CANDIDATES
    assert tuner.num_explorations == 1


@pytest.mark.parametrize(("goodput", "elapsed_s"), [(1e308, 0.01), (1.0, 5e-324)])
def test_absurd_amounts_do_not_stop_it_for_good(goodput: float, elapsed_s: float) -> None:
    tuner = tuner_of()
    tuner.frame(goodput, elapsed_s, is_contended=True)
    play(tuner, FAVOURS_LOW, 200)
    assert set(play(tuner, FAVOURS_LOW, 60)) == {0.5, 0.8}


# Determinism --------------------------------------------------------------------------------------


@given(
    frames=st.lists(
        st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True), st.booleans()), max_size=60
    )
)
def test_the_same_frames_give_the_same_cutoffs_and_only_candidates(
    frames: list[tuple[float, float, bool]],
) -> None:
    one, other = tuner_of(epoch_frames=2), tuner_of(epoch_frames=2)
    for goodput, elapsed_s, is_contended in frames:
        for tuner in (one, other):
            tuner.frame(goodput, elapsed_s, is_contended=is_contended)
        assert one.cutoff == other.cutoff
        assert one.cutoff in CANDIDATES
