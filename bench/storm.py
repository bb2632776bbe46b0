"""A storm of preemptions over long contexts: KV swapped, computed again, and stock SGLang.

Patient requests with long prompts fill the KV pool; bursts of urgent ones come on top, each with a
long prompt of its own, and can be in time only if somebody gives up KV. Three servers take turns on
the same load, in an order that rotates: ours with host memory for KV, ours without, and SGLang's
own scheduler. Deadlines are set from how long the same requests take on this machine when nobody
disturbs them. Judged on the client's clock.
"""

import argparse
import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import openai

from bench import report, servers
from bench.answers import Answer, Ask, Session
from bench.turns import in_turn
from core.clock import MonotonicClock

SERVERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "swap": ("gmax", ("--kv-swap-gib", "2")),
    "recompute": ("gmax", ("--kv-swap-gib", "0")),
    "stock": ("sglang", ()),
}
"""Policy and flags by name."""
WORDS = ("river", "stone", "cloud", "green", "seven", "paper", "light", "under", "maple", "quiet")


class Job(msgspec.Struct, frozen=True):
    """One request of the storm. Times in seconds from its beginning."""

    at_s: float
    prompt: str
    max_tokens: int
    deadline_s: float
    is_urgent: bool


class Outcome(NamedTuple):
    """What came of a storm: answers in the order of its jobs, and what the server counted."""

    answers: list[Answer]
    counts: dict[str, Any]


def main(argv: list[str]) -> int:
    """``python -m bench storm``."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.rounds, args.patient, args.bursts = 1, 4, 3
    names = args.servers.split(",")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in names:
            policy, flags = SERVERS[name]
            urls[name] = stack.enter_context(
                servers.server(policy, [*_pool_flags(args), *flags], args.model)
            )
        alone_s = _undisturbed_s(urls[names[0]], args)
        print(f"undisturbed: patient {alone_s[0]:.1f} s, a burst {alone_s[1]:.1f} s", flush=True)
        rounds = []
        for number in range(args.rounds):
            jobs = make_jobs(args, alone_s, args.seed + number)
            rounds.append(jobs)
            for name in in_turn(names, number):
                outcomes[name].append(_play(urls[name], jobs))
                print(f"round {number + 1}/{args.rounds} {name}: done", flush=True)
    summary = summarise(rounds, outcomes)
    _print(rounds, outcomes)
    detail = {"rounds": rounds, "outcomes": outcomes, "options": str(vars(args))}
    report.write(args.json, "storm", summary, msgspec.to_builtins(detail))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench storm", description=__doc__)
    parser.add_argument("--servers", default=",".join(SERVERS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--patient", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--bursts", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--burst", type=int, default=2, help="urgent requests in each")
    parser.add_argument("--prompt-tokens", type=int, default=900, help="about (%(default)s)")
    parser.add_argument("--patient-tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--urgent-tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--patience", type=float, default=2.5, help="deadline of the patient")
    parser.add_argument("--haste", type=float, default=2.5, help="deadline of the urgent")
    parser.add_argument("--model", default="demo", help="as launch.py takes it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one small round")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    return parser


def _pool_flags(args: argparse.Namespace) -> list[str]:
    """KV for the patient ones and no more."""
    each = 1.15 * args.prompt_tokens + args.patient_tokens
    running = args.patient + args.burst
    flags = ["--max-total-tokens", str(int(args.patient * each))]
    return [*flags, "--max-running-requests", str(running)]


def make_jobs(args: argparse.Namespace, alone_s: tuple[float, float], seed: int) -> list[Job]:
    """The patient at once, the bursts over the time that the patient would take alone.

    Args:
        alone_s: seconds that the patient take together undisturbed, and that a burst takes.
    """
    rng = random.Random(seed)
    patient_s, burst_s = alone_s
    jobs = [
        Job(0.0, _prompt(rng, args), args.patient_tokens, args.patience * patient_s, False)
        for _ in range(args.patient)
    ]
    for number in range(args.bursts):
        at_s = patient_s * (0.5 + number) / args.bursts
        jobs += [
            Job(at_s, _prompt(rng, args), args.urgent_tokens, args.haste * burst_s, True)
            for _ in range(args.burst)
        ]
    return jobs


def _prompt(rng: random.Random, args: argparse.Namespace) -> str:
    """Text of about so many tokens that nobody has sent before."""
    words = " ".join(rng.choices(WORDS, k=args.prompt_tokens - 30))
    return f"{rng.randrange(10**6)}. Count the words and go on with more of them: {words}"


def _undisturbed_s(url: str, args: argparse.Namespace) -> tuple[float, float]:
    jobs = make_jobs(args, (1.0, 1.0), args.seed - 1)
    patient = [job for job in jobs if not job.is_urgent]
    burst = [job for job in jobs if job.is_urgent][: args.burst]
    found = []
    for part in (burst, patient, burst):
        at_once = [msgspec.structs.replace(job, at_s=0.0, deadline_s=3600.0) for job in part]
        found.append(max(answer.end_s for answer in _play(url, at_once).answers))
    return found[1], found[2]


def _play(url: str, jobs: Sequence[Job]) -> Outcome:
    servers.flush(url)
    before = _counts(url)
    answers = asyncio.run(_send_all(url, jobs))
    after = _counts(url)
    return Outcome(answers, {name: after[name] - before[name] for name in after})


def _counts(url: str) -> dict[str, int]:
    response = httpx.get(f"{url}/slo/state", timeout=30)
    if response.status_code != httpx.codes.OK:
        return {}
    state = response.json()
    swap = state.get("kv_swap") or {}
    return {
        "preemptions": state.get("num_preemptions", 0),
        "restored": swap.get("restored", 0),
        "restored_tokens": swap.get("restored_tokens", 0),
        "lost": swap.get("lost", 0),
    }


async def _send_all(url: str, jobs: Sequence[Job]) -> list[Answer]:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        session = Session(client, http, MonotonicClock())

        async def one(job: Job) -> Answer:
            await asyncio.sleep(max(job.at_s - session.now_s(), 0))
            fields = {"deadline": job.deadline_s, "ignore_eos": True}
            ask = Ask(job.prompt, job.max_tokens, fields)
            answer, _ = await session.ask(ask, session.now_s() + 3 * job.deadline_s + 60)
            return answer

        return list(await asyncio.gather(*(one(job) for job in jobs)))


def is_met(job: Job, answer: Answer) -> bool:
    """Whole, and by its deadline."""
    return answer.ending == "finished" and answer.end_s - answer.start_s <= job.deadline_s


def goodput(
    rounds: Sequence[Sequence[Job]], outcomes: Sequence[Outcome]
) -> dict[str, tuple[int, int]]:
    """Requests met and their tokens, of the urgent and of the patient, over all rounds."""
    found = {"urgent": (0, 0), "patient": (0, 0)}
    for jobs, outcome in zip(rounds, outcomes, strict=True):
        for job, answer in zip(jobs, outcome.answers, strict=True):
            if is_met(job, answer):
                kind = "urgent" if job.is_urgent else "patient"
                met, tokens = found[kind]
                found[kind] = met + 1, tokens + answer.input_tokens + answer.output_tokens
    return found


def summarise(
    rounds: Sequence[Sequence[Job]], outcomes: Mapping[str, Sequence[Outcome]]
) -> dict[str, float]:
    """Goodput of the first server over each other's, and how long each took for all of it."""
    first, summary = next(iter(outcomes)), {}
    totals = {name: _total(rounds, played) for name, played in outcomes.items()}
    for name, (met, tokens) in totals.items():
        if name != first:
            summary[f"request_goodput_ratio_vs_{name}"] = round(totals[first][0] / max(met, 1), 3)
            summary[f"token_goodput_ratio_vs_{name}"] = round(totals[first][1] / max(tokens, 1), 3)
            spent = sum(_spent_s(outcomes[name])) / max(sum(_spent_s(outcomes[first])), 1e-9)
            summary[f"makespan_ratio_of_{name}"] = round(spent, 3)
    return summary


def _total(rounds: Sequence[Sequence[Job]], played: Sequence[Outcome]) -> tuple[int, int]:
    found = goodput(rounds, played).values()
    return sum(met for met, _ in found), sum(tokens for _, tokens in found)


def _spent_s(played: Sequence[Outcome]) -> list[float]:
    """Until the last answer of each round."""
    return [max(answer.end_s for answer in outcome.answers) for outcome in played]


def _print(rounds: Sequence[Sequence[Job]], outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    rows: list[list[Any]] = []
    num = {True: 0, False: 0}
    for jobs in rounds:
        for job in jobs:
            num[job.is_urgent] += 1
    for name, played in outcomes.items():
        found = goodput(rounds, played)
        counts = [sum(outcome.counts.get(key, 0) for outcome in played) for key in _COUNTS]
        rows.append(
            [
                name,
                f"{found['urgent'][0]} of {num[True]}",
                f"{found['patient'][0]} of {num[False]}",
                found["urgent"][1] + found["patient"][1],
                sum(_spent_s(played)),
                *counts,
            ]
        )
    headers = ["server", "urgent met", "patient met", "goodput tokens", "seconds", *_COUNTS]
    print(report.table(headers, rows))


_COUNTS = ("preemptions", "restored", "restored_tokens", "lost")
