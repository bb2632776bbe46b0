"""The simulator against the real server: the same load on both, policy by policy.

The step times of the real engine are measured first, from outside (``bench.step_load``), and
nothing else of its speed goes into the simulator but what a request costs beside its steps.
Then each policy serves the same load really; the simulator gets the arrivals, the objectives
and the true token counts, and has to say what came of it. Its analysts learn from turn to turn, as
the server's do, and its steps are as much slower in a turn as the server's own step timer found
them (``bench.pace``): a shared machine is not equally fast in all of them. One policy is served
twice, so that the machine's own noise is known. Errors are of the simulator, as shares of the real
figures.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench import pace, replay_served, report, serve, servers
from bench.calibration import PATIENCE, Known, simulate
from bench.load import Offer, Result, Targets
from bench.replay import (
    Engine,
    Figures,
    error,
    real_figures,
    replay,
    rows_of,
    simulated_figures,
    summarise,
)
from bench.simulations import analysts
from bench.step_load import Prober, Seen, by_kind
from engine.simulator import measured
from engine.simulator.shape import EngineShape

AGAIN = " again"
"""Behind the policy that is served a second time."""


class Turn(msgspec.Struct, frozen=True):
    """The same load served by one policy."""

    policy: str
    results: list[Result]
    step_s: float = 0.0
    """Seconds of the reference step meanwhile (``bench.pace``); 0: not known."""


def main(argv: list[str]) -> int:
    """``python -m bench calibrate``."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.served is None) != (args.known is None):
        parser.error("--served and --known go together")
    if args.served:
        return replay_served.run(args)
    if args.quick:
        args.seconds = 30.0
    policies = args.policies.split(",")
    with servers.server(policies[0], serve.server_flags(args), args.model) as url:
        seen, known = _measure(args, url)
        offers = serve.offers_of(args, known.targets, args.seed)
        turns = _serve_all(url, policies, offers, known.targets)
    if args.steps_csv:
        measured.write(args.steps_csv, seen.rows)
    real = {turn.policy: real_figures(turn.results, args.seconds) for turn in turns}
    simulated = _simulate_all(args, known, offers, turns)
    _print(policies, real, simulated)
    summary = summarise({policy: real[policy] for policy in policies}, simulated)
    last = policies[-1]
    summary["repeat_difference_fraction"] = _repeat(real, last, last + AGAIN)
    print(", ".join(f"{name} {value:g}" for name, value in summary.items()))
    detail = {
        "known": known,
        "real": real,
        "simulated": simulated,
        "offers": offers,
        "turns": turns,
        "options": str(vars(args)),
    }
    report.write(args.json, "calibrate", summary, msgspec.to_builtins(detail))
    return 0


def _measure(args: argparse.Namespace, url: str) -> tuple[Seen, Known]:
    """The idle server's steps, then its speed under the load."""
    info = _get(url, "/server_info")
    shape = engine_shape(_get(url, "/slo/state"), info)
    seen = Prober(url, args.seed).measure()
    own_model_s = tuple(_get(url, "/slo/state").get("step_time_coefficients_s", ()))
    _print_steps(seen, own_model_s)
    servers.use_policy(url, "fcfs")
    targets = serve.measure_speed(args, url)
    print(targets.describe(args.overload), flush=True)
    # SGLang's overlap schedule takes a step's result while the next one runs.
    is_late = not info.get("disable_overlap_schedule", False)
    engine = Engine(seen.overhead_s, int(is_late))
    return seen, Known(shape, seen.steps, engine, targets, own_model_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench calibrate", description=__doc__)
    parser.add_argument(
        "--policies", default="fcfs,edf,gmax", help="the last one twice (default: %(default)s)"
    )
    parser.add_argument(
        "--analyst",
        default="real",
        help=f"what the simulated scheduler is told: {analysts.CHOICES} (default: %(default)s)",
    )
    parser.add_argument("--steps-csv", type=Path, default=None, help="write the steps here")
    parser.add_argument(
        "--served",
        type=Path,
        default=None,
        help="only replay this run of `bench serve` (its JSON), without a server; with --known",
    )
    parser.add_argument(
        "--known", type=Path, default=None, help="JSON of a calibration of the same machine"
    )
    parser.add_argument(
        "--no-pace", action="store_true", help="the machine is as fast in all turns as at first"
    )
    parser.add_argument("--quick", action="store_true", help="30 s of arrivals")
    serve.add_load_arguments(parser, overload=2.0, seconds=60.0)
    return parser


def _get(url: str, path: str) -> dict[str, Any]:
    response = httpx.get(url + path, timeout=30)
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


def engine_shape(state: Mapping[str, Any], info: Mapping[str, Any]) -> EngineShape:
    """Of a server, by what it says of itself."""
    chunk = info.get("chunked_prefill_size") or 0
    return EngineShape(
        max_batch=state["max_batch"],
        kv_tokens=state["total_kv_tokens"],
        slots=state["total_request_slots"],
        chunk_tokens=chunk if chunk > 0 else info.get("max_prefill_tokens", 16384),
        mixes_chunks=bool(info.get("enable_mixed_chunk", False)),
    )


def _serve_all(
    url: str, policies: Sequence[str], offers: Sequence[Offer], targets: Targets
) -> list[Turn]:
    turns = []
    for name in [*policies, policies[-1] + AGAIN]:
        policy = name.removesuffix(AGAIN)
        with pace.watched(url) as paces:
            results = serve.play_round(policy, url, offers, targets, PATIENCE)
        turns.append(Turn(name, results, paces.median_s))
        print(f"{name}: served", flush=True)
    return turns


def _simulate_all(
    args: argparse.Namespace, known: Known, offers: Sequence[Offer], turns: Sequence[Turn]
) -> dict[str, Figures]:
    found, told = {}, analysts.AnalystsOfRuns(args.analyst, args.seed)
    for turn in turns:
        slower = 1.0 if args.no_pace else known.pace(turn.step_s)
        others = [other.results for other in turns if other is not turn]
        load = replay(offers, turn.results, others, known.targets, args.seconds, known.engine)
        policy = turn.policy.removesuffix(AGAIN)
        result = simulate(load.workload, policy, known, told.of_next_run(), slower)
        found[turn.policy] = simulated_figures(result, args.seconds, known.engine)
        print(
            f"{turn.policy}: simulated, steps {slower:.3f} times as long; lengths of "
            f"{load.num_borrowed} from other runs, of {load.num_guessed} guessed",
            flush=True,
        )
    return found


def _repeat(real: Mapping[str, Figures], policy: str, again: str) -> float:
    difference = error(real[again].token_goodput_per_s, real[policy].token_goodput_per_s)
    return round(abs(difference), 4) if difference is not None else 1.0


def _print_steps(seen: Seen, fitted: Sequence[float]) -> None:
    rows = []
    for name, part in by_kind(seen.rows):
        fit = measured.fit_error(seen.steps, part)
        rows.append([name, fit.num_steps, fit.median, fit.p90, fit.worst])
    print(report.table(["steps", "rows", "error median", "p90", "worst"], rows))
    coefficients = msgspec.structs.asdict(seen.steps)
    shown = ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in coefficients.items())
    print(f"measured: {shown}; overhead of a request {1e3 * seen.overhead_s:.1f} ms")
    own = ", ".join(f"{1e3 * value:.4g} ms" for value in fitted)
    print(
        f"the server's own model (constant, decode, context, prefill, padding): {own}", flush=True
    )


def _print(
    policies: Sequence[str], real: Mapping[str, Figures], simulated: Mapping[str, Figures]
) -> None:
    rows = [row for name in real for row in rows_of(name, real[name], simulated[name])]
    print(report.table(["policy", "figure", "real", "simulated", "error"], rows))
    once, twice = real[policies[-1]], real[policies[-1] + AGAIN]
    rows = rows_of(policies[-1], once, twice)
    print("the machine's own noise, one policy served twice:")
    print(report.table(["policy", "figure", "first", "again", "difference"], rows))
