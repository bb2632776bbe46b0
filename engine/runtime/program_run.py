"""One run of a program: names for its calls, which of them needed which, and when it is over.

Nothing here is SGLang's but the *states* handed in: its ``StreamExecutor``s, one for the program
and one for each fork. Where a state stands (``Place``) travels with the ``backend`` attribute of
that state, because a fork is given the backend of the state it leaves: it begins where that
state stood at that moment, without anybody being told of the fork.
"""

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from core.terms import MAX_NAME_CHARS, MAX_PARENTS, is_text

logger = logging.getLogger(__name__)

ROOT = ""
"""The key of a program's first state; those of forks are their ids."""
MAX_ROLE_CHARS = MAX_NAME_CHARS - 16
"""Leaves room for ``#`` and a number."""
LIVENESS_CHECK_S = 1.0
"""How often somebody who waits for a state looks whether its thread still lives."""


class CallError(RuntimeError):
    """A call failed: the server refused it or gave it up, or could not be asked.

    Attributes:
        status: of HTTP: 400 for a bad field, 409 in a program that was cancelled, 503 for a
            drop. None where the server has not spoken.
        code: the server's word for it, such as ``program_cancelled`` or why a call was dropped.
        field: the field that a 400 complains of.
    """

    def __init__(self, status: int | None, content: Any) -> None:
        super().__init__(status, content)
        error = content.get("error", content) if isinstance(content, dict) else content
        details = error if isinstance(error, dict) else {"message": error}
        self.status = status
        self.code = str(details.get("code") or status or "")
        self.field: str | None = details.get("param")
        self._message = str(details.get("message", details))

    def __str__(self) -> str:
        return self._message if self.status is None else f"{self.status}: {self._message}"

    def again(self) -> "CallError":
        """The same for raising: what was raised holds on to the frames that it came through.

        Frames hold states, and the thread of a state that somebody holds does not end.
        """
        error = CallError(*self.args)
        error.__cause__ = self.__cause__
        return error


@dataclass(frozen=True)
class Place:
    """Where a state stands between two calls."""

    key: str = ROOT
    """The state that came here by calling; a fork that has not called yet is not that state."""
    needs: tuple[str, ...] = ()
    """The calls whose answers the next call from here will have needed."""
    tools: tuple[str, ...] = ()
    """The tools that ran since."""
    error: CallError | None = None
    """Why there is no next call."""


class Lineage:
    """The calls of a program and what each of them needed."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, ...]] = {}
        self._depth: dict[str, int] = {}
        self._times: Counter[str] = Counter()

    def add(self, name: str, parents: tuple[str, ...]) -> str:
        """The node of a new call: ``name`` the first time, then ``name#2``, ``name#3``."""
        role = role_of(name)
        self._times[role] += 1
        node = role if self._times[role] == 1 else f"{role}#{self._times[role]}"
        self._parents[node] = parents
        self._depth[node] = 1 + max((self._depth[parent] for parent in parents), default=0)
        return node

    def nearest(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """``nodes`` without those that another of them already needed, each once, in order."""
        kept = tuple(dict.fromkeys(nodes))
        if len(kept) < 2:
            return kept
        # Nothing above the highest of them can be one of them.
        top = min(self._depth[node] for node in kept)
        passed: set[str] = set()
        ahead = [parent for node in kept for parent in self._parents[node]]
        while ahead:
            node = ahead.pop()
            if node not in passed and self._depth[node] >= top:
                passed.add(node)
                ahead.extend(self._parents[node])
        return tuple(node for node in kept if node not in passed)


def role_of(name: str) -> str:
    """What calls of one kind are called: the name up to ``#``, within the server's bounds."""
    role = name.split("#")[0][:MAX_ROLE_CHARS]
    return (role if is_text(role) else role.encode("utf-8", "replace").decode()) or "call"


@dataclass(eq=False)
class _Track:
    """What a run remembers of one of its states."""

    executor: "weakref.ref[Any] | None" = None
    place: Place = Place()
    has_ended: bool = False
    """SGLang has told its thread to end after what is still queued."""
    answered: tuple[str, ...] = ()
    """Its last call that is answered, until the state that it was forked from needs it."""
    source: "_Track | None" = None
    """The state it was forked from."""
    forks: list["_Track"] = field(default_factory=list)
    """Its forks that have called and were not joined."""


class ProgramRun:
    """One run. Its forks call from threads of their own, so all of it may be used by several.

    Args:
        fields: goes with every call: the program's id, its deadline, and so on.
        close: tells the server that the program is over; gets ``"end"`` or ``"cancel"`` and
            returns what the run's outcome is. It must not raise.
    """

    def __init__(self, fields: dict[str, Any], close: Callable[[str], Any]) -> None:
        self._fields = fields
        self._close = close
        # Reentrant: the collector may end a forgotten state of this very run at any moment.
        self._lock = threading.RLock()
        self._lineage = Lineage()
        self._tracks: dict[str, _Track] = {}
        self._has_ended = False
        self._is_closed = False
        self._raised = ""
        self._num_calls = 0
        self.outcome: Future[Any] = Future()
        """Set when the server has been told."""

    def begin_call(self, state: Any, name: str, *, has_answer: bool = True) -> dict[str, Any]:
        """The body fields of a call that ``state`` is about to make.

        Without an answer (SGLang has the text before a fork computed, or not, as its threads
        happen to run) it is a call of the program, but none that a later call needs.

        Raises:
            CallError: the state, or one that it was forked from, has failed; or the program has.
        """
        with self._lock:
            place: Place = state.backend.place
            self._check(place)
            key = key_of(state)
            track = self._tracks.setdefault(key, _Track())
            track.executor = weakref.ref(state)
            if place.key != key:  # a fork's first call
                track.source = self._tracks.setdefault(place.key, _Track())
                track.source.forks.append(track)
            needs = [*place.needs, *_answered_by_forks(track)]
            parents = self._lineage.nearest(needs)[-MAX_PARENTS:]
            node = self._lineage.add(name, parents)
            is_answer = Place(key, (node,))
            self._move(state, is_answer if has_answer else replace(place, key=key, needs=parents))
            self._num_calls += 1
            if self._is_closed:  # A fork that outlives its program has gone on.
                self._is_closed, self.outcome = False, Future()
                self._finish_beside()
        call = {**self._fields, "node": node, "parents": list(parents)}
        tools = place.tools if has_answer else ()
        return {**call, "tools_run": list(tools[-MAX_PARENTS:])} if tools else call

    def end_call(self, state: Any) -> None:
        """The call of ``state`` is answered."""
        with self._lock:
            if key_of(state) in self._tracks:
                self._tracks[key_of(state)].answered = state.backend.place.needs

    def tool_ran(self, state: Any, name: str) -> None:
        """A tool ran after the last call of ``state``."""
        with self._lock:
            place: Place = state.backend.place
            self._move(state, replace(place, tools=(*place.tools, name)))

    def fail(self, state: Any, error: CallError) -> None:
        """A call of ``state`` has failed: it and what is forked from it make no more."""
        with self._lock:
            place: Place = state.backend.place
            if place.error is None:
                self._move(state, replace(place, error=error))

    def join(self, state: Any, fork: Any) -> None:
        """``state`` has got the answers of ``fork``, which is done.

        Raises:
            CallError: a call of the fork has failed.
        """
        with self._lock:
            place: Place = state.backend.place
            answered: Place = fork.backend.place
            joined = self._tracks.pop(fork.sid, _Track())
            if joined.source is not None and joined in joined.source.forks:
                joined.source.forks.remove(joined)
            needs = [*place.needs, *answered.needs, *_answered_by_forks(joined)]
            self._move(state, replace(place, needs=self._lineage.nearest(needs)))
        if answered.error is not None:
            raise answered.error.again()

    def meet(self, state: Any) -> None:
        """SGLang lets go of a state; the program is over only when the state is done.

        Takes no lock: the collector calls it, from any thread.
        """
        track = self._tracks.setdefault(key_of(state), _Track(place=state.backend.place))
        track.executor, track.has_ended = weakref.ref(state), True

    def end(self, state: Any, raised: BaseException | None) -> None:
        """The program's function has returned, or ``raised``; its calls may still be going on."""
        if not self._has_ended:
            self.meet(state)
            self._has_ended, self._raised = True, "" if raised is None else repr(raised)
            self._finish_beside()

    def _check(self, place: Place) -> None:
        if place.error is not None:
            raise place.error.again()
        if self._raised:
            raise CallError(None, f"not called: the program has ended with {self._raised}")

    def _move(self, state: Any, place: Place) -> None:
        state.backend = state.backend.at(place)
        if key_of(state) in self._tracks:
            self._tracks[key_of(state)].place = place

    def _finish_beside(self) -> None:
        # No daemon: a script that ends with its program still tells the server.
        closer = threading.Thread(target=self._finish, name="program-end")
        try:
            closer.start()
        except RuntimeError as error:  # too many threads, or the interpreter is going down
            logger.warning("program_left_open program_id=%s error=%r", self.program_id, error)
            self.outcome.set_result(None)

    @property
    def program_id(self) -> str:
        """What the server knows the run by."""
        return str(self._fields["program_id"])

    def _finish(self) -> None:
        """Wait for the last answer, unless the program has failed, and tell the server."""
        if self._raised:
            self._let_go()
        else:
            self._drain()
        with self._lock:
            self._is_closed = True
            outcome, has_called = self.outcome, self._num_calls > 0
            root = self._tracks.get(ROOT, _Track())
            has_failed = bool(self._raised) or root.place.error is not None
        result = self._close("cancel" if has_failed else "end") if has_called else None
        outcome.set_result(result)

    def _let_go(self) -> None:
        """End the threads of all forks: who holds the exception holds them, perhaps for ever."""
        for track in list(self._tracks.values()):
            executor = track.executor() if track.executor is not None else None
            if executor is not None and not track.has_ended:
                executor.end()

    def _drain(self) -> None:
        waited: set[str] = set()
        # Who is waited for may fork meanwhile.
        while ahead := [key for key in list(self._tracks) if key not in waited]:
            for key in ahead:
                track = self._tracks.get(key, _Track())
                executor = track.executor() if track.executor is not None else None
                if executor is not None:
                    wait_until_done(executor, has_ended=track.has_ended)
                waited.add(key)


def _answered_by_forks(track: _Track) -> list[str]:
    """What a state's forks have answered that were not joined, each answer once.

    A program may read what its forks answered without joining them, and nobody sees it read;
    but what is answered by the state's next call it can have waited for.
    """
    nodes: list[str] = []
    for fork in track.forks:
        nodes += [*fork.answered, *_answered_by_forks(fork)]
        fork.answered = ()
    return nodes


def key_of(state: Any) -> str:
    """Of the program's first state or of a fork."""
    return ROOT if state.fork_start_text_pos is None else str(state.sid)


def wait_until_done(state: Any, *, has_ended: bool) -> None:
    """Return when everything that was asked of ``state`` is done, or its thread has died."""
    if not state.use_thread:
        return
    if has_ended:
        state.worker.join()
    done = state.queue.all_tasks_done
    while state.worker.is_alive():
        with done:
            if done.wait_for(lambda: state.queue.unfinished_tasks == 0, LIVENESS_CHECK_S):
                return
