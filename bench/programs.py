"""Deadline attainment of real programs, with the graphs process's outlooks and without.

The four examples run as SGLang frontend programs against the real server, with Poisson arrivals
above what it can do and plain chat requests beside them. Both ways take turns on the same
programs, seeds and arrival times. Rate and deadlines are set from the machine's own speed: the
first pass, in which the graphs process learns, runs as many programs at once as may.
"""

import argparse
import asyncio
import importlib.util
import logging
import random
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from bench import report, servers
from bench.load import Offer, Targets, make_offers, play
from core.clock import Clock, MonotonicClock
from engine.runtime.frontend import JITEndpoint

EXAMPLES = ("tree_of_thought", "plan_and_execute", "map_reduce", "self_refine")
WAYS = ("with", "without")


class Job(msgspec.Struct, frozen=True):
    """One program to run."""

    at_s: float
    example: str
    seed: int


class Ran(msgspec.Struct, frozen=True):
    """What came of it, by the server's account of its calls and the client's clock."""

    example: str
    seed: int
    met: bool
    goodput_tokens: int
    tokens: int
    calls: int
    elapsed_s: float


def main(argv: list[str]) -> int:
    """``python -m bench programs``."""
    parser = argparse.ArgumentParser(prog="python -m bench programs", description=__doc__)
    parser.add_argument("--policy", default="gmax")
    parser.add_argument("--running", type=int, default=8, help="batch (default: %(default)s)")
    parser.add_argument("--learn", type=int, default=24, help="programs of the first pass")
    parser.add_argument("--programs", type=int, default=24, help="per round and way")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--overload", type=float, default=1.2, help="times the capacity (default: %(default)s)"
    )
    parser.add_argument(
        "--tightness",
        type=float,
        default=1.0,
        help="deadline of an example, in medians of its time in the first pass",
    )
    parser.add_argument(
        "--chat", type=float, default=0.5, help="chat requests per program (default: %(default)s)"
    )
    parser.add_argument("--model", default="demo", help="as launch.py takes it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.learn, args.programs = 1, 12, 12
    # A program that fails is counted; its traceback is not what this is about.
    logging.getLogger().setLevel(logging.ERROR)
    with servers.server(
        args.policy, ["--max-running-requests", str(args.running)], args.model
    ) as url:
        results, first = _measure(args, url)
    summary = _summary(results)
    _print(results, first)
    raw = {way: [msgspec.to_builtins(item) for item in results[way]] for way in WAYS}
    report.write(args.json, "programs", summary, {"results": raw, "options": str(vars(args))})
    return 0


def _measure(args: argparse.Namespace, url: str) -> tuple[dict[str, list[Ran]], dict[str, float]]:
    """Results by way, and each example's deadline."""
    clock = MonotonicClock()
    player = Player(url, clock)
    learning = [
        Job(0.0, EXAMPLES[index % len(EXAMPLES)], 1000 + index) for index in range(args.learn)
    ]
    start_s = clock.now_s()
    learnt = player.play(learning, {}, at_once=args.running)
    rate_per_s = args.overload * len(learnt) / (clock.now_s() - start_s)
    deadlines = {
        example: args.tightness
        * statistics.median(item.elapsed_s for item in learnt if item.example == example)
        for example in EXAMPLES
    }
    print(f"first pass done; {rate_per_s:.2f} programs/s from now on", flush=True)
    results: dict[str, list[Ran]] = defaultdict(list)
    for number in range(args.rounds):
        jobs = make_jobs(args.programs, rate_per_s, args.seed + number)
        chat = _chat(jobs, args.chat * rate_per_s, args.seed + number)
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            servers.use_outlooks(url, is_used=way == "with")
            servers.flush(url)
            beside = threading.Thread(target=_play_chat, args=(url, chat))
            beside.start()
            results[way] += player.play(jobs, deadlines)
            beside.join()
            print(f"round {number + 1}/{args.rounds} {way}: done", flush=True)
    return results, deadlines


def make_jobs(num: int, rate_per_s: float, seed: int) -> list[Job]:
    """Poisson arrivals of the examples, each as often as the others."""
    rng = random.Random(seed)
    jobs, at_s = [], 0.0
    for index in range(num):
        at_s += rng.expovariate(rate_per_s)
        jobs.append(Job(at_s, EXAMPLES[index % len(EXAMPLES)], rng.randrange(1 << 30)))
    return jobs


def _chat(jobs: Sequence[Job], rate_per_s: float, seed: int) -> list[Offer]:
    if rate_per_s <= 0:
        return []
    return make_offers(rate_per_s, jobs[-1].at_s, 60, None, seed)


def _play_chat(url: str, offers: Sequence[Offer]) -> None:
    targets = Targets(1.0, ttft_s=5.0, tbt_s=0.5, deadline_s=60.0, tokens_per_s=0.0)
    asyncio.run(play(url, offers, targets, patience_s=600.0))


class Player:
    """Runs example programs against one server."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._run_of = {name: _run_function(name) for name in EXAMPLES}

    def play(
        self, jobs: Sequence[Job], deadlines: dict[str, float], at_once: int | None = None
    ) -> list[Ran]:
        """Run ``jobs`` at their times; at most ``at_once`` together, or all."""
        start_s = self._clock.now_s()
        waiting = threading.Event()

        def one(job: Job) -> Ran:
            # Nobody sets it: a wait that does not take the processor.
            waiting.wait(max(job.at_s - (self._clock.now_s() - start_s), 0.0))
            return self._one(job, deadlines.get(job.example))

        with ThreadPoolExecutor(at_once or len(jobs)) as pool:
            return list(pool.map(one, jobs))

    def _one(self, job: Job, deadline_s: float | None) -> Ran:
        endpoint = JITEndpoint(
            self._url, deadline=deadline_s, chat_template_name="chatml", application=job.example
        )
        start_s = self._clock.now_s()
        try:
            outcome = self._run_of[job.example](endpoint, job.seed)["outcome"]
        except (RuntimeError, ValueError, KeyError, OSError):
            outcome = None
        elapsed_s = self._clock.now_s() - start_s
        if outcome is None:
            return Ran(job.example, job.seed, False, 0, 0, 0, elapsed_s)
        return Ran(
            job.example,
            job.seed,
            outcome["met"],
            outcome["goodput_tokens"],
            outcome["tokens"],
            outcome["calls"],
            elapsed_s,
        )


def _run_function(name: str) -> Callable[[JITEndpoint, int], dict[str, Any]]:
    """``run`` of an example, by its file: another package may be called ``examples``."""
    path = servers.REPOSITORY / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bench_example_{name}", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Callable[[JITEndpoint, int], dict[str, Any]] = module.run
    return run


def _summary(results: dict[str, list[Ran]]) -> dict[str, Any]:
    met = {way: sum(item.met for item in results[way]) for way in WAYS}
    tokens = {way: sum(item.goodput_tokens for item in results[way]) for way in WAYS}
    return {
        "programs": sum(len(items) for items in results.values()),
        "attainment_with": round(met["with"] / max(len(results["with"]), 1), 3),
        "attainment_without": round(met["without"] / max(len(results["without"]), 1), 3),
        "request_goodput_ratio": round(met["with"] / max(met["without"], 1), 3),
        "token_goodput_ratio": round(tokens["with"] / max(tokens["without"], 1), 3),
    }


def _print(results: dict[str, list[Ran]], deadlines: dict[str, float]) -> None:
    rows: list[list[Any]] = []
    for example in (*EXAMPLES, "all"):
        for way in WAYS:
            items = [item for item in results[way] if example in ("all", item.example)]
            ends = sorted(item.elapsed_s for item in items)
            rows.append(
                [
                    example,
                    way,
                    len(items),
                    deadlines.get(example),
                    sum(item.met for item in items),
                    sum(item.goodput_tokens for item in items),
                    ends[len(ends) // 2] if ends else None,
                    sum(item.calls == 0 for item in items),
                ]
            )
    headers = ["program", "outlooks", "runs", "deadline s", "in time", "goodput tokens"]
    print(report.table([*headers, "time p50 s", "failed"], rows))
