"""How well the share of a program's next stage is foretold, and what that does to deadlines.

Each forecaster is asked when the first call of a stage has arrived: it knows that call, the
stages before it, and the programs that it was trained on. Of a stage's true share x and the
foretold y the relative error is abs(y - x) / x; the shares are those of ``graphs.amortise``. What
they are worth is the error of the sub-deadline, as a part of the whole deadline D, where the
stage begins on time: after the part of D that the work before it is of all work.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bench.calls import PACE, Program
from graphs.amortise import Amortisation, share, stage_due_s
from graphs.matcher import Match
from graphs.shape import Pace, ProgramShape, StageShape
from graphs.store import PatternStore

Floats = npt.NDArray[np.float64]

COLUMNS: tuple[str, ...] = (
    *(f"share_{how}" for how in Amortisation),
    "due_phi",
    *(f"due_{how}" for how in Amortisation),
)
"""Relative errors of the three shares; then errors of the sub-deadline as parts of the deadline:
``due_phi`` for phi(s) * D from the opening on, the others as ``stage_due_s`` has them."""
UNBOUNDED = 1 << 20
TRAIN_FRACTION = 0.6
_SMALLEST = 1e-9


class Times(NamedTuple):
    """Execution times before a stage's first call, of its calls, and of all that follows."""

    before_s: float
    stage_s: float
    later_s: float


def true_times(program: Program, pace: Pace) -> list[Times]:
    """Of every stage. The tools before a stage have run when its first call arrives."""
    stages = [stage.shape() for stage in program.stages]
    times = [stage.time_s(pace) for stage in stages]
    total_s = sum(times)
    found, before_s = [], 0.0
    for stage, time_s in zip(stages, times, strict=True):
        stage_s = time_s - stage.tool_s
        found.append(Times(before_s + stage.tool_s, stage_s, max(total_s - before_s - time_s, 0.0)))
        before_s += time_s
    return found


# Forecasters.


class Forecaster(Protocol):
    """What is expected at the opening of each stage; None where it cannot tell."""

    def forecasts(self, program: Program) -> list[Times | None]: ...


class Matching:
    """The product's: patterns in a store, matched stage by stage.

    Args:
        capacity: of the store; above it patterns are clustered.
    """

    def __init__(
        self,
        train: Sequence[Program],
        *,
        capacity: int = UNBOUNDED,
        has_roles: bool = True,
        pace: Pace = PACE,
    ) -> None:
        self._has_roles = has_roles
        self._pace = pace
        self.store = PatternStore(capacity)
        for program in train:
            shape = program.shape()
            stages = tuple(self._told(stage) for stage in shape.stages)
            self.store.add(ProgramShape(shape.application, stages), 0.0)
            if self.store.is_clustering_due:
                self.store.adopt(self.store.clustering().run())

    def forecasts(self, program: Program) -> list[Times | None]:
        match = Match(self.store.pack)
        found: list[Times | None] = []
        for stage, truth in zip(program.stages, true_times(program, self._pace), strict=True):
            opened = self._told(stage.opening())
            remaining = match.outlook(self._pace, opened)
            if remaining is None:
                found.append(None)
            else:
                found.append(Times(truth.before_s, remaining.stage_s, remaining.later_s))
            match.close_stage(self._told(stage.shape()))
        return found

    def _told(self, stage: StageShape) -> StageShape:
        """A stage as clients tell of it, with or without roles."""
        if self._has_roles:
            return stage
        return StageShape(
            stage.identity,
            0,
            stage.num_calls,
            stage.input_tokens,
            stage.output_tokens,
            stage.longest_tokens,
            stage.tool_s,
            stage.tools,
        )


class PlainAverage:
    """Mean times of the stages at the same place, of the programs that came so far."""

    def __init__(self, train: Sequence[Program], pace: Pace = PACE) -> None:
        self._pace = pace
        known = [true_times(program, pace) for program in train]
        self._means: list[tuple[float, float]] = []
        for place in range(max((len(times) for times in known), default=0)):
            there = [times[place] for times in known if len(times) > place]
            self._means.append(
                (
                    float(np.mean([times.stage_s for times in there])),
                    float(np.mean([times.later_s for times in there])),
                )
            )

    def forecasts(self, program: Program) -> list[Times | None]:
        truths = true_times(program, self._pace)
        known = [
            Times(truth.before_s, stage_s, later_s)
            for truth, (stage_s, later_s) in zip(truths, self._means, strict=False)
        ]
        return [*known, *([None] * (len(truths) - len(known)))]


class EqualShares:
    """All stages alike, and as many of them as the programs had on average."""

    def __init__(self, train: Sequence[Program]) -> None:
        self._num = float(np.mean([len(program.stages) for program in train]))

    def forecasts(self, program: Program) -> list[Times | None]:
        places = range(len(program.stages))
        return [Times(float(at), 1.0, max(self._num - at - 1.0, 0.0)) for at in places]


class NoForecast:
    """Without the graphs process: every stage has the whole deadline."""

    def forecasts(self, program: Program) -> list[Times | None]:
        return [None] * len(program.stages)


class PerSource:
    """A forecaster for each source, which knows that source alone."""

    def __init__(
        self, make: Callable[[Sequence[Program]], Forecaster], train: Sequence[Program]
    ) -> None:
        parts: dict[str, list[Program]] = {}
        for program in train:
            parts.setdefault(program.source, []).append(program)
        self._by_source = {source: make(part) for source, part in parts.items()}

    def forecasts(self, program: Program) -> list[Times | None]:
        return self._by_source.get(program.source, NoForecast()).forecasts(program)


# Errors.


class Errors(NamedTuple):
    """One row for each stage of each program that was forecast."""

    source: npt.NDArray[np.str_]
    seen: npt.NDArray[np.int64]
    """Stages that were over."""
    is_known: npt.NDArray[np.bool_]
    values: Floats
    """By ``COLUMNS``, (n, 7)."""

    def of(self, column: str, source: str | None = None, seen: int | None = None) -> Floats:
        """The errors in a column: of all, of a source, after so many stages."""
        rows = np.ones(len(self.seen), dtype=bool)
        if source is not None:
            rows &= self.source == source
        if seen is not None:
            rows &= self.seen == seen
        found: Floats = self.values[rows, COLUMNS.index(column)]
        return found


def judge(forecaster: Forecaster, programs: Sequence[Program], pace: Pace = PACE) -> Errors:
    """Forecast every stage of ``programs``, in order."""
    sources, seen, known, values = [], [], [], []
    for program in programs:
        truths = true_times(program, pace)
        for place, (truth, forecast) in enumerate(
            zip(truths, forecaster.forecasts(program), strict=True)
        ):
            sources.append(program.source)
            seen.append(place)
            known.append(forecast is not None)
            values.append(errors_of(truth, forecast or _unknown(truth, place)))
    shape = (len(values), len(COLUMNS))
    return Errors(
        np.array(sources, dtype=np.str_),
        np.array(seen, dtype=np.int64),
        np.array(known, dtype=bool),
        np.array(values, dtype=np.float64).reshape(shape),
    )


def _unknown(truth: Times, place: int) -> Times:
    """What follows from nothing: the last stage, as long as those before were."""
    stage_s = truth.before_s / place if place else 1.0
    return Times(truth.before_s, max(stage_s, _SMALLEST), 0.0)


def errors_of(truth: Times, forecast: Times) -> list[float]:
    """By ``COLUMNS``. The stage begins on time: when its part of the deadline before it is over."""
    total_s = max(sum(truth), _SMALLEST)
    relative = []
    for how in Amortisation:
        true = max(share(how, **truth._asdict()), _SMALLEST)
        relative.append(abs(share(how, **forecast._asdict()) - true) / true)
    due = (truth.before_s + truth.stage_s) / total_s
    phi = share(Amortisation.ACCUMULATED, **forecast._asdict())
    dues = [
        stage_due_s(
            how,
            opened_s=0.0,
            deadline_at_s=1.0,
            started_s=truth.before_s / total_s,
            **forecast._asdict(),
        )
        for how in Amortisation
    ]
    return [*relative, abs(phi - due), *(abs(at - due) for at in dues)]


# Splits and seeds.


class Split(NamedTuple):
    """Both in random order."""

    train: list[Program]
    test: list[Program]


def split(programs: Sequence[Program], seed: int, fraction: float = TRAIN_FRACTION) -> Split:
    """The same part of every source to train on, at least one program; the rest to test on."""
    rng = np.random.default_rng(seed)
    by_source: dict[str, list[Program]] = {}
    for program in programs:
        by_source.setdefault(program.source, []).append(program)
    train: list[Program] = []
    test: list[Program] = []
    for part in by_source.values():
        order = rng.permutation(len(part))
        num = max(round(fraction * len(part)), 1)
        train += [part[index] for index in order[:num]]
        test += [part[index] for index in order[num:]]
    return Split(
        [train[index] for index in rng.permutation(len(train))],
        [test[index] for index in rng.permutation(len(test))],
    )


class Spread(NamedTuple):
    """A figure over seeds."""

    mean: float
    deviation: float
    """Standard deviation; 0 for one seed."""

    def __str__(self) -> str:
        return f"{self.mean:.3g} ±{self.deviation:.2g}"


def over_seeds(values: Sequence[float]) -> Spread | None:
    """Mean and deviation; None of nothing."""
    if not values:
        return None
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Spread(float(np.mean(values)), deviation)


Runs = Sequence[Mapping[str, Errors]]
"""For each seed, the errors of each forecaster by name."""


def figure(
    runs: Runs,
    name: str,
    column: str,
    *,
    source: str | None = None,
    seen: int | None = None,
    is_median: bool = False,
) -> Spread | None:
    """Mean, or median, error of a forecaster in each run, over the runs."""
    average = np.median if is_median else np.mean
    found = [run[name].of(column, source, seen) for run in runs]
    return over_seeds([float(average(errors)) for errors in found if len(errors)])


def is_better(runs: Runs, name: str, other: str, column: str, source: str) -> bool:
    """Whether a forecaster beats another by more than the advantage differs between seeds."""
    pairs = [(run[other].of(column, source), run[name].of(column, source)) for run in runs]
    gain = over_seeds([float(np.mean(a) - np.mean(b)) for a, b in pairs if len(a)])
    return gain is not None and gain.mean > gain.deviation
