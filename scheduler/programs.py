"""Running programs: what their calls have got so far and what is still to come."""

import math

import msgspec
import numpy as np

from core.slo import CompoundSlo, RequestTerms
from scheduler.table import Floats


class ProgramOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a pattern match expects after the calls that are live now. All of it may be 0."""

    future_input_tokens: float = 0.0
    """Input tokens of the calls still to come."""
    future_output_tokens: float = 0.0
    future_stage_tokens: float = 0.0
    """Output tokens of the longest call of each stage still to come, added up."""
    stage_due_s: float | None = None
    """Absolute sub-deadline of the current stage: for urgency, never a hard rule."""


_MAX_ALLOWANCE_S = 1e6
"""More time than this is no deadline."""
_RECENT_PROGRAMS = 64.0
"""Closed programs that the relation of stages to time is learnt from, about."""


class Programs:
    """Programs by tenant and id, as indices into columns.

    A program without a live call is kept, since its next one may come after a tool call; of
    those the longest idle are forgotten above ``max_idle``, and a closed one at once.
    """

    _FIELDS = (
        "service",
        "done_in",
        "done_out",
        "future_in",
        "future_out",
        "future_stage",
        "stage_due_s",
        "stages",
        "is_open",
        "allowance_s",
    )

    def __init__(self, max_idle: int = 10_000) -> None:
        self._max_idle = max_idle
        self._index: dict[tuple[str, str], int] = {}
        self._keys: list[tuple[str, str]] = []
        self._live: list[int] = []
        self._free: list[int] = []
        self._idle: dict[tuple[str, str], None] = {}
        self._closed: set[int] = set()
        self._closed_stages = 0.0
        self._closed_allowance_s = 0.0
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
            known_s = allowance_s if 0 < allowance_s < _MAX_ALLOWANCE_S else 0.0
            self._columns["allowance_s"][index] = known_s
        self._idle.pop(key, None)
        stages = self._columns["stages"]
        if self._live[index] == 0:
            stages[index] += 1
        self._live[index] += 1
        if is_final and index not in self._closed:
            self._closed.add(index)
            self._columns["is_open"][index] = 0.0
            allowance_s = float(self._columns["allowance_s"][index])
            if allowance_s > 0:
                self._closed_stages += stages[index] - self._closed_stages / _RECENT_PROGRAMS
                self._closed_allowance_s += (
                    allowance_s - self._closed_allowance_s / _RECENT_PROGRAMS
                )
        return index

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

    def leave(self, index: int, *, input_tokens: float, output_tokens: float) -> None:
        """A call ended; so many tokens of it count towards the program."""
        self._columns["done_in"][index] += input_tokens
        self._columns["done_out"][index] += output_tokens
        self._live[index] -= 1
        if self._live[index] > 0:
            return
        key = self._keys[index]
        if index in self._closed:
            self._forget(key)
            return
        self._idle[key] = None
        if len(self._idle) > self._max_idle:
            self._forget(next(iter(self._idle)))

    def serve(self, index: int, tokens: float) -> None:
        """One of its calls was given service, in tokens: PLAS ranks by it."""
        self._columns["service"][index] += tokens

    def expect(self, tenant: str, program_id: str, outlook: ProgramOutlook) -> None:
        """A pattern match came in; ignored for a program that is not known (any more)."""
        index = self._index.get((tenant, program_id))
        if index is None:
            return
        due_s = outlook.stage_due_s
        self._columns["is_open"][index] = 0.0
        values = {
            "future_in": outlook.future_input_tokens,
            "future_out": outlook.future_output_tokens,
            "future_stage": outlook.future_stage_tokens,
            "stage_due_s": math.inf if due_s is None or math.isnan(due_s) else due_s,
        }
        for name, value in values.items():
            if name == "stage_due_s":
                self._columns[name][index] = value
            elif math.isfinite(value):
                self._columns[name][index] = min(max(value, 0.0), 1e12)

    @property
    def stages_to_come(self) -> Floats:
        """Stages after the live one of programs whose end nothing tells. Shape as of a column.

        Taken to be in proportion to the time that the program was allowed, as in the programs
        whose last stage has been seen lately, and at least one. 0 before any was seen.
        """
        if self._closed_allowance_s <= 0:
            return np.zeros(self.num_indices)
        stages_per_s = self._closed_stages / self._closed_allowance_s
        more = self.column("allowance_s") * stages_per_s - self.column("stages")
        to_come: Floats = np.maximum(more, 1.0) * self.column("is_open")
        return to_come

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
        self._columns["stage_due_s"][index] = math.inf
        self._columns["is_open"][index] = 1.0
        self._index[key] = index
        return index

    def _forget(self, key: tuple[str, str]) -> None:
        index = self._index.pop(key)
        self._idle.pop(key, None)
        self._closed.discard(index)
        self._free.append(index)
