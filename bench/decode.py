"""Decode steps and prefills of the real server with each attention backend, alternating.

One server per backend, all on this machine, asleep while another is measured. Streams with prompts
of their own decode side by side, so the time between two tokens is that of a step with everything
that an engine does in it. Batches of the same total context but other lengths show what a spread
of lengths costs. Ratios are taken round by round; absolute figures are the machine's.
"""

import argparse
import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report, servers
from bench.step_load import Prober, Stream, decode_rows
from bench.turns import median_ratio
from engine.simulator.measured import Measurement, write

BACKENDS = "torch_native,jitserve_cpu"
OUTPUT_TOKENS = 14
CASES: Mapping[str, tuple[int, ...]] = {
    "1 x 512": (512,),
    "16 x 64": (64,) * 16,
    "16 x 512": (512,) * 16,
    "8 x 64 + 8 x 960": (64, 960) * 8,
    "15 x 128 + 6,272": (128,) * 15 + (6272,),
    "16 x 1,500": (1500,) * 16,
}
"""Contexts of a batch. Those in the middle have the total of 16 x 512."""
QUICK = ("16 x 64", "16 x 512", "16 x 1,500")
PROMPTS: Mapping[str, tuple[int, int]] = {
    "prompt of 512": (0, 512),
    "512 after 1,024 cached": (1024, 512),
    "16 after 1,024 cached": (1024, 16),
}
"""Prompt tokens that are cached, and those that are new."""

Seconds = dict[str, dict[str, list[float]]]
"""By case and backend, one per round."""


def main(argv: list[str]) -> int:
    """``python -m bench decode``."""
    parser = argparse.ArgumentParser(prog="python -m bench decode", description=__doc__)
    parser.add_argument("--backends", default=BACKENDS, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="as launch.py takes it")
    parser.add_argument("--model", default="demo", help="as launch.py takes it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 rounds of three batches")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.add_argument(
        "--steps-csv", type=Path, default=None, help="write the last backend's steps here"
    )
    args = parser.parse_args(argv)
    cases = {name: CASES[name] for name in (QUICK if args.quick else CASES)}
    rounds = 2 if args.quick else args.rounds
    backends = args.backends.split(",")
    steps: Seconds = {name: {backend: [] for backend in backends} for name in cases}
    prefills: Seconds = {name: {backend: [] for backend in backends} for name in PROMPTS}
    rows: dict[str, list[Measurement]] = {backend: [] for backend in backends}
    with contextlib.ExitStack() as stack:
        probers = {}
        for backend in backends:
            flags = ["--attention-backend", backend, "--dtype", args.dtype]
            flags += ["--max-running-requests", "16"]
            url = stack.enter_context(servers.server("fcfs", flags, args.model))
            probers[backend] = (url, Prober(url, args.seed))
        for name, contexts in cases.items():
            _measure_case(name, contexts, rounds, probers, steps, rows)
        for name, (cached, new) in PROMPTS.items():
            _measure_prompt(name, cached, new, rounds, probers, prefills)
    _print(cases, backends, steps, prefills)
    if args.steps_csv:
        write(args.steps_csv, rows[backends[-1]])
    detail = {"step_s": steps, "prefill_s": prefills, "options": str(vars(args))}
    report.write(args.json, "decode", _summary(backends, steps, prefills), detail)
    return 0


def _measure_case(
    name: str,
    contexts: Sequence[int],
    rounds: int,
    probers: Mapping[str, tuple[str, Prober]],
    steps: Seconds,
    rows: Mapping[str, list[Measurement]],
) -> None:
    """The same batch on each server in turn; its prompts are computed before anything counts."""
    prompts: dict[str, list[list[int]]] = {}
    for backend, (url, prober) in probers.items():
        servers.flush(url)
        prompts[backend] = [prober.fresh(tokens) for tokens in contexts]
        prober.burst(prompts[backend], 2)
    for _ in range(rounds):
        for backend, (_, prober) in probers.items():
            found = decode_rows(prober.burst(prompts[backend], OUTPUT_TOKENS))
            rows[backend].extend(found)
            steps[name][backend].append(statistics.median(row.duration_s for row in found))
    _say(name, steps[name])


def _measure_prompt(
    name: str,
    cached: int,
    new: int,
    rounds: int,
    probers: Mapping[str, tuple[str, Prober]],
    prefills: Seconds,
) -> None:
    """Time to the first token of a prompt of which the beginning is in the cache."""
    for _ in range(rounds):
        for backend, (url, prober) in probers.items():
            servers.flush(url)
            begin = prober.fresh(cached)
            if cached:
                prober.burst([begin], 1)
            stream: Stream = prober.burst([[*begin, *prober.fresh(new)]], 1)[0]
            prefills[name][backend].append(stream.times[0])
    _say(name, prefills[name])


def _say(name: str, seconds: Mapping[str, Sequence[float]]) -> None:
    shown = ", ".join(
        f"{backend} {1e3 * statistics.median(values):.1f} ms" for backend, values in seconds.items()
    )
    print(f"{name}: {shown}", flush=True)


def _print(
    cases: Mapping[str, Sequence[int]], backends: Sequence[str], steps: Seconds, prefills: Seconds
) -> None:
    first = backends[0]
    rows: list[list[Any]] = []
    for name, contexts in cases.items():
        for backend in backends:
            step_s = statistics.median(steps[name][backend])
            speed = len(contexts) / step_s
            rows.append([name, backend, 1e3 * step_s, speed, _faster(steps[name], first, backend)])
    print(report.table(["batch", "backend", "step ms", "tokens/s", f"x {first}"], rows))
    rows = [
        [name, backend, 1e3 * statistics.median(values), _faster(found, first, backend)]
        for name, found in prefills.items()
        for backend, values in found.items()
    ]
    print(report.table(["prompt", "backend", "first token ms", f"x {first}"], rows))


def _faster(seconds: Mapping[str, Sequence[float]], first: str, backend: str) -> float:
    """How many times as fast as the first backend."""
    return median_ratio(seconds[first], seconds[backend])


def _summary(backends: Sequence[str], steps: Seconds, prefills: Seconds) -> dict[str, float]:
    return {
        f"{backend} {name}": round(_faster(found, backends[0], backend), 3)
        for backend in backends[1:]
        for name, found in {**steps, **prefills}.items()
    }
