"""Running programs: what their calls have got, what is expected, and what is forgotten."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD

from scheduler.programs import ProgramOutlook, Programs

FUTURE = ("future_in", "future_out", "future_stage")


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
    assert of(programs, index, "service", "done_in", "done_out", *FUTURE) == [0] * 6
    assert of(programs, index, "stage_due_s") == [math.inf]


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
    programs.expect("", "a", ProgramOutlook(future_output_tokens=50, stage_due_s=3.0))
    end(programs, index, 9, 9)
    assert joined(programs, "b") == index
    assert of(programs, index, "service", "done_in", "done_out", *FUTURE) == [0] * 6
    assert of(programs, index, "stage_due_s") == [math.inf]


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
    assert of(programs, index, *FUTURE) == [100, 20, 10]
    assert of(programs, index, "stage_due_s") == [math.inf]


def test_an_outlook_on_another_tenants_program_or_an_unknown_one_is_ignored() -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("other", "p", ProgramOutlook(future_output_tokens=20))
    programs.expect("", "q", ProgramOutlook(future_output_tokens=20))
    assert of(programs, index, *FUTURE) == [0, 0, 0]
    assert len(programs) == 1


def test_less_than_nothing_is_expected_as_nothing() -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("", "p", ProgramOutlook(future_output_tokens=-20))
    assert of(programs, index, *FUTURE) == [0, 0, 0]


@pytest.mark.parametrize("due_s", [None, math.nan, math.inf])
def test_a_stage_without_a_time_is_never_due(due_s: float | None) -> None:
    programs = Programs()
    index = joined(programs)
    programs.expect("", "p", ProgramOutlook(stage_due_s=due_s))
    assert of(programs, index, "stage_due_s") == [math.inf]


@given(inputs=ABSURD.times, outputs=ABSURD.times, stage=ABSURD.times, due_s=ABSURD.times)
def test_whatever_is_expected_the_columns_are_amounts(
    inputs: float, outputs: float, stage: float, due_s: float
) -> None:
    programs = Programs()
    joined(programs)
    outlook = ProgramOutlook(
        future_input_tokens=inputs,
        future_output_tokens=outputs,
        future_stage_tokens=stage,
        stage_due_s=due_s,
    )
    programs.expect("", "p", outlook)
    for name in FUTURE:
        assert np.isfinite(programs.column(name)).all()
        assert (programs.column(name) >= 0).all()
    assert not np.isnan(programs.column("stage_due_s")).any()


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
