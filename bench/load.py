"""An open load of chat requests, played with the real ``openai`` client."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai

from core.clock import Clock, MonotonicClock
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


class Offer(msgspec.Struct, frozen=True):
    """One request of the load."""

    at_s: float
    """When to send it, from the start of the round."""
    slo_type: str
    prompt: str
    max_tokens: int
    known_tokens: int | None = None
    """How long the answer will be, told to a server that believes it (oracles)."""


class Targets(msgspec.Struct, frozen=True):
    """The objectives of a load and how they were set."""

    rate_per_s: float
    ttft_s: float
    tbt_s: float
    deadline_s: float
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
    """What came of it, on the client's clock."""

    slo_type: str
    met: bool
    goodput_tokens: int
    ttft_s: float | None
    e2el_s: float
    output_tokens: int
    ending: str
    """finished, dropped, or timeout."""


def make_offers(
    rate_per_s: float, seconds: float, max_tokens: int, prompts: Path | None, seed: int
) -> list[Offer]:
    """A Poisson load over ``seconds``: latency, deadline and best-effort 2:2:1."""
    rng = random.Random(seed)
    pool = (
        _read_prompts(prompts)
        if prompts
        else [task.format(topic) for task in _TASKS for topic in _TOPICS]
    )
    offers = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        slo_type = rng.choices(("latency", "deadline", "best_effort"), (2, 2, 1))[0]
        offers.append(Offer(at_s, slo_type, rng.choice(pool), max_tokens))
        at_s += rng.expovariate(rate_per_s)
    return offers


def _read_prompts(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [prompt for line in lines if len(prompt := json.loads(line)["prompt"]) < 2000]


async def play(
    url: str, offers: Sequence[Offer], targets: Targets, patience_s: float
) -> list[Result]:
    """Send ``offers`` at their times; give up on what has no end ``patience_s`` after its start."""
    clock = MonotonicClock()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        start_s = clock.now_s()

        async def one(offer: Offer) -> Result:
            await asyncio.sleep(max(offer.at_s - (clock.now_s() - start_s), 0))
            return await _send(client, clock, offer, targets, patience_s)

        return list(await asyncio.gather(*(one(offer) for offer in offers)))


async def _send(
    client: openai.AsyncOpenAI,
    clock: Clock,
    offer: Offer,
    targets: Targets,
    patience_s: float,
) -> Result:
    objective, fields = _objective(offer, targets)
    terms = RequestTerms(clock.now_s(), objective)
    tracker = OutcomeTracker(terms)
    usage: dict[str, int] = {}
    ending = "finished"
    try:
        async with asyncio.timeout(patience_s):
            await _read(client, clock, offer, fields, tracker, usage)
    except TimeoutError:
        ending = "timeout"
    except openai.APIStatusError:
        ending = "dropped"
    now_s = clock.now_s()
    if "completion" in usage and not isinstance(objective, LatencySlo):
        tracker.sent(usage["completion"], now_s)
    outcome = tracker.finish(
        usage.get("prompt", 0), now_s, None if ending == "finished" else ending
    )
    return Result(
        offer.slo_type,
        outcome.met,
        outcome.goodput_tokens,
        outcome.ttft_s,
        outcome.e2el_s,
        outcome.output_tokens,
        ending,
    )


def _objective(offer: Offer, targets: Targets) -> tuple[Slo, dict[str, Any]]:
    if offer.slo_type == "latency":
        fields = {"target_ttft": targets.ttft_s, "target_tbt": targets.tbt_s}
        return LatencySlo(targets.ttft_s, targets.tbt_s), fields
    if offer.slo_type == "deadline":
        return DeadlineSlo(targets.deadline_s), {"deadline": targets.deadline_s}
    return BestEffortSlo(600.0), {}


async def _read(
    client: openai.AsyncOpenAI,
    clock: Clock,
    offer: Offer,
    fields: dict[str, Any],
    tracker: OutcomeTracker,
    usage: dict[str, int],
) -> None:
    """Read one answer; a streamed chunk with text counts as a token when it is here."""
    messages: list[Any] = [{"role": "user", "content": offer.prompt}]
    if offer.known_tokens is not None:
        fields = {**fields, "custom_params": {"known_output_tokens": offer.known_tokens}}
    options: dict[str, Any] = {
        "model": "default",
        "messages": messages,
        "max_tokens": offer.max_tokens,
        "temperature": 0,
        "extra_body": fields,
    }
    if offer.slo_type != "latency":
        answer = await client.chat.completions.create(**options)
        usage["prompt"] = answer.usage.prompt_tokens
        usage["completion"] = answer.usage.completion_tokens
        return
    num_chunks = 0
    async for chunk in await client.chat.completions.create(stream=True, **options):
        if chunk.choices and chunk.choices[0].delta.content:
            num_chunks += 1
            tracker.sent(num_chunks, clock.now_s())
