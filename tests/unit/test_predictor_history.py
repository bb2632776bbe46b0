"""What is known of a model, a tenant and a node: each falls back on the level above it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor import history
from predictor.history import HISTORY_FEATURES, History

M, M2, T, T2, N, N2 = 11, 12, 21, 22, 31, 32


def taught(*answers: tuple[int, int, int, float], times: int = 300) -> History:
    known = History()
    for _ in range(times):
        for answer in answers:
            known.learn(*answer)
    return known


def features(known: History, model: int, tenant: int, node: int) -> dict[str, float]:
    outlook = known.outlook(model, tenant, node)
    return dict(zip(HISTORY_FEATURES, outlook.features, strict=True))


def test_with_no_history_at_all_the_prior_counts() -> None:
    assert History(4.5).outlook(M, T, N).expected == 4.5
    assert History().outlook(0, 0, 0).expected == History().prior_mean


def test_each_level_learns_what_its_own_answers_were() -> None:
    known = taught((M, T, N, 3.0), (M, T, N2, 5.0), (M, T2, N2, 8.0))
    assert known.outlook(M, T, N).expected == pytest.approx(3.0, abs=0.3)
    assert known.outlook(M, T, N2).expected == pytest.approx(5.0, abs=0.3)
    assert known.outlook(M, T2, N2).expected == pytest.approx(8.0, abs=0.3)


def test_a_new_node_is_taken_for_its_tenant() -> None:
    known = taught((M, T, N, 3.0), (M, T2, N, 7.0))
    assert known.outlook(M, T, 999).expected == known.outlook(M, T, 0).expected
    assert known.outlook(M, T, 0).expected == pytest.approx(3.0, abs=0.3)


def test_a_new_tenant_is_taken_for_its_model() -> None:
    known = taught((M, T, N, 3.0), (M2, T, N, 7.0))
    assert known.outlook(M, 999, 0).expected == known.outlook(M, 0, 0).expected
    assert known.outlook(M, 999, 888).expected == known.outlook(M, 0, 0).expected
    assert known.outlook(M, 0, 0).expected == pytest.approx(3.0, abs=0.3)


def test_a_new_model_is_taken_for_something_between_the_prior_and_all_others() -> None:
    known = taught((M, T, N, 7.0))
    assert known.prior_mean <= known.outlook(999, T, N).expected <= 7.0


def test_requests_without_a_tenant_or_a_node_count_for_their_model() -> None:
    known = taught((M, 0, 0, 6.5))
    assert known.outlook(M, 0, 0).expected == pytest.approx(6.5, abs=0.2)
    assert known.outlook(M, T, N).expected == pytest.approx(6.5, abs=0.2)


def test_one_answer_moves_an_estimate_only_a_little() -> None:
    known = taught((M, T, N, 4.0))
    known.learn(M, T2, 0, 9.0)
    moved = known.outlook(M, T2, 0).expected
    assert 4.0 < moved < 5.5
    known.learn(M, T2, 0, 9.0)
    assert moved < known.outlook(M, T2, 0).expected < 9.0


def test_the_more_answers_the_closer_to_them() -> None:
    known = taught((M, T, N, 4.0))
    seen = [known.outlook(M, T2, 0).expected]
    for _ in range(100):
        known.learn(M, T2, 0, 8.0)
        seen.append(known.outlook(M, T2, 0).expected)
    assert seen == sorted(seen)
    assert seen[-1] > 7.5


def test_an_estimate_follows_when_answers_change() -> None:
    known = taught((M, T, N, 4.0), times=3000)
    for _ in range(1000):
        known.learn(M, T, N, 6.0)
    for model, tenant, node in ((M, 0, 0), (M, T, 0), (M, T, N)):
        assert known.outlook(model, tenant, node).expected == pytest.approx(6.0, abs=0.3)


def test_a_node_is_followed_sooner_than_a_model() -> None:
    known = taught((M, T, N, 4.0), times=3000)
    for _ in range(60):
        known.learn(M, T, N, 6.0)
    assert known.outlook(M, T, N).expected > known.outlook(M, 0, 0).expected


def test_features_tell_how_tenant_and_node_differ_and_how_sure_that_is() -> None:
    known = taught((M, T, N, 3.0), (M, T, N2, 6.0), (M, T2, N, 8.0))
    found = features(known, M, T, N)
    assert found["tenant_shift"] < 0
    assert found["node_shift"] < 0
    assert features(known, M, T, N2)["node_shift"] > 0
    assert found["log_tenant_count"] > 0
    nobody = features(known, M, 999, 888)
    assert nobody["tenant_shift"] == nobody["node_shift"] == 0
    assert nobody["log_tenant_count"] == nobody["log_node_count"] == 0


def test_spread_tells_steady_answers_from_scattered_ones() -> None:
    steady, scattered = taught((M, T, N, 5.0)), taught((M, T, N, 3.0), (M, T, N, 7.0))
    assert features(steady, M, T, N)["spread"] < 0.3 < features(scattered, M, T, N)["spread"]


def test_looking_changes_nothing() -> None:
    known = taught((M, T, N, 3.0), times=10)
    first = known.outlook(M, T, N)
    for _ in range(5):
        known.outlook(M, T2, N2)
        again = known.outlook(M, T, N)
        assert (again.expected, again.features) == (first.expected, first.features)


def test_only_so_many_groups_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_GROUPS", 50)
    known = History()
    for tenant in range(1, 500):
        known.learn(M, tenant, tenant + 1000, 4.0)
    assert len(known.state()["keys"]) <= 50


def test_groups_in_use_are_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_GROUPS", 50)
    known = History()
    for _ in range(50):
        known.learn(M, T, 0, 9.0)
    for tenant in range(100, 500):
        known.learn(M, tenant, 0, 4.0)
        known.outlook(M, T, 0)
    assert features(known, M, T, 0)["log_tenant_count"] > 3


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.floats(0, 21)),
        max_size=40,
    )
)
def test_an_estimate_lies_within_what_was_seen(
    answers: list[tuple[int, int, int, float]],
) -> None:
    known = History(5.0)
    for answer in answers:
        known.learn(*answer)
    values = [5.0, *(answer[3] for answer in answers)]
    for model in range(4):
        for tenant in range(4):
            outlook = known.outlook(model, tenant, 1)
            assert min(values) - 1e-9 <= outlook.expected <= max(values) + 1e-9
            assert len(outlook.features) == len(HISTORY_FEATURES)
            assert all(math.isfinite(value) for value in outlook.features)


# State --------------------------------------------------------------------------------------------


def test_state_restores_the_same_outlooks() -> None:
    known = taught((M, T, N, 3.0), (M, T2, N2, 8.0), (2**63 - 1, 2**62, 1, 5.5), times=9)
    other = History(known.prior_mean)
    other.restore(known.state())
    for key in ((M, T, N), (M, T2, N2), (M, 5, 5), (2**63 - 1, 2**62, 1)):
        assert other.outlook(*key).expected == known.outlook(*key).expected
        assert other.outlook(*key).features == known.outlook(*key).features


def test_an_empty_state_is_a_state() -> None:
    other = History()
    other.restore(History().state())
    assert other.outlook(M, T, N).expected == History().prior_mean


GOOD = (1.0, 1.0, 1.0, 1.0, 1.0)


def with_value(place: int, value: float) -> np.ndarray:
    groups = np.array([GOOD])
    groups[0, place] = value
    return groups


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        (np.zeros((2, 2)), np.ones((2, 5))),
        (np.zeros((2, 3)), np.ones((1, 5))),
        (np.zeros((1, 3)), np.ones((1, 3))),
        (np.zeros(3), np.ones(5)),
        *((np.zeros((1, 3)), with_value(place, math.nan)) for place in range(5)),
        *((np.zeros((1, 3)), with_value(place, math.inf)) for place in range(5)),
        *((np.zeros((1, 3)), with_value(place, -1.0)) for place in (0, 2, 3, 4)),
    ],
)
def test_a_state_that_cannot_be_is_refused(keys: np.ndarray, groups: np.ndarray) -> None:
    with pytest.raises(ValueError, match="history"):
        History().restore({"keys": keys, "groups": groups})


def test_a_state_with_a_negative_mean_is_one() -> None:
    History().restore({"keys": np.zeros((1, 3)), "groups": with_value(1, -1.0)})


# What is still to come ----------------------------------------------------------------------------


def test_what_is_left_of_a_cut_answer_is_the_tokens_seen_over_the_answers_that_ended() -> None:
    known, rng = History(), np.random.default_rng(0)
    for length in rng.exponential(400, 4000):
        known.saw(M, min(length, 200.0), is_cut=length > 200)
    assert known.residual_tokens(M, 200) == pytest.approx(400, rel=0.2)
    # Of another model nothing is known.
    assert known.residual_tokens(M2, 200) == 200


def test_it_does_not_rest_on_answers_that_nobody_saw_to_their_end() -> None:
    known = History()
    for _ in range(1000):
        known.saw(M, 100, is_cut=True)
    assert known.residual_tokens(M, 100) == history.MAX_RESIDUAL * 100


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.booleans()), max_size=30),
    st.floats(0, 1e9),
)
def test_what_is_left_is_more_than_a_few_tokens_and_no_more_than_a_few_times_what_is_there(
    seen: list[tuple[float, bool]], generated: float
) -> None:
    known = History()
    for tokens, is_cut in seen:
        known.saw(M, tokens, is_cut=is_cut)
    left = known.residual_tokens(M, generated)
    most = history.MAX_RESIDUAL * max(generated, history.MIN_RESIDUAL_TOKENS)
    assert history.MIN_RESIDUAL_TOKENS <= left <= most


def test_seeing_an_answer_moves_no_estimate_of_lengths() -> None:
    known = taught((M, T, N, 4.0), times=20)
    before = known.outlook(M, T, N)
    for _ in range(100):
        known.saw(M, 5000, is_cut=True)
    after = known.outlook(M, T, N)
    assert (after.expected, after.features) == (before.expected, before.features)


def test_state_restores_what_was_seen() -> None:
    known, other = History(), History()
    for number in range(50):
        known.saw(M, 10 * number, is_cut=number % 3 == 0)
    other.restore(known.state())
    assert other.residual_tokens(M, 300) == known.residual_tokens(M, 300)
