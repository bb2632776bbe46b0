"""The table of live requests: dense rows whose columns stay together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD, Ask, request_of, table_of

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    ReasoningSlo,
    Slo,
)
from scheduler.lifecycle import RequestState, TransitionError
from scheduler.request import Request
from scheduler.table import (
    BEST_EFFORT,
    COMPOUND,
    DEADLINE,
    LATENCY,
    PARKED,
    RUNNING,
    STATES,
    RequestTable,
)


def columns(table: RequestTable) -> dict[str, Any]:
    """Every array of the table, by name."""
    return {name: value for name, value in vars(table).items() if isinstance(value, np.ndarray)}


def entered(table: RequestTable, serial: int, ask: Ask | None = None) -> Request:
    """A request that has just entered the table."""
    request = request_of(ask or Ask(), f"r{serial}", serial)
    table.add(request)
    return request


# Entering and leaving -----------------------------------------------------------------------------


def test_a_request_enters_waiting_in_the_next_row() -> None:
    table = RequestTable()
    first, second = entered(table, 0), entered(table, 1)
    assert (first.row, second.row, len(table)) == (0, 1, 2)
    assert first.state is RequestState.WAITING
    assert list(table) == [first, second]


def test_the_last_request_takes_the_place_of_one_that_leaves() -> None:
    table = RequestTable()
    first, second, third = (entered(table, serial) for serial in range(3))
    table.remove(first.row, RequestState.ABORTED)
    assert (first.row, second.row, third.row) == (-1, 1, 0)
    assert table.ids == ["r2", "r1"]
    assert table.serial[:2].tolist() == [2, 1]


def test_one_that_has_left_keeps_its_last_figures() -> None:
    table = RequestTable()
    request = entered(table, 0)
    table.generated_tokens[0] = 17
    table.remove(0, RequestState.ABORTED)
    assert request.generated_tokens == 17
    assert request.state is RequestState.ABORTED
    assert not request.holds_kv


def test_a_reused_row_has_nothing_of_its_predecessor() -> None:
    table = RequestTable()
    entered(table, 0, Ask(slo=LatencySlo(1, 1), priority=5, known=9))
    for name in (
        "frames_waited",
        "frames_blocked",
        "generated_tokens",
        "frame_quota",
        "timeline_from",
    ):
        getattr(table, name)[0] = 7
    table.has_forecast[0] = True
    table.remove(0, RequestState.ABORTED)
    entered(table, 1)
    for name in (
        "frames_waited",
        "frames_blocked",
        "generated_tokens",
        "frame_quota",
        "timeline_from",
    ):
        assert getattr(table, name)[0] == 0, name
    assert not table.has_forecast[0]
    assert math.isnan(table.known_tokens[0])
    assert (table.priority[0], table.tbt_s[0]) == (0, 0)
    assert table.is_stale[0]


def test_the_table_grows_and_keeps_what_it_has() -> None:
    table = RequestTable(capacity=2)
    for serial in range(9):
        request = entered(table, serial)
        table.points[request.row] = serial
    assert table.serial[:9].tolist() == list(range(9))
    assert table.points[:9, 5].tolist() == list(range(9))
    assert len(table.rows().serial) == 9


def mark(table: RequestTable, row: int, serial: int) -> None:
    """Write something of the serial to every column but the state, which is counted."""
    for name, column in columns(table).items():
        if name != "state":
            column[row] = serial % 2 if column.dtype == np.bool_ else serial % 100


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.sampled_from(["running", "parked", "preempted"]), st.integers(0, 50)),
    ),
    max_size=60,
)


@given(operations=operations)
def test_whoever_comes_and_goes_every_column_stays_with_its_request(
    operations: list[tuple[str, int]],
) -> None:
    table = RequestTable(capacity=1)
    model: dict[str, tuple[Request, int, RequestState]] = {}
    for serial, (what, which) in enumerate(operations):
        if what == "add":
            request = entered(table, serial)
            mark(table, request.row, serial)
            model[request.request_id] = (request, serial, RequestState.WAITING)
        elif model:
            name = sorted(model)[which % len(model)]
            request, number, _ = model[name]
            if what == "remove":
                table.remove(request.row, RequestState.ABORTED)
                del model[name]
            else:
                table.set_state(request.row, RequestState(what))
                model[name] = (request, number, RequestState(what))
        assert_is(table, model)


def assert_is(table: RequestTable, model: dict[str, tuple[Request, int, RequestState]]) -> None:
    """The table holds what the model does, and nothing else."""
    assert sorted(table.ids) == sorted(model)
    for row, (name, owner) in enumerate(zip(table.ids, table.requests, strict=True)):
        request, serial, state = model[name]
        assert request is owner
        assert (request.row, request.state) == (row, state)
        for column, values in columns(table).items():
            expected = serial % 2 if values.dtype == np.bool_ else serial % 100
            assert column == "state" or (values[row] == expected).all(), column
    for state in STATES:
        expected = sum(kept is state for _, _, kept in model.values())
        assert table.num_in(state) == expected


# States -------------------------------------------------------------------------------------------


def test_requests_are_counted_by_state() -> None:
    table = RequestTable()
    first, second, third = (entered(table, serial) for serial in range(3))
    first.move_to(RequestState.RUNNING)
    second.move_to(RequestState.RUNNING)
    second.move_to(RequestState.PARKED)
    third.move_to(RequestState.DROPPED)
    table.remove(third.row, RequestState.DROPPED)
    counts = {state.value: table.num_in(state) for state in RequestState if table.num_in(state)}
    assert counts == {"running": 1, "parked": 1}
    assert table.in_state(RUNNING).tolist() == [first.row]
    assert table.in_state(RUNNING, PARKED).tolist() == [0, 1]
    assert (second.num_parks, second.holds_kv) == (1, True)


def test_a_move_that_is_not_possible_changes_nothing() -> None:
    table = RequestTable()
    request = entered(table, 0)
    with pytest.raises(TransitionError):
        request.move_to(RequestState.PARKED)
    assert request.state is RequestState.WAITING
    assert table.num_in(RequestState.WAITING) == 1


# Kinds and times ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "kind", "due_s", "tbt_s"),
    [
        (LatencySlo(2.0, 0.5), LATENCY, 1002.0, 0.5),
        (DeadlineSlo(60.0), DEADLINE, 1060.0, 0.0),
        (CompoundSlo(60.0, "p"), COMPOUND, 1060.0, 0.0),
        (BestEffortSlo(600.0), BEST_EFFORT, 1600.0, 0.0),
        (ReasoningSlo(30.0, 0.5), DEADLINE, 1030.0, 0.0),
    ],
    ids=["latency", "deadline", "compound", "best effort", "reasoning"],
)
def test_each_class_has_its_kind_and_its_due_time(
    slo: Slo, kind: int, due_s: float, tbt_s: float
) -> None:
    table = table_of(Ask(slo=slo))
    rows = table.rows()
    assert (rows.kind[0], rows.due_s[0], rows.tbt_s[0]) == (kind, due_s, tbt_s)
    assert table.next_due_s(0) == due_s


def test_each_token_of_a_stream_is_due_one_interval_after_the_last() -> None:
    table = table_of(Ask(slo=LatencySlo(2.0, 0.5), generated=4))
    assert table.next_due_s(0) == table.rows().due_s[0] == 1004.0


def test_an_answer_that_begins_to_stream_has_its_first_token_due_as_before() -> None:
    table = table_of(Ask(slo=ReasoningSlo(30.0, 0.5), generated=200))
    table.begin_stream(0, 0.5)
    assert table.rows().kind[0] == LATENCY
    assert table.next_due_s(0) == 1030.0
    table.generated_tokens[0] = 203
    assert table.next_due_s(0) == table.rows().due_s[0] == 1031.5
    assert table.requests[0].next_due_s() == 1031.5


def test_an_answer_that_begins_to_stream_keeps_the_class_its_length_is_learnt_of() -> None:
    table = table_of(Ask(slo=ReasoningSlo(30.0, 0.5)), Ask(slo=LatencySlo(1, 1)))
    before = table.length_class[:2].tolist()
    table.begin_stream(0, 0.5)
    assert table.length_class[:2].tolist() == before
    assert before[0] != before[1]


def test_rows_at_an_index_come_in_its_order() -> None:
    table = table_of(Ask(input_tokens=10), Ask(input_tokens=20), Ask(input_tokens=30))
    assert table.rows(np.array([2, 0])).input_tokens.tolist() == [30, 10]
    assert table.rows().take(np.array([1])).input_tokens.tolist() == [20]


def test_what_max_tokens_leaves_is_at_least_one_token() -> None:
    rows = table_of(Ask(max_output_tokens=50, generated=20), Ask(max_output_tokens=5, generated=9))
    assert rows.rows().room_tokens.tolist() == [30, 1]


# Nonsense -----------------------------------------------------------------------------------------


def test_huge_and_negative_counts_are_clamped() -> None:
    table = table_of(
        Ask(input_tokens=1 << 80, max_output_tokens=1 << 80, known=1 << 80, priority=1 << 80),
        Ask(input_tokens=-5, max_output_tokens=-5, known=-5, priority=-(1 << 80)),
    )
    assert table.input_tokens[:2].tolist() == [1 << 40, 0]
    assert table.max_output_tokens[:2].tolist() == [1 << 40, 0]
    assert table.known_tokens[:2].tolist() == [1 << 40, 1]
    assert table.priority[0] > 1e15
    assert table.priority[1] < -1e15


def test_a_time_that_is_no_number_never_comes() -> None:
    table = table_of(Ask(slo=DeadlineSlo(math.nan)), Ask(slo=DeadlineSlo(math.inf)))
    never_s = table.deadline_s[:2]
    assert np.isfinite(never_s).all()
    assert (never_s > 1e11).all()


def test_a_time_before_all_times_is_one_that_has_passed() -> None:
    table = table_of(Ask(slo=DeadlineSlo(-math.inf)))
    assert math.isfinite(table.deadline_s[0])
    assert table.deadline_s[0] < -1e11


@given(ask=ABSURD.asks())
def test_whatever_a_sender_claims_every_column_is_finite(ask: Ask) -> None:
    table = table_of(ask)
    for name, column in columns(table).items():
        if name != "known_tokens":
            assert np.isfinite(column[:1]).all(), name
    assert np.isfinite(table.rows().due_s).all()
    assert math.isfinite(table.next_due_s(0))
    known = table.known_tokens[0]
    assert math.isnan(known) == (ask.known is None)
    assert math.isnan(known) or 1 <= known <= 1 << 40


@given(tbt_s=ABSURD.times, generated=st.integers(0, 1 << 40))
def test_a_stream_begun_with_any_interval_has_finite_due_times(
    tbt_s: float, generated: int
) -> None:
    table = table_of(Ask(slo=ReasoningSlo(30.0, 0.5)))
    table.begin_stream(0, tbt_s)
    table.generated_tokens[0] = generated
    assert math.isfinite(table.next_due_s(0))
    assert np.isfinite(table.rows().due_s).all()


def test_memory_per_request_is_that_of_all_columns() -> None:
    table = RequestTable(capacity=128)
    total = sum(column.nbytes for column in columns(table).values())
    assert table.bytes_per_request * 128 == total
