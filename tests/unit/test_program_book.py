"""Programs as the HTTP process keeps them: one deadline, what became of the calls, and an end."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.programs import (
    MAX_PROGRAMS,
    ProgramBook,
    ProgramCancelledError,
    ProgramClock,
    ProgramOutcome,
    ProgramRecord,
)

NOW_S = 1000.0
TIMEOUT_S = 60.0
YEAR_S = 366 * 24 * 3600.0


def book(*, max_programs: int = MAX_PROGRAMS) -> ProgramBook:
    return ProgramBook(max_programs, TIMEOUT_S)


def joined(
    programs: ProgramBook,
    at_s: float = NOW_S,
    name: str = "p",
    *,
    tenant: str = "t",
    deadline_s: float = 30.0,
) -> ProgramClock:
    return programs.join(tenant, name, at_s, deadline_s)


def known(programs: ProgramBook, name: str = "p", *, tenant: str = "t") -> ProgramRecord:
    record = programs.get(tenant, name)
    assert record is not None
    return record


def call(
    programs: ProgramBook,
    at_s: float,
    end_s: float | None = None,
    name: str = "p",
    *,
    tokens: int | None = None,
    deadline_s: float = 30.0,
) -> ProgramRecord:
    """A call from one time to another; one without an end goes on, one without tokens failed."""
    joined(programs, at_s, name, deadline_s=deadline_s)
    record = known(programs, name)
    record.begin(at_s)
    if end_s is not None:
        if tokens is not None:
            record.finished(tokens, end_s)
        record.leave(end_s)
    return record


def record(deadline_at_s: float = NOW_S + 30) -> ProgramRecord:
    return ProgramRecord(ProgramClock(NOW_S, deadline_at_s))


# One deadline -------------------------------------------------------------------------------------


def test_the_first_call_says_when_the_whole_program_is_due() -> None:
    programs = book()
    first = joined(programs, NOW_S, deadline_s=30)
    assert first == ProgramClock(NOW_S, NOW_S + 30)
    assert joined(programs, NOW_S + 10, deadline_s=500) == first
    assert joined(programs, NOW_S + 40, deadline_s=1) == first, "also after the deadline"
    assert len(programs) == 1


def test_programs_are_apart_by_id_and_by_tenant() -> None:
    programs = book()
    joined(programs, 1000)
    joined(programs, 1001, "q")
    joined(programs, 1002, tenant="other")
    joined(programs, 1003, "tp", tenant="")
    opened = [
        known(programs).clock.opened_s,
        known(programs, "q").clock.opened_s,
        known(programs, tenant="other").clock.opened_s,
        known(programs, "tp", tenant="").clock.opened_s,
    ]
    assert opened == [1000, 1001, 1002, 1003]
    assert len(programs) == 4


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_what_one_tenant_ends_is_not_anothers(end: str) -> None:
    programs = book()
    joined(programs, tenant="a")
    joined(programs, tenant="b")
    assert getattr(programs, end)("a", "p") is not None
    programs.tidy("a", "p")
    assert joined(programs, NOW_S + 5, tenant="b").opened_s == NOW_S
    assert known(programs, tenant="b").num_live == 0


def test_nothing_is_known_of_a_program_that_nobody_has_opened() -> None:
    programs = book()
    joined(programs)
    for name, tenant in (("q", "t"), ("p", "other"), ("p", ""), ("", "t")):
        assert programs.get(tenant, name) is None
        assert programs.close(tenant, name) is None
        assert programs.cancel(tenant, name) is None
        programs.tidy(tenant, name)
    assert len(programs) == 1, "asking opens nothing, and ends nobody else's"
    assert joined(programs, NOW_S + 1).opened_s == NOW_S


# Going quiet --------------------------------------------------------------------------------------


def test_a_program_without_a_call_for_the_timeout_is_over() -> None:
    programs = book()
    call(programs, NOW_S, NOW_S + 5, tokens=9)
    assert joined(programs, NOW_S + 5 + TIMEOUT_S - 1).opened_s == NOW_S
    programs = book()
    call(programs, NOW_S, NOW_S + 5, tokens=9)
    back_s = NOW_S + 5 + TIMEOUT_S + 1
    assert joined(programs, back_s, deadline_s=20) == ProgramClock(back_s, back_s + 20)
    assert known(programs).outcome() == ProgramOutcome(calls=0, tokens=0, goodput_tokens=0)


def test_the_timeout_counts_from_the_latest_call_and_not_from_the_first() -> None:
    programs = book()
    for number in range(10):
        start_s = NOW_S + number * (TIMEOUT_S - 1)
        call(programs, start_s, start_s, tokens=1)
    assert known(programs).outcome().calls == 10


def test_the_timeout_counts_from_the_end_of_a_long_call() -> None:
    programs = book()
    end_s = NOW_S + 3 * TIMEOUT_S
    record = call(programs, NOW_S, tokens=1)
    record.finished(1, end_s)
    record.leave(end_s)
    assert joined(programs, end_s + TIMEOUT_S - 1).opened_s == NOW_S


def test_a_live_call_keeps_its_program_past_the_timeout() -> None:
    programs = book()
    call(programs, NOW_S, name="live")
    call(programs, NOW_S, NOW_S + 1, name="quiet")
    # Others come and go in between, so that whatever is swept is swept.
    for number in range(5):
        joined(programs, NOW_S + number * TIMEOUT_S, f"other{number}")
    assert joined(programs, NOW_S + 5 * TIMEOUT_S, "live").opened_s == NOW_S
    assert joined(programs, NOW_S + 5 * TIMEOUT_S, "quiet").opened_s == NOW_S + 5 * TIMEOUT_S


def test_the_quiet_ones_are_forgotten_as_others_arrive() -> None:
    programs = book()
    for number in range(50):
        call(programs, NOW_S, NOW_S + 1, f"p{number}")
    assert len(programs) == 50
    joined(programs, NOW_S + 1 + TIMEOUT_S + 1, "new")
    assert len(programs) == 1


def test_a_call_that_is_refused_after_it_joined_leaves_no_program_for_ever() -> None:
    # It joined, and its client left before it was let in: nothing begins and nothing leaves.
    programs = book()
    joined(programs)
    joined(programs, NOW_S + TIMEOUT_S + 1, "other")
    assert programs.get("t", "p") is None


@pytest.mark.parametrize("back_s", [1.0, 3600.0, 1e9])
def test_a_clock_that_jumps_back_forgets_nobody(back_s: float) -> None:
    programs = book()
    call(programs, NOW_S, NOW_S + 1, tokens=5)
    call(programs, NOW_S, name="live")
    joined(programs, NOW_S - back_s, "other")
    assert known(programs).outcome().calls == 1
    assert joined(programs, NOW_S - back_s).opened_s == NOW_S
    assert known(programs, "live").num_live == 1


def test_after_a_clock_has_jumped_back_a_program_still_goes_quiet() -> None:
    programs = book()
    back_s = NOW_S - 900
    call(programs, back_s, back_s + 1)
    joined(programs, back_s + TIMEOUT_S + 2, "other")
    assert programs.get("t", "p") is None


def test_a_clock_that_jumps_far_ahead_costs_no_live_call_its_record() -> None:
    programs = book()
    record = call(programs, NOW_S)
    joined(programs, NOW_S + YEAR_S, "other")
    record.finished(9, NOW_S + YEAR_S)
    record.leave(NOW_S + YEAR_S)
    assert record.outcome() == ProgramOutcome(calls=1, tokens=9, goodput_tokens=0)


# Closing ------------------------------------------------------------------------------------------


def test_a_closed_program_without_live_calls_is_forgotten_once_tidied() -> None:
    programs = book()
    record = call(programs, NOW_S, NOW_S + 5, tokens=9)
    assert programs.close("t", "p") is record
    programs.tidy("t", "p")
    assert len(programs) == 0
    assert programs.get("t", "p") is None
    assert joined(programs, NOW_S + 6).opened_s == NOW_S + 6


def test_a_closed_program_is_known_while_a_call_of_it_is_live() -> None:
    programs = book()
    record = call(programs, NOW_S)
    assert programs.close("t", "p") is record
    programs.tidy("t", "p")
    assert known(programs) is record
    record.finished(9, NOW_S + 5)
    record.leave(NOW_S + 5)
    programs.tidy("t", "p")
    assert programs.get("t", "p") is None


def test_tidying_leaves_an_open_program_alone() -> None:
    programs = book()
    call(programs, NOW_S, NOW_S + 5)
    programs.tidy("t", "p")
    assert joined(programs, NOW_S + 6).opened_s == NOW_S


def test_closing_twice_reports_the_same_program_while_it_is_known() -> None:
    programs = book()
    record = call(programs, NOW_S)
    assert programs.close("t", "p") is record
    assert programs.close("t", "p") is record
    record.leave(NOW_S + 1)
    programs.tidy("t", "p")
    assert programs.close("t", "p") is None


# Cancelling ---------------------------------------------------------------------------------------


def test_calls_of_a_cancelled_program_are_refused_until_the_timeout() -> None:
    programs = book()
    record = call(programs, NOW_S, NOW_S + 5, tokens=9)
    assert programs.cancel("t", "p") is record
    for after_s in (0.0, 1.0, TIMEOUT_S - 1):
        with pytest.raises(ProgramCancelledError):
            joined(programs, NOW_S + 5 + after_s)
    again_s = NOW_S + 5 + 3 * TIMEOUT_S
    assert joined(programs, again_s).opened_s == again_s


def test_a_refused_call_does_not_keep_a_cancelled_program_alive_for_ever() -> None:
    # A client that asks again and again is refused for the timeout, and then is a new program.
    programs = book()
    call(programs, NOW_S, NOW_S + 1)
    programs.cancel("t", "p")
    refused_at_s = []
    for after_s in range(0, int(4 * TIMEOUT_S), 5):
        try:
            joined(programs, NOW_S + after_s)
        except ProgramCancelledError:
            refused_at_s.append(after_s)
        else:
            break
    assert refused_at_s, "it is refused at first"
    assert max(refused_at_s) <= 2 * TIMEOUT_S


def test_a_cancelled_program_is_refused_while_its_calls_still_end() -> None:
    programs = book()
    record = call(programs, NOW_S)
    call(programs, NOW_S)
    programs.cancel("t", "p")
    with pytest.raises(ProgramCancelledError):
        joined(programs, NOW_S + 1)
    record.leave(NOW_S + 2)
    record.leave(NOW_S + 2)
    programs.tidy("t", "p")
    with pytest.raises(ProgramCancelledError):
        joined(programs, NOW_S + 3)


def test_a_refused_call_changes_nothing_of_what_is_known() -> None:
    programs = book()
    record = call(programs, NOW_S, NOW_S + 5, tokens=9)
    programs.cancel("t", "p")
    before = record.outcome(), record.num_live, record.ended_s, len(programs)
    with pytest.raises(ProgramCancelledError):
        joined(programs, NOW_S + 9)
    assert (record.outcome(), record.num_live, record.ended_s, len(programs)) == before


def test_a_client_that_did_not_hear_the_answer_may_cancel_again() -> None:
    programs = book()
    record = call(programs, NOW_S, NOW_S + 5)
    assert programs.cancel("t", "p") is record
    assert programs.cancel("t", "p") is record
    assert programs.close("t", "p") is None, "it is not open any more"


def test_a_program_that_is_over_cannot_be_cancelled() -> None:
    programs = book()
    call(programs, NOW_S, NOW_S + 5, tokens=9)
    programs.close("t", "p")
    assert programs.cancel("t", "p") is None
    assert joined(programs, NOW_S + 6).opened_s == NOW_S + 6, "and its name is not burnt"


def test_a_closed_program_can_be_cancelled_while_its_last_call_is_live() -> None:
    programs = book()
    record = call(programs, NOW_S)
    programs.close("t", "p")
    assert programs.cancel("t", "p") is record
    record.leave(NOW_S + 1)
    programs.tidy("t", "p")
    assert len(programs) == 0


def test_the_error_is_one_that_a_caller_of_the_terms_expects() -> None:
    assert issubclass(ProgramCancelledError, ValueError)


# What came of it ----------------------------------------------------------------------------------


def test_a_program_in_time_counts_all_tokens_of_all_its_calls() -> None:
    it = record()
    for tokens, end_s in ((40, NOW_S + 5), (2, NOW_S + 10), (300, NOW_S + 29)):
        it.begin(end_s - 1)
        it.finished(tokens, end_s)
        it.leave(end_s)
    assert it.met
    assert it.outcome() == ProgramOutcome(calls=3, tokens=342, goodput_tokens=342)


def test_a_program_whose_last_call_is_late_counts_nothing() -> None:
    it = record()
    it.finished(40, NOW_S + 5)
    it.finished(2, NOW_S + 30.001)
    assert not it.met
    assert it.outcome() == ProgramOutcome(calls=2, tokens=42, goodput_tokens=0)


def test_a_program_made_to_the_moment_is_made() -> None:
    it = record(NOW_S + 30)
    it.finished(40, NOW_S + 30)
    assert it.met
    assert it.outcome().goodput_tokens == 40


def test_a_late_call_is_not_made_good_by_one_that_is_told_after_it_but_ended_before() -> None:
    it = record()
    it.finished(40, NOW_S + 31)
    it.finished(2, NOW_S + 29)
    assert it.outcome() == ProgramOutcome(calls=2, tokens=42, goodput_tokens=0)


def test_a_call_that_failed_does_not_count_and_does_not_make_the_program_late() -> None:
    it = record()
    it.begin(NOW_S)
    it.finished(40, NOW_S + 5)
    it.leave(NOW_S + 5)
    it.begin(NOW_S + 6)
    it.leave(NOW_S + 50)
    assert it.outcome() == ProgramOutcome(calls=1, tokens=40, goodput_tokens=40)


def test_a_program_of_which_nothing_has_finished_has_nothing() -> None:
    it = record()
    assert it.outcome() == ProgramOutcome(calls=0, tokens=0, goodput_tokens=0)
    it.begin(NOW_S)
    it.leave(NOW_S + 90)
    assert it.outcome() == ProgramOutcome(calls=0, tokens=0, goodput_tokens=0)


def test_live_calls_are_counted_and_never_fewer_than_none() -> None:
    it = record()
    it.begin(NOW_S)
    it.begin(NOW_S)
    assert it.num_live == 2
    for _ in range(2):
        it.leave(NOW_S + 1)
    assert it.num_live == 0


def test_a_cancelled_program_keeps_its_tokens_and_counts_none_of_them() -> None:
    programs = book()
    record = call(programs, NOW_S, NOW_S + 5, tokens=9)
    programs.cancel("t", "p")
    assert not record.met
    assert record.outcome() == ProgramOutcome(calls=1, tokens=9, goodput_tokens=0)


# Bounds -------------------------------------------------------------------------------------------


def test_ten_thousand_programs_that_never_end_are_bounded() -> None:
    programs = ProgramBook(max_programs=100, timeout_s=TIMEOUT_S)
    for number in range(10_000):
        call(programs, NOW_S + number * 1e-3, NOW_S + number * 1e-3, f"p{number}")
    assert len(programs) <= 100
    assert programs.get("t", "p9999") is not None
    assert programs.get("t", "p0") is None


def test_the_least_recently_used_is_forgotten_first() -> None:
    programs = book(max_programs=2)
    for at_s, name in ((1, "old"), (2, "used"), (3, "old"), (4, "new")):
        call(programs, at_s, at_s, name)
    assert programs.get("t", "used") is None
    assert known(programs, "old").clock.opened_s == 1
    assert known(programs, "new").clock.opened_s == 4


def test_cancelled_programs_are_bounded_too() -> None:
    programs = book(max_programs=10)
    for number in range(100):
        call(programs, NOW_S, NOW_S, f"p{number}")
        programs.cancel("t", f"p{number}")
    assert len(programs) <= 10


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["join", "begin", "finish", "fail", "close", "cancel", "tidy", "clock"]),
        st.integers(0, 4),
        st.integers(0, 200),
    ),
    max_size=80,
)


@given(OPERATIONS, st.integers(1, 4))
@example([("join", 0, 1), ("begin", 0, 1), ("join", 1, 1)], 1)
def test_whatever_happens_the_book_is_bounded_and_its_figures_are_those_of_the_calls(
    operations: list[tuple[str, int, int]], max_programs: int
) -> None:
    programs = book(max_programs=max_programs)
    now_s = NOW_S
    tallies: dict[int, tuple[ProgramRecord, list[tuple[int, float]], int]] = {}
    cancelled: list[ProgramRecord | None] = []
    for what, number, amount in operations:
        name = f"p{number}"
        found = programs.get("t", name)
        if what == "clock":
            now_s += amount - 50
        elif what == "join":
            try:
                clock = joined(programs, now_s, name, deadline_s=1 + amount)
            except ProgramCancelledError:
                continue
            kept = programs.get("t", name)
            # Where each of the others has a live call, there is no place for one that has none.
            live_records = sum(live > 0 for _, _, live in tallies.values())
            assert kept is not None or live_records >= max_programs
            assert kept is None or kept.clock == clock
            assert math.isfinite(clock.deadline_at_s)
        elif what == "cancel":
            cancelled.append(programs.cancel("t", name))
        elif what in ("close", "tidy"):
            getattr(programs, what)("t", name)
        elif found is not None:
            _, ended, live = tallies.setdefault(id(found), (found, [], 0))
            if what == "begin":
                found.begin(now_s)
                live += 1
            elif live:
                if what == "finish":
                    found.finished(amount, now_s)
                    ended.append((amount, now_s))
                found.leave(now_s)
                live -= 1
            tallies[id(found)] = (found, ended, live)
        assert len(programs) <= max_programs
    for it, ended, live in tallies.values():
        outcome = it.outcome()
        assert (outcome.calls, outcome.tokens) == (len(ended), sum(tokens for tokens, _ in ended))
        in_time = all(end_s <= it.clock.deadline_at_s for _, end_s in ended)
        counts = in_time and not any(it is other for other in cancelled)
        assert outcome.goodput_tokens == (outcome.tokens if counts else 0)
        assert it.num_live == live


def test_after_a_last_call_that_came_to_nothing_there_is_no_goodput() -> None:
    record = ProgramRecord(ProgramClock(0.0, 60.0))
    record.begin(0.0)
    record.finished(100, 5.0)
    record.leave(5.0)
    assert record.outcome().goodput_tokens == 100
    record.begin(6.0)
    record.leave(60.0, has_failed=True)
    assert (record.met, record.outcome().goodput_tokens, record.outcome().tokens) == (False, 0, 100)
    record.begin(60.0)
    record.finished(50, 60.0)
    record.leave(60.0)
    assert record.outcome().goodput_tokens == 150
