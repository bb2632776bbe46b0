"""An open load of chat requests and programs, played with the real ``openai`` client."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
import openai

from bench import compound
from bench.answers import Answer, Ask, Session
from core.clock import MonotonicClock
from core.slo import BestEffortSlo, DeadlineSlo, LatencySlo, OutcomeTracker, RequestTerms, Slo

_TOPICS = (
    "the history of bread", "how bridges stay up", "why the sky is blue", "learning the piano",
    "the water cycle", "planning a garden", "how vaccines work", "the rules of chess",
    "good study habits", "the life of bees", "how trains brake", "the phases of the moon",
)  # fmt: skip
_TASKS = (
    "In one word, name something about {}.",
    "Write one short sentence about {}.",
    "Explain {} to a child in three sentences.",
    "List ten facts about {}, one per line.",
    "Write a detailed essay about {}.",
    "Give step by step advice on {}.",
)
CHAT_MIX: Mapping[str, float] = {"latency": 2.0, "deadline": 2.0, "best_effort": 1.0}
FULL_MIX: Mapping[str, float] = {"latency": 1.0, "deadline": 1.0, "compound": 1.0}
CLASSES = ("latency", "deadline", "compound", "best_effort")


class Offer(msgspec.Struct, frozen=True):
    """One request, or one program, of the load."""

    at_s: float
    """When to send it, from the start of the round."""
    slo_type: str
    prompt: str
    max_tokens: int
    """Of each call."""
    known_tokens: int | None = None
    """How long the answer will be, told to a server that believes it (oracles)."""
    application: str = ""
    """Of a program: which one of ``bench.compound``."""


class Targets(msgspec.Struct, frozen=True):
    """The objectives of a load and how they were set."""

    rate_per_s: float
    """Requests and programs."""
    ttft_s: float
    tbt_s: float
    deadline_s: float
    """Of a program: as often as it has stages."""
    tokens_per_s: float
    """What the machine makes of full batches of such requests."""

    def describe(self, overload: float) -> str:
        """One line for people."""
        return (
            f"capacity {self.tokens_per_s:.0f} tokens/s; offered {overload:g} times that, "
            f"{self.rate_per_s:.2f} requests/s; targets: TTFT {self.ttft_s:.1f} s, "
            f"TBT {self.tbt_s:.2f} s, deadline {self.deadline_s:.0f} s"
        )


class Result(msgspec.Struct, frozen=True):
    """What came of it, on the client's clock; times from the beginning of the round."""

    slo_type: str
    met: bool
    goodput_tokens: int
    ttft_s: float | None
    e2el_s: float
    output_tokens: int
    ending: str
    """finished, cut, dropped, or timeout."""
    start_s: float = 0.0
    calls: tuple[Answer, ...] = ()


def parse_mix(text: str) -> dict[str, float]:
    """Shares of ``CLASSES`` as 1:1:1 or 1:1:1:0.5; ValueError that says what is wrong."""
    try:
        shares = [float(part) for part in text.split(":")]
    except ValueError:
        shares = []
    if not 0 < len(shares) <= len(CLASSES) or min(shares) < 0 or sum(shares) == 0:
        raise ValueError(f"a mix is up to {len(CLASSES)} shares of {':'.join(CLASSES)}: {text!r}")
    return {name: share for name, share in zip(CLASSES, shares, strict=False) if share}


def make_offers(
    rate_per_s: float,
    seconds: float,
    max_tokens: int,
    prompts: Path | None,
    seed: int,
    mix: Mapping[str, float] = CHAT_MIX,
) -> list[Offer]:
    """A Poisson load over ``seconds``, its classes in the shares of ``mix``.

    No two prompts of ours begin alike, but for what the chat template puts in front.
    """
    rng = random.Random(seed)
    pool = (
        _read_prompts(prompts)
        if prompts
        else [task.format(topic) for task in _TASKS for topic in _TOPICS]
    )
    offers: list[Offer] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        slo_type = rng.choices(list(mix), list(mix.values()))[0]
        prompt = rng.choice(pool)
        if not prompts:
            prompt = f"{rng.randrange(100, 1000)}-{len(offers)}. {prompt}"
        application = rng.choice(compound.NAMES) if slo_type == "compound" else ""
        offers.append(Offer(at_s, slo_type, prompt, max_tokens, application=application))
        at_s += rng.expovariate(rate_per_s)
    return offers


def _read_prompts(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [prompt for line in lines if len(prompt := json.loads(line)["prompt"]) < 2000]


async def play(
    url: str, offers: Sequence[Offer], targets: Targets, patience_s: float
) -> list[Result]:
    """Send ``offers`` at their times; give up on what has no end ``patience_s`` after its start.

    For a program it is as often that as it has stages.
    """
    clock = MonotonicClock()
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        session = Session(client, http, clock)

        async def one(number: int, offer: Offer) -> Result:
            await asyncio.sleep(max(offer.at_s - session.now_s(), 0))
            if offer.slo_type == "compound":
                return await _run(session, number, offer, targets, patience_s)
            return await _send(session, offer, targets, patience_s)

        return list(await asyncio.gather(*(one(*item) for item in enumerate(offers))))


async def _send(session: Session, offer: Offer, targets: Targets, patience_s: float) -> Result:
    objective, fields = _objective(offer, targets)
    if offer.known_tokens is not None:
        fields = {**fields, "custom_params": {"known_output_tokens": offer.known_tokens}}
    start_s = session.now_s()
    tracker = OutcomeTracker(RequestTerms(start_s, objective))
    is_stream = isinstance(objective, LatencySlo)
    ask = Ask(offer.prompt, offer.max_tokens, fields, is_stream=is_stream)
    answer, _ = await session.ask(ask, start_s + patience_s, tracker if is_stream else None)
    if not is_stream:
        tracker.sent(answer.output_tokens, answer.end_s)
    reason = None if answer.ending == "finished" else answer.ending
    outcome = tracker.finish(answer.input_tokens, answer.end_s, reason)
    return Result(
        offer.slo_type,
        outcome.met,
        outcome.goodput_tokens,
        outcome.ttft_s,
        outcome.e2el_s,
        outcome.output_tokens,
        answer.ending,
        start_s,
        (answer,),
    )


async def _run(
    session: Session, number: int, offer: Offer, targets: Targets, patience_s: float
) -> Result:
    """A program; judged by ``compound.judge``."""
    stages = compound.APPLICATIONS[offer.application]
    task = compound.Task(
        f"{session.name}-{number}", offer.application, offer.prompt, offer.max_tokens
    )
    start_s = session.now_s()
    deadline_s = len(stages) * targets.deadline_s
    until_s = start_s + len(stages) * patience_s
    calls = await compound.run(session, task, deadline_s, until_s)
    met, tokens = compound.judge(calls, compound.num_calls(stages), start_s + deadline_s)
    firsts = [call.first_s for call in calls if call.first_s is not None]
    return Result(
        "compound",
        met,
        tokens,
        min(firsts) - start_s if firsts else None,
        max(call.end_s for call in calls) - start_s,
        sum(call.output_tokens for call in calls),
        next((call.ending for call in calls if call.ending != "finished"), "finished"),
        start_s,
        calls,
    )


def _objective(offer: Offer, targets: Targets) -> tuple[Slo, dict[str, object]]:
    if offer.slo_type == "latency":
        return LatencySlo(targets.ttft_s, targets.tbt_s), {
            "target_ttft": targets.ttft_s,
            "target_tbt": targets.tbt_s,
        }
    if offer.slo_type == "deadline":
        return DeadlineSlo(targets.deadline_s), {"deadline": targets.deadline_s}
    return BestEffortSlo(600.0), {}
