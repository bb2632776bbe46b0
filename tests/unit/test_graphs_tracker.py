"""Programs that run: what is expected of them, how they end, and what is learnt of which."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from program_shapes import CODE_ERROR, PACE, Part, at_s, call, life, seconds_of, shape_of

from graphs import tracker as tracker_module
from graphs.amortise import Amortisation
from graphs.protocol import Arrived, Closed, Event, Finished, Outlook, check_outlook
from graphs.request_graph import validate
from graphs.store import PatternStore
from graphs.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TIMEOUT_S = 100.0
PEER = b"peer"


class Told:
    """A tracker and its clock, and the newest outlook of each program."""

    def __init__(self, **options: Any) -> None:
        self.store = PatternStore()
        self.tracker = Tracker(self.store, **{"timeout_s": TIMEOUT_S, **options})
        self.now_s = 0.0
        self.outlooks: dict[int, Outlook] = {}

    def take(self, *events: Event) -> None:
        """Each at its own time."""
        for event in events:
            happened_s = at_s(event)
            self.now_s = self.now_s if happened_s is None else max(self.now_s, happened_s)
            self.tracker.take(event, PACE, self.now_s, PEER)

    def look(self) -> dict[int, Outlook]:
        """What is new."""
        found = {outlook.program: outlook for _, outlook in self.tracker.outlooks()}
        for outlook in found.values():
            check_outlook(outlook)
        self.outlooks |= found
        return found

    def see(self, *events: Event) -> Outlook:
        """What is expected after these events of one program."""
        self.take(*events)
        (outlook,) = self.look().values()
        return outlook

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.tracker.expire(self.now_s)

    def teach(self, parts: Sequence[Part], count: int = 1, **options: Any) -> None:
        for number in range(count):
            self.take(*life(10_000 + number, parts, opened_s=self.now_s, **options))
        self.look()

    def count(self, name: str) -> int:
        return self.tracker.counters[name]


def arrived(
    node: int = 1,
    at: float = 0.0,
    *,
    program: int = 1,
    place: int | None = None,
    opened_s: float = 0.0,
    deadline_s: float = 60.0,
    is_final: bool = False,
    application: int = 0,
    **of_call: Any,
) -> Arrived:
    return Arrived(
        program=program,
        application=application,
        place=node - 1 if place is None else place,
        call=call(node, at, **of_call),
        opened_s=opened_s,
        deadline_at_s=opened_s + deadline_s,
        is_final=is_final,
    )


def finished(
    node: int = 1, at: float = 1.0, tokens: int = 100, *, program: int = 1, has_failed: bool = False
) -> Finished:
    return Finished(program, node, tokens, at, has_failed=has_failed)


def near(value: float) -> Any:
    return pytest.approx(value, rel=2.5 * CODE_ERROR, abs=1e-3)


def by_arrivals(events: Iterable[Event]) -> list[list[Event]]:
    """Events in groups, each beginning with the arrivals of a stage."""
    groups: list[list[Event]] = []
    for event in events:
        begins = isinstance(event, Arrived)
        if begins and (not groups or isinstance(groups[-1][-1], Finished)):
            groups.append([])
        groups[-1].append(event)
    return groups


THREE = [Part((100,)), Part((300, 200), 500), Part((50,), tool_s=5.0)]


@pytest.fixture
def told() -> Told:
    return Told()


# Outlooks -----------------------------------------------------------------------------------------


def test_of_a_program_that_nothing_is_like_nothing_is_known(told: Told) -> None:
    outlook = told.see(arrived())
    assert (outlook.program, outlook.num_calls, outlook.stage) == (1, 1, 0)
    assert not outlook.is_known


def test_what_finished_programs_did_is_expected_of_a_new_one(told: Told) -> None:
    told.teach(THREE, 5)
    outlook = told.see(arrived(at=told.now_s, opened_s=told.now_s))
    assert outlook.is_known
    assert outlook.stages == pytest.approx(2)
    assert outlook.calls == near(3)
    assert outlook.input_tokens == near(1000 + 200)
    assert outlook.output_tokens == near(500 + 50)
    assert outlook.stage_tokens == near(300 + 50)
    assert outlook.tool_s == near(5)
    assert outlook.stage_due_s is not None
    assert outlook.next_call_s is None


def test_calls_of_this_stage_that_have_not_arrived_are_still_to_come(told: Told) -> None:
    told.teach([Part((300, 100, 200), 500), Part((50,))], 5)
    start_s = told.now_s
    outlook = told.see(arrived(1, start_s, opened_s=start_s, input_tokens=500))
    assert outlook.calls == near(2 + 1)
    assert outlook.input_tokens == near(2 * 500 + 200)
    assert outlook.output_tokens == near(2 * 200 + 50)
    assert outlook.stages == pytest.approx(1)
    assert outlook.stage_tokens == near(50)
    for node, left in ((2, 1), (3, 0)):
        outlook = told.see(arrived(node, start_s + node, opened_s=start_s, input_tokens=500))
        assert outlook.num_calls == node
        assert outlook.calls == pytest.approx(left + 1, abs=0.2)
        assert outlook.output_tokens == pytest.approx(left * 200 + 50, abs=40)


def test_between_two_stages_the_next_call_is_expected_after_its_tool(told: Told) -> None:
    told.teach([Part(), Part(tool_s=20.0), Part(tool_s=3.0)], 5)
    start_s = told.now_s
    told.take(arrived(1, start_s, opened_s=start_s))
    outlook = told.see(finished(1, start_s + 7))
    assert outlook.stage_due_s is None
    assert outlook.next_call_s == pytest.approx(start_s + 7 + 20, abs=20 * 2 * CODE_ERROR)
    assert outlook.stages == pytest.approx(2)
    outlook = told.see(arrived(2, start_s + 25, opened_s=start_s))
    assert outlook.next_call_s is None
    assert outlook.stage_due_s is not None
    assert outlook.stage == 1
    outlook = told.see(finished(2, start_s + 30))
    assert outlook.next_call_s == pytest.approx(start_s + 33, abs=0.3)


def test_after_the_last_stage_no_call_is_expected(told: Told) -> None:
    told.teach([Part(), Part()], 5)
    for event in life(1, [Part(), Part()], opened_s=told.now_s, is_final=False):
        outlook = told.see(event)
    assert outlook.next_call_s is None
    assert outlook.stage_due_s is None
    assert outlook.calls == outlook.stages == outlook.output_tokens == 0


def test_a_program_that_goes_on_longer_than_any_before_is_not_known(told: Told) -> None:
    told.teach([Part(), Part()], 5)
    start_s = told.now_s
    for event in life(1, [Part()] * 2, opened_s=start_s, is_final=False):
        outlook = told.see(event)
    outlook = told.see(arrived(3, told.now_s, opened_s=start_s))
    assert not outlook.is_known
    assert outlook.stage == 2
    # And what it did is learnt in its turn.
    told.take(finished(3, told.now_s + 1), Closed(1, is_cancelled=False))
    assert len(told.store.shapes[-1].stages) == 3


def test_more_calls_in_a_stage_than_ever_before_are_no_trouble(told: Told) -> None:
    told.teach([Part((10, 10)), Part()], 5)
    start_s = told.now_s
    for node in range(1, 40):
        outlook = told.see(arrived(node, start_s, opened_s=start_s))
        assert outlook.num_calls == node
    assert outlook.calls == near(1)


def test_a_final_stage_is_followed_by_nothing_whatever_others_did(told: Told) -> None:
    told.teach([Part()] * 6, 5)
    start_s = told.now_s
    told.take(*life(1, [Part()], opened_s=start_s, is_final=False))
    outlook = told.see(arrived(2, start_s + 10, opened_s=start_s, is_final=True))
    assert outlook.is_known
    assert outlook.calls == outlook.stages == outlook.output_tokens == outlook.tool_s == 0
    # It has all the time that there is.
    assert outlook.stage_due_s == pytest.approx(start_s + 60)


def test_a_final_stage_is_due_at_the_deadline_though_nothing_is_known(told: Told) -> None:
    outlook = told.see(arrived(is_final=True))
    assert outlook.stage_due_s == pytest.approx(60)
    assert outlook.calls == 0


def test_each_outlook_is_told_once_and_the_newest_counts(told: Told) -> None:
    told.take(arrived(1), arrived(2, 0.5))
    found = told.look()
    assert found[1].num_calls == 2
    assert told.look() == {}
    told.take(finished(1))
    assert list(told.look()) == [1]


def test_programs_are_told_of_by_themselves(told: Told) -> None:
    told.take(arrived(program=1), arrived(program=2), arrived(program=3))
    assert set(told.look()) == {1, 2, 3}
    told.take(finished(program=2))
    assert set(told.look()) == {2}


def test_who_told_of_a_program_is_who_wants_to_know(told: Told) -> None:
    told.tracker.take(arrived(1), PACE, 0.0, b"a")
    told.tracker.take(arrived(2, 0.1), PACE, 0.1, b"b")
    ((running, _),) = told.tracker.outlooks()
    assert set(running.peers) == {b"a", b"b"}


def test_of_an_application_that_does_the_same_each_time_its_own_programs_count(
    told: Told,
) -> None:
    # Twenty of each; that they come to one pattern each is no matter of theirs.
    told.teach([Part(), Part((100,))], 20, application=5)
    told.teach([Part(), *[Part((100,))] * 9], 20, application=6)
    assert told.see(arrived(program=1, application=5)).stages == pytest.approx(1, abs=0.1)
    assert told.see(arrived(program=2, application=6)).stages == pytest.approx(9, abs=0.1)


def test_the_application_s_own_programs_count(told: Told) -> None:
    for number in range(10):
        parts = [Part(), Part((5 * 2**number,))]
        told.take(*life(100 + number, parts, application=5))
        parts = [Part(), *[Part((5 * 2**number,))] * 9]
        told.take(*life(200 + number, parts, application=6))
    told.look()
    assert told.see(arrived(program=1, application=5)).stages == pytest.approx(1)
    assert told.see(arrived(program=2, application=6)).stages == pytest.approx(9)


def test_what_is_expected_is_reckoned_at_the_pace_that_is_told(told: Told) -> None:
    told.teach([Part((100,), 10_000), Part((1000,), 10)], 5)
    due = []
    # Where reading costs nothing and where only reading costs.
    for program, changes in ((1, {"prefill_s": 0.0}), (2, {"step_s": 0.0, "token_s": 0.0})):
        pace = msgspec.structs.replace(PACE, **changes)
        told.tracker.take(
            arrived(program=program, at=told.now_s, opened_s=told.now_s, input_tokens=10_000),
            pace,
            told.now_s,
        )
        due.append(told.look()[program].stage_due_s - told.now_s)
    assert due[0] == pytest.approx(60 * 0.09, abs=2)
    assert due[1] == pytest.approx(60, abs=2)


# Sub-deadlines ------------------------------------------------------------------------------------

EVEN = [Part((100,))] * 3
"""Stages that take as long, each."""


def test_on_time_each_stage_is_due_at_its_accumulated_share(told: Told) -> None:
    parts = [Part((100,)), Part((300,)), Part((200,))]
    told.teach(parts, 5)
    start_s = told.now_s
    seconds = [seconds_of(part.shape()) for part in parts]
    started_s = start_s
    for number, part in enumerate(parts):
        due_s = start_s + 60 * sum(seconds[: number + 1]) / sum(seconds)
        outlook = told.see(arrived(number + 1, started_s, opened_s=start_s))
        assert outlook.stage_due_s == pytest.approx(due_s, abs=2)
        started_s = due_s
        told.see(finished(number + 1, due_s, part.outputs[0]))


@pytest.mark.parametrize(("ended_after_s", "next_due_after_s"), [(50, 55), (10, 35), (58, 59)])
def test_what_a_late_or_early_stage_left_is_shared_by_those_to_come(
    told: Told, ended_after_s: float, next_due_after_s: float
) -> None:
    told.teach(EVEN, 5)
    start_s = told.now_s
    outlook = told.see(arrived(1, start_s, opened_s=start_s))
    assert outlook.stage_due_s == pytest.approx(start_s + 20, abs=1)
    told.see(finished(1, start_s + ended_after_s))
    outlook = told.see(arrived(2, start_s + ended_after_s, opened_s=start_s))
    assert outlook.stage_due_s == pytest.approx(start_s + next_due_after_s, abs=1)
    told.see(finished(2, start_s + next_due_after_s))
    outlook = told.see(arrived(3, start_s + next_due_after_s, opened_s=start_s))
    assert outlook.stage_due_s == pytest.approx(start_s + 60)


@pytest.mark.parametrize(
    ("tool_took_s", "next_due_after_s"), [(15.0, 45.0), (5.0, 40.0), (0.0, 37.5)]
)
def test_a_tool_has_its_share_and_takes_none_from_the_calls_after_it(
    told: Told, tool_took_s: float, next_due_after_s: float
) -> None:
    # Four equal parts: work, a tool, work, work.
    work_s = seconds_of(Part((100,)).shape())
    parts = [Part((100,)), Part((100,), tool_s=work_s), Part((100,))]
    told.teach(parts, 5, stage_s=work_s)
    start_s = told.now_s
    outlook = told.see(arrived(1, start_s, opened_s=start_s))
    assert outlook.stage_due_s == pytest.approx(start_s + 15, abs=1)
    told.see(finished(1, start_s + 15))
    # Both pieces of work that are left have half of what the tool has left them, each.
    outlook = told.see(arrived(2, start_s + 15 + tool_took_s, opened_s=start_s))
    assert outlook.stage_due_s == pytest.approx(start_s + next_due_after_s, abs=1.5)


def test_a_sub_deadline_lies_between_the_opening_and_the_deadline_and_is_refined(
    told: Told,
) -> None:
    told.teach([Part((100,)), Part((800,)), Part((20,))], 5)
    told.teach([Part((100,)), Part((20,)), Part((800,)), Part((20,))], 5)
    start_s = told.now_s
    due_s = []
    for group in by_arrivals(life(1, [Part((100,)), Part((20,)), Part((800,))], opened_s=start_s)):
        outlook = told.see(group[0])
        due_s.append(outlook.stage_due_s)
        told.see(*group[1:]) if len(due_s) < 3 else told.take(*group[1:])
    assert due_s == sorted(due_s)
    assert all(start_s < due <= start_s + 60 for due in due_s)
    assert due_s[-1] == pytest.approx(start_s + 60)


def test_after_the_deadline_a_stage_is_not_due_later_than_it(told: Told) -> None:
    told.teach(EVEN, 5)
    start_s = told.now_s
    told.take(arrived(1, start_s, opened_s=start_s), finished(1, start_s + 500))
    outlook = told.see(arrived(2, start_s + 500, opened_s=start_s))
    assert outlook.stage_due_s is not None
    assert outlook.stage_due_s <= start_s + 60


@pytest.mark.parametrize("how", list(Amortisation))
def test_every_amortisation_may_be_asked_for(how: Amortisation) -> None:
    told = Told(how=how)
    told.teach([Part((100,)), Part((200,)), Part((300,))], 5)
    start_s = told.now_s
    for group in by_arrivals(life(1, EVEN, opened_s=start_s, stage_s=5.0)):
        outlook = told.see(group[0])
        assert outlook.stage_due_s is not None
        assert start_s <= outlook.stage_due_s <= start_s + 60 + 1e-6
        told.take(*group[1:])
        told.look()


@pytest.mark.parametrize(
    ("how", "due_after_s"),
    [
        (Amortisation.ACCUMULATED, 10 + 50 / 2),
        (Amortisation.STAGE_SHARE, 10 + 60 / 3),
        (Amortisation.REMAINING_SHARE, 10 + 50 / 2),
    ],
)
def test_the_second_of_three_equal_stages_is_due_by_the_share_that_was_asked_for(
    how: Amortisation, due_after_s: float
) -> None:
    told = Told(how=how)
    told.teach(EVEN, 5)
    start_s = told.now_s
    told.take(arrived(1, start_s, opened_s=start_s), finished(1, start_s + 10))
    outlook = told.see(arrived(2, start_s + 10, opened_s=start_s))
    assert outlook.stage_due_s == pytest.approx(start_s + due_after_s, abs=1)


def test_while_calls_of_a_stage_still_arrive_its_due_time_stays(told: Told) -> None:
    told.teach([Part((100,) * 4), Part((400,))], 5)
    start_s = told.now_s
    first = told.see(arrived(1, start_s, opened_s=start_s))
    for node in (2, 3, 4):
        later = told.see(arrived(node, start_s + node, opened_s=start_s))
        assert later.stage_due_s == pytest.approx(first.stage_due_s, abs=1e-6)


# Ends ---------------------------------------------------------------------------------------------


def ends(told: Told, *, learnt: int, unlearnt: int) -> bool:
    assert len(told.tracker) == 0
    assert told.count("learnt") == told.store.num_added == learnt
    assert told.count("unlearnt") == unlearnt
    return True


def test_a_program_whose_final_stage_is_over_is_over_and_learnt(told: Told) -> None:
    told.take(*life(1, THREE, opened_s=50.0))
    assert ends(told, learnt=1, unlearnt=0)
    assert told.store.shapes[0] == shape_of(*THREE)


def test_a_final_stage_is_over_when_all_of_its_calls_are(told: Told) -> None:
    told.take(arrived(1, is_final=True), arrived(2, 0.1, is_final=True), arrived(3, 0.2))
    told.take(finished(2), finished(1))
    assert len(told.tracker) == 1
    told.take(finished(3, 2.0))
    assert ends(told, learnt=1, unlearnt=0)
    assert told.store.shapes[0].stages[0].num_calls == 3


def test_after_its_end_nothing_is_told_of_a_program(told: Told) -> None:
    told.take(*life(1, [Part()]))
    assert told.look() == {}
    told.take(arrived(program=2), Closed(2, is_cancelled=True))
    assert told.look() == {}
    told.take(arrived(program=3))
    told.wait(0.0)
    told.take(finished(program=3))
    told.wait(2 * TIMEOUT_S)
    assert told.look() == {}


def test_a_client_s_word_ends_a_program_and_it_is_learnt(told: Told) -> None:
    told.take(arrived(), finished(), Closed(1, is_cancelled=False))
    assert ends(told, learnt=1, unlearnt=0)


def test_a_cancelled_program_is_not_learnt(told: Told) -> None:
    told.take(arrived(), finished(), Closed(1, is_cancelled=True))
    assert ends(told, learnt=0, unlearnt=1)


def test_a_program_that_was_closed_while_a_call_ran_ends_with_that_call(told: Told) -> None:
    told.take(arrived(1), finished(1), arrived(2, 2.0), Closed(1, is_cancelled=False))
    assert len(told.tracker) == 1
    told.take(finished(2, 3.0))
    assert ends(told, learnt=1, unlearnt=0)


def test_a_sender_whose_calls_have_a_gap_has_lost_some(told: Told) -> None:
    told.take(arrived(1), finished(1), arrived(3, 2.0, place=2, is_final=True), finished(3, 3.0))
    assert ends(told, learnt=0, unlearnt=1)


def test_what_was_cached_is_not_computed_again(told: Told) -> None:
    told.take(arrived(1, is_final=True))
    told.take(Finished(1, 1, 100, 1.0, has_failed=False, cached_tokens=150))
    (stage,) = told.store.shapes[0].stages
    assert (stage.input_tokens, stage.filled_tokens) == (200, 50)


def test_a_program_a_call_of_which_failed_is_not_learnt(told: Told) -> None:
    told.take(arrived(1), finished(1, has_failed=True), arrived(2, 2.0, is_final=True))
    told.take(finished(2, 3.0))
    assert ends(told, learnt=0, unlearnt=1)


def test_a_program_whose_beginning_nobody_told_is_not_learnt_and_nothing_is_said_of_it(
    told: Told,
) -> None:
    told.teach(EVEN, 5)
    before = told.store.num_added
    told.take(arrived(4, told.now_s, place=3, opened_s=told.now_s))
    assert not any(outlook.is_known for outlook in told.look().values())
    told.take(finished(4, told.now_s + 1), Closed(1, is_cancelled=False))
    assert told.store.num_added == before
    assert told.count("partial") == 1


def test_a_program_that_is_told_again_from_its_beginning_is_known_after_all(told: Told) -> None:
    # After a restart the newest event may come before all that is told again.
    told.teach(EVEN, 5)
    start_s = told.now_s
    first, second, third = by_arrivals(life(1, EVEN, opened_s=start_s))
    told.take(second[0])
    told.take(*first, *second[:1])
    (outlook,) = told.look().values()
    assert outlook.is_known
    assert (outlook.num_calls, outlook.stage) == (2, 1)
    told.take(*second[1:], *third)
    # What was known from the middle on has gone unlearnt; the whole is learnt once.
    assert ends(told, learnt=6, unlearnt=1)
    assert len(told.store) == 1


def test_a_program_that_has_gone_quiet_is_over_and_learnt(told: Told) -> None:
    told.take(arrived(1), finished(1, 5.0))
    told.wait(TIMEOUT_S - 1)
    assert len(told.tracker) == 1
    told.wait(2)
    assert ends(told, learnt=1, unlearnt=0)
    assert told.count("quiet") == 1


def test_a_program_with_a_call_that_runs_is_not_quiet(told: Told) -> None:
    told.take(arrived(1))
    for _ in range(30):
        told.wait(TIMEOUT_S / 10)
    assert len(told.tracker) == 1
    told.take(finished(1, told.now_s))
    told.wait(TIMEOUT_S - 1)
    assert len(told.tracker) == 1


def test_a_program_the_end_of_whose_call_got_lost_is_not_kept_for_ever(told: Told) -> None:
    # Its scheduler was killed: nobody will ever tell.
    told.take(arrived(1))
    for _ in range(500):
        told.wait(TIMEOUT_S / 10)
    assert ends(told, learnt=0, unlearnt=1)


def test_every_call_begins_the_time_of_quiet_anew(told: Told) -> None:
    now_s = 0.0
    for node in range(1, 10):
        told.take(arrived(node, now_s), finished(node, now_s + 1))
        now_s += TIMEOUT_S - 5
        told.wait(now_s - told.now_s)
        assert len(told.tracker) == 1


def test_without_a_call_nothing_was_ever_a_program(told: Told) -> None:
    told.take(Closed(1, is_cancelled=False), finished())
    assert ends(told, learnt=0, unlearnt=0)
    assert told.count("opened") == 0


def test_where_programs_say_when_they_end_one_that_only_goes_quiet_has_not_been_finished(
    told: Told,
) -> None:
    for number in range(20):
        told.take(*life(100 + number, THREE, opened_s=told.now_s, application=5))
    learnt = told.count("learnt")
    # Its client died after the first stage.
    told.take(*life(1, THREE[:1], opened_s=told.now_s, application=5, is_final=False))
    told.wait(2 * TIMEOUT_S)
    assert len(told.tracker) == 0
    assert told.count("learnt") == learnt == 20
    assert len(told.store) == 1


def test_where_programs_never_say_when_they_end_quiet_ones_are_learnt(told: Told) -> None:
    for number in range(20):
        parts = life(100 + number, THREE, opened_s=told.now_s, application=5, is_final=False)
        told.take(*parts)
        told.wait(2 * TIMEOUT_S)
    assert told.count("learnt") == 20
    # Whatever those of another application do.
    for number in range(20):
        told.take(*life(200 + number, EVEN, opened_s=told.now_s, application=6))
    told.take(*life(1, THREE, opened_s=told.now_s, application=5, is_final=False))
    told.wait(2 * TIMEOUT_S)
    assert told.count("learnt") == 41


def test_habits_of_many_applications_are_bounded(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "MAX_HABITS", 10)
    for application in range(1, 100):
        told.take(*life(application, [Part()], opened_s=told.now_s, application=application))
    assert len(told.tracker._habits) <= 10
    assert told.count("learnt") == 99


def test_what_a_program_was_matched_with_is_strengthened(told: Told) -> None:
    told.teach(EVEN)
    told.teach([Part((5000,) * 9)])
    before = told.store.pack.weight.tolist()
    for event in life(1, [Part((100,)), Part((100,)), Part((120,), tool_s=90.0)], opened_s=5.0):
        told.take(event)
        told.look()
    after = told.store.pack.weight.tolist()
    assert after[0] >= before[0] + 0.9
    assert after[1] == pytest.approx(before[1], rel=0.01)


# What does not fit --------------------------------------------------------------------------------


def test_an_event_that_comes_again_changes_nothing(told: Told) -> None:
    told.take(arrived(1), arrived(1), arrived(1))
    (outlook,) = told.look().values()
    assert outlook.num_calls == 1
    assert told.count("repeated") == 2
    told.take(finished(1), finished(1, 1.5), finished(1, 2.0))
    assert told.count("unknown_calls") == 2
    told.take(arrived(2, 3.0, is_final=True), arrived(2, 3.0, is_final=True), finished(2, 4.0))
    assert ends(told, learnt=1, unlearnt=0)
    assert told.store.shapes[0] == shape_of(Part(), Part(tool_s=2.0))


def test_events_of_unknown_programs_and_calls_are_counted(told: Told) -> None:
    told.take(finished(program=9), Closed(9, is_cancelled=True))
    assert told.count("unknown_programs") == 2
    told.take(arrived(1), finished(77))
    assert told.count("unknown_calls") == 1
    assert len(told.tracker) == 1
    assert told.count("events") == 4


def test_events_after_the_end_are_counted_and_open_nothing_that_is_learnt(told: Told) -> None:
    events = life(1, [Part(), Part()])
    told.take(*events)
    told.take(events[-1], Closed(1, is_cancelled=False))
    assert told.count("unknown_programs") == 2
    assert len(told.tracker) == 0
    # A straggler of the same program, of which the rest is over.
    told.take(arrived(3, 9.0, place=2), finished(3, 10.0), Closed(1, is_cancelled=False))
    assert told.count("learnt") == 1


def test_a_program_id_that_is_used_again_is_another_program(told: Told) -> None:
    for _ in range(3):
        told.take(*life(1, THREE, opened_s=told.now_s))
    assert told.count("opened") == told.count("learnt") == 3
    assert len(told.store) == 1


def test_a_call_that_belongs_to_a_stage_that_is_over_is_no_trouble(told: Told) -> None:
    told.teach(EVEN, 40)
    start_s = told.now_s
    told.take(*life(1, EVEN[:2], opened_s=start_s, is_final=False))
    told.look()
    # By its parents it is beside the second stage's call, which has ended.
    late = arrived(9, told.now_s, place=2, opened_s=start_s, parents=(1,))
    outlook = told.see(late)
    assert outlook.num_calls == 3
    told.take(finished(9, told.now_s + 1, 5000))
    told.take(Closed(1, is_cancelled=False))
    assert told.store.shapes[-1] == shape_of(Part((100,)), Part((100, 5000)))


def test_after_a_call_of_a_stage_that_was_over_the_outlook_is_that_of_a_program_told_in_order(
    told: Told,
) -> None:
    told.teach([Part((100,)), Part((100,)), Part((10,))], 5)
    told.teach([Part((100,)), Part((100, 5000)), *[Part((10,))] * 7], 5)
    start_s = told.now_s
    first = arrived(1, start_s, opened_s=start_s), finished(1, start_s + 1)
    second = arrived(2, start_s + 1, opened_s=start_s), finished(2, start_s + 2)
    late = (
        arrived(3, start_s + 3, opened_s=start_s, parents=(1,)),
        finished(3, start_s + 9, 5000),
    )
    told.take(*first, *second)
    before = told.look()[1]
    told.see(late[0])
    after = told.see(late[1])
    assert before.stages < after.stages
    in_order = (*first, *second, *late)
    told.take(*(msgspec.structs.replace(event, program=2) for event in in_order))
    assert msgspec.structs.replace(told.look()[2], program=1) == after


def test_patterns_that_go_while_a_program_runs_are_no_trouble(told: Told) -> None:
    for number in range(60):
        told.take(*life(100 + number, [Part(), Part(model=number), Part()], opened_s=told.now_s))
    told.look()
    assert len(told.store) == 60
    start_s = told.now_s
    told.see(arrived(1, start_s, opened_s=start_s))
    told.store.capacity = 10
    assert told.store.adopt(told.store.clustering().run())
    told.see(finished(1, start_s + 1))
    outlook = told.see(arrived(2, start_s + 1, opened_s=start_s, model=5))
    assert outlook.is_known
    told.store.decay(start_s + 1e7)
    told.take(finished(2, start_s + 2))
    assert told.look()[1].is_known
    told.take(Closed(1, is_cancelled=False))
    assert len(told.tracker) == 0


def test_after_the_patterns_have_changed_the_outlook_is_that_of_a_program_begun_anew() -> None:
    told = Told()
    told.teach(THREE, 5)
    start_s = told.now_s
    lives = {
        program: by_arrivals(life(program, THREE, opened_s=start_s, is_final=False))
        for program in (1, 2)
    }
    told.take(*lives[1][0])
    told.look()
    for number in range(80):
        told.take(*life(100 + number, [Part(), Part(model=number)], opened_s=start_s))
    told.store.capacity = 30
    told.store.adopt(told.store.clustering().run())
    told.take(*lives[1][1])
    told.take(*lives[2][0], *lives[2][1])
    found = told.look()
    assert msgspec.structs.replace(found[2], program=1) == found[1]


# Clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-1e6, -50.0])
def test_a_clock_that_jumps_back_ends_no_program_and_keeps_none_for_ever(
    told: Told, jump_s: float
) -> None:
    told.take(arrived(1, 10.0), finished(1, 11.0))
    told.wait(jump_s)
    assert len(told.tracker) == 1
    told.take(arrived(2, told.now_s, place=1), finished(2, told.now_s + 1))
    told.look()
    told.wait(2)
    assert len(told.tracker) == 1
    told.wait(3 * TIMEOUT_S)
    assert len(told.tracker) == 0


def test_quiet_programs_are_not_kept_until_a_clock_that_jumped_back_has_caught_up(
    told: Told,
) -> None:
    for program in range(1, 21):
        told.take(arrived(program=program, at=1e6, opened_s=1e6))
        told.take(finished(program=program, at=1e6 + 1))
    told.wait(-1e6)
    assert len(told.tracker) == 20
    for _ in range(50):
        told.wait(TIMEOUT_S / 10)
    assert len(told.tracker) == 0


def test_after_a_jump_ahead_what_runs_goes_on(told: Told) -> None:
    told.teach(EVEN, 5)
    start_s = told.now_s
    told.take(arrived(1, start_s, opened_s=start_s))
    told.wait(5 * TIMEOUT_S)
    assert len(told.tracker) == 1
    told.take(finished(1, told.now_s))
    told.take(arrived(2, told.now_s, opened_s=start_s))
    outlook = told.look()[1]
    assert outlook.stage_due_s is not None
    assert math.isfinite(outlook.stage_due_s)


def test_times_of_events_that_contradict_each_other_are_no_trouble(told: Told) -> None:
    told.teach(THREE, 5)
    start_s = told.now_s
    told.take(
        arrived(1, start_s + 100, opened_s=start_s + 500, deadline_s=-900),
        finished(1, start_s - 400),
        arrived(2, start_s - 800, opened_s=start_s + 500, deadline_s=-900),
    )
    told.look()
    told.take(finished(2, start_s - 900), Closed(1, is_cancelled=False))
    assert all(stage.tool_s >= 0 for stage in told.store.shapes[-1].stages)
    validate_all(told)


def validate_all(told: Told) -> None:
    for program in range(20):
        running = told.tracker.get(program)
        if running is not None:
            validate(running.graph.graph)


# Bounds -------------------------------------------------------------------------------------------


def test_of_too_many_programs_the_quiet_ones_are_forgotten_unlearnt() -> None:
    told = Told(max_programs=10)
    for program in range(1, 31):
        told.take(arrived(program=program, at=float(program)))
        told.take(finished(program=program, at=program + 0.5))
        told.tracker.expire(told.now_s)
        assert len(told.tracker) <= 10
    assert told.tracker.get(30) is not None
    assert told.tracker.get(1) is None
    assert told.count("dropped") == 20
    assert told.count("learnt") == 0


def test_who_was_heard_last_is_kept() -> None:
    told = Told(max_programs=3)
    for program in (1, 2, 3):
        told.take(arrived(program=program, at=float(program)))
    told.take(finished(program=1, at=4.0))
    told.take(arrived(program=4, at=5.0))
    told.tracker.expire(5.0)
    assert told.tracker.get(1) is not None
    assert told.tracker.get(2) is None


def test_of_too_many_calls_those_of_quiet_programs_are_forgotten(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "MAX_CALLS", 100)
    for program in range(1, 21):
        for node in range(1, 21):
            told.take(arrived(node, float(program), program=program))
        told.tracker.expire(told.now_s)
    left = [program for program in range(1, 21) if told.tracker.get(program) is not None]
    assert 1 <= len(left) <= 5
    assert left[-1] == 20


def test_one_program_of_too_many_calls_does_not_drive_out_the_others(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One id for everything that a client ever asks.
    monkeypatch.setattr(tracker_module, "MAX_CALLS", 100)
    for program in range(2, 12):
        told.take(arrived(program=program))
    for node in range(1, 200):
        told.take(arrived(node, 1.0, program=1), finished(node, 1.0, program=1))
        told.tracker.expire(told.now_s)
    left = [program for program in range(2, 12) if told.tracker.get(program) is not None]
    assert left == list(range(2, 12))


def test_the_matches_of_many_programs_are_forgotten_and_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_module, "MAX_MATCHES", 5)
    told = Told()
    told.teach(THREE, 5)
    start_s = told.now_s
    for program in range(1, 41):
        told.take(*by_arrivals(life(program, THREE, opened_s=start_s))[0])
        told.look()
    running = [told.tracker.get(program) for program in range(1, 41)]
    assert sum(one is not None and one.match is not None for one in running) <= 6
    second = by_arrivals(life(1, THREE, opened_s=start_s))[1][0]
    outlook = told.see(second)
    assert outlook.is_known
    assert outlook.stages == pytest.approx(1)


def test_ten_thousand_programs_opened_and_never_finished_are_bounded() -> None:
    told = Told()
    told.teach(THREE, 5)
    start_s = told.now_s
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for program in range(1, 12_001):
            event = arrived(program=program, at=start_s, opened_s=start_s)
            told.tracker.take(event, PACE, start_s, PEER)
            if program % 50 == 0 and program <= 2500:
                assert len(told.look()) == 50
        told.outlooks.clear()
        told.tracker.expire(start_s)
        assert len(told.tracker) <= 10_000
        held, _ = tracemalloc.get_traced_memory()
        # Eight kilobytes each would be a lot.
        assert held - before < 80e6
        for program in range(1, 12_001):
            told.tracker.take(Closed(program, is_cancelled=True), PACE, start_s)
        told.look()
        assert len(told.tracker) == 0
        gc.collect()  # a networkx graph has cycles
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 0.1 * (held - before)
    finally:
        tracemalloc.stop()
    assert told.count("learnt") == 5


def test_a_program_of_very_many_calls_is_bounded_and_others_go_on(told: Told) -> None:
    told.teach(THREE, 5)
    start_s = told.now_s
    for node in range(1, 6001):
        told.take(arrived(node, start_s, opened_s=start_s))
    assert told.look()[1].num_calls == 6000
    running = told.tracker.get(1)
    assert running is not None
    assert running.graph.graph.number_of_nodes() <= 2048
    assert told.see(arrived(program=2, at=start_s, opened_s=start_s)).is_known


# Branches that differ in depth --------------------------------------------------------------------


def test_calls_of_later_stages_that_have_arrived_are_not_foreseen_again(told: Told) -> None:
    told.teach([Part((100, 100)), Part((100,)), Part((100,))], 5)
    start_s = told.now_s
    told.take(
        arrived(1, start_s, opened_s=start_s),
        arrived(2, start_s, opened_s=start_s),
        finished(1, start_s + 1),
        arrived(3, start_s + 1, opened_s=start_s, parents=(1,)),
    )
    outlook = told.look()[1]
    assert (outlook.stage, outlook.num_calls) == (0, 3)
    assert (outlook.calls, outlook.stages) == (pytest.approx(1, abs=0.1), pytest.approx(1, abs=0.1))


def test_a_program_whose_stages_keep_changing_behind_it_is_given_up(told: Told) -> None:
    told.teach([Part((100,))] * 2, 5)
    start_s = told.now_s
    told.take(arrived(1, start_s, opened_s=start_s), finished(1, start_s + 1))
    told.take(arrived(2, start_s + 1, opened_s=start_s), finished(2, start_s + 2))
    told.look()
    known = []
    for node in range(3, 3 + 2 * tracker_module.MAX_RESCORED):
        # One more that only needed the first: of a stage that is long over.
        told.take(arrived(node, start_s + 2, opened_s=start_s, parents=(1,)))
        told.take(finished(node, start_s + 2))
        known.append(told.look()[1].is_known)
    assert known[0]
    assert not known[-1]
