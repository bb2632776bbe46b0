"""How long a match takes per new stage: in this process, and through the socket."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.calls import PACE, Program, Unfolding, jittered, unfold
from core.checkpoint import CheckpointStore
from core.clock import MonotonicClock
from graphs import state
from graphs.client import GraphsClient
from graphs.matcher import Match
from graphs.patterns import PatternPack
from graphs.protocol import Closed, Outlook
from graphs.store import PatternStore
from graphs.tracker import Tracker

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 10.0
DEADLINE_S = 600.0
SPARE = 1000
"""Room in the process's store, so that nothing is clustered while it is measured."""
NUM_WARM_UP = 8

Probe = Callable[[Program], "list[float]"]
"""Runs a program through and gives the seconds that each new stage took."""


def latency(
    pool: Sequence[Program], num_patterns: int, num_probes: int, seed: int
) -> dict[str, float]:
    """Figures in milliseconds for programs like those of ``pool`` against so many patterns."""
    patterns = jittered(pool, num_patterns, seed)
    probes = jittered(pool, num_probes + NUM_WARM_UP, seed + 1)
    pack = PatternPack([program.shape() for program in patterns], [1.0] * num_patterns)
    incremental = _measured(lambda program: _incremental(pack, program), probes)
    from_scratch = _measured(lambda program: _from_scratch(pack, program), probes)
    arrived, ended = _Tracked(_stored(patterns)).times(probes)
    with graphs_process(patterns) as (address, process):
        through = _Asked(address, process).times(probes)
    return {
        **_quantiles("match", incremental),
        **_quantiles("from_scratch", from_scratch),
        "from_scratch_ratio": sum(from_scratch) / sum(incremental),
        **_quantiles("tracker", arrived),
        **_quantiles("tracker_end", ended),
        **_quantiles("socket", through),
        "stages": float(len(incremental)),
    }


def _quantiles(name: str, times_s: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_ms_p50": float(np.median(times_s)) * 1e3,
        f"{name}_ms_p99": float(np.quantile(times_s, 0.99)) * 1e3,
    }


def _stored(patterns: Sequence[Program]) -> PatternStore:
    store = PatternStore(len(patterns) + SPARE)
    for program in patterns:
        store.restore(program.shape(), 1.0)
    return store


# In this process.


def _measured(probe: Probe, programs: Sequence[Program]) -> list[float]:
    for program in programs[:NUM_WARM_UP]:
        probe(program)
    return [took_s for program in programs[NUM_WARM_UP:] for took_s in probe(program)]


def _incremental(pack: PatternPack, program: Program) -> list[float]:
    """A stage is over and the next has opened: one term more for each pattern that is left."""
    clock = MonotonicClock()
    stages = [stage.shape() for stage in program.stages]
    openings = [stage.opening() for stage in program.stages]
    match = Match(pack)
    times = []
    for over, opened in zip(stages, openings[1:], strict=False):
        start_s = clock.now_s()
        match.close_stage(over)
        match.outlook(PACE, opened)
        times.append(clock.now_s() - start_s)
    return times


def _from_scratch(pack: PatternPack, program: Program) -> list[float]:
    """The same, with all stages scored anew each time."""
    clock = MonotonicClock()
    stages = [stage.shape() for stage in program.stages]
    openings = [stage.opening() for stage in program.stages]
    times = []
    for num_over in range(1, len(stages)):
        start_s = clock.now_s()
        match = Match(pack)
        for over in stages[:num_over]:
            match.close_stage(over)
        match.outlook(PACE, openings[num_over])
        times.append(clock.now_s() - start_s)
    return times


class _Tracked:
    """Programs told to a tracker event by event."""

    def __init__(self, store: PatternStore) -> None:
        self._tracker = Tracker(store)
        self._clock = MonotonicClock()

    def times(self, programs: Sequence[Program]) -> tuple[list[float], list[float]]:
        """From a stage's first call to the outlook, and from the end of its last call."""
        arrived: list[float] = []
        ended: list[float] = []
        for number, program in enumerate(programs):
            if number == NUM_WARM_UP:
                arrived, ended = [], []
            for stage in unfold(program, _hash(number), opened_s=0.0, deadline_s=DEADLINE_S):
                self._stage(stage, arrived, ended)
            # Taken back, so that nothing is learnt meanwhile.
            self._tracker.take(Closed(_hash(number), is_cancelled=True), PACE, 0.0)
        return arrived, ended

    def _stage(self, stage: Unfolding, arrived: list[float], ended: list[float]) -> None:
        clock, tracker = self._clock, self._tracker
        start_s = clock.now_s()
        tracker.take(stage.arrived[0], PACE, 0.0)
        tracker.outlooks()
        arrived.append(clock.now_s() - start_s)
        for arrival in stage.arrived[1:]:
            tracker.take(arrival, PACE, 0.0)
        for end in stage.finished[:-1]:
            tracker.take(end, PACE, 0.0)
        tracker.outlooks()
        start_s = clock.now_s()
        tracker.take(stage.finished[-1], PACE, 0.0)
        tracker.outlooks()
        ended.append(clock.now_s() - start_s)


def _hash(number: int) -> int:
    """A program's, far enough from others for the nodes between."""
    return (number + 1) << 20


# Through the socket.


@contextlib.contextmanager
def graphs_process(
    patterns: Sequence[Program],
) -> Iterator["tuple[str, subprocess.Popen[bytes]]"]:
    """A graphs process of its own that starts with these patterns, and its address."""
    with tempfile.TemporaryDirectory(prefix="jitserve-") as folder:
        checkpoints = CheckpointStore(Path(folder), "graphs", version=state.FORMAT_VERSION)
        checkpoints.save(state.encode(_stored(patterns)))
        checkpoints.close()
        address = f"ipc://{folder}/graphs"
        command = [sys.executable, "-m", "graphs", "--address", address, "--state-dir", folder]
        command += ["--patterns", str(len(patterns) + SPARE)]
        process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent)
        try:
            yield address, process
        finally:
            process.terminate()
            process.wait(timeout=30)


class _Asked:
    """Programs told to a graphs process through its client."""

    def __init__(self, address: str, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._clock = MonotonicClock()
        self._client = GraphsClient(address, self._clock, timeout_s=DEADLINE_S)

    def times(self, programs: Sequence[Program]) -> list[float]:
        """From a stage's first call to its outlook's arrival. Ends the connection."""
        try:
            self._await(self._client.is_alive, START_LIMIT_S)
            times: list[float] = []
            for number, program in enumerate(programs):
                if number == NUM_WARM_UP:
                    times = []
                stages = unfold(program, _hash(number), opened_s=0.0, deadline_s=DEADLINE_S)
                times += [self._stage(stage) for stage in stages]
                self._client.closed(_hash(number), is_cancelled=True)
            return times
        finally:
            self._client.close()

    def _stage(self, stage: Unfolding) -> float:
        program = stage.arrived[0].program
        start_s = self._clock.now_s()
        self._arrived(stage, 0)
        self._await_outlook(program, stage.arrived[0].place + 1)
        took_s = self._clock.now_s() - start_s
        for index in range(1, len(stage.arrived)):
            self._arrived(stage, index)
        if len(stage.arrived) > 1:
            self._await_outlook(program, stage.arrived[-1].place + 1)
        for event in stage.finished:
            self._client.finished(
                program, event.node, event.output_tokens, at_s=event.at_s, has_failed=False
            )
        self._await_outlook(program, stage.arrived[-1].place + 1)
        return took_s

    def _arrived(self, stage: Unfolding, index: int) -> None:
        event = stage.arrived[index]
        self._client.arrived(
            event.program, event.call, opened_s=event.opened_s, deadline_at_s=event.deadline_at_s
        )

    def _await_outlook(self, program: int, num_calls: int) -> None:
        def is_it(outlook: Outlook) -> bool:
            return outlook.program == program and outlook.num_calls >= num_calls

        self._await(lambda: any(map(is_it, self._client.poll(PACE))), ANSWER_LIMIT_S, polls=False)

    def _await(self, is_there: Callable[[], bool], limit_s: float, *, polls: bool = True) -> None:
        end_s = self._clock.now_s() + limit_s
        while not is_there():
            if self._clock.now_s() > end_s or self._process.poll() is not None:
                raise RuntimeError("the graphs process does not answer")
            if polls:
                self._client.poll(PACE)
            self._client.wait(0.05)
