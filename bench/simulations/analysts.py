"""What the simulated schedulers are told of lengths and programs, by name.

none: nothing. known: everything. noisy:SIGMA: lengths through noise of that deviation in their
logarithms, and programs as others of their application went. real: the project's own forest and
matcher, in process, as late as their sockets are.
"""

from __future__ import annotations

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
