"""The patterns that are kept: strengthened, forgotten, clustered, and never without bound."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import PACE, Part, chain, shape_of

from graphs.matcher import Match
from graphs.shape import ProgramShape
from graphs.store import (
    DECAY_PER_HOUR,
    KEPT_FRACTION,
    MAX_WEIGHT,
    MIN_KEPT,
    MIN_WEIGHT,
    PatternStore,
)

HOUR_S = 3600.0


def filled(count: int, capacity: int = 50, now_s: float = 0.0) -> PatternStore:
    """A store after so many programs, no two of them alike."""
    store = PatternStore(capacity, now_s)
    for number in range(count):
        store.add(unlike(number), now_s)
    return store


def unlike(number: int, application: int = 0) -> ProgramShape:
    """Programs no two of which are alike: each calls a model of its own in the middle."""
    first, last = 10 * 4 ** (number % 5), 10 * 4 ** (number // 5 % 5)
    parts = Part((first,)), Part((100,), model=1000 + number), Part((last,))
    return shape_of(*parts, application=application)


def weights(store: PatternStore) -> list[float]:
    return store.pack.weight.tolist()


def whole(store: PatternStore) -> bool:
    """Whether patterns, shapes and weights belong together."""
    assert len(store) == len(store.pack) == len(store.shapes)
    for index, shape in enumerate(store.shapes):
        found, expected = store.pack.at(index), store.pack.encode(shape)
        assert found.codes.tolist() == expected.codes.tolist()
        assert found.identity.tolist() == expected.identity.tolist()
        assert found.application == expected.application
    weight = store.pack.weight
    return bool(np.isfinite(weight).all() and (weight >= 0).all() and (weight <= MAX_WEIGHT).all())


# Adding -------------------------------------------------------------------------------------------


def test_a_finished_program_is_a_pattern() -> None:
    store = PatternStore()
    assert len(store) == 0
    assert store.add(chain(100, 200), 5.0) == 0
    assert store.add(chain(3000), 6.0) == 1
    assert store.shapes == [chain(100, 200), chain(3000)]
    assert weights(store) == [1, 1]
    assert (store.num_added, store.num_merged, store.num_evicted) == (2, 0, 0)
    assert whole(store)


def test_the_same_program_again_strengthens_its_pattern() -> None:
    store = PatternStore()
    for number in range(10):
        assert store.add(chain(100, 200), float(number)) == 0
    assert len(store) == 1
    assert weights(store) == pytest.approx([10], rel=1e-3)
    assert (store.num_added, store.num_merged) == (10, 9)


def test_nearly_the_same_program_is_the_same() -> None:
    store = PatternStore()
    store.add(chain(1000, 2000), 0.0)
    store.add(chain(1010, 1990), 0.0)
    assert len(store) == 1


@pytest.mark.parametrize(
    "other",
    [
        chain(1000, 4000),
        chain(1000, 2000, 5),
        chain(1000),
        chain(1000, 2000, application=5),
        shape_of(Part((1000,)), Part((2000,), model=8)),
        shape_of(Part((1000,)), Part((2000,), tools=(3,))),
        shape_of(Part((1000,)), Part((2000,), tool_s=30.0)),
        shape_of(Part((1000,)), Part((1000, 1000))),
    ],
)
def test_another_program_is_another_pattern(other: ProgramShape) -> None:
    store = PatternStore()
    store.add(chain(1000, 2000), 0.0)
    assert store.add(other, 0.0) == 1
    assert len(store) == 2


def test_a_program_without_a_stage_is_refused_and_changes_nothing() -> None:
    store = filled(3)
    with pytest.raises(ValueError, match=r"."):
        store.add(ProgramShape(0, ()), 0.0)
    with pytest.raises(ValueError, match=r"."):
        store.restore(ProgramShape(0, ()), 1.0)
    assert len(store) == store.num_added == 3
    assert whole(store)


def test_what_is_restored_is_as_it_was_kept() -> None:
    store = PatternStore()
    store.restore(chain(100), 3.5)
    store.restore(chain(100), 0.5)
    assert len(store) == 2
    assert weights(store) == [3.5, 0.5]
    assert whole(store)


def test_use_strengthens_a_pattern() -> None:
    store = filled(3)
    store.used(1, 0.0)
    assert weights(store)[1] > weights(store)[0]
    assert whole(store)


def test_no_weight_is_beyond_all_measure() -> None:
    store = filled(2)
    store.restore(chain(7777), MAX_WEIGHT)
    for _ in range(100):
        store.add(chain(7777), 0.0)
        store.used(2, 0.0)
    assert weights(store)[2] <= MAX_WEIGHT


# Forgetting ---------------------------------------------------------------------------------------


def test_in_an_hour_a_tenth_is_forgotten() -> None:
    store = filled(5, now_s=1000.0)
    store.decay(1000.0 + HOUR_S)
    assert DECAY_PER_HOUR == 0.9
    assert weights(store) == pytest.approx([DECAY_PER_HOUR] * 5, rel=0.003)
    store.decay(1000.0 + 3 * HOUR_S)
    assert weights(store) == pytest.approx([DECAY_PER_HOUR**3] * 5, rel=0.003)


@pytest.mark.parametrize("step_s", [0.25, 1.0, 59.0, 61.0, 1000.0])
def test_it_does_not_matter_how_often_it_is_looked_at(step_s: float) -> None:
    store, now_s = filled(3), 0.0
    while now_s < HOUR_S:
        now_s = min(now_s + step_s, HOUR_S)
        store.decay(now_s)
    # The last minute may still be to come.
    assert weights(store) == pytest.approx([DECAY_PER_HOUR] * 3, rel=0.003)


def test_what_is_added_later_has_not_been_forgotten() -> None:
    store = filled(1)
    store.decay(HOUR_S)
    store.add(chain(5000), HOUR_S)
    store.decay(2 * HOUR_S)
    assert weights(store) == pytest.approx([DECAY_PER_HOUR**2, DECAY_PER_HOUR], rel=0.003)


def test_a_clock_that_jumps_back_is_no_time() -> None:
    store = filled(3, now_s=1000.0)
    store.decay(-1e6)
    assert weights(store) == [1, 1, 1]
    # And from there an hour is an hour.
    store.decay(-1e6 + HOUR_S)
    assert weights(store) == pytest.approx([DECAY_PER_HOUR] * 3, rel=0.003)


def test_what_was_seen_once_and_not_for_two_days_is_evicted() -> None:
    store = filled(45)
    pack = store.pack
    store.decay(40 * HOUR_S)
    assert len(store) == 45
    assert store.pack is pack
    for number in range(5):
        store.add(unlike(number), 40 * HOUR_S)
    store.decay(48 * HOUR_S)
    assert len(store) == MIN_KEPT
    assert store.pack is not pack
    assert store.num_evicted == 45 - MIN_KEPT
    assert whole(store)
    # Those that were seen again are still there.
    assert {unlike(number) for number in range(5)} <= set(store.shapes)
    assert min(weights(store)) > 0


def test_a_few_are_kept_however_long_nothing_comes() -> None:
    store = filled(MIN_KEPT)
    for day in range(1, 200):
        store.decay(day * 24 * HOUR_S)
    assert len(store) == MIN_KEPT
    assert whole(store)
    assert Match(store.pack).outlook(PACE) is not None


def test_the_least_used_are_evicted() -> None:
    store = filled(40)
    for number in range(0, 40, 4):
        for _ in range(3):
            store.used(number, 0.0)
    store.decay(46 * HOUR_S)
    assert len(store) == MIN_KEPT
    assert {unlike(number) for number in range(0, 40, 4)} <= set(store.shapes)
    assert min(weights(store)) < MIN_WEIGHT < max(weights(store))


# Clustering ---------------------------------------------------------------------------------------


def test_it_is_time_to_cluster_above_the_capacity() -> None:
    store = filled(50)
    assert not store.is_clustering_due
    store.add(unlike(50), 0.0)
    assert store.is_clustering_due


def test_clustered_there_is_room_and_nothing_of_what_was_seen_is_lost() -> None:
    store = filled(51)
    for number in range(51):
        store.used(number, 0.0)
    before = sum(weights(store))
    assert before == 102
    assert store.adopt(store.clustering().run())
    assert len(store) == int(KEPT_FRACTION * 50)
    assert not store.is_clustering_due
    assert store.num_clusterings == 1
    assert sum(weights(store)) == pytest.approx(before, rel=1e-4)
    assert whole(store)


def test_each_cluster_is_represented_by_one_of_its_own() -> None:
    store = PatternStore(5)
    for number in range(9):
        # Three kinds, three of each, that are a little apart.
        store.add(shape_of(Part((10 * 4 ** (number // 3),)), Part(model=100 + number % 3)), 0.0)
    assert len(store) == 9
    store.adopt(store.clustering().run())
    assert len(store) == 3
    assert {shape.stages[1].identity for shape in store.shapes} == {100, 101, 102}
    # The one in the middle of each.
    assert {shape.stages[0].output_tokens for shape in store.shapes} == {40}
    assert weights(store) == pytest.approx([3, 3, 3])


def test_what_has_come_in_meanwhile_is_kept() -> None:
    store = filled(51)
    clustering = store.clustering()
    new = [unlike(number) for number in range(100, 110)]
    for shape in new:
        store.add(shape, 0.0)
    clustered = clustering.run()
    for shape in new[:3]:
        store.add(shape, 0.0)
    assert store.adopt(clustered)
    assert set(new) <= set(store.shapes)
    weight_of = dict(zip(store.shapes, weights(store), strict=True))
    assert [weight_of[shape] for shape in new] == pytest.approx([2] * 3 + [1] * 7)
    assert sum(weights(store)) == pytest.approx(64, rel=1e-4)
    assert whole(store)
    # And a match of now is against them, too.
    assert len(Match(store.pack)) == len(store)


def test_what_was_seen_again_meanwhile_is_not_lost() -> None:
    store = filled(51)
    clustering = store.clustering()
    for _ in range(20):
        store.add(unlike(7), 0.0)
    assert store.adopt(clustering.run())
    assert sum(weights(store)) == pytest.approx(71, rel=1e-4)


def test_after_an_eviction_the_clustering_is_refused() -> None:
    store = filled(51)
    clustered = store.clustering().run()
    store.decay(48 * HOUR_S)
    assert len(store) == MIN_KEPT
    shapes = list(store.shapes)
    assert not store.adopt(clustered)
    assert store.shapes == shapes
    assert store.num_clusterings == 0
    assert whole(store)


def test_a_clustering_is_adopted_once() -> None:
    store = filled(51)
    clustered = store.clustering().run()
    assert store.adopt(clustered)
    shapes, before = list(store.shapes), weights(store)
    assert not store.adopt(clustered)
    assert store.shapes == shapes
    assert weights(store) == before


def test_clustering_twice_from_the_same_patterns_is_the_same() -> None:
    found = []
    for _ in range(2):
        store = filled(60)
        store.adopt(store.clustering().run())
        found.append((store.shapes, weights(store)))
    assert found[0] == found[1]


@pytest.mark.parametrize("capacity", [-5, 0, 1, 2, 3, 64])
def test_clustered_whenever_it_is_time_it_is_bounded(capacity: int) -> None:
    store = PatternStore(capacity)
    bound = max(capacity, 2)
    for number in range(300):
        store.add(unlike(number), float(number))
        if store.is_clustering_due:
            assert store.adopt(store.clustering().run())
        assert 1 <= len(store) <= bound
    assert whole(store)
    assert store.num_added == 300


def test_though_it_is_never_clustered_it_is_bounded() -> None:
    # Clustering runs beside everything else: it may be slow, or fail again and again.
    store = filled(3000, capacity=20)
    assert len(store) <= 20 * 20
    assert whole(store)
    assert store.add(unlike(5000), 0.0) >= 0


def test_every_application_keeps_a_pattern() -> None:
    store = PatternStore(40)
    for number in range(200):
        store.add(unlike(number, application=1 + number % 4), 0.0)
        if store.is_clustering_due:
            store.adopt(store.clustering().run())
    assert {shape.application for shape in store.shapes} == {1, 2, 3, 4}


# Whatever comes -----------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 30)),
    st.tuples(st.just("used"), st.integers(0, 30)),
    st.tuples(st.just("time"), st.sampled_from([0.1, 70.0, 5e4, -1e4, 1e6])),
    st.tuples(st.just("cluster"), st.just(0)),
    st.tuples(st.just("adopt"), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_in_any_order_it_stays_whole(steps: list[tuple[str, float]]) -> None:
    store, now_s, clustered, num_added = PatternStore(6), 100.0, None, 0
    for step, value in steps:
        match step:
            case "add":
                shape = unlike(int(value))
                assert store.shapes[store.add(shape, now_s)] == shape
                num_added += 1
            case "used":
                if len(store):
                    store.used(int(value) % len(store), now_s)
            case "time":
                now_s += value
                store.decay(now_s)
            case "cluster":
                if store.is_clustering_due:
                    clustered = store.clustering().run()
            case _:
                if clustered is not None:
                    store.adopt(clustered)
        assert whole(store)
    assert store.num_added == num_added
    assert num_added == 0 or len(store) > 0


# Tenants ------------------------------------------------------------------------------------------


def of_tenant(tenant: int, number: int) -> ProgramShape:
    return msgspec.structs.replace(unlike(number, application=number), tenant=tenant)


@pytest.mark.parametrize("is_clustered", [False, True])
def test_nobody_s_patterns_are_crowded_out_by_another_s(is_clustered: bool) -> None:
    store = PatternStore(40)
    for number in range(10):
        store.add(of_tenant(1, number), 0.0)
    for number in range(300):
        store.add(of_tenant(2, 100 + number), 0.0)
        if is_clustered and store.is_clustering_due:
            assert store.adopt(store.clustering().run())
    assert len(store) <= 2 * store.capacity
    assert sum(shape.tenant == 1 for shape in store.shapes) == 10
    assert whole(store)


def test_more_tenants_than_patterns_may_stay_are_bounded_too() -> None:
    store = PatternStore(10)
    for tenant in range(1, 200):
        store.add(of_tenant(tenant, tenant), 0.0)
        if store.is_clustering_due:
            assert store.adopt(store.clustering().run())
    assert len(store) <= store.capacity
    assert whole(store)
