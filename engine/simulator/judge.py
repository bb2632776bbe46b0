"""Judges what a simulation gave, by the definitions of ``docs/metrics.md``.

A program is what its sender asked for as one: a stream, an answer, or all calls together.
"""

from __future__ import annotations

from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, slo_type
from engine.simulator.job import Job
from engine.simulator.outcome import CallEnd, CallOutcome, ProgramOutcome
from engine.simulator.workload import SimProgram, Workload
from scheduler.lifecycle import RequestState

_ENDS: dict[RequestState, CallEnd] = {
    RequestState.FINISHED: "finished",
    RequestState.DROPPED: "dropped",
    RequestState.ABORTED: "aborted",
}


class Judge:
    """Collects the ends of calls."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._calls: list[CallOutcome] = []
        self._of: list[list[CallOutcome]] = [[] for _ in workload.programs]
        self._worst_s: list[float | None] = [None] * len(workload.programs)
        self._stage: dict[int, int] = {}

    def began(self, program: int, stage: int) -> None:
        """A stage of it is the live one, or was the last."""
        self._stage[program] = stage

    def live_stage(self, program: int) -> int:
        return self._stage.get(program, 0)

    def call_ended(self, job: Job, state: RequestState, reason: str | None, now_s: float) -> None:
        self._note(job, _ENDS[state], reason, now_s)

    def unfinished(self, job: Job, now_s: float) -> None:
        """The simulation is over and it is still there."""
        self._note(job, "unfinished", None, now_s)

    def _note(self, job: Job, end: CallEnd, reason: str | None, now_s: float) -> None:
        if job.is_stream and job.generated:
            self._worst_s[job.program] = job.worst_lateness_s
        outcome = CallOutcome(
            job.program,
            job.stage,
            job.place,
            end,
            reason,
            job.terms.arrival_s,
            job.first_scheduled_s,
            job.first_token_s,
            now_s,
            job.call.input_tokens,
            job.generated,
            job.on_time_tokens if job.is_stream else 0,
            job.max_tbt_s,
            job.num_preemptions,
            job.num_parks,
            job.replica,
        )
        self._calls.append(outcome)
        self._of[job.program].append(outcome)

    def calls(self) -> tuple[CallOutcome, ...]:
        """In the order in which they ended."""
        return tuple(self._calls)

    def programs(self, end_s: float) -> tuple[ProgramOutcome, ...]:
        """Every program of the workload, those that never began included."""
        return tuple(
            self._judged(index, program, end_s)
            for index, program in enumerate(self._workload.programs)
        )

    def _judged(self, index: int, program: SimProgram, end_s: float) -> ProgramOutcome:
        calls = self._of[index]
        is_complete = len(calls) == program.num_calls and all(
            call.end == "finished" for call in calls
        )
        last_s = max((call.end_s for call in calls), default=end_s)
        if not is_complete and all(call.end == "finished" for call in calls):
            last_s = end_s
        firsts = [call.first_token_s for call in calls if call.first_token_s is not None]
        lateness_s, met, goodput = self._verdict(index, program, last_s, is_complete=is_complete)
        return ProgramOutcome(
            index,
            slo_type(program.slo),
            program.application,
            program.arrival_s,
            last_s,
            is_complete,
            met,
            goodput,
            min(firsts) - program.arrival_s if firsts else None,
            lateness_s,
            _offered_tokens(program),
        )

    def _verdict(
        self, index: int, program: SimProgram, last_s: float, *, is_complete: bool
    ) -> tuple[float | None, bool, int]:
        """Lateness, request-level and token-level goodput."""
        match program.slo:
            case LatencySlo():
                worst_s = self._worst_s[index]
                on_time = sum(call.on_time_tokens for call in self._of[index])
                return worst_s, is_complete and worst_s is not None and worst_s <= 0, on_time
            case DeadlineSlo(deadline_s) | CompoundSlo(deadline_s):
                # By the arithmetic of ``core.slo``: just in time must not depend on rounding.
                late_s = last_s - (program.arrival_s + deadline_s)
                met = is_complete and late_s <= 0
                return (
                    (late_s if is_complete else None),
                    met,
                    _offered_tokens(program) if met else 0,
                )
            case BestEffortSlo():
                return None, is_complete, 0


def _offered_tokens(program: SimProgram) -> int:
    """What counts of it if all of it is in time: of a stream its output, of others all tokens."""
    match program.slo:
        case LatencySlo():
            return program.output_tokens
        case DeadlineSlo() | CompoundSlo():
            return program.input_tokens + program.output_tokens
        case BestEffortSlo():
            return 0
