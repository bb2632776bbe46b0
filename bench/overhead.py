"""Throughput against stock SGLang at saturation, where every request is of one class.

Two servers, stock and ours, get the same burst of requests in turn, several rounds, in an
order that rotates; ours runs each of its policies. What is reported is the ratio of tokens
per second, the median over the rounds: absolute figures are the machine's.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
from pathlib import Path

import openai

from bench import report, servers
from bench.turns import in_turn, median_ratio
from core.clock import MonotonicClock

STOCK = "sglang"


def main(argv: list[str]) -> int:
    """``python -m bench overhead``."""
    parser = argparse.ArgumentParser(prog="python -m bench overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=96, help="per burst (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="per answer (default: %(default)s)")
    parser.add_argument("--running", type=int, default=32, help="batch (default: %(default)s)")
    parser.add_argument("--policies", default="gmax,fcfs", help="ours (default: %(default)s)")
    parser.add_argument("--model", default="demo", help="as launch.py takes it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 48 requests")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.requests = 3, 48
    policies = [STOCK, *args.policies.split(",")]
    flags = ["--max-running-requests", str(args.running)]
    with contextlib.ExitStack() as stack:
        stock = stack.enter_context(servers.server(STOCK, flags, args.model))
        ours = stack.enter_context(servers.server(policies[1], flags, args.model))
        speeds = _measure(args, policies, stock, ours)
    _print(policies, speeds)
    summary = {
        f"throughput_ratio_{policy}": _ratio(speeds, policy)
        for policy in policies
        if policy != STOCK
    }
    report.write(
        args.json, "overhead", summary, {"tokens_per_s": speeds, "options": str(vars(args))}
    )
    return 0


def _measure(
    args: argparse.Namespace, policies: list[str], stock: str, ours: str
) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {policy: [] for policy in policies}
    for policy in policies:
        # Warm: first steps fit the step-time model and touch every code path.
        _run(args, policy, stock, ours, num_requests=8)
    for round_index in range(args.rounds):
        for policy in in_turn(policies, round_index):
            speed = _run(args, policy, stock, ours, num_requests=args.requests)
            speeds[policy].append(speed)
            print(
                f"round {round_index + 1}/{args.rounds} {policy}: {speed:.1f} tokens/s", flush=True
            )
    return speeds


def _run(args: argparse.Namespace, policy: str, stock: str, ours: str, num_requests: int) -> float:
    url = stock if policy == STOCK else ours
    if policy != STOCK:
        servers.use_policy(url, policy)
    servers.flush(url)
    return asyncio.run(_burst(url, num_requests, args.tokens, args.seed))


async def _burst(url: str, num_requests: int, tokens: int, seed: int) -> float:
    """Tokens per second of a burst, all sent at once."""
    rng = random.Random(seed)
    prompts = [
        " ".join(str(rng.randrange(1000)) for _ in range(rng.choice([4, 8, 12])))
        for _ in range(num_requests)
    ]
    clock = MonotonicClock()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        start_s = clock.now_s()
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="default",
                    prompt=prompt,
                    max_tokens=tokens,
                    temperature=0,
                    timeout=600,
                    extra_body={"ignore_eos": True},
                )
                for prompt in prompts
            )
        )
        elapsed_s = clock.now_s() - start_s
    return sum(answer.usage.completion_tokens for answer in answers if answer.usage) / elapsed_s


def _ratio(speeds: dict[str, list[float]], policy: str) -> float:
    return round(median_ratio(speeds[policy], speeds[STOCK]), 4)


def _print(policies: list[str], speeds: dict[str, list[float]]) -> None:
    rows = [
        [
            policy,
            statistics.median(speeds[policy]),
            min(speeds[policy]),
            max(speeds[policy]),
            _ratio(speeds, policy),
        ]
        for policy in policies
    ]
    print(report.table(["policy", "tokens/s", "min", "max", "ratio to stock (median)"], rows))
