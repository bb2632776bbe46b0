"""The experiments of the paper's evaluation, and ours, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from bench.simulations import tables
from bench.simulations.grid import Case, Grid
from bench.simulations.options import Options
from scheduler.policies import CANCEL_SUFFIX

OPERATING_POINT = 1.5
"""Load of the experiments that have one: that of the figures to reach."""
LOADS = (0.6, 0.9, 1.2, 1.5, 2.0)
BASELINES = ("fcfs", "sarathi", "sjf", "ltr", "plas", "edf", "vtc", "gmax-paper")
ALL = (
    "gmax",
    *BASELINES,
    *(name + CANCEL_SUFFIX for name in BASELINES),
    "gmax-oracle",
)
"""Every policy; ``priority`` is ``fcfs`` with chunked prefill where nobody has a priority."""
QUICK = ("gmax", "fcfs", "sarathi", "ltr", "plas", "edf+cancel", "ltr+cancel", "gmax-paper")
QUICK_ORACLE = (*QUICK, "gmax-oracle")

Rows = tuple[Sequence[str], Sequence[Sequence[object]]]


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """One question.

    Attributes:
        title: what is shown.
        paper: what the paper says of it, and where.
        cases: of the options.
        policies, quick_policies: labels.
        view: headers and rows of its table.
        has_bounds: whether the upper bounds are asked for, too.
    """

    title: str
    paper: str
    cases: Callable[[Options], Sequence[Case]]
    policies: tuple[str, ...] = ALL
    quick_policies: tuple[str, ...] = QUICK
    view: Callable[[Grid], Rows] = tables.goodput
    has_bounds: bool = False


def loads(options: Options) -> list[Case]:
    """The paper's mix at each load."""
    quick = (0.9, OPERATING_POINT)
    wanted = options.loads or (quick if options.is_quick else LOADS)
    return [options.case(f"{load:g}x", load, load) for load in wanted]


EXPERIMENTS: Mapping[str, Experiment] = {
    "table": Experiment(
        title="Token- and request-level goodput of every policy, the paper's mix, by load",
        paper="gmax over LTR 1.3-1.7x in tokens and 2.3-4.5x in requests, over Autellix (plas) "
        "5.3-6.1x in tokens; vLLM and Sarathi fall behind with time (section End-to-End)",
        cases=loads,
        quick_policies=QUICK_ORACLE,
        has_bounds=True,
    ),
}
