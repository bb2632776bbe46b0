"""A deadline shared out to stages: the paper's formulas, and what is left when one was late."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphs.amortise import Amortisation, share, stage_due_s

ACCUMULATED = Amortisation.ACCUMULATED
SECONDS = st.floats(0, 1e4)
TIMES = st.lists(st.floats(0.01, 1e3), min_size=1, max_size=12)
EVERY = list(Amortisation)


def around(times: list[float], stage: int) -> dict[str, float]:
    """A pattern's times as they are before, in and after one of its stages."""
    return {
        "before_s": sum(times[:stage]),
        "stage_s": times[stage],
        "later_s": sum(times[stage + 1 :]),
    }


def due_s(
    how: Amortisation,
    times: list[float],
    stage: int,
    started_s: float,
    opened_s: float = 100.0,
    deadline_s: float = 60.0,
) -> float:
    return stage_due_s(
        how,
        opened_s=opened_s,
        deadline_at_s=opened_s + deadline_s,
        started_s=started_s,
        **around(times, stage),
    )


# Shares -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Amortisation.ACCUMULATED, [0.1, 0.3, 0.6, 1.0]),
        (Amortisation.STAGE_SHARE, [0.1, 0.2, 0.3, 0.4]),
        (Amortisation.REMAINING_SHARE, [1 / 10, 2 / 9, 3 / 7, 1.0]),
    ],
)
def test_the_shares_are_the_paper_s(how: Amortisation, expected: list[float]) -> None:
    times = [1.0, 2.0, 3.0, 4.0]
    assert [share(how, **around(times, s)) for s in range(4)] == pytest.approx(expected)


@given(TIMES, st.floats(0.1, 100))
def test_only_proportions_count(times: list[float], factor: float) -> None:
    for how, stage in itertools.product(EVERY, range(len(times))):
        scaled = share(how, **around([factor * time for time in times], stage))
        assert scaled == pytest.approx(share(how, **around(times, stage)))


@given(TIMES)
def test_the_accumulated_share_grows_to_one(times: list[float]) -> None:
    shares = [share(ACCUMULATED, **around(times, stage)) for stage in range(len(times))]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


@given(TIMES)
def test_the_shares_of_all_stages_are_one(times: list[float]) -> None:
    how = Amortisation.STAGE_SHARE
    assert sum(share(how, **around(times, s)) for s in range(len(times))) == pytest.approx(1)


@given(SECONDS, SECONDS, SECONDS)
def test_a_share_is_one_whatever_the_times(before: float, stage: float, later: float) -> None:
    for how in EVERY:
        assert 0 <= share(how, before_s=before, stage_s=stage, later_s=later) <= 1


@pytest.mark.parametrize("how", EVERY)
def test_where_nothing_takes_time_there_is_a_share_all_the_same(how: Amortisation) -> None:
    found = share(how, before_s=0.0, stage_s=0.0, later_s=0.0)
    assert math.isfinite(found)
    assert 0 <= found <= 1


# Sub-deadlines ------------------------------------------------------------------------------------


def test_on_time_a_stage_is_due_when_the_paper_says() -> None:
    times, deadline_s = [1.0, 2.0, 3.0, 4.0], 60.0
    phi = [0.0, 0.1, 0.3, 0.6, 1.0]
    for stage in range(4):
        found = due_s(ACCUMULATED, times, stage, 100 + phi[stage] * deadline_s)
        assert found == pytest.approx(100 + phi[stage + 1] * deadline_s)


@given(TIMES, st.floats(0, 1e6), st.floats(0.1, 1e5))
def test_on_time_each_stage_gets_its_accumulated_share(
    times: list[float], opened_s: float, deadline_s: float
) -> None:
    total = sum(times)
    for stage in range(len(times)):
        phi = [sum(times[:end]) / total for end in (stage, stage + 1)]
        started_s = opened_s + phi[0] * deadline_s
        found = due_s(ACCUMULATED, times, stage, started_s, opened_s, deadline_s)
        assert found == pytest.approx(opened_s + phi[1] * deadline_s, abs=1e-6 * deadline_s)


def test_a_late_stage_has_its_part_of_what_is_left() -> None:
    # 3 of the 9 seconds that are left of the pattern, and 27 of the deadline.
    found = due_s(ACCUMULATED, [1.0, 3.0, 6.0], 1, 133.0)
    assert found == pytest.approx(133 + 27 / 3)


def test_an_early_stage_has_its_part_of_what_is_left() -> None:
    found = due_s(ACCUMULATED, [5.0, 3.0, 2.0], 1, 110.0)
    assert found == pytest.approx(110 + 50 * 3 / 5)


@given(TIMES, st.floats(0, 1), st.data())
def test_however_late_it_is_what_is_left_is_shared_by_the_paper_s_proportions(
    times: list[float], fraction: float, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, len(times) - 1))
    total, started_s = sum(times), 100 + fraction * 60
    phi = [sum(times[:end]) / total for end in (stage, stage + 1)]
    assume(phi[0] < 0.999)
    expected = started_s + (160 - started_s) * (phi[1] - phi[0]) / (1 - phi[0])
    assert due_s(ACCUMULATED, times, stage, started_s) == pytest.approx(expected, abs=1e-4)


@given(TIMES, st.floats(0, 1))
def test_the_last_stage_is_due_at_the_deadline(times: list[float], fraction: float) -> None:
    found = due_s(ACCUMULATED, times, len(times) - 1, 100 + fraction * 60)
    assert found == pytest.approx(160)


@given(TIMES, st.data())
def test_stage_by_stage_the_sub_deadlines_rise_to_the_deadline(
    times: list[float], data: st.DataObject
) -> None:
    # Each stage ends at some moment before its own is due, or after.
    started_s, before = 100.0, 100.0
    for stage in range(len(times)):
        found = due_s(ACCUMULATED, times, stage, started_s)
        assert before <= found <= 160 + 1e-9
        before = started_s
        started_s += data.draw(st.floats(0, 1.5)) * (found - started_s)
        if started_s > 160:
            break


@given(TIMES, st.floats(0, 60), st.floats(0, 60), st.data())
def test_who_starts_later_is_not_due_earlier(
    times: list[float], first: float, second: float, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, len(times) - 1))
    early, late = sorted((first, second))
    found = [due_s(ACCUMULATED, times, stage, 100 + after) for after in (early, late)]
    assert found[0] <= found[1] + 1e-6


@given(
    how=st.sampled_from(EVERY),
    opened_s=st.floats(-1e6, 1e6),
    deadline_s=st.floats(0.001, 1e6),
    start=st.floats(-2, 3),
    before=SECONDS,
    stage=SECONDS,
    later=SECONDS,
)
def test_nothing_is_ever_due_after_the_deadline(
    how: Amortisation,
    opened_s: float,
    deadline_s: float,
    start: float,
    before: float,
    stage: float,
    later: float,
) -> None:
    deadline_at_s = opened_s + deadline_s
    found = stage_due_s(
        how,
        opened_s=opened_s,
        deadline_at_s=deadline_at_s,
        started_s=opened_s + start * deadline_s,
        before_s=before,
        stage_s=stage,
        later_s=later,
    )
    assert math.isfinite(found)
    assert found <= deadline_at_s + 1e-9 * abs(deadline_at_s)
    if start <= 1:
        assert found >= min(opened_s, opened_s + start * deadline_s) - 1e-6


@given(st.sampled_from(EVERY), TIMES, st.floats(0, 1), st.data())
def test_no_stage_is_due_before_it_began(
    how: Amortisation, times: list[float], fraction: float, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, len(times) - 1))
    # On time by the pattern: whichever way the deadline is shared out.
    started_s = 100 + 60 * sum(times[:stage]) / sum(times) * fraction
    assert due_s(how, times, stage, started_s) >= started_s - 1e-9


def test_the_alternatives_are_others() -> None:
    times = [1.0, 2.0, 3.0, 4.0]
    found = {round(due_s(how, times, 2, 125.0), 3) for how in EVERY}
    assert len(found) >= 2


def test_the_first_stage_is_due_alike_in_every_way_that_looks_at_the_whole() -> None:
    # At the opening t_1 / t_total is what all three are.
    found = [due_s(how, [2.0, 3.0, 5.0], 0, 100.0) for how in EVERY]
    assert found == pytest.approx([112.0] * 3)
