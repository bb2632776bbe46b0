"""One chat completion with the real ``openai`` client, and what it looked like from outside."""

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import openai

from core.clock import Clock
from core.slo import OutcomeTracker

COMPLETE = ("stop", "length")
"""Finish reasons of an answer that is whole."""


class Ask(msgspec.Struct, frozen=True):
    """What is asked; ``node`` and ``stage`` place it within a program."""

    prompt: str
    max_tokens: int
    fields: Mapping[str, object]
    is_stream: bool = False
    node: str = ""
    stage: int = 0


class Answer(msgspec.Struct, frozen=True):
    """What came of one call; times from the beginning of the session."""

    start_s: float
    end_s: float
    first_s: float | None
    """Not streamed: the end, where there was an answer."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Of the prompt, as the server tells it (``--enable-cache-report``)."""
    ending: str
    """finished, cut (with what there was), dropped, or timeout."""
    gaps_ms: tuple[int, ...] = ()
    """Between two chunks of a stream."""
    node: str = ""
    stage: int = 0


class _Usage:
    """What is known of an answer so far."""

    def __init__(self) -> None:
        self.input = self.output = self.cached = 0
        self.text, self.finish = "", ""
        self.times: list[float] = []
        """When each chunk of a stream came that had text."""
        self.finish_s = 0.0

    def read(self, usage: Any) -> None:
        """The server's own counts."""
        if usage is not None:
            self.input, self.output = usage.prompt_tokens, usage.completion_tokens
            details = getattr(usage, "prompt_tokens_details", None)
            self.cached = (details.cached_tokens or 0) if details else 0


class Session:
    """A client of one server, with a clock that begins now."""

    def __init__(self, client: openai.AsyncOpenAI, http: httpx.AsyncClient, clock: Clock) -> None:
        self._client, self.http = client, http
        self.name = uuid.uuid4().hex
        """Of no other session: programs of two must not be taken for one."""
        self._clock, self._begin_s = clock, clock.now_s()

    def now_s(self) -> float:
        """Since the session began."""
        return self._clock.now_s() - self._begin_s

    async def ask(
        self, ask: Ask, until_s: float, tracker: OutcomeTracker | None = None
    ) -> tuple[Answer, str]:
        """The outcome and the text; given up at ``until_s``.

        Args:
            tracker: of a stream: told of each token when it is here.
        """
        start_s, usage, ending = self.now_s(), _Usage(), ""
        try:
            async with asyncio.timeout(max(until_s - start_s, 0.0)):
                await self._read(ask, usage, tracker)
        except TimeoutError:
            ending = "timeout"
        except openai.APIError:
            # Also in the middle of a stream, where no status can be given any more.
            ending = "dropped"
        end_s = self.now_s()
        if not ending:
            ending = "finished" if usage.finish in COMPLETE else "cut"
        if ask.is_stream:
            first_s = usage.times[0] if usage.times else None
            usage.output = max(usage.output, len(usage.times))
        else:
            first_s = end_s if ending == "finished" else None
        times = usage.times
        gaps = tuple(round(1e3 * (b - a)) for a, b in itertools.pairwise(times))
        answer = Answer(
            start_s,
            end_s,
            first_s,
            usage.input,
            usage.output,
            usage.cached,
            ending,
            gaps,
            ask.node,
            ask.stage,
        )
        return answer, usage.text

    async def _read(self, ask: Ask, usage: _Usage, tracker: OutcomeTracker | None) -> None:
        options: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": ask.prompt}],
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "extra_body": dict(ask.fields),
        }
        if not ask.is_stream:
            answer = await self._client.chat.completions.create(**options)
            usage.read(answer.usage)
            usage.text = answer.choices[0].message.content or ""
            usage.finish = answer.choices[0].finish_reason or ""
            return
        options["stream_options"] = {"include_usage": True}
        async for chunk in await self._client.chat.completions.create(stream=True, **options):
            self._take(chunk, usage, tracker)

    def _take(self, chunk: Any, usage: _Usage, tracker: OutcomeTracker | None) -> None:
        """A chunk with text is a token; what has none of its own came with the end."""
        usage.read(chunk.usage)
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.delta.content:
                usage.times.append(self.now_s())
            if choice.finish_reason:
                usage.finish, usage.finish_s = choice.finish_reason, self.now_s()
        if usage.finish and usage.output > len(usage.times):
            usage.times.append(usage.finish_s)
            usage.output = max(usage.output, len(usage.times))
            if tracker is not None:
                tracker.sent(usage.output, usage.finish_s)
        elif tracker is not None and chunk.choices and usage.times:
            tracker.sent(len(usage.times), usage.times[-1])
