"""The adapter between SGLang's requests, the graphs process and the frame manager; rest faked."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from graphs.protocol import Outlook, check_pace
from graphs.shape import Call
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState

# Importing SGLang takes a quarter of a minute on two idle cores, and it warns of missing GPUs.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

START_S = 1000.0
TIMEOUT_S = 60.0
BLOCK = list(range(100, 164))
"""A prompt that is long enough to be told from others: two blocks."""


@pytest.fixture(scope="module")
def module() -> Any:
    from engine.runtime import programs

    return programs


@pytest.fixture(scope="module")
def reasons() -> Any:
    from sglang.srt.managers import schedule_batch

    return schedule_batch


class Told(NamedTuple):
    """A call as the client was told of it."""

    program: int
    call: Call
    more: dict[str, Any]


class FakeClient:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.endings: list[tuple[int, int, int, bool]] = []
        self.over: list[tuple[int, bool]] = []
        self.live: set[tuple[int, int]] = set()
        self.outlooks: tuple[Outlook, ...] = ()
        self.paces: list[Any] = []

    def arrived(self, program: int, call: Call, **more: Any) -> None:
        assert (program, call.node) not in self.live, "another node has that number"
        self.live.add((program, call.node))
        self.told.append(Told(program, call, more))

    has_news = True

    def finished(
        self,
        program: int,
        node: int,
        output_tokens: int,
        *,
        at_s: float,
        has_failed: bool,
        cached_tokens: int,
    ) -> None:
        assert math.isfinite(at_s)
        assert cached_tokens == 3
        self.live.remove((program, node))
        self.endings.append((program, node, output_tokens, has_failed))

    def closed(self, program: int, *, is_cancelled: bool) -> None:
        self.over.append((program, is_cancelled))

    def poll(self, pace: Any) -> tuple[Outlook, ...]:
        self.paces.append(pace)
        return self.outlooks

    alive = True

    def is_alive(self) -> bool:
        return self.alive

    def counters(self) -> dict[str, int]:
        return {"open": 1}


def req(ids: list[int], *, max_new_tokens: int | None = 100) -> Any:
    """An SGLang request as far as it is looked at."""
    return SimpleNamespace(
        origin_input_ids=ids,
        output_ids=[],
        cached_tokens=3,
        finished_reason=None,
        sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens),
    )


class World:
    """A frame manager, its programs, and a client that only listens."""

    def __init__(self, module: Any, reasons: Any, *, has_client: bool = True) -> None:
        self.module, self.reasons = module, reasons
        self.clock = ManualClock(START_S)
        self.frames = FrameManager(SchedulerConfig(program_timeout_s=TIMEOUT_S))
        self.client = FakeClient()
        client = self.client if has_client else None
        self.watch = module.ProgramWatch(self.frames, client, self.clock.now_s, model="demo")
        self.live: dict[str, tuple[Any, RequestTerms]] = {}
        self.num_requests = 0

    def terms(self, slo: Slo, tenant: str = "", closes: str = "") -> RequestTerms:
        return RequestTerms(self.clock.now_s(), slo, tenant=tenant, closes_program=closes)

    def arrive(
        self,
        slo: Slo,
        ids: list[int] | None = None,
        *,
        tenant: str = "",
        closes: str = "",
        max_new_tokens: int | None = 100,
    ) -> str | None:
        """A request is queued; the key of it, or None where it is refused."""
        key = f"r{self.num_requests}"
        self.num_requests += 1
        asked = req(ids or [7] * 5, max_new_tokens=max_new_tokens)
        terms = self.terms(slo, tenant, closes)
        self.frames.arrive(
            key, terms, input_tokens=len(asked.origin_input_ids), max_output_tokens=9
        )
        self.live[key] = (asked, terms)
        if self.watch.arrived(key, asked, terms):
            return key
        self.end(key, "abort")
        return None

    def call(self, name: str = "", program: str = "p", **more: Any) -> Call:
        """A call of a program that is let in, as the client was told of it."""
        fields = {
            field: more.pop(field)
            for field in ("parents", "final", "program_age_s", "application", "tools")
            if field in more
        }
        key = self.arrive(CompoundSlo(60.0, program, node=name, **fields), **more)
        assert key is not None
        self.latest = key
        return self.client.told[-1].call

    def end(self, key: str, how: str = "stop", *, tokens: int = 3) -> None:
        asked, terms = self.live.pop(key)
        asked.output_ids = [1] * tokens
        asked.finished_reason = {
            "stop": self.reasons.FINISH_MATCHED_TOKEN(matched=2),
            "length": self.reasons.FINISH_LENGTH(length=7),
            "abort": self.reasons.FINISH_ABORT("x"),
            "vanished": None,
        }[how]
        self.frames.ended(key, RequestState.ABORTED)
        self.watch.ended(key, asked, terms)

    def hash(self, program: str = "p", tenant: str = "") -> int:
        number: int = self.module.hash_of_program(tenant, program)
        return number

    def state(self, name: str) -> Any:
        return self.watch.state()[name]

    def expected(self, key: str, *names: str) -> list[float]:
        """What the frame manager expects of the program of a live request."""
        request = self.frames.get(key)
        assert request is not None
        index = int(self.frames.table.program[request.row])
        return [float(self.frames.programs.column(name)[index]) for name in names]


@pytest.fixture
def world(module: Any, reasons: Any) -> World:
    return World(module, reasons)


# What is told -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slo", [BestEffortSlo(600), DeadlineSlo(5), LatencySlo(1, 1)])
def test_a_request_of_no_program_is_not_told(world: World, slo: Slo) -> None:
    key = world.arrive(slo)
    assert key is not None
    world.end(key)
    assert (world.client.told, world.client.endings) == ([], [])
    assert world.state("num_programs") == 0


def test_a_call_is_told_with_its_size_its_time_and_the_programs_clock(world: World) -> None:
    call = world.call("plan", ids=[7] * 50, program_age_s=15.0)
    told = world.client.told[-1]
    assert told.program == world.hash()
    assert (call.input_tokens, call.at_s) == (50, START_S)
    assert told.more["opened_s"] == START_S - 15
    assert told.more["deadline_at_s"] == START_S + 60
    assert told.more["is_final"] is False


def test_a_call_names_its_tools_and_the_model_as_numbers(world: World) -> None:
    first = world.call("a", tools=("search", "clock"))
    second = world.call("b", tools=("clock",))
    assert len(set(first.tools)) == 2
    assert second.tools == first.tools[1:]
    assert first.model == second.model != 0


def test_programs_are_told_apart_by_tenant_and_id(world: World) -> None:
    for tenant, program in (("", "p"), ("ann", "p"), ("", "q"), ("an", "np")):
        world.call("a", program, tenant=tenant)
    assert len({told.program for told in world.client.told}) == 4
    assert world.state("num_programs") == 4


def test_applications_are_told_apart_by_name_and_by_tenant(world: World) -> None:
    for program, tenant, application in (
        ("p", "ann", "agent"),
        ("q", "ann", "agent"),
        ("r", "ann", "search"),
        ("s", "bob", "agent"),
    ):
        world.call("a", program, tenant=tenant, application=application)
    one, same, other, foreign = [told.more["application"] for told in world.client.told]
    assert one == same
    assert len({one, other, foreign}) == 3


# Nodes --------------------------------------------------------------------------------------------


def test_a_parent_is_known_by_its_name(world: World) -> None:
    plan, search = world.call("plan"), world.call("search")
    answer = world.call("answer", parents=("search", "plan"))
    assert answer.parents == (search.node, plan.node)
    assert plan.parents == search.parents == ()


def test_names_mean_the_same_in_every_program(world: World) -> None:
    first, second = world.call("plan", "p"), world.call("plan", "q")
    assert (first.node, first.role) == (second.node, second.role)


def test_what_stands_before_the_mark_is_the_role(world: World) -> None:
    one, two, other = world.call("draft#1"), world.call("draft#2"), world.call("review#1")
    assert one.role == two.role != other.role
    assert len({one.node, two.node, other.node}) == 3
    plain = world.call("draft")
    assert plain.role == one.role


@pytest.mark.parametrize("name", ["", "#", "#1"])
def test_a_call_without_a_role_has_none(world: World, name: str) -> None:
    assert world.call(name).role == 0


def test_several_answers_to_one_call_are_nodes_of_their_own_in_one_role(world: World) -> None:
    answers = [world.call("vote#1") for _ in range(5)]
    assert len({answer.node for answer in answers}) == 5
    assert len({answer.role for answer in answers}) == 1
    assert world.call("count", parents=("vote#1",)).parents == (answers[0].node,)


def test_a_name_that_comes_again_is_a_node_of_its_own(world: World) -> None:
    first = world.call("plan")
    world.end(world.latest, "abort")
    again = world.call("plan")
    assert again.node != first.node


def test_calls_without_a_name_are_nodes_of_their_own(world: World) -> None:
    nodes = set()
    for _ in range(5):
        nodes.add(world.call().node)
        world.end(world.latest)
        nodes.add(world.call().node)
    assert len(nodes) == 10
    assert 0 not in nodes


def test_a_request_id_that_comes_again_is_another_node(module: Any, reasons: Any) -> None:
    world = World(module, reasons)
    first = world.call().node
    world.end(world.latest)
    world.num_requests = 0
    assert world.call().node != first


# Parents that nobody named ------------------------------------------------------------------------


def test_a_prompt_that_continues_an_earlier_call_is_its_child(world: World) -> None:
    first = world.call(ids=BLOCK)
    world.end(world.latest, tokens=10)
    second = world.call(ids=[*BLOCK, *range(30)])
    world.end(world.latest, tokens=10)
    third = world.call(ids=[*BLOCK, *range(90)])
    assert first.parents == ()
    assert second.parents == (first.node,)
    assert third.parents == (second.node,)


def test_a_prompt_that_only_begins_alike_is_nobodys_child(world: World) -> None:
    world.call(ids=[*BLOCK, 1, 2, 3])
    world.end(world.latest, tokens=100)
    assert world.call(ids=[*BLOCK, 4, 5, 6]).parents == ()
    assert world.call(ids=list(range(500, 600))).parents == ()


def test_prompts_of_another_program_are_nobodys_parents(world: World) -> None:
    world.call(ids=BLOCK)
    world.end(world.latest)
    assert world.call(program="q", ids=[*BLOCK, *range(30)]).parents == ()
    assert world.call(tenant="ann", ids=[*BLOCK, *range(30)]).parents == ()


def test_parents_that_are_told_win_over_prompts(world: World) -> None:
    plan = world.call("plan", ids=BLOCK)
    world.call(ids=BLOCK)
    world.end(world.latest)
    child = world.call(ids=[*BLOCK, *range(30)], parents=("plan",))
    assert child.parents == (plan.node,)


# Its end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "has_failed"),
    [("stop", False), ("length", False), ("abort", True), ("vanished", True)],
)
def test_an_end_is_told_with_its_tokens_and_whether_it_failed(
    world: World, how: str, *, has_failed: bool
) -> None:
    call = world.call("plan")
    world.end(world.latest, how, tokens=17)
    assert world.client.endings == [(world.hash(), call.node, 17, has_failed)]


def test_an_end_is_told_once(world: World) -> None:
    world.call("plan")
    asked, terms = world.live[world.latest]
    world.end(world.latest)
    world.watch.ended(world.latest, asked, terms)
    world.watch.ended("never seen", asked, terms)
    assert len(world.client.endings) == 1


def test_the_final_call_ends_the_program_once_no_call_of_it_is_live(world: World) -> None:
    world.call("plan")
    first = world.latest
    world.call("answer", final=True)
    assert world.client.told[-1].more["is_final"] is True
    world.end(world.latest)
    assert world.state("num_programs") == 1
    world.end(first)
    assert world.state("num_programs") == 0
    assert len(world.client.endings) == 2


def test_a_last_call_that_is_streamed_is_told_as_the_final_one(world: World) -> None:
    world.call("plan")
    world.end(world.latest)
    key = world.arrive(LatencySlo(1.0, 0.1), closes="p")
    assert key is not None
    last = world.client.told[-1]
    assert (last.program, last.more["is_final"]) == (world.hash(), True)
    world.end(key)
    assert world.client.endings[-1][1] == last.call.node
    assert world.state("num_programs") == 0


def test_a_program_that_its_client_ends_goes_with_its_last_call(world: World) -> None:
    world.call("plan")
    assert world.watch.closed(world.hash(), is_cancelled=False) == [world.latest]
    assert world.client.over == [(world.hash(), False)]
    assert (world.state("num_programs"), len(world.frames.programs)) == (1, 1)
    world.end(world.latest)
    assert (world.state("num_programs"), len(world.frames.programs)) == (0, 0)


def test_a_program_that_is_ended_between_two_calls_goes_at_once(world: World) -> None:
    world.call("plan")
    world.end(world.latest)
    assert world.watch.closed(world.hash(), is_cancelled=False) == []
    assert (world.state("num_programs"), len(world.frames.programs)) == (0, 0)
    # Its name may be used again.
    world.call("plan")
    assert world.state("num_programs") == 1


def test_the_end_of_a_program_that_nobody_knows_is_nothing(world: World) -> None:
    world.call("plan")
    assert world.watch.closed(world.hash("q"), is_cancelled=False) == []
    assert world.watch.closed(world.hash(tenant="ann"), is_cancelled=False) == []
    assert world.watch.closed(0, is_cancelled=True) == []
    assert world.state("num_programs") == 1
    assert world.client.over == []


# Cancelling ---------------------------------------------------------------------------------------


def test_cancelling_names_the_calls_that_are_live(world: World) -> None:
    world.call("a")
    first = world.latest
    world.call("b")
    world.end(world.latest)
    world.call("c")
    third = world.latest
    world.call("d", "q")
    keys = world.watch.closed(world.hash(), is_cancelled=True)
    assert sorted(keys) == sorted([first, third])
    assert world.client.over == [(world.hash(), True)]
    for key in keys:
        world.end(key, "abort")
    assert world.state("num_programs") == 1, "the other program's"


def test_calls_of_a_cancelled_program_are_refused_and_not_told(world: World) -> None:
    world.call("a")
    world.watch.closed(world.hash(), is_cancelled=True)
    num_told = len(world.client.told)
    assert world.arrive(CompoundSlo(60.0, "p", node="late")) is None
    assert world.arrive(LatencySlo(1, 1), closes="p") is None
    assert len(world.client.told) == num_told
    # Nobody else's.
    assert world.arrive(CompoundSlo(60.0, "q")) is not None
    assert world.arrive(CompoundSlo(60.0, "p"), tenant="ann") is not None
    assert world.arrive(BestEffortSlo(600)) is not None


def test_a_cancelled_program_that_has_not_arrived_yet_is_refused_when_it_does(
    world: World,
) -> None:
    assert world.watch.closed(world.hash(), is_cancelled=True) == []
    assert world.arrive(CompoundSlo(60.0, "p")) is None
    assert world.state("num_programs") == 0


def test_cancelling_twice_names_those_that_are_live_still(world: World) -> None:
    world.call("a")
    first = world.latest
    world.call("b")
    second = world.latest
    assert set(world.watch.closed(world.hash(), is_cancelled=True)) == {first, second}
    world.end(first, "abort")
    assert world.watch.closed(world.hash(), is_cancelled=True) == [second]
    world.end(second, "abort")
    assert world.watch.closed(world.hash(), is_cancelled=True) == []


def test_a_cancelled_id_may_be_used_again_after_the_timeout(world: World) -> None:
    # As in the HTTP process: or its calls would be let in there and refused here.
    world.call("a")
    world.watch.closed(world.hash(), is_cancelled=True)
    world.end(world.latest, "abort")
    world.clock.advance(TIMEOUT_S + 1)
    assert world.arrive(CompoundSlo(60.0, "p")) is not None


def test_of_very_many_that_were_cancelled_the_latest_are_refused(world: World, module: Any) -> None:
    for number in range(module.MAX_PROGRAMS + 1):
        world.watch.closed(world.hash(f"p{number}"), is_cancelled=True)
    assert world.arrive(CompoundSlo(60.0, f"p{module.MAX_PROGRAMS}")) is None
    assert world.arrive(CompoundSlo(60.0, "p0")) is not None


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_live", [False, True])
def test_programs_that_never_finish_are_bounded(
    module: Any, reasons: Any, *, is_live: bool
) -> None:
    world = World(module, reasons)
    asked = req([7] * 5)
    asked.finished_reason = reasons.FINISH_LENGTH(length=7)
    count = module.MAX_PROGRAMS + 50
    for number in range(count):
        terms = world.terms(CompoundSlo(60.0, f"p{number}"))
        assert world.watch.arrived(f"r{number}", asked, terms)
        if not is_live:
            world.watch.ended(f"r{number}", asked, terms)
    # One with a live call is never forgotten: they are as many as there are requests.
    assert world.state("num_programs") <= (count if is_live else module.MAX_PROGRAMS)
    # Those that are not known any more end without a word.
    world.watch.ended("r0", asked, world.terms(CompoundSlo(60.0, "p0")))


def test_a_program_that_goes_quiet_is_forgotten(world: World) -> None:
    world.call("a", "quiet")
    world.end(world.latest)
    world.clock.advance(TIMEOUT_S - 1)
    world.call("a", "other")
    assert world.state("num_programs") == 2
    world.clock.advance(1)
    world.call("b", "other")
    assert world.state("num_programs") == 1


def test_a_program_with_a_live_call_is_not_forgotten(world: World) -> None:
    call = world.call("a", "live")
    live = world.latest
    world.clock.advance(10 * TIMEOUT_S)
    world.call("a", "other")
    assert world.state("num_programs") == 2
    world.end(live)
    assert world.client.endings == [(world.hash("live"), call.node, 3, False)]


def test_the_timeout_counts_from_the_end_of_a_call(world: World) -> None:
    first = world.call(program="long", ids=BLOCK)
    world.clock.advance(2 * TIMEOUT_S)
    world.end(world.latest)
    world.clock.advance(1)
    world.call("a", "other")
    assert world.call(program="long", ids=[*BLOCK, *range(30)]).parents == (first.node,)


def test_a_clock_that_jumps_back_forgets_nobody(world: World) -> None:
    world.call("a", "p")
    world.end(world.latest)
    world.clock.advance(-500)
    world.call("a", "q")
    assert world.state("num_programs") == 2


# What is expected ---------------------------------------------------------------------------------


def outlook(world: World, program: str = "p", **fields: Any) -> Outlook:
    known = {"num_calls": 1, "stage": 0, "is_known": True} | fields
    return Outlook(world.hash(program), **known)


def test_an_outlook_reaches_the_frame_manager(world: World) -> None:
    world.call("a")
    found = outlook(
        world,
        calls=3.0,
        stages=2.0,
        input_tokens=100.0,
        output_tokens=50.0,
        stage_tokens=40.0,
        spread_tokens=15.0,
        tool_s=7.0,
        stage_due_s=START_S + 20,
        next_call_s=START_S + 30,
        next_input_tokens=60.0,
    )
    world.watch.take((found,))
    assert world.expected(
        world.latest, "future_in", "future_out", "future_stage", "future_spread", "future_tool_s"
    ) == [100, 50, 40, 15, 7]
    assert world.expected(world.latest, "stage_due_s", "next_call_s", "next_in") == [
        START_S + 20,
        START_S + 30,
        60,
    ]
    assert world.state("num_outlooks") == 1


def test_where_nothing_fits_what_was_expected_is_taken_back(world: World) -> None:
    world.call("a")
    world.watch.take((outlook(world, output_tokens=50.0, stage_due_s=START_S + 1),))
    # What else it says, says nothing.
    world.watch.take((outlook(world, is_known=False, output_tokens=9.0, stage_due_s=START_S),))
    assert world.expected(world.latest, "future_out", "stage_due_s", "is_open") == [0, math.inf, 1]


def test_the_latest_of_several_outlooks_counts(world: World) -> None:
    world.call("a")
    found = (outlook(world, output_tokens=50.0), outlook(world, output_tokens=70.0, num_calls=2))
    world.watch.take(found)
    assert world.expected(world.latest, "future_out") == [70]


def test_switched_off_the_manager_is_left_to_itself(world: World) -> None:
    world.call("a")
    world.watch.use(is_used=False)
    world.watch.take((outlook(world, output_tokens=50.0),))
    assert world.expected(world.latest, "future_out") == [0]
    assert world.state("is_used") is False
    world.end(world.latest)
    assert len(world.client.endings) == 1, "the graphs process learns in any case"
    world.watch.use(is_used=True)
    world.call("b")
    world.watch.take((outlook(world, num_calls=2, output_tokens=50.0),))
    assert world.expected(world.latest, "future_out") == [50]


def test_an_outlook_from_before_the_latest_call_is_not_used(world: World) -> None:
    world.call("a")
    world.call("b")
    world.watch.take((outlook(world, num_calls=1, output_tokens=50.0, stage_due_s=1.0),))
    assert world.expected(world.latest, "future_out") == [0]
    world.watch.take((outlook(world, num_calls=2, output_tokens=60.0),))
    assert world.expected(world.latest, "future_out") == [60]


def test_an_outlook_on_a_program_that_is_gone_is_let_go(world: World) -> None:
    world.call("a", final=True)
    world.end(world.latest)
    world.watch.take((outlook(world, output_tokens=50.0), outlook(world, "never seen")))
    assert world.state("num_outlooks") == 0
    world.call("a")
    assert world.expected(world.latest, "future_out") == [0]


def test_an_outlook_reaches_the_program_of_its_own_tenant(world: World) -> None:
    world.call("a", tenant="ann")
    world.call("a")
    anns = next(key for key, (_, terms) in world.live.items() if terms.tenant == "ann")
    world.watch.take((outlook(world, output_tokens=50.0),))
    assert world.expected(world.latest, "future_out") == [50]
    assert world.expected(anns, "future_out") == [0]


# The client ---------------------------------------------------------------------------------------


def test_what_work_costs_is_told_in_numbers(world: World) -> None:
    world.client.outlooks = (outlook(world),)
    assert world.watch.listen() == (outlook(world),)
    world.call("a")
    world.frames.started(world.latest, START_S)
    world.watch.listen()
    assert len(world.client.paces) == 2
    for pace in world.client.paces:
        check_pace(pace)


def test_without_a_graphs_process_programs_are_known_all_the_same(
    module: Any, reasons: Any
) -> None:
    world = World(module, reasons, has_client=False)
    key = world.arrive(CompoundSlo(60.0, "p"))
    assert key is not None
    assert world.watch.listen() == ()
    world.watch.take(())
    state = world.watch.state()
    assert (state["is_alive"], state["num_programs"], state["num_live"]) == (False, 1, 1)
    assert world.watch.closed(world.hash(), is_cancelled=True) == [key]
    world.end(key, "abort")
    assert world.arrive(CompoundSlo(60.0, "p")) is None
    assert world.state("num_programs") == 0


def test_whoever_looks_sees_how_many_programs_are_live(world: World) -> None:
    world.call("a", "p")
    world.call("a", "q")
    world.end(world.latest)
    state = world.watch.state()
    assert (state["num_programs"], state["num_live"], state["is_alive"]) == (2, 1, True)
    assert state["channel"] == {"open": 1}


def test_a_call_that_only_fills_the_prefix_cache_is_no_part_of_the_program(world: World) -> None:
    slo = CompoundSlo(60.0, "p", node="fork prefix#1")
    key = world.arrive(slo, max_new_tokens=0)
    assert key is not None
    world.end(key)
    assert (world.client.told, world.client.endings) == ([], [])
    # By its name alone a call is not passed over.
    assert world.arrive(slo, max_new_tokens=10) is not None
    assert len(world.client.told) == 1


# Anything in any order ----------------------------------------------------------------------------

NAMES = st.sampled_from(["", "a", "b", "a#1", "#"])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "final", "stream", "end", "close", "cancel", "outlook", "clock"]),
        st.integers(0, 3),
        NAMES,
        st.integers(0, 90),
    ),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(operations=OPERATIONS)
def test_whatever_happens_each_node_begins_and_ends_once(
    module: Any, reasons: Any, operations: list[tuple[str, int, str, int]]
) -> None:
    world = World(module, reasons)
    for what, number, name, amount in operations:
        program = f"p{number}"
        if what in ("call", "final"):
            slo = CompoundSlo(60.0, program, (name,) * bool(name), name, final=what == "final")
            world.arrive(slo, [*BLOCK, *range(amount)])
        elif what == "stream":
            world.arrive(LatencySlo(1, 1), closes=program)
        elif what == "end" and world.live:
            world.end(sorted(world.live)[amount % len(world.live)], tokens=amount)
        elif what in ("close", "cancel"):
            keys = world.watch.closed(world.hash(program), is_cancelled=what == "cancel")
            assert set(keys) <= set(world.live)
        elif what == "outlook":
            known = outlook(world, program, is_known=amount > 9, tool_s=float(amount))
            world.watch.take((known,))
        elif what == "clock":
            world.clock.advance(amount - 20)
        assert world.state("num_live") <= world.state("num_programs") <= 4
    for key in list(world.live):
        world.end(key)
    assert world.client.live == set()
    assert len(world.client.told) == len(world.client.endings)
    assert world.state("num_live") == 0
    assert list(world.frames.live()) == []


def test_once_the_graphs_process_is_silent_what_it_said_is_taken_back(world: World) -> None:
    world.call("a")
    world.watch.take(world.watch.listen())
    world.watch.take((outlook(world, output_tokens=50.0),))
    assert world.expected(world.latest, "future_out") == [50]
    world.client.alive = False
    world.watch.take(world.watch.listen())
    assert world.expected(world.latest, "future_out") == [0]
    assert world.watch.listen() == ()


def test_all_ranks_decide_by_the_time_that_they_are_given(module: Any, reasons: Any) -> None:
    world = World(module, reasons)
    world.watch.closed(world.hash(), is_cancelled=True)
    assert world.arrive(CompoundSlo(60.0, "p")) is None
    world.clock.advance(TIMEOUT_S)
    assert world.arrive(CompoundSlo(60.0, "p")) is not None
