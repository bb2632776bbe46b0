"""The project's own forest and pattern matcher in the simulator, in process, as late as measured.

A simulated call has no text. What the forest is told of it: input tokens, the limit of output
tokens, whether it is a stream or a program's; its application in the tenant's place (as one key
per application would), and its role in the node's. It starts from the shipped prior and learns
from whatever ends, as the serving predictor does, which sees prompts too and so knows more.
"""

from __future__ import annotations

import numpy as np

from core.names import name_hash
from core.slo import CompoundSlo, LatencySlo
from engine.outlooks import as_expected
from engine.simulator.analysts import Pace, Points
from engine.simulator.job import Job
from engine.simulator.workload import SimProgram
from graphs import shape
from graphs.protocol import Arrived, Closed, Event, Finished
from graphs.store import PatternStore
from graphs.tracker import Tracker
from predictor.book import LengthBook
from predictor.features import NO_CUES, EngineFacts, feature_row
from predictor.forest import warm_up
from predictor.model import Asked, LengthModel, Request
from predictor.server import restored_model
from scheduler.programs import ProgramOutlook

FORECAST_LATENCY_S = 0.86e-3
MATCH_LATENCY_S = 0.53e-3
"""Both through the socket of the serving process: docs/experiments.md."""
REFINE_EVERY_TOKENS = 50
"""As ``engine.runtime.forecasts`` does."""
FIT_EVERY_S = 120.0
"""Of simulated time, at least: the serving predictor fits beside its work, here it costs ours."""
TOKEN_S = 40e-6
"""More of a step for each request in it: of the study's engine."""
MODEL = name_hash("simulated")
NOON_S = 43_200.0


class RealLengths:
    """``predictor.model`` and ``predictor.book`` as a ``LengthAnalyst``."""

    latency_s = FORECAST_LATENCY_S
    refine_every_tokens = REFINE_EVERY_TOKENS

    def __init__(self, seed: int) -> None:
        self._model, _ = restored_model(lambda: LengthModel(seed=seed), None)
        warm_up()
        if self._model.forest is None:
            self._model.refit()
        self._book = LengthBook()
        self._calibration = -1
        self._asked: dict[int, Asked] = {}
        self._fitted_s = 0.0

    def begin_run(self) -> None:
        """Another simulation begins, at time 0; what was learnt stays, who ran is gone."""
        self._book = LengthBook()
        self._calibration = -1
        self._asked.clear()
        self._fitted_s = 0.0

    def forecast(self, job: Job, program: SimProgram) -> Points | None:
        self._fit(job.terms.arrival_s)
        asked = self._model.forecast([self._request(job, program)], NOON_S)[0]
        self._asked[job.serial] = asked
        if self._calibration != self._model.calibrator.version:
            self._calibration = self._model.calibrator.version
            self._book.calibrate(self._model.calibrator.factors, self._model.tilt.tilts)
        self._book.enter(job.key, asked.points)
        return self.refined(job, 0)

    def refined(self, job: Job, generated_tokens: int) -> Points | None:
        total = self._book.refine(job.key, generated_tokens)
        return None if total is None else total.astype(np.float64)

    def ended(self, job: Job, *, is_finished: bool) -> None:
        self._book.forget(job.key)
        asked = self._asked.pop(job.serial, None)
        if asked is not None:
            is_cut = not is_finished or job.generated >= job.call.max_output_tokens
            self._model.learn(asked, job.generated, is_cut=is_cut)

    def _fit(self, now_s: float) -> None:
        if now_s - self._fitted_s >= FIT_EVERY_S and self._model.is_fit_due():
            self._model.refit()
            self._fitted_s = now_s

    def _request(self, job: Job, program: SimProgram) -> Request:
        facts = EngineFacts(
            input_tokens=job.call.input_tokens,
            max_output_tokens=job.call.max_output_tokens,
            is_streamed=isinstance(program.slo, LatencySlo),
            is_latency=isinstance(program.slo, LatencySlo),
            is_program=isinstance(program.slo, CompoundSlo),
        )
        role = job.call.role
        return Request(
            feature_row(NO_CUES, facts),
            MODEL,
            name_hash("tenant", program.tenant, program.application),
            name_hash("node", program.application, role),
        )


class RealPrograms:
    """``graphs.tracker`` and its store as a ``ProgramAnalyst``."""

    latency_s = MATCH_LATENCY_S

    def __init__(self) -> None:
        self._tracker = Tracker(PatternStore())
        self._now_s = 0.0
        self._told: dict[int, int] = {}
        """Calls of each running program that the tracker has been told of."""
        self._live: dict[int, tuple[int, ...]] = {}
        """Nodes of the stage that runs, or was last."""
        self._run = 0
        """Of several simulations behind each other: the same index is another program in each."""

    def begin_run(self) -> None:
        """Another simulation begins, at time 0; what was learnt stays, who ran is gone."""
        for index in list(self._live):
            self._take(Closed(self._name(index), is_cancelled=True), self._now_s, None)
        self._told.clear()
        self._live.clear()
        self._now_s = 0.0
        self._run += 1

    def _name(self, index: int) -> int:
        return name_hash("program", str(self._run), str(index))

    def stage_began(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook | None:
        slo, place = program.slo, self._told.get(index, 0)
        assert isinstance(slo, CompoundSlo), "only programs are foreseen"
        before, nodes = self._live.get(index, ()), []
        for number, call in enumerate(program.stages[stage].calls, start=place):
            nodes.append(name_hash("node", str(self._run), str(index), str(number)))
            arrived = Arrived(
                program=self._name(index),
                application=name_hash(program.tenant, program.application),
                place=number,
                call=shape.Call(
                    node=nodes[-1],
                    role=name_hash("role", call.role),
                    model=MODEL,
                    parents=before,
                    tools=tuple(name_hash("tool", tool) for tool in program.stages[stage].tools),
                    input_tokens=call.input_tokens,
                    at_s=now_s,
                ),
                opened_s=program.arrival_s,
                deadline_at_s=program.arrival_s + slo.deadline_s,
                is_final=False,
                tenant=name_hash("tenant", program.tenant),
            )
            self._take(arrived, now_s, pace)
        self._told[index], self._live[index] = place + len(nodes), tuple(nodes)
        return self._outlook(index)

    def stage_ended(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook | None:
        self._finish(index, program, stage, now_s, pace)
        return self._outlook(index)

    def ended(self, index: int, program: SimProgram, *, is_complete: bool) -> None:
        if is_complete:
            self._finish(index, program, len(program.stages) - 1, self._now_s, None)
        self._take(Closed(self._name(index), is_cancelled=not is_complete), self._now_s, None)
        self._told.pop(index, None)
        self._live.pop(index, None)
        store = self._tracker.store
        if store.is_clustering_due:
            store.adopt(store.clustering().run())

    def _finish(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace | None
    ) -> None:
        """All calls of a stage have; when each of them did is not known, and does not count."""
        for node, call in zip(self._live[index], program.stages[stage].calls, strict=True):
            finished = Finished(
                program=self._name(index),
                node=node,
                output_tokens=call.output_tokens,
                at_s=now_s,
                has_failed=False,
                cached_tokens=call.prefix_tokens,
            )
            self._take(finished, now_s, pace)

    def _take(self, event: Event, now_s: float, pace: Pace | None) -> None:
        self._now_s = now_s
        told = shape.Pace() if pace is None else shape.Pace(pace.prefill_s, pace.step_s, TOKEN_S)
        self._tracker.take(event, told, now_s)

    def _outlook(self, index: int) -> ProgramOutlook | None:
        for _, outlook in self._tracker.outlooks():
            if outlook.program == self._name(index):
                return as_expected(outlook)
        return None
