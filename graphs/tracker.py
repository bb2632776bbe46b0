"""Programs that run: their graphs, what they match, and what is learnt once they are over.

Pure: events and times come in, outlooks go out. Bounded: of too many programs those that have
been quiet the longest are forgotten, unlearnt.
"""

from collections import Counter, OrderedDict
from typing import assert_never

from core.programs import DEFAULT_TIMEOUT_S
from graphs.amortise import Amortisation, stage_due_s
from graphs.matcher import Match, Remaining
from graphs.protocol import Arrived, Closed, Event, Finished, Outlook
from graphs.request_graph import RequestGraph
from graphs.shape import MAX_STAGES, Pace, StageShape
from graphs.store import PatternStore

MAX_PROGRAMS = 10_000
MAX_CALLS = 200_000
"""Calls of all running programs together."""
MAX_MATCHES = 2000
"""Programs whose scores are kept; those of others are computed again when something happens."""
MAX_HABITS = 4096
SAME_TIME_S = 1e-3
MAX_RESCORED = 16
"""A program whose stages keep changing behind it is not matched any more."""
MAX_PEERS = 16
"""Scheduler processes that one program has calls in."""
LOST_FACTOR = 10.0
"""So many time-outs after the last news the end of a call is taken to be lost."""


class _Habit:
    """How the programs of one application end."""

    __slots__ = ("num_quiet", "num_told")

    def __init__(self) -> None:
        self.num_told = self.num_quiet = 0

    @property
    def tells(self) -> bool:
        """Whether one that only goes quiet has most likely not been finished."""
        return self.num_told > self.num_quiet


class Running:
    """One program that runs."""

    __slots__ = (
        "application",
        "deadline_at_s",
        "done_s",
        "graph",
        "heard_s",
        "is_closed",
        "is_final",
        "is_partial",
        "is_wrong",
        "match",
        "num_rescored",
        "opened_s",
        "pace",
        "peers",
        "tenant",
    )

    def __init__(self, arrived: Arrived, pace: Pace) -> None:
        self.application, self.tenant = arrived.application, arrived.tenant
        self.opened_s, self.deadline_at_s = arrived.opened_s, arrived.deadline_at_s
        self.graph = RequestGraph()
        self.match: Match | None = None
        self.done_s = 0.0
        """Execution time of the stages that ``match`` has counted."""
        self.pace = pace
        self.heard_s = 0.0
        self.is_final = False
        """Its last stage has begun."""
        self.is_closed = False
        """Its client has said that it is over: what is live goes on."""
        self.num_rescored = 0
        self.is_partial = not _is_first(arrived)
        """Its beginning is not known: nothing can be told of it or learnt from it."""
        self.is_wrong = False
        """A stage has changed that ``match`` has counted."""
        self.peers: dict[bytes, int] = {}
        """Who has told of it lately, and how many calls each has told of."""

    def heard(self, peer: bytes, pace: Pace, now_s: float) -> None:
        """Something was told of it."""
        self.heard_s, self.pace = now_s, pace
        self.peers[peer] = self.peers.pop(peer, 0)
        while len(self.peers) > MAX_PEERS:
            del self.peers[next(iter(self.peers))]


class Tracker:
    """All running programs against one store.

    Args:
        timeout_s: a program of which nothing is heard for so long, while none of its calls is
            live, is over.
    """

    def __init__(
        self,
        store: PatternStore,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        how: Amortisation = Amortisation.ACCUMULATED,
        max_programs: int = MAX_PROGRAMS,
    ) -> None:
        self.store = store
        self._timeout_s = timeout_s
        self._how = how
        self._max_programs = max_programs
        self._running: OrderedDict[int, Running] = OrderedDict()
        """The longest quiet first."""
        self._matched: OrderedDict[int, None] = OrderedDict()
        self._habits: OrderedDict[int, _Habit] = OrderedDict()
        self._changed: dict[int, None] = {}
        self._num_calls = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def get(self, program: int) -> Running | None:
        """A running program."""
        return self._running.get(program)

    # Events.

    def take(self, event: Event, pace: Pace, now_s: float, peer: bytes = b"") -> None:
        """Something has happened, and ``peer`` wants to know what follows from it."""
        self.counters["events"] += 1
        running = self._running.get(event.program)
        if isinstance(event, Arrived) and (running is None or _begins_anew(running, event)):
            running = self._open(event, pace)
        if running is None:
            self.counters["unknown_programs"] += 1
            return
        self._running.move_to_end(event.program)
        running.heard(peer, pace, now_s)
        match event:
            case Arrived():
                self._arrived(running, event, peer)
            case Finished():
                self._finished(running, event, now_s)
            case Closed(is_cancelled=is_cancelled):
                running.is_closed = running.is_final = True
                if is_cancelled or not running.graph.num_live:
                    self._close(event.program, now_s, is_told=True, is_over=not is_cancelled)
            case _:
                assert_never(event)
        if event.program in self._running:
            self._changed[event.program] = None

    def outlooks(self) -> list[tuple[Running, Outlook]]:
        """The newest outlook of each program that something has happened to since the last call."""
        changed, self._changed = self._changed, {}
        found = []
        for program in changed:
            running = self._running.get(program)
            if running is not None:
                found.append((running, self._outlook(program, running)))
        return found

    def expire(self, now_s: float) -> None:
        """Close what has been quiet for too long; drop what is too much."""
        while self._num_calls > MAX_CALLS:
            # One id for everything that somebody asks must not drive out all others.
            largest = max(self._running, key=lambda name: self._running[name].graph.num_calls)
            self._drop(largest, now_s)
        while len(self._running) > self._max_programs:
            self._drop(next(iter(self._running)), now_s)
        if self._running and next(reversed(self._running.values())).heard_s > now_s:
            # A clock that has jumped back is no reason to wait for ever.
            for running in self._running.values():
                running.heard_s = min(running.heard_s, now_s)
        for program, running in list(self._running.items()):
            quiet_s = now_s - running.heard_s
            if quiet_s < self._timeout_s:
                return
            if running.graph.num_live and quiet_s < LOST_FACTOR * self._timeout_s:
                continue
            self.counters["quiet"] += 1
            self._close(program, now_s, is_told=False, is_over=True)

    def _drop(self, program: int, now_s: float) -> None:
        self.counters["dropped"] += 1
        self._close(program, now_s, is_told=False, is_over=False)

    def _open(self, arrived: Arrived, pace: Pace) -> Running:
        before = self._running.get(arrived.program)
        if before is not None:
            self._num_calls -= before.graph.num_calls
            self.counters["unlearnt"] += 1
        running = self._running[arrived.program] = Running(arrived, pace)
        self.counters["opened"] += 1
        self.counters["partial"] += running.is_partial
        return running

    def _arrived(self, running: Running, event: Arrived, peer: bytes) -> None:
        if running.graph.knows(event.call.node):
            # Said again by a client that was not sure.
            self.counters["repeated"] += 1
            return
        # A sender whose calls have a gap: what lies in it has got lost.
        running.is_partial |= event.place != running.peers[peer]
        running.peers[peer] = event.place + 1
        self._num_calls += 1
        stage = running.graph.arrived(event.call)
        running.is_final |= event.is_final
        if running.match is not None and stage < running.match.num_stages:
            running.is_wrong = True

    def _finished(self, running: Running, event: Finished, now_s: float) -> None:
        graph = running.graph
        stage = graph.ended(
            event.node,
            event.output_tokens,
            event.at_s,
            has_failed=event.has_failed,
            cached_tokens=event.cached_tokens,
        )
        if event.has_failed and not running.is_closed:
            # If it was to be the last, another one may follow.
            running.is_final = False
        if stage < 0:
            self.counters["unknown_calls"] += 1
        elif running.is_final and not graph.num_live:
            self._close(event.program, now_s, is_told=True, is_over=True)

    # Ends.

    def _close(self, program: int, now_s: float, *, is_told: bool, is_over: bool) -> None:
        """A program is over; learn from it if it came to its end."""
        running = self._running.pop(program)
        self._matched.pop(program, None)
        self._changed.pop(program, None)
        self._num_calls -= running.graph.num_calls
        graph = running.graph
        is_good = is_over and not graph.has_failed and not graph.num_live
        if not is_good or running.is_partial or not graph.num_stages:
            self.counters["unlearnt"] += 1
            return
        habit = self._habit_of(running.application)
        habit.num_told += is_told
        habit.num_quiet += not is_told
        if not is_told and habit.tells:
            # Its kind says when it is over: most likely its client has gone away.
            self.counters["unlearnt"] += 1
            return
        if running.match is not None and running.match.pack is self.store.pack:
            self.store.used(running.match.best(), now_s)
        self.store.add(graph.shape(running.application, running.tenant), now_s)
        self.counters["learnt"] += 1

    def _habit_of(self, application: int) -> _Habit:
        habit = self._habits.get(application)
        if habit is None:
            habit = self._habits[application] = _Habit()
        self._habits.move_to_end(application)
        while len(self._habits) > MAX_HABITS:
            self._habits.popitem(last=False)
        return habit

    # Matching.

    def _outlook(self, program: int, running: Running) -> Outlook:
        graph = running.graph
        is_lost = running.is_partial or running.num_rescored > MAX_RESCORED
        if is_lost or graph.num_stages >= MAX_STAGES:
            return Outlook(program, graph.num_calls, graph.num_stages - 1, is_known=False)
        match = self._matched_up(program, running)
        stage = match.num_stages
        is_between = stage == graph.num_stages
        opened = graph.stage(min(stage, graph.num_stages - 1))
        remaining: Remaining | None = None
        if not running.is_final:
            remaining = match.outlook(running.pace, None if is_between else opened)
        if remaining is None:
            # Of its last stage everything is known: nothing follows.
            due_s = running.deadline_at_s if running.is_final else None
            return Outlook(
                program,
                graph.num_calls,
                min(stage, graph.num_stages - 1),
                running.is_final,
                stage_due_s=due_s,
            )
        ahead = [graph.stage(index) for index in range(stage + 1, graph.num_stages)]
        calls = remaining.calls - sum(one.num_calls for one in ahead)
        input_tokens = remaining.input_tokens - sum(one.input_tokens for one in ahead)
        output_tokens = remaining.output_tokens - sum(one.output_tokens for one in ahead)
        return Outlook(
            program,
            graph.num_calls,
            min(stage, graph.num_stages - 1),
            is_known=True,
            # Where branches differ in depth, calls of later stages may have arrived already.
            calls=max(calls, 0.0) + remaining.missing_calls,
            stages=max(remaining.stages - len(ahead), 0.0),
            input_tokens=max(input_tokens, 0.0) + remaining.missing_input_tokens,
            output_tokens=max(output_tokens, 0.0) + remaining.missing_output_tokens,
            stage_tokens=remaining.longest_tokens,
            spread_tokens=remaining.spread_tokens,
            tool_s=max(remaining.tool_s - sum(one.tool_s for one in ahead), 0.0),
            stage_due_s=None if is_between else self._due_s(running, stage, opened, remaining),
            next_call_s=_next_call_s(graph, remaining) if is_between else None,
            next_input_tokens=remaining.next_input_tokens if is_between else 0.0,
            new_tokens=max(remaining.new_tokens - sum(one.filled_tokens for one in ahead), 0.0),
        )

    def _matched_up(self, program: int, running: Running) -> Match:
        """The match of a program, up to the first stage that has a live call."""
        match = running.match
        if match is None or match.pack is not self.store.pack or running.is_wrong:
            match = running.match = Match(self.store.pack, running.application, running.tenant)
            running.num_rescored += running.is_wrong
            running.done_s, running.is_wrong = 0.0, False
        self._matched[program] = None
        self._matched.move_to_end(program)
        while len(self._matched) > MAX_MATCHES:
            old = self._running.get(self._matched.popitem(last=False)[0])
            if old is not None:
                old.match = None
        graph = running.graph
        while match.num_stages < graph.num_stages and not graph.num_live_in(match.num_stages):
            stage = graph.stage(match.num_stages)
            running.done_s += stage.time_s(running.pace)
            match.close_stage(stage)
        return match

    def _due_s(
        self, running: Running, stage: int, opened: StageShape, remaining: Remaining
    ) -> float:
        return stage_due_s(
            self._how,
            opened_s=running.opened_s,
            deadline_at_s=running.deadline_at_s,
            started_s=running.graph.started_s(stage),
            # The tools before it have run: what is shared out from its first call on is the rest.
            before_s=running.done_s + opened.tool_s,
            stage_s=remaining.stage_s,
            later_s=remaining.later_s,
        )


def _begins_anew(running: Running, arrived: Arrived) -> bool:
    """A program known from its middle on is told from its beginning: after a restart."""
    return running.is_partial and _is_first(arrived)


def _is_first(arrived: Arrived) -> bool:
    """Whether it is a program's first call: of several senders each has a first of its own."""
    return arrived.place == 0 and arrived.call.at_s <= arrived.opened_s + SAME_TIME_S


def _next_call_s(graph: RequestGraph, remaining: Remaining) -> float | None:
    if remaining.stages < 0.5:
        return None
    return graph.ended_s(graph.num_stages - 1) + remaining.next_tool_s
