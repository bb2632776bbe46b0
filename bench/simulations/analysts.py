"""What the simulated schedulers are told of lengths and programs, by name.

none: nothing. known: everything. noisy:SIGMA: lengths through noise of that deviation in their
logarithms, and programs as others of their application went. real: the project's own forest and
matcher, in process, as late as their sockets are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.simulator.analysts import (
    KnownLengths,
    KnownPrograms,
    LengthAnalyst,
    NoisyLengths,
    ProgramAnalyst,
    ProgramHabits,
    UnawareOfLengths,
    UnawareOfPrograms,
)

if TYPE_CHECKING:
    from bench.simulations.real import RealLengths, RealPrograms

CHOICES = "noisy:SIGMA, known, none or real"
"""For people."""


def check(name: str) -> None:
    """Raise ValueError that says what a name may be, unless it is one."""
    kind, _, sigma = name.partition(":")
    if kind == "noisy":
        try:
            NoisyLengths(float(sigma), 0)
        except ValueError as error:
            raise ValueError(f"analyst must be {CHOICES}, got {name!r}") from error
    elif name not in ("known", "none", "real"):
        raise ValueError(f"analyst must be {CHOICES}, got {name!r}")


class AnalystsOfRuns:
    """For simulations behind each other: what learns goes on, as a server's analysts do.

    Raises ValueError that says what a name may be.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        check(name)
        self._learning: tuple[RealLengths, RealPrograms] | None = None
        if name == "real":
            from bench.simulations.real import RealLengths, RealPrograms

            self._learning = RealLengths(seed), RealPrograms()

    def of_next_run(self) -> tuple[LengthAnalyst, ProgramAnalyst]:
        """Those of a simulation that is about to begin."""
        if self._learning is None:
            return analysts_of(self._name, self._seed)
        for analyst in self._learning:
            analyst.begin_run()
        return self._learning


def analysts_of(name: str, seed: int) -> tuple[LengthAnalyst, ProgramAnalyst]:
    """Fresh ones for a run. Raises ValueError that says what a name may be."""
    check(name)
    if name == "known":
        return KnownLengths(), KnownPrograms()
    if name == "none":
        return UnawareOfLengths(), UnawareOfPrograms()
    if name == "real":
        # Here, not above: the forest's libraries take a second to import.
        from bench.simulations.real import RealLengths, RealPrograms

        return RealLengths(seed), RealPrograms()
    return NoisyLengths(float(name.partition(":")[2]), seed), ProgramHabits()
