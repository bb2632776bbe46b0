"""The paper's evaluation in the simulator, with the scheduler that serves.

``python -m bench sim NAME`` prints a table, the paper's figures beside it, and the definition of
every number. What has been simulated is kept by the code that it depends on: a grid that was
broken off goes on, and a change of the scheduler runs it anew.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import goodput, report
from bench.simulations import analysts, capacity, figures, summary, tables
from bench.simulations.cases import OPERATING_POINT
from bench.simulations.cell import (
    DEFAULT_ANALYST,
    STUDY_STEPS,
    Engine,
    parse_settings,
    split_label,
    steps_of,
)
from bench.simulations.charts import Chart
from bench.simulations.experiments import EXPERIMENTS, Experiment
from bench.simulations.grid import Grid, Runner, run_grid
from bench.simulations.options import Options
from bench.simulations.pool import Cache, Failed
from bench.simulations.progress import Progress
from bench.workloads import paper_spec
from engine.demo_model import cache_dir
from engine.simulator.shape import EngineShape

FULL = (3600.0, 5)
"""Window in seconds, and seeds."""
QUICK = (600.0, 2)
DEFINITIONS = {**goodput.DEFINITIONS, **figures.DEFINITIONS}


def main(argv: list[str]) -> int:
    """``python -m bench sim``."""
    args = _parser().parse_args(argv)
    experiment = EXPERIMENTS[args.name]
    try:
        options = _options(args)
        grid = _grid(args, experiment, options)
    except (OSError, ValueError, Failed) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 2
    _print(experiment, grid)
    if args.plots:
        _draw(args.plots, args.name, experiment.draw(grid))
    report.write(
        args.json,
        "sim",
        summary.of(grid),
        _detail(args, grid),
    )
    return 0


def _detail(args: argparse.Namespace, grid: Grid) -> dict[str, Any]:
    """The raw figures, for the JSON."""
    return {
        "experiment": args.name,
        "definitions": dict(DEFINITIONS),
        "capacity": msgspec.to_builtins(grid.capacity),
        "runs": [
            {
                "case": case,
                "policy": policy,
                "seed": seed,
                "cell": msgspec.to_builtins(cell),
                "figures": msgspec.to_builtins(grid.runs[case, policy, seed]),
            }
            for (case, policy, seed), cell in grid.cells.items()
        ],
        "bounds": [
            {"case": case, "seed": seed, "goodput": level, **msgspec.to_builtins(bound)}
            for (case, seed, level), bound in grid.bounds.items()
        ],
        "options": str(vars(args)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench sim", description=__doc__)
    parser.add_argument("name", nargs="?", default="table", choices=sorted(EXPERIMENTS))
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes: 600 s, two seeds, less")
    size.add_argument("--full", action="store_true", help="3600 s, five seeds (default)")
    parser.add_argument("--seeds", type=int, default=None, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first of them")
    parser.add_argument("--window", type=float, default=None, help="seconds of arrivals")
    parser.add_argument("--loads", default="", help="over capacity, such as 0.9,1.5")
    parser.add_argument(
        "--policies", default="", help="labels, such as gmax,gmax:frame_steps=25,ltr+cancel"
    )
    parser.add_argument("--analyst", default=DEFAULT_ANALYST, help="noisy:SIGMA, known, none, real")
    parser.add_argument(
        "--engine", default=STUDY_STEPS, help="MODEL@GPU, MODEL@GPUxN or a CSV of steps"
    )
    parser.add_argument("--batch", type=int, default=None, help="requests that run together")
    parser.add_argument("--requests", default="", help="trace whose lengths single requests have")
    parser.add_argument("--calls", default="", help="log of call graphs that programs have")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of gmax's SchedulerConfig"
    )
    parser.add_argument(
        "--trace", action="append", default=[], metavar="PATH", help="arrivals, for burst"
    )
    goodput.add_argument(parser)
    parser.add_argument(
        "--bounds",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the most that any schedule could have had, of every case (minutes each); by default "
        "of the table's operating point",
    )
    parser.add_argument(
        "--keep-rivals",
        action="store_true",
        help="take rivals' runs, and the capacity, by whatever code they were made",
    )
    parser.add_argument(
        "--probe", type=int, default=capacity.PROGRAMS, help="programs to measure the capacity with"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--cache", type=Path, default=cache_dir() / "simulations.jsonl")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.add_argument("--plots", type=Path, default=None, help="folder for an SVG")
    return parser


def _options(args: argparse.Namespace) -> Options:
    window_s, num_seeds = QUICK if args.quick else FULL
    window_s, num_seeds = args.window or window_s, args.seeds or num_seeds
    policies = tuple(args.policies.split(",")) if args.policies else ()
    # Whatever is wrong is said before anything is measured.
    for label in policies:
        split_label(label)
    analysts.check(args.analyst)
    steps_of(args.engine)
    shape = EngineShape() if args.batch is None else EngineShape(max_batch=args.batch)
    return Options(
        is_quick=args.quick,
        seeds=tuple(range(args.seed, args.seed + num_seeds)),
        policies=policies,
        loads=tuple(float(load) for load in args.loads.split(",") if load),
        workload=paper_spec(1.0, window_s, requests=args.requests, calls=args.calls),
        engine=Engine(steps=args.engine, shape=shape),
        analyst=args.analyst,
        settings=parse_settings(args.set),
        goodput=tuple(goodput.parse(args.goodput).items()),
        traces=tuple(args.trace),
        probe_programs=args.probe,
    )


def _grid(args: argparse.Namespace, experiment: Experiment, options: Options) -> Grid:
    runner = Runner(
        Cache(args.cache),
        jobs=args.jobs,
        progress=Progress(sys.stderr, f"sim {args.name}"),
        keep_rivals=args.keep_rivals,
    )
    own = experiment.quick_policies if options.is_quick else experiment.policies
    cases = experiment.cases(options)
    bounded = [case.name for case in cases if args.bounds]
    if args.bounds is None and experiment.has_bounds:
        bounded = [case.name for case in cases if case.load == OPERATING_POINT]
    return run_grid(cases, options.policies or own, options.seeds, runner, bounded=bounded)


def _print(experiment: Experiment, grid: Grid) -> None:
    print(f"{experiment.title}: {len(grid.seeds)} seeds of {grid.cases[0].workload.window_s:g} s\n")
    print(report.table(("case", "capacity, programs/s", "calls/s", "token/s"), _capacities(grid)))
    print(f"{capacity.NOTE}.")
    defines: dict[str, None] = {}
    for view in (*experiment.views, *((tables.by_flags,) if grid.cases[0].goodput else ())):
        found = view(grid)
        defines.update(dict.fromkeys(found.defines))
        print(f"\n{found.title}".rstrip(" "))
        print(report.table(found.headers, found.rows))
    print("\n± is the half width of a 95 % confidence interval over seeds (Student's t); ratios")
    print("are taken seed by seed, on the same workload.")
    for name in defines:
        print(f"{name}: {DEFINITIONS[name]}.")
    print(f"\nPaper: {experiment.paper}.\nOurs: {experiment.say(grid)}.")


def _capacities(grid: Grid) -> list[list[Any]]:
    return [
        [name, found.programs_per_s, found.calls_per_s, found.tokens_per_s]
        for name, found in grid.capacity.items()
    ]


def _draw(folder: Path, name: str, drawn: Sequence[Chart]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for chart in drawn:
        path = folder / f"{name}-{chart.name}.svg"
        path.write_text(chart.svg, encoding="utf-8")
        print(f"written to {path}")
