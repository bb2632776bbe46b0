"""Running programs: what their calls have got so far and what is still to come."""

import math

import msgspec
import numpy as np

from core.programs import DEFAULT_TIMEOUT_S
from core.slo import CompoundSlo, RequestTerms
from scheduler.table import Floats, Ints, clip


class ProgramOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a pattern match expects after the calls that are live now. All of it may be 0."""

    future_input_tokens: float = 0.0
    """Input tokens of the calls still to come."""
    future_output_tokens: float = 0.0
    future_stage_tokens: float = 0.0
    """Output tokens of the longest call of each stage still to come, added up."""
    future_spread_tokens: float = 0.0
    """Standard deviation of ``future_stage_tokens``: how sure that is; 0: certain."""
    future_tool_s: float = 0.0
    """Tool time before those stages, added up."""
    future_new_tokens: float | None = None
    """Of the input still to come what will not be in the prefix cache; None: all of it."""
    next_call_s: float | None = None
    """Absolute: when the next stage is expected to begin, between two stages."""
    next_input_tokens: float = 0.0
    """Input tokens of that stage's calls."""
    stage_due_s: float | None = None
    """Absolute sub-deadline of the current stage: for urgency, never a hard rule."""


MAX_STAGES = 256.0
"""Most stages that a program is taken to have still to come."""
_MIN_ALLOWANCE_S = 0.1
"""A program given less time cannot be meant: how many stages it has says nothing of others."""
MAX_TENANTS = 4096
_MAX_ALLOWANCE_S = 1e6
"""More time than this is no deadline."""
_AMOUNTS = (
    "future_in",
    "future_out",
    "future_stage",
    "future_spread",
    "future_tool_s",
    "future_new",
)
_RECENT_PROGRAMS = 64.0
"""Closed programs that the relation of stages to time is learnt from, about."""


class _Seen:
    """Stages and time of the programs that one tenant has finished lately."""

    __slots__ = ("allowance_s", "stages")

    def __init__(self) -> None:
        self.stages = self.allowance_s = 0.0

    def add(self, stages: float, allowance_s: float) -> None:
        self.stages += stages - self.stages / _RECENT_PROGRAMS
        self.allowance_s += allowance_s - self.allowance_s / _RECENT_PROGRAMS

    @property
    def stages_per_s(self) -> float:
        return self.stages / self.allowance_s if self.allowance_s > 0 else 0.0


class Programs:
    """Programs by tenant and id, as indices into columns.

    A program without a live call is kept, since its next one may come after a tool call, for
    ``timeout_s``; of those the longest idle are forgotten above ``max_idle``, and a closed one
    at once.
    """

    _FIELDS = (
        "service",
        "done_in",
        "done_out",
        "future_in",
        "future_out",
        "future_stage",
        "future_spread",
        "future_tool_s",
        "future_new",
        "next_call_s",
        "next_in",
        "stage_due_s",
        "stages",
        "is_open",
        "allowance_s",
        "stages_per_s",
    )

    def __init__(self, max_idle: int = 10_000, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._max_idle = max_idle
        self._timeout_s = timeout_s
        self._index: dict[tuple[str, str], int] = {}
        self._keys: list[tuple[str, str]] = []
        self._live: list[int] = []
        self._free: list[int] = []
        self._idle: dict[tuple[str, str], float] = {}
        """Programs without a live call by when the last one ended, the longest idle first."""
        self._closed: dict[int, bool] = {}
        """Programs whose stages are all known, and whether their client has said so for good."""
        self._seen: dict[str, _Seen] = {}
        """What the programs of each tenant were like; the longest unused first."""
        self._columns: dict[str, Floats] = {name: np.zeros(16) for name in self._FIELDS}

    def __len__(self) -> int:
        return len(self._index)

    def join(
        self, tenant: str, program_id: str, *, is_final: bool, allowance_s: float = math.inf
    ) -> int:
        """A call arrived; the program's index.

        Args:
            is_final: no stage follows this call's.
            allowance_s: from now to the program's deadline; counts with its first call.
        """
        key = (tenant, program_id)
        index = self._index.get(key)
        if index is None:
            index = self._new(key)
            is_known = _MIN_ALLOWANCE_S <= allowance_s < _MAX_ALLOWANCE_S
            known_s = allowance_s if is_known else 0.0
            self._columns["allowance_s"][index] = known_s
        self._idle.pop(key, None)
        stages = self._columns["stages"]
        if self._live[index] == 0:
            stages[index] += 1
            # What was said of the stage before is no news of this one.
            self._columns["stage_due_s"][index] = math.inf
        self._live[index] += 1
        seen = self._seen.get(tenant)
        # One tenant's programs say nothing of another's.
        self._columns["stages_per_s"][index] = 0.0 if seen is None else seen.stages_per_s
        self._columns["next_call_s"][index] = math.inf
        if is_final:
            self._close(index, is_told=False)
        return index

    def is_first_call(self, index: int) -> bool:
        """Whether the call that came last is all that the program has had so far."""
        return self._live[index] == 1 and bool(self._columns["stages"][index] == 1.0)

    def close(self, tenant: str, program_id: str, *, is_cancelled: bool = False) -> None:
        """No call of it will follow; ignored for a program that is not known.

        Args:
            is_cancelled: it has not come to its end, and says nothing of others.
        """
        index = self._index.get((tenant, program_id))
        if index is None:
            return
        self._close(index, is_told=True)
        if self._live[index] == 0:
            if not is_cancelled:
                self._learn(index)
            self._forget((tenant, program_id))
        elif is_cancelled:
            self._columns["allowance_s"][index] = 0.0

    def expire(self, now_s: float) -> None:
        """Forget programs that have been idle for too long. A clock may have jumped back."""
        while self._idle:
            key, since_s = next(iter(self._idle.items()))
            if now_s - since_s < self._timeout_s:
                return
            self._forget(key)

    def _close(self, index: int, *, is_told: bool) -> None:
        """Its stages are all known."""
        self._closed[index] = self._closed.get(index, False) or is_told
        for name in ("is_open", "next_in", *_AMOUNTS):
            self._columns[name][index] = 0.0
        self._columns["next_call_s"][index] = math.inf

    def _learn(self, index: int) -> None:
        """How many stages come in how much time: a program has come to its end."""
        allowance_s = float(self._columns["allowance_s"][index])
        if allowance_s <= 0:
            return
        tenant = self._keys[index][0]
        seen = self._seen.pop(tenant, None) or _Seen()
        self._seen[tenant] = seen
        seen.add(float(self._columns["stages"][index]), allowance_s)
        while len(self._seen) > MAX_TENANTS:
            del self._seen[next(iter(self._seen))]

    def enter(self, terms: RequestTerms) -> int:
        """The index of the program that a request is a call of; -1 for none."""
        slo = terms.slo
        if isinstance(slo, CompoundSlo):
            return self.join(
                terms.tenant, slo.program_id, is_final=slo.final, allowance_s=slo.deadline_s
            )
        if terms.closes_program:
            return self.join(terms.tenant, terms.closes_program, is_final=True)
        return -1

    def leave(
        self,
        index: int,
        *,
        input_tokens: float,
        output_tokens: float,
        now_s: float = 0.0,
        is_undone: bool = False,
    ) -> None:
        """A call ended; so many tokens of it count towards the program.

        Args:
            is_undone: it was to be the last and came to nothing: another may follow.
        """
        self._columns["done_in"][index] += input_tokens
        self._columns["done_out"][index] += output_tokens
        self._live[index] -= 1
        if is_undone and not self._closed.get(index, True):
            del self._closed[index]
            self._columns["is_open"][index] = 1.0
        if self._live[index] > 0:
            return
        key = self._keys[index]
        if index in self._closed:
            self._learn(index)
            self._forget(key)
            return
        self._idle[key] = now_s
        if len(self._idle) > self._max_idle:
            self._forget(next(iter(self._idle)))

    def serve(self, index: int, tokens: float) -> None:
        """One of its calls was given service, in tokens: PLAS ranks by it."""
        self._columns["service"][index] += tokens

    def serve_all(self, indices: Ints, tokens: float) -> None:
        """Each of these was given so much; -1 stands for none."""
        np.add.at(self._columns["service"], indices[indices >= 0], tokens)

    def expect(self, tenant: str, program_id: str, outlook: ProgramOutlook | None) -> None:
        """A pattern match came in; ignored for a program that is not known (any more).

        None: nothing that is known fits it any more, and its end is open again.
        """
        index = self._index.get((tenant, program_id))
        if index is None or index in self._closed:
            return
        self._columns["is_open"][index] = float(outlook is None)
        outlook = outlook or ProgramOutlook()
        amounts = {
            "future_in": outlook.future_input_tokens,
            "future_out": outlook.future_output_tokens,
            "future_stage": outlook.future_stage_tokens,
            "future_spread": outlook.future_spread_tokens,
            "future_tool_s": outlook.future_tool_s,
            "future_new": (
                outlook.future_input_tokens
                if outlook.future_new_tokens is None
                else outlook.future_new_tokens
            ),
            "next_in": outlook.next_input_tokens,
        }
        for name, value in amounts.items():
            self._columns[name][index] = min(max(value, 0.0), 1e12) if math.isfinite(value) else 0.0
        times = {"stage_due_s": outlook.stage_due_s, "next_call_s": outlook.next_call_s}
        for name, at_s in times.items():
            is_time = at_s is not None and not math.isnan(at_s)
            self._columns[name][index] = at_s if is_time else math.inf

    def foreseen_tokens(self, now_s: float, until_s: float) -> float:
        """Input tokens of calls that are expected to arrive within that time."""
        next_s = self.column("next_call_s")
        is_near = (next_s >= now_s) & (next_s <= until_s)
        return float(self.column("next_in")[is_near].sum())

    @property
    def stages_to_come(self) -> Floats:
        """Stages after the live one of programs whose end nothing tells. Shape as of a column.

        Taken to be in proportion to the time that the program was allowed, as in those that its
        tenant has finished lately, and at least one. 0 before any was seen.
        """
        stages_per_s = self.column("stages_per_s")
        more = self.column("allowance_s") * stages_per_s - self.column("stages")
        is_known = self.column("is_open") * (stages_per_s > 0)
        return clip(more, 1.0, MAX_STAGES) * is_known

    def column(self, name: str) -> Floats:
        """One column by index, shape (``num_indices``,). Names are in ``_FIELDS``."""
        return self._columns[name][: self.num_indices]

    @property
    def num_indices(self) -> int:
        """Length of the columns."""
        return max(len(self._keys), 1)

    def _new(self, key: tuple[str, str]) -> int:
        if self._free:
            index = self._free.pop()
            self._keys[index], self._live[index] = key, 0
        else:
            index = len(self._keys)
            self._keys.append(key)
            self._live.append(0)
            if index == len(self._columns["service"]):
                for name, column in self._columns.items():
                    self._columns[name] = np.concatenate([column, np.zeros_like(column)])
        for column in self._columns.values():
            column[index] = 0.0
        self._columns["stage_due_s"][index] = self._columns["next_call_s"][index] = math.inf
        self._columns["is_open"][index] = 1.0
        self._index[key] = index
        return index

    def _forget(self, key: tuple[str, str]) -> None:
        index = self._index.pop(key)
        self._idle.pop(key, None)
        self._columns["next_call_s"][index] = math.inf
        self._closed.pop(index, None)
        self._free.append(index)
