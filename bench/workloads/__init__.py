"""Workloads as the paper has them: applications, classes, objectives, arrivals.

``build`` makes a ``Workload`` of a ``WorkloadSpec`` and a seed; ``paper_spec`` is the paper's.
"""

from bench.workloads.arrivals import (
    ArrivalSpec,
    AzureLike,
    Gamma,
    Poisson,
    ServeGenArrivals,
    Surge,
    TraceArrivals,
)
from bench.workloads.command import main
from bench.workloads.mix import (
    ApplicationShares,
    ClassShares,
    Targets,
    WorkloadSpec,
    build,
    paper_spec,
)
from bench.workloads.recorded import from_calls, stages_of
from bench.workloads.summary import describe

__all__ = [
    "ApplicationShares",
    "ArrivalSpec",
    "AzureLike",
    "ClassShares",
    "Gamma",
    "Poisson",
    "ServeGenArrivals",
    "Surge",
    "Targets",
    "TraceArrivals",
    "WorkloadSpec",
    "build",
    "describe",
    "from_calls",
    "main",
    "paper_spec",
    "stages_of",
]
