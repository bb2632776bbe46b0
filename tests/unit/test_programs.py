"""Running programs: what their calls have got, what is expected, and what is forgotten."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD

from scheduler.programs import ProgramOutlook, Programs

FUTURE = ("future_in", "future_out", "future_stage", "future_tool_s")
NOTHING = [0.0] * len(FUTURE)


def joined(programs: Programs, name: str = "p", *, tenant: str = "", is_final: bool = False) -> int:
    return programs.join(tenant, name, is_final=is_final)


def end(programs: Programs, index: int, input_tokens: float = 0, output_tokens: float = 0) -> None:
    programs.leave(index, input_tokens=input_tokens, output_tokens=output_tokens)


def of(programs: Programs, index: int, *names: str) -> list[float]:
    """These columns of a program."""
    return [float(programs.column(name)[index]) for name in names]


def test_calls_of_one_program_have_one_index() -> None:
    programs = Programs()
    assert joined(programs) == joined(programs)
    assert len(programs) == 1


def test_programs_are_apart_by_id_and_by_tenant() -> None:
    programs = Programs()
    indices = {joined(programs), joined(programs, "q"), joined(programs, tenant="other")}
    assert len(indices) == len(programs) == programs.num_indices == 3


def test_a_new_program_has_nothing_behind_it_and_expects_nothing() -> None:
    programs = Programs()
    index = joined(programs)
    assert of(programs, index, "service", "done_in", "done_out", *FUTURE) == [0, 0, 0, *NOTHING]
    assert of(programs, index, "stage_due_s", "next_call_s") == [math.inf] * 2


def test_what_its_calls_were_given_adds_up() -> None:
    programs = Programs()
    index = joined(programs)
    joined(programs)
    end(programs, index, 100, 20)
    end(programs, index, 10, 2)
    programs.serve(index, 70)
    programs.serve(index, 7)
    assert of(programs, index, "done_in", "done_out", "service") == [110, 22, 77]


def test_a_program_between_two_calls_is_kept() -> None:
    programs = Programs()
    end(programs, joined(programs), 100, 20)
    assert of(programs, joined(programs), "done_in") == [100]


def test_a_program_is_forgotten_when_its_final_call_has_ended() -> None:
    programs = Programs()
    end(programs, joined(programs, is_final=True), 100, 20)
    assert len(programs) == 0
    assert of(programs, joined(programs), "done_in") == [0]


def test_a_final_call_does_not_end_a_program_whose_other_calls_are_live() -> None:
    programs = Programs()
    index = joined(programs)
    joined(programs, is_final=True)
    end(programs, index, 5, 5)
    assert len(programs) == 1
    end(programs, index, 5, 5)
    assert len(programs) == 0


def test_one_that_comes_again_after_its_end_is_a_new_program() -> None:
    programs = Programs()
    end(programs, joined(programs, is_final=True))
    index = joined(programs)
    end(programs, index, 3, 3)
    assert len(programs) == 1, "it was closed in its former life only"


def test_of_idle_programs_the_longest_idle_are_forgotten() -> None:
    programs = Programs(max_idle=2)
    indices = [joined(programs, name) for name in "abc"]
    for place in (1, 0, 2):
        end(programs, indices[place], 9, 9)
    assert len(programs) == 2
    assert [of(programs, joined(programs, name), "done_in") for name in "abc"] == [[9], [0], [9]]


def test_a_live_program_is_never_forgotten() -> None:
    programs = Programs(max_idle=0)
    index = joined(programs, "live")
    end(programs, joined(programs, "idle"))
    assert len(programs) == 1
    assert joined(programs, "live") == index


def test_who_takes_the_place_of_a_forgotten_one_starts_anew() -> None:
    programs = Programs(max_idle=0)
    index = joined(programs, "a")
    programs.serve(index, 99)
    outlook = ProgramOutlook(
        future_output_tokens=50,
        future_tool_s=9.0,
        stage_due_s=3.0,
        next_call_s=4.0,
        next_input_tokens=70,
    )
    programs.expect("", "a", outlook)
    end(programs, index, 9, 9)
    assert joined(programs, "b") == index
    assert of(programs, index, "service", "done_in", "done_out", *FUTURE) == [0, 0, 0, *NOTHING]
    assert of(programs, index, "stage_due_s", "next_call_s") == [math.inf] * 2
    assert programs.foreseen_tokens(0.0, 10.0) == 0


def test_many_programs_keep_their_own_columns() -> None:
    programs = Programs()
    for number in range(100):
        programs.serve(joined(programs, f"p{number}"), number)
    assert programs.column("service").tolist() == list(range(100))


# What is expected --------------------------------------------------------------------------------


def test_an_outlook_is_what_the_last_match_says() -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("", "p", ProgramOutlook(future_input_tokens=1, stage_due_s=5.0))
    programs.expect(
        "",
        "p",
        ProgramOutlook(future_input_tokens=100, future_output_tokens=20, future_stage_tokens=10),
    )
    assert of(programs, index, *FUTURE) == [100, 20, 10, 0]
    assert of(programs, index, "stage_due_s") == [math.inf]


def test_an_outlook_on_another_tenants_program_or_an_unknown_one_is_ignored() -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("other", "p", ProgramOutlook(future_output_tokens=20))
    programs.expect("", "q", ProgramOutlook(future_output_tokens=20))
    assert of(programs, index, *FUTURE) == NOTHING
    assert len(programs) == 1


def test_less_than_nothing_is_expected_as_nothing() -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("", "p", ProgramOutlook(future_output_tokens=-20))
    assert of(programs, index, *FUTURE) == NOTHING


@pytest.mark.parametrize("due_s", [None, math.nan, math.inf])
def test_a_stage_without_a_time_is_never_due(due_s: float | None) -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("", "p", ProgramOutlook(stage_due_s=due_s))
    assert of(programs, index, "stage_due_s") == [math.inf]


outlooks = st.builds(
    ProgramOutlook,
    future_input_tokens=ABSURD.times,
    future_output_tokens=ABSURD.times,
    future_stage_tokens=ABSURD.times,
    future_tool_s=ABSURD.times,
    next_call_s=st.none() | ABSURD.times,
    next_input_tokens=ABSURD.times,
    stage_due_s=st.none() | ABSURD.times,
)


@given(st.lists(st.none() | outlooks, min_size=1, max_size=3), ABSURD.times, ABSURD.times)
def test_whatever_is_expected_the_columns_are_amounts(
    found: list[ProgramOutlook | None], now_s: float, until_s: float
) -> None:
    programs = Programs()
    joined(programs)
    for outlook in found:
        programs.expect("", "p", outlook)
    for name in (*FUTURE, "next_in"):
        assert np.isfinite(programs.column(name)).all()
        assert (programs.column(name) >= 0).all()
    for name in ("stage_due_s", "next_call_s"):
        assert not np.isnan(programs.column(name)).any()
    assert math.isfinite(programs.foreseen_tokens(now_s, until_s))
    assert programs.foreseen_tokens(now_s, until_s) >= 0


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["join", "final", "leave"]), st.integers(0, 7)), max_size=80
    ),
    max_idle=st.integers(0, 3),
)
def test_programs_are_bounded_by_the_live_ones_and_the_idle_that_are_kept(
    operations: list[tuple[str, int]], max_idle: int
) -> None:
    programs = Programs(max_idle=max_idle)
    live: dict[str, list[int]] = {}
    for what, number in operations:
        name = f"p{number}"
        if what != "leave":
            live.setdefault(name, []).append(joined(programs, name, is_final=what == "final"))
        elif name in live:
            end(programs, live[name].pop(), 1, 1)
            live = {other: calls for other, calls in live.items() if calls}
        assert len(live) <= len(programs) <= len(live) + max_idle
        assert len({calls[0] for calls in live.values()}) == len(live)
        assert all(len(set(calls)) == 1 for calls in live.values())


# The call that comes next -------------------------------------------------------------------------


def foreseen(
    programs: Programs, *, in_s: float | None = 2.0, tokens: float = 70.0, name: str = "p"
) -> int:
    """A program between two stages whose next one is expected in so many seconds from 0."""
    index = joined(programs, name)
    end(programs, index, 10, 10)
    outlook = ProgramOutlook(next_call_s=in_s, next_input_tokens=tokens)
    programs.expect("", name, outlook)
    return index


def test_a_call_that_is_expected_counts_from_its_time_on() -> None:
    programs = Programs()
    index = foreseen(programs)
    assert of(programs, index, "next_call_s", "next_in") == [2.0, 70.0]
    assert programs.foreseen_tokens(0.0, 1.9) == 0
    assert programs.foreseen_tokens(0.0, 2.0) == 70
    assert programs.foreseen_tokens(1.0, 3.0) == 70


def test_calls_of_several_programs_are_foreseen_together() -> None:
    programs = Programs()
    foreseen(programs, in_s=1.0, tokens=10, name="a")
    foreseen(programs, in_s=2.0, tokens=20, name="b")
    foreseen(programs, in_s=9.0, tokens=40, name="c")
    foreseen(programs, in_s=None, tokens=80, name="d")
    assert programs.foreseen_tokens(0.0, 5.0) == 30


def test_a_call_that_did_not_come_is_not_waited_for_for_ever() -> None:
    programs = Programs()
    foreseen(programs, in_s=2.0)
    assert programs.foreseen_tokens(600.0, 601.0) == 0


def test_a_call_that_has_arrived_is_foreseen_no_more() -> None:
    programs = Programs()
    foreseen(programs)
    joined(programs)
    assert programs.foreseen_tokens(0.0, 5.0) == 0


@pytest.mark.parametrize("how", ["closed", "final", "expired", "crowded out", "nothing fits"])
def test_of_a_program_that_is_over_no_call_is_foreseen(how: str) -> None:
    programs = Programs(max_idle=1, timeout_s=60.0)
    foreseen(programs)
    if how == "closed":
        programs.close("", "p")
    elif how == "final":
        joined(programs, is_final=True)
    elif how == "expired":
        programs.expire(60.0)
    elif how == "crowded out":
        end(programs, joined(programs, "other"))
    else:
        programs.expect("", "p", None)
    assert programs.foreseen_tokens(0.0, 1e9) == 0


# Its end ------------------------------------------------------------------------------------------


def test_a_program_that_is_closed_between_two_calls_is_forgotten_at_once() -> None:
    programs = Programs()
    end(programs, joined(programs), 100, 20)
    programs.close("", "p")
    assert len(programs) == 0
    assert of(programs, joined(programs), "done_in") == [0]


def test_a_program_that_is_closed_while_calls_are_live_lives_as_long_as_they() -> None:
    programs = Programs()
    index = joined(programs)
    joined(programs)
    programs.close("", "p")
    programs.close("", "p")
    end(programs, index, 100, 20)
    assert of(programs, index, "done_in") == [100]
    end(programs, index, 1, 1)
    assert len(programs) == 0


def test_closing_ends_nobody_elses_program() -> None:
    programs = Programs()
    joined(programs)
    joined(programs, tenant="a")
    programs.close("b", "p")
    programs.close("a", "q")
    programs.close("a", "p")
    end(programs, joined(programs), 1, 1)
    assert len(programs) == 2


def test_a_closed_program_expects_nothing_whatever_a_match_says() -> None:
    programs = Programs()
    index = joined(programs)
    outlook = ProgramOutlook(
        future_input_tokens=1.0,
        future_output_tokens=2.0,
        future_stage_tokens=3.0,
        future_tool_s=4.0,
        next_call_s=5.0,
        next_input_tokens=6.0,
    )
    programs.expect("", "p", outlook)
    programs.close("", "p")
    assert of(programs, index, *FUTURE) == NOTHING
    assert programs.foreseen_tokens(0.0, 10.0) == 0
    programs.expect("", "p", outlook)
    assert of(programs, index, *FUTURE) == NOTHING
    assert programs.foreseen_tokens(0.0, 10.0) == 0
    programs.expect("", "p", None)
    assert programs.stages_to_come[index] == 0


def test_who_takes_the_place_of_a_closed_one_is_open() -> None:
    programs = Programs()
    first = joined(programs, "a")
    programs.close("", "a")
    end(programs, first)
    index = joined(programs, "b")
    assert index == first
    programs.expect("", "b", ProgramOutlook(future_output_tokens=20))
    assert of(programs, index, "future_out") == [20]
    end(programs, index)
    assert len(programs) == 1


def idle_since(programs: Programs, name: str, at_s: float) -> None:
    programs.leave(joined(programs, name), input_tokens=1, output_tokens=1, now_s=at_s)


def test_programs_that_have_been_idle_for_the_timeout_are_forgotten() -> None:
    programs = Programs(timeout_s=60.0)
    for name, at_s in (("a", 100.0), ("b", 130.0), ("c", 160.0)):
        idle_since(programs, name, at_s)
    programs.expire(159.0)
    assert len(programs) == 3
    programs.expire(195.0)
    assert len(programs) == 1
    assert of(programs, joined(programs, "c"), "done_in") == [1]


def test_a_live_program_does_not_expire_and_its_time_counts_from_its_last_call() -> None:
    programs = Programs(timeout_s=60.0)
    idle_since(programs, "p", 100.0)
    index = joined(programs)
    programs.expire(1e9)
    assert len(programs) == 1
    programs.leave(index, input_tokens=1, output_tokens=1, now_s=500.0)
    programs.expire(559.0)
    assert of(programs, joined(programs), "done_in") == [2]


def test_programs_without_end_are_bounded() -> None:
    programs = Programs(timeout_s=60.0)
    for number in range(10_000):
        idle_since(programs, f"p{number}", number)
        programs.expire(number)
    assert len(programs) <= 61
    assert programs.num_indices <= 100, "places are used again"


@pytest.mark.parametrize("back_s", [1.0, 500.0, 1e9])
def test_a_clock_that_jumps_back_expires_nobody(back_s: float) -> None:
    programs = Programs(timeout_s=60.0)
    idle_since(programs, "a", 1000.0)
    programs.expire(1000.0 - back_s)
    idle_since(programs, "b", 1000.0 - back_s)
    programs.expire(1000.0 - back_s)
    assert len(programs) == 2
    programs.expire(1061.0)
    assert len(programs) == 0


@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["join", "final", "leave", "close", "expect", "expire", "clock"]),
            st.integers(0, 4),
            st.integers(-50, 100),
        ),
        max_size=100,
    )
)
def test_whatever_happens_live_programs_stay_and_the_others_go(
    operations: list[tuple[str, int, int]],
) -> None:
    programs = Programs(max_idle=3, timeout_s=60.0)
    now_s = 1000.0
    live: dict[str, list[int]] = {}
    for what, number, amount in operations:
        name = f"p{number}"
        if what == "clock":
            now_s += amount
        elif what in ("join", "final"):
            live.setdefault(name, []).append(joined(programs, name, is_final=what == "final"))
        elif what == "close":
            programs.close("", name)
        elif what == "expire":
            programs.expire(now_s)
        elif what == "expect":
            outlook = ProgramOutlook(
                future_tool_s=amount, next_call_s=now_s + amount, next_input_tokens=amount
            )
            programs.expect("", name, outlook if amount else None)
        elif name in live:
            index = live[name].pop()
            programs.leave(index, input_tokens=1, output_tokens=1, now_s=now_s)
            live = {other: calls for other, calls in live.items() if calls}
        assert len(live) <= len(programs) <= len(live) + 3
        assert len({calls[0] for calls in live.values()}) == len(live)
        assert all(len(set(calls)) == 1 for calls in live.values())
        assert 0 <= programs.foreseen_tokens(now_s, now_s + 60) < 1e6
    programs.expire(now_s + 1e6)
    assert len(programs) == len(live)


# Stages still to come -----------------------------------------------------------------------------


def closed_program(programs: Programs, name: str, num_stages: int, allowance_s: float) -> None:
    """A program of so many stages, given so much time, whose last call said so."""
    for stage in range(num_stages):
        index = programs.join(
            "t", name, is_final=stage == num_stages - 1, allowance_s=allowance_s - stage
        )
        programs.leave(index, input_tokens=1, output_tokens=1)


def test_before_any_program_has_closed_nothing_is_expected_to_come() -> None:
    programs = Programs()
    programs.join("t", "open", is_final=False, allowance_s=60)
    assert programs.stages_to_come.tolist() == [0]


def test_stages_are_in_proportion_to_the_time_that_a_program_is_given() -> None:
    programs = Programs()
    closed_program(programs, "closed", num_stages=4, allowance_s=80)  # a stage in 20 s
    index = programs.join("t", "open", is_final=False, allowance_s=100)
    assert programs.stages_to_come[index] == pytest.approx(5 - 1)


def test_a_program_that_is_open_has_at_least_one_stage_to_come() -> None:
    programs = Programs()
    closed_program(programs, "closed", num_stages=1, allowance_s=80)
    index = programs.join("t", "open", is_final=False, allowance_s=20)
    assert programs.stages_to_come[index] == 1


def test_after_the_final_call_or_a_pattern_match_nothing_more_is_guessed() -> None:
    programs = Programs()
    closed_program(programs, "closed", num_stages=4, allowance_s=80)
    final = programs.join("t", "final", is_final=True, allowance_s=100)
    matched = programs.join("t", "matched", is_final=False, allowance_s=100)
    programs.expect("t", "matched", ProgramOutlook(future_output_tokens=7))
    assert programs.stages_to_come[[final, matched]].tolist() == [0, 0]


def test_calls_that_run_together_are_one_stage() -> None:
    programs = Programs()
    first = programs.join("t", "p", is_final=False)
    programs.join("t", "p", is_final=False)
    assert programs.column("stages")[first] == 1
    for _ in range(2):
        programs.leave(first, input_tokens=1, output_tokens=1)
    programs.join("t", "p", is_final=False)
    assert programs.column("stages")[first] == 2


def test_a_program_without_a_deadline_teaches_nothing() -> None:
    programs = Programs()
    closed_program(programs, "closed", num_stages=4, allowance_s=math.inf)
    programs.join("t", "open", is_final=False, allowance_s=60)
    assert programs.stages_to_come.max() == 0


def test_a_program_that_its_client_ends_has_shown_how_many_stages_it_has() -> None:
    programs = Programs()
    for stage in range(4):
        index = programs.join("t", "ended", is_final=False, allowance_s=80 - stage)
        programs.leave(index, input_tokens=1, output_tokens=1)
    programs.close("t", "ended")
    index = programs.join("t", "open", is_final=False, allowance_s=100)
    assert programs.stages_to_come[index] == pytest.approx(5 - 1)


def test_where_a_match_is_taken_back_stages_are_guessed_again() -> None:
    programs = Programs()
    closed_program(programs, "closed", num_stages=4, allowance_s=80)
    index = programs.join("t", "open", is_final=False, allowance_s=100)
    programs.expect("t", "open", ProgramOutlook(future_output_tokens=7))
    programs.expect("t", "open", None)
    assert programs.stages_to_come[index] == pytest.approx(5 - 1)
    assert programs.column("future_out")[index] == 0


@pytest.mark.parametrize("allowance_s", [5e-324, 1e-300, 1e-9])
def test_a_program_that_was_given_next_to_no_time_does_not_make_the_others_endless(
    allowance_s: float,
) -> None:
    programs = Programs()
    closed_program(programs, "absurd", num_stages=1, allowance_s=allowance_s)
    programs.join("t", "open", is_final=False, allowance_s=600)
    assert np.isfinite(programs.stages_to_come).all()
    assert programs.stages_to_come.max() < 1e6
