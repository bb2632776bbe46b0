"""Service-level objectives: what a sender asked for, and what came of it.

Times are seconds. ``*_s`` fields of an SLO are relative to the request's arrival; names
ending in ``_at_s`` are absolute, on the clock that stamped the arrival.
"""

import enum
import math
from typing import Literal, assert_never

import msgspec

from core.programs import ProgramOutcome


class OnMiss(enum.StrEnum):
    """What becomes of a deadline or compound request whose deadline has passed."""

    FINISH = "finish"
    """Served on as best-effort, after everything that can still make it."""
    CANCEL = "cancel"
    """Ended with what it has and a reason."""


class LatencySlo(msgspec.Struct, frozen=True, tag="latency"):
    """Token i (from 0) is on time if sent by arrival + target_ttft + i * target_tbt."""

    target_ttft_s: float
    target_tbt_s: float


class DeadlineSlo(msgspec.Struct, frozen=True, tag="deadline"):
    """All tokens (input and output) count if the answer is complete by then, else none."""

    deadline_s: float


class CompoundSlo(msgspec.Struct, frozen=True, tag="compound"):
    """One call of a program: all calls share one deadline, which the first call sets."""

    deadline_s: float
    """From this call's own arrival; negative once the program's deadline has passed."""
    program_id: str
    parents: tuple[str, ...] = ()
    node: str = ""
    final: bool = False
    program_age_s: float = 0.0
    """How long before this call the program's first call arrived."""
    application: str = ""
    """What the program is an instance of, where it was told."""
    tools: tuple[str, ...] = ()
    """Names of the tools that ran before this call, where they were told."""


class BestEffortSlo(msgspec.Struct, frozen=True, tag="best_effort"):
    """No objective. The long default deadline only keeps it from waiting for ever."""

    deadline_s: float


class ReasoningSlo(msgspec.Struct, frozen=True, tag="reasoning"):
    """Thinks by a deadline, then streams: two phases of one answer.

    The visible answer must begin by the deadline, else nothing counts. Token j (from 0) of it
    is on time if sent by arrival + deadline + j * target_tbt; input and thinking count whole.
    """

    deadline_s: float
    """By when the visible answer must begin."""
    target_tbt_s: float


Slo = LatencySlo | DeadlineSlo | CompoundSlo | BestEffortSlo | ReasoningSlo

SloType = Literal["latency", "deadline", "compound", "best_effort", "reasoning"]


class RequestTerms(msgspec.Struct, frozen=True):
    """Everything the scheduler is told about one request apart from its length."""

    arrival_s: float
    """When the server received it, on the machine's monotonic clock."""
    slo: Slo
    waiting_time_s: float | None = None
    """Dropped if not first scheduled within this time; None never drops it."""
    on_miss: OnMiss = OnMiss.FINISH
    tenant: str = ""
    closes_program: str = ""
    """The program whose last call this is, where it does not share the program's deadline."""


def program_of(terms: RequestTerms) -> str:
    """The id of the program that a request is a call of; empty for none."""
    slo = terms.slo
    return slo.program_id if isinstance(slo, CompoundSlo) else terms.closes_program


def is_final(terms: RequestTerms) -> bool:
    """Whether it is to be the last call of its program."""
    slo = terms.slo
    return slo.final if isinstance(slo, CompoundSlo) else bool(terms.closes_program)


def slo_type(slo: Slo) -> SloType:
    """The class name used in answers, metrics and defaults."""
    match slo:
        case LatencySlo():
            return "latency"
        case DeadlineSlo():
            return "deadline"
        case CompoundSlo():
            return "compound"
        case BestEffortSlo():
            return "best_effort"
        case ReasoningSlo():
            return "reasoning"


def deadline_at_s(terms: RequestTerms) -> float:
    """When the whole answer (or its thinking) is due; infinite for a latency-sensitive request."""
    match terms.slo:
        case LatencySlo():
            return math.inf
        case (
            DeadlineSlo(deadline_s)
            | CompoundSlo(deadline_s)
            | BestEffortSlo(deadline_s)
            | ReasoningSlo(deadline_s)
        ):
            return terms.arrival_s + deadline_s


def token_due_at_s(terms: RequestTerms, slo: LatencySlo, index: int) -> float:
    """When token ``index`` (from 0) of a latency-sensitive answer is due."""
    return terms.arrival_s + slo.target_ttft_s + index * slo.target_tbt_s


class SloOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one answer went; the ``metadata.slo`` object of a response."""

    type: SloType
    met: bool
    goodput_tokens: int
    """Tokens that count: see docs/metrics.md."""
    ttft_s: float | None
    worst_lateness_s: float | None
    """Largest lateness of a token (latency) or of the answer; negative is early."""
    e2el_s: float
    output_tokens: int
    target_ttft: float | None = None
    target_tbt: float | None = None
    deadline: float | None = None
    program_id: str | None = None
    reason: str | None = None
    """Why it ended other than by finishing."""
    program: ProgramOutcome | None = None
    """The whole program so far, with this call."""


class OutcomeTracker:
    """Follows the tokens of one answer as they are sent and judges it at the end."""

    __slots__ = (
        "_answer_from",
        "_began_in_time",
        "_first_s",
        "_goodput",
        "_sent",
        "_terms",
        "_worst_s",
    )

    def __init__(self, terms: RequestTerms) -> None:
        self._terms = terms
        self._sent = 0
        self._goodput = 0
        self._first_s: float | None = None
        self._worst_s = -math.inf
        self._answer_from: int | None = None
        self._began_in_time = False

    def answer_began(self, thinking_tokens: int) -> None:
        """The tokens before were thinking; the next one is the first of the visible answer.

        Only a reasoning request has two phases; a second report is ignored.
        """
        if isinstance(self._terms.slo, ReasoningSlo) and self._answer_from is None:
            self._answer_from = max(thinking_tokens, self._sent)

    def sent(self, total_tokens: int, now_s: float) -> None:
        """``total_tokens`` of the answer have now been sent; calls with no news are ignored."""
        if total_tokens <= self._sent:
            return
        if self._first_s is None:
            self._first_s = now_s
        slo = self._terms.slo
        if isinstance(slo, LatencySlo):
            due_s = token_due_at_s(self._terms, slo, self._sent)
            self._stream(total_tokens - self._sent, due_s, slo.target_tbt_s, now_s)
        elif isinstance(slo, ReasoningSlo) and self._answer_from is not None:
            first = max(self._sent, self._answer_from)
            ahead = first - self._answer_from
            due_s = self._terms.arrival_s + slo.deadline_s + ahead * slo.target_tbt_s
            self._stream(total_tokens - first, due_s, slo.target_tbt_s, now_s)
            if first == self._answer_from and total_tokens > first and now_s <= due_s:
                self._began_in_time = True
        self._sent = total_tokens

    def _stream(self, num_new: int, first_due_s: float, tbt_s: float, now_s: float) -> None:
        """Tokens sent together are as late as the earliest-due of them."""
        if num_new <= 0:
            return
        self._worst_s = max(self._worst_s, now_s - first_due_s)
        overdue_tokens = (now_s - first_due_s) / tbt_s - 1e-9
        num_late = math.ceil(min(max(overdue_tokens, 0), num_new))
        self._goodput += num_new - num_late

    def finish(self, input_tokens: int, now_s: float, reason: str | None = None) -> SloOutcome:
        """Judge the answer, complete at ``now_s`` unless ``reason`` says why it is not."""
        terms, slo = self._terms, self._terms.slo
        lateness_s: float | None
        match slo:
            case LatencySlo():
                lateness_s = self._worst_s if self._sent else None
                met = reason is None and (lateness_s is None or lateness_s <= 0)
                goodput = self._goodput
            case DeadlineSlo() | CompoundSlo():
                lateness_s = now_s - deadline_at_s(terms)
                met = reason is None and lateness_s <= 0
                goodput = input_tokens + self._sent if met else 0
            case ReasoningSlo():
                # Without a visible answer it is judged as a deadline.
                began = self._worst_s > -math.inf
                lateness_s = self._worst_s if began else now_s - deadline_at_s(terms)
                met = reason is None and lateness_s <= 0
                goodput = self._goodput
                if self._began_in_time:
                    goodput += input_tokens + (self._answer_from or 0)
                else:
                    goodput = 0 if began or not met else input_tokens + self._sent
            case BestEffortSlo():
                lateness_s = None
                met = reason is None
                goodput = 0
            case _:
                assert_never(slo)
        return SloOutcome(
            type=slo_type(slo),
            met=met,
            goodput_tokens=goodput,
            ttft_s=_since(self._first_s, terms.arrival_s),
            worst_lateness_s=None if lateness_s is None else round(lateness_s, 6),
            e2el_s=round(now_s - terms.arrival_s, 6),
            output_tokens=self._sent,
            target_ttft=slo.target_ttft_s if isinstance(slo, LatencySlo) else None,
            target_tbt=slo.target_tbt_s if isinstance(slo, LatencySlo | ReasoningSlo) else None,
            deadline=_deadline_asked_for(slo),
            program_id=slo.program_id if isinstance(slo, CompoundSlo) else None,
            reason=reason,
        )


def _deadline_asked_for(slo: Slo) -> float | None:
    """Of a program: the one that its first call set, from that call's arrival."""
    match slo:
        case LatencySlo():
            return None
        case CompoundSlo():
            return round(slo.deadline_s + slo.program_age_s, 6)
        case DeadlineSlo(deadline_s) | BestEffortSlo(deadline_s) | ReasoningSlo(deadline_s):
            return deadline_s


def _since(at_s: float | None, start_s: float) -> float | None:
    return None if at_s is None else round(at_s - start_s, 6)
