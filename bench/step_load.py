"""Times an engine's steps from outside, on an idle server of our own.

Streams of equal contexts that decode side by side get a token in every step, so the time between
two tokens is that of a step, with everything that an engine does between two forward passes.
A prompt whose answer is one token takes its prefill and what a request costs besides: that is
known from a prompt of which all but one token is cached, which computes what a decode does.
"""

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import msgspec

from bench import servers
from core.clock import MonotonicClock
from engine.simulator.measured import Measurement, fit
from engine.simulator.steps import LinearSteps, Step

DECODES: tuple[tuple[int, ...], ...] = (
    *((30,) * num for num in (1, 2, 4, 8, 12, 16)),
    *((250,) * num for num in (1, 4, 8, 16)),
    *((100,) * num for num in (6, 12, 16)),
    (500, *(30,) * 7),
    (300, *(30,) * 15),
    (250,) * 4 + (60,) * 8,
)
"""Contexts of the streams of each burst."""
PROMPTS = (8, 16, 32, 64, 96, 128, 192, 256, 400)
"""Prompt tokens computed in one step."""
PAIRS = ((2, 24), (4, 48), (8, 32))
"""Prompts that come together, and tokens of each."""
OUTPUT_TOKENS = 17
WINDOW = 4
"""Steps of one observation."""
IDLE_ASKS = 7


class Seen(NamedTuple):
    """What was measured."""

    steps: LinearSteps
    overhead_s: float
    """Of a request, beside the steps."""
    rows: list[Measurement]


class Stream(NamedTuple):
    """Times at which its tokens were here, from the burst's begin, in seconds."""

    input_tokens: int
    times: list[float]


class Prober:
    """Sends bursts of token ids to one server."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._clock = MonotonicClock()

    def measure(self, contexts: Sequence[Sequence[int]] = DECODES) -> Seen:
        """Decode steps, then what a request costs, then prompts."""
        rows = [row for burst in contexts for row in self._decodes(burst)]
        only_decodes = fit(rows, with_prefill_constant=False)
        overhead_s = self._overhead_s(only_decodes)
        for tokens in PROMPTS:
            rows += self._prompts((self.fresh(tokens),), overhead_s)
        for num, tokens in PAIRS:
            rows += self._prompts([self.fresh(tokens) for _ in range(num)], overhead_s)
        return Seen(fit(rows), overhead_s, rows)

    def _decodes(self, contexts: Sequence[int]) -> list[Measurement]:
        """Steps of a burst; prompts of one length share their text, so that it is computed once."""
        texts = {tokens: self.fresh(tokens - 1) for tokens in contexts}
        for text in texts.values():
            self.burst([text], 1)
        prompts = [[*texts[tokens], self._rng.randrange(1000, 9000)] for tokens in contexts]
        return decode_rows(self.burst(prompts, OUTPUT_TOKENS))

    def _overhead_s(self, steps: LinearSteps) -> float:
        """What an idle server's single request takes beside its one step."""
        text = self.fresh(30)
        self.burst([text], 1)
        spent = []
        for _ in range(IDLE_ASKS):
            # Only the last token is new.
            prompt = [*text, self._rng.randrange(1000, 9000)]
            stream = self.burst([prompt], 1)[0]
            spent.append(stream.times[0] - steps.seconds(Step(1, len(prompt), 0, 0)))
        return max(statistics.median(spent), 0.0)

    def _prompts(self, prompts: Sequence[list[int]], overhead_s: float) -> list[Measurement]:
        """One step with these prompts in it."""
        servers.flush(self._url)
        end_s = max(stream.times[-1] for stream in self.burst(prompts, 1))
        tokens = sum(len(prompt) for prompt in prompts)
        pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in prompts)
        duration_s = end_s - overhead_s
        return [Measurement(Step(0, 0, 0, tokens, pairs), duration_s)] if duration_s > 0 else []

    def fresh(self, tokens: int) -> list[int]:
        """A prompt of so many tokens that nobody has sent before."""
        return [self._rng.randrange(1000, 9000) for _ in range(tokens)]

    def burst(self, prompts: Sequence[list[int]], output_tokens: int) -> list[Stream]:
        """Send the prompts together; when the tokens of each answer came."""
        return asyncio.run(self._ask_all(prompts, output_tokens))

    async def _ask_all(self, prompts: Sequence[list[int]], output_tokens: int) -> list[Stream]:
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as client:
            # The first request opens connections, and that is none of the server's doing.
            await client.get("/slo/state")
            begin_s = self._clock.now_s()
            return await asyncio.gather(
                *(self._ask(client, prompt, output_tokens, begin_s) for prompt in prompts)
            )

    async def _ask(
        self, client: httpx.AsyncClient, prompt: list[int], output_tokens: int, begin_s: float
    ) -> Stream:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {
                "max_new_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
            },
        }
        times: list[float] = []
        async with client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                meta = msgspec.json.decode(line[6:])["meta_info"]
                # Tokens that came together have one time.
                while len(times) < meta["completion_tokens"]:
                    times.append(self._clock.now_s() - begin_s)
        return Stream(len(prompt), times)


def decode_rows(streams: Sequence[Stream], window: int = WINDOW) -> list[Measurement]:
    """Steps while all ``streams`` decoded, ``window`` of them to a row.

    The first and the last step in which all took part are left out: others began or ended there.
    """
    started_s = max(stream.times[0] for stream in streams)
    ended_s = min(stream.times[-1] for stream in streams)
    # The slowest stream shows when a step was over; all of them agree on how many there were.
    shown = [t for t in streams[-1].times if started_s < t < ended_s]
    if len(shown) <= window:
        return []
    before = [sum(t <= shown[0] for t in stream.times) for stream in streams]
    rows = []
    for first in range(0, len(shown) - window, window):
        elapsed_s = shown[first + window] - shown[first]
        middle = first + window // 2
        contexts = [
            stream.input_tokens + begun + middle
            for stream, begun in zip(streams, before, strict=True)
        ]
        total, num = sum(contexts), len(contexts)
        step = Step(num, total, max(contexts) * num - total, 0)
        rows.append(Measurement(step, elapsed_s / window))
    return rows


def by_kind(rows: Sequence[Measurement]) -> list[tuple[str, list[Measurement]]]:
    """Rows by what of a step they are about, for people."""

    def kind(row: Measurement) -> str:
        return "prompts" if row.step.prefill_tokens else "decodes"

    ranked = sorted(rows, key=kind)
    return [(name, list(group)) for name, group in itertools.groupby(ranked, key=kind)]
