"""SLO attainment and goodput per class and policy, on the real server at an overload.

The real ``openai`` client sends a mix of streamed latency-sensitive and deadline-sensitive chat
requests and of programs of several calls, with Poisson arrivals. Policies take turns on the same
load, in an order that rotates: stock SGLang on a server of its own, ours on one server that is
switched. The rate and the targets are set from the machine's own speed, measured first, so that
the load is the same multiple of what it can do anywhere. Outcomes are judged on the client's
clock (docs/metrics.md), programs as a whole.
"""

import argparse
import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import pace, report, servers
from bench.answers import Answer
from bench.load import CLASSES, Offer, Result, Targets, make_offers, parse_mix, play
from bench.turns import in_turn

STOCK = "sglang"
FALLBACK = "+fallback"
"""Behind a policy's name: without the predictor's forecasts, by the lengths of each class."""
BURST = 3
"""Batches that the machine's speed is measured with."""
FULL_SHARE = 0.7
"""Of their tokens, after which the batches are no longer full."""


def main(argv: list[str]) -> int:
    """``python -m bench serve``."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.rounds, args.seconds = 1, 60.0
    policies = args.policies.split(",")
    if "compound" in args.mix and any("oracle" in policy for policy in policies):
        raise SystemExit("an oracle's lengths of programs are not known here: --mix 1:1")
    targets, rounds, results, paces = _measure(args, policies)
    summary = summarise(policies, results)
    _print(policies, results)
    print(targets.describe(args.overload))
    detail = {
        "targets": targets,
        "seconds": args.seconds,
        "offers": rounds,
        "results": {policy: results[policy] for policy in policies},
        "paces": paces,
        "options": str(vars(args)),
    }
    report.write(args.json, "serve", summary, msgspec.to_builtins(detail))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__)
    parser.add_argument(
        "--policies",
        default="edf,sarathi+cancel,gmax-paper,gmax",
        help="by name, sglang for stock; with +fallback behind it without forecasts "
        "(default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of 60 s")
    add_load_arguments(parser, overload=1.5, seconds=100.0)
    return parser


def add_load_arguments(parser: argparse.ArgumentParser, *, overload: float, seconds: float) -> None:
    """The flags of the load and the server, which other benchmarks share."""
    parser.add_argument(
        "--overload", type=float, default=overload, help="times the capacity (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of arrivals, per round (%(default)s)"
    )
    parser.add_argument(
        "--mix",
        type=parse_mix,
        default="1:1:1",
        help=f"shares of {':'.join(CLASSES)}, by programs (default: %(default)s)",
    )
    parser.add_argument("--running", type=int, default=16, help="batch (default: %(default)s)")
    parser.add_argument(
        "--tbt-steps", type=float, default=1.5, help="target_tbt in steps of a full batch"
    )
    parser.add_argument(
        "--ttft-steps", type=float, default=10.0, help="target_ttft in steps of a full batch"
    )
    parser.add_argument(
        "--deadline-steps",
        type=float,
        default=60.0,
        help="deadline in steps of a full batch; of a program so much for each stage",
    )
    parser.add_argument("--max-tokens", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines with a prompt each")
    parser.add_argument("--model", default="demo", help="as launch.py takes it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")


def _measure(
    args: argparse.Namespace, policies: Sequence[str]
) -> tuple[Targets, list[list[Offer]], dict[str, list[Result]], dict[str, list[float]]]:
    """The targets, each round's load, and what came of it and how fast steps were by policy."""
    results: dict[str, list[Result]] = defaultdict(list)
    paces: dict[str, list[float]] = defaultdict(list)
    rounds: list[list[Offer]] = []
    flags = server_flags(args)
    needs_lengths = any("oracle" in policy for policy in policies)
    if needs_lengths:
        # In float32 the same prompt gives the same answer whatever else is in the batch.
        flags += ["--dtype", "float32", "--test-known-lengths"]
    ours = [policy for policy in policies if policy != STOCK]
    with contextlib.ExitStack() as stack:
        urls = {}
        if STOCK in policies:
            urls[STOCK] = stack.enter_context(servers.server(STOCK, flags, args.model))
        if ours:
            first = ours[0].removesuffix(FALLBACK)
            url = stack.enter_context(servers.server(first, flags, args.model))
            urls.update(dict.fromkeys(ours, url))
        if STOCK not in urls:
            # Streams without hurry would wait for each other elsewhere.
            servers.use_policy(urls[ours[0]], "fcfs")
        targets = measure_speed(args, next(iter(urls.values())))
        print(targets.describe(args.overload), flush=True)
        for round_index in range(args.rounds):
            offers = offers_of(args, targets, args.seed + round_index)
            if needs_lengths:
                offers = _with_lengths(offers, urls[ours[0]], args.running)
            rounds.append(offers)
            for policy in in_turn(policies, round_index):
                with pace.watched(urls[policy]) as seen:
                    results[policy] += play_round(policy, urls[policy], offers, targets)
                paces[policy].append(seen.median_s)
                print(f"round {round_index + 1}/{args.rounds} {policy}: done", flush=True)
    return targets, rounds, results, paces


def server_flags(args: argparse.Namespace) -> list[str]:
    """Of every server of a run."""
    return ["--max-running-requests", str(args.running), "--enable-cache-report"]


def offers_of(args: argparse.Namespace, targets: Targets, seed: int) -> list[Offer]:
    """The load of a round."""
    return make_offers(
        targets.rate_per_s, args.seconds, args.max_tokens, args.prompts, seed, args.mix
    )


def measure_speed(args: argparse.Namespace, url: str) -> Targets:
    """How fast this machine is: full batches of the same mix, without a deadline to miss."""
    offers = make_offers(1.0, 1000.0, args.max_tokens, args.prompts, args.seed - 1, args.mix)
    burst = [msgspec.structs.replace(offer, at_s=0.0) for offer in offers[: BURST * args.running]]
    # As far away as a server takes it: nobody is in a hurry, nobody is preferred.
    relaxed = Targets(1.0, 3600.0, 3600.0, 3600.0, 0.0)
    results = asyncio.run(play(url, burst, relaxed, patience_s=600))
    tokens_per_s = speed_of([call for result in results for call in result.calls])
    tokens_each = sum(result.output_tokens for result in results) / len(results)
    step_s = args.running / tokens_per_s
    return Targets(
        rate_per_s=args.overload * tokens_per_s / tokens_each,
        ttft_s=args.ttft_steps * step_s,
        tbt_s=args.tbt_steps * step_s,
        deadline_s=args.deadline_steps * step_s,
        tokens_per_s=tokens_per_s,
    )


def speed_of(calls: Sequence[Answer]) -> float:
    """Output tokens per second until most of a burst's were there, while batches were full."""
    wanted = FULL_SHARE * sum(call.output_tokens for call in calls)
    seen = 0
    for call in sorted(calls, key=lambda call: call.end_s):
        seen += call.output_tokens
        if seen >= wanted and call.end_s > 0:
            return seen / call.end_s
    raise RuntimeError("the server answered nothing to measure its speed by")


def play_round(
    policy: str,
    url: str,
    offers: Sequence[Offer],
    targets: Targets,
    patience: float = 1.5,
) -> list[Result]:
    """One policy's turn, from an empty cache; ``patience`` is in deadlines."""
    if policy != STOCK:
        has_forecasts = not policy.endswith(FALLBACK)
        servers.use_policy(url, policy.removesuffix(FALLBACK), forecasts=has_forecasts)
    servers.flush(url)
    return asyncio.run(play(url, offers, targets, patience_s=patience * targets.deadline_s))


def _with_lengths(offers: Sequence[Offer], url: str, running: int) -> list[Offer]:
    """The same load with each answer's length, which a pass without objectives finds out."""
    servers.use_policy(url, "fcfs")
    prompts = list(dict.fromkeys(offer.prompt for offer in offers))
    asks = [
        Offer(0.05 * index, "best_effort", prompt, offers[0].max_tokens)
        for index, prompt in enumerate(prompts)
    ]
    unhurried = Targets(1.0, 1.0, 1.0, 1.0, 0.0)
    results = asyncio.run(play(url, asks, unhurried, patience_s=3600))
    length_of = {
        prompt: result.output_tokens
        for prompt, result in zip(prompts, results, strict=True)
        if result.ending == "finished"
    }
    return [
        msgspec.structs.replace(offer, known_tokens=length_of.get(offer.prompt)) for offer in offers
    ]


def goodput(results: Sequence[Result]) -> tuple[int, int]:
    """Tokens, and requests or programs, that met their SLO; best-effort has none."""
    return sum(item.goodput_tokens for item in results), sum(
        item.met for item in results if item.slo_type != "best_effort"
    )


def num_calls(results: Sequence[Result]) -> int:
    """LLM calls that were sent."""
    return sum(len(item.calls) for item in results)


def summarise(policies: Sequence[str], results: dict[str, list[Result]]) -> dict[str, Any]:
    """The flat figures of a run; ``requests`` are LLM calls, of the policy with the fewest."""
    summary: dict[str, Any] = {"requests": min(num_calls(results[name]) for name in policies)}
    for policy in policies:
        summary[f"requests_{policy}"] = num_calls(results[policy])
    if "gmax" not in policies:
        return summary
    tokens, requests = goodput(results["gmax"])
    for policy in policies:
        if policy != "gmax":
            their_tokens, their_requests = goodput(results[policy])
            summary[f"token_goodput_ratio_vs_{policy}"] = round(tokens / max(their_tokens, 1), 3)
            ratio = round(requests / max(their_requests, 1), 3)
            summary[f"request_goodput_ratio_vs_{policy}"] = ratio
    return summary


def _print(policies: Sequence[str], results: dict[str, list[Result]]) -> None:
    rows: list[list[Any]] = []
    for policy in policies:
        for slo_type in CLASSES:
            items = [item for item in results[policy] if item.slo_type == slo_type]
            if items:
                rows.append([policy, slo_type, *_row(items)])
        rows.append([policy, "all", *_row(results[policy])])
        tokens, requests = goodput(results[policy])
        rows[-1][4:7] = [None, requests, tokens]
    headers = ["policy", "class", "programs", "calls", "SLO met", "met", "goodput tokens"]
    headers += ["TTFT p50 s", "E2EL p50 s", "output tokens"]
    print(report.table(headers, rows))


def _row(items: Sequence[Result]) -> list[Any]:
    met = sum(item.met for item in items)
    ttfts = sorted(item.ttft_s for item in items if item.ttft_s is not None)
    ends = sorted(item.e2el_s for item in items)
    return [
        len(items),
        num_calls(items),
        f"{100 * met / max(len(items), 1):.0f} %",
        met,
        sum(item.goodput_tokens for item in items),
        ttfts[len(ttfts) // 2] if ttfts else None,
        ends[len(ends) // 2] if ends else None,
        sum(item.output_tokens for item in items),
    ]
