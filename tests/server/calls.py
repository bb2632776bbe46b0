"""How these tests talk to a server: bodies, answers, streams, load, the scheduler's state."""

from __future__ import annotations

import json
import random
import re
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Json = dict[str, Any]
T = TypeVar("T")

MAX_BATCH = 8
CHUNKED_PREFILL_TOKENS = 256
CALL_TIMEOUT_S = 120.0
REPORT_KEYS = {"type", "ttft_s", "worst_lateness_s", "e2el_s", "met", "goodput_tokens"}


# Bodies -------------------------------------------------------------------------------------------


MODEL = "SmolLM2-135M-Instruct"
"""The Responses API takes no other name than the one that is served."""


def _chat_body(prompt: str, max_tokens: int, sampling: Json) -> Json:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens} | sampling


def _completions_body(prompt: str, max_tokens: int, sampling: Json) -> Json:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens} | sampling


def _responses_body(prompt: str, max_tokens: int, sampling: Json) -> Json:
    # The Responses API has neither `ignore_eos` nor `n`; it is called with what it knows.
    known = {name: value for name, value in sampling.items() if name in {"temperature", "top_k"}}
    return {"model": MODEL, "input": prompt, "max_output_tokens": max_tokens} | known


def _generate_body(prompt: str, max_tokens: int, sampling: Json) -> Json:
    renamed = {{"min_tokens": "min_new_tokens"}.get(key, key): sampling[key] for key in sampling}
    return {"text": prompt, "sampling_params": {"max_new_tokens": max_tokens} | renamed}


@dataclass(frozen=True)
class Route:
    """One of the four routes that take service-level objectives."""

    name: str
    path: str
    make_body: Callable[[str, int, Json], Json]

    def body(
        self,
        *,
        prompt: str = "Name a colour.",
        max_tokens: int = 4,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Json:
        """A greedy request; `sampling` goes where the route wants it, `fields` on top level."""
        settings = {"temperature": 0.0} | dict(sampling or {})
        return self.make_body(prompt, max_tokens, settings) | fields

    def __str__(self) -> str:
        """The name, as pytest shows it."""
        return self.name


CHAT = Route("chat", "/v1/chat/completions", _chat_body)
COMPLETIONS = Route("completions", "/v1/completions", _completions_body)
RESPONSES = Route("responses", "/v1/responses", _responses_body)
GENERATE = Route("generate", "/generate", _generate_body)
ROUTES = (CHAT, COMPLETIONS, RESPONSES, GENERATE)
EXACT = {"ignore_eos": True}
"""Sampling under which an answer is exactly `max_tokens` long (not on /v1/responses)."""


def new_name(prefix: str = "t") -> str:
    """A program or request id that no other test uses."""
    return f"{prefix}-{uuid.uuid4().hex}"


def token_ids(num_tokens: int) -> list[int]:
    """A prompt of exactly that many tokens which no prefix cache has seen."""
    rng = random.Random(uuid.uuid4().int)
    return [rng.randrange(1_000, 40_000) for _ in range(num_tokens)]


# Answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What came back: one chunk when plain (or one for each of a batch), all chunks of a stream."""

    status: int
    headers: httpx.Headers
    text: str
    chunks: list[Json]
    is_complete: bool

    @property
    def slo(self) -> Json:
        """`metadata.slo` of the last chunk."""
        assert self.status == 200, f"{self.status}: {self.text[:2000]}"
        assert self.chunks, f"nothing came: {self.text[:2000]!r}"
        return slo_of(self.chunks[-1])

    @property
    def finish_reason(self) -> str:
        """Why it ended, the last one said."""
        reasons = [reason for chunk in self.chunks if (reason := _finish_reason(chunk))]
        assert reasons, f"no finish reason in {self.text[-2000:]}"
        return reasons[-1]

    @property
    def num_prompt_tokens(self) -> int:
        """Input tokens as the answer counts them."""
        return _last_count(self.chunks, "prompt_tokens", "input_tokens")

    @property
    def num_completion_tokens(self) -> int:
        """Output tokens as the answer counts them."""
        return _last_count(self.chunks, "completion_tokens", "output_tokens")

    @property
    def error_strings(self) -> list[str]:
        """Every text in the JSON body, keys not included."""
        return [text for chunk in self.chunks for text in _strings(chunk)]

    def names(self, word: str) -> bool:
        """Whether the body's text says `word`, as a word of its own."""
        pattern = rf"(?<![\w-]){re.escape(word)}(?![\w-])"
        return any(re.search(pattern, text, re.IGNORECASE) for text in self.error_strings)


def slo_of(chunk: Json) -> Json:
    """The service-level report in one answer, or in the event that ends a Responses stream."""
    holder = chunk.get("response", chunk)
    metadata = holder.get("metadata")
    assert isinstance(metadata, dict), f"no metadata in {chunk}"
    assert isinstance(metadata.get("slo"), dict), f"no metadata.slo in {chunk}"
    report: Json = metadata["slo"]
    return report


def target(report: Json, field: str) -> float:
    """A target in a report, be it `field`, `field_s` or inside `targets`."""
    for place in (report, report.get("targets") or {}):
        for name in (field, f"{field}_s"):
            if place.get(name) is not None:
                return float(place[name])
    raise AssertionError(f"no target {field} in {report}")


def reason_in(report: Json) -> str:
    """Why a report's request was not served to its end."""
    reasons = [value for key, value in report.items() if "reason" in key and value]
    assert reasons, f"no reason in {report}"
    assert isinstance(reasons[0], str)
    return reasons[0]


def _finish_reason(chunk: Json) -> str | None:
    reason: str | None
    if choices := chunk.get("choices"):
        reason = choices[0].get("finish_reason")
    elif meta := chunk.get("meta_info"):
        reason = (meta.get("finish_reason") or {}).get("type")
    else:
        reason = chunk.get("response", chunk).get("status")
    return reason


def _last_count(chunks: list[Json], *names: str) -> int:
    for chunk in reversed(chunks):
        holder = chunk.get("response", chunk)
        usage = holder.get("usage") or holder.get("meta_info") or {}
        for name in names:
            if usage.get(name) is not None:
                return int(usage[name])
    raise AssertionError(f"none of {names} in {chunks[-1:]}")


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for part in value.values():
                yield from _strings(part)
        case list():
            for part in value:
                yield from _strings(part)
        case _:
            return


def parse(response: httpx.Response) -> Answer:
    """A response that has been read to its end."""
    text = response.text
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        payloads = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
        chunks = [json.loads(payload) for payload in payloads if payload != "[DONE]"]
        terminal = {"response.completed", "response.incomplete", "response.failed"}
        ends_well = payloads[-1:] == ["[DONE]"] or (
            bool(chunks) and chunks[-1].get("type") in terminal
        )
        return Answer(response.status_code, response.headers, text, chunks, ends_well)
    try:
        value = response.json()
    except json.JSONDecodeError:
        value = {"not_json": text}
    chunks = value if isinstance(value, list) else [value]
    return Answer(response.status_code, response.headers, text, chunks, is_complete=True)


def ask(
    http: httpx.Client,
    route: Route,
    *,
    stream: bool = False,
    headers: Mapping[str, str] | None = None,
    **request: Any,
) -> Answer:
    """Send one request (see `Route.body`) and read the answer to its end."""
    body = route.body(**request) | ({"stream": True} if stream else {})
    return parse(http.post(route.path, json=body, headers=headers))


def ask_with_raw(http: httpx.Client, route: Route, field: str, raw_json: str) -> Answer:
    """Send a request whose `field` is the given JSON text, legal JSON or not."""
    content = f'{json.dumps(route.body())[:-1]}, "{field}": {raw_json}}}'
    return parse(
        http.post(route.path, content=content, headers={"content-type": "application/json"})
    )


# Waiting ------------------------------------------------------------------------------------------


def poll(
    probe: Callable[[], T],
    until: Callable[[T], bool],
    *,
    limit_s: float = 60.0,
    pause_s: float = 0.1,
) -> T:
    """Ask again and again until the value is as wanted; fail with the last one otherwise."""
    give_up_at = time.monotonic() + limit_s
    while True:
        value = probe()
        if until(value):
            return value
        assert time.monotonic() < give_up_at, f"still {value!r} after {limit_s} s"
        time.sleep(pause_s)


def scheduler_state(http: httpx.Client) -> Json:
    """What the scheduler holds now, from `GET /slo/state`."""
    response = http.get("/slo/state")
    assert response.status_code == 200, response.text
    state: Json = response.json()
    return state


def num_live(state: Json) -> int:
    """Requests that have arrived and not ended."""
    waiting = ("num_running", "num_parked", "num_waiting", "num_preempted")
    return sum(int(state[key]) for key in waiting)


def wait_until_idle(http: httpx.Client, *, limit_s: float = 60.0) -> Json:
    """The state once no request is left."""
    return poll(lambda: scheduler_state(http), lambda state: num_live(state) == 0, limit_s=limit_s)


# Load ---------------------------------------------------------------------------------------------


class Stream:
    """A streaming /generate request, read by a thread of its own while the test goes on.

    With `again`, it is sent anew whenever it ends, until `stop` is set: load that never runs dry.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_tokens: int,
        again: bool = False,
        **fields: Any,
    ) -> None:
        """Prepare it; entering it sends it."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        prompt: Json = {} if "input_ids" in fields else {"text": "Tell me a long story."}
        self._body: Json = {**prompt, "sampling_params": sampling, "stream": True, **fields}
        self._base_url = base_url
        self._again = again
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._error: Exception | None = None
        self.stop = threading.Event()
        self.chunks: list[Json] = []
        self.is_done = False
        self.status: int | None = None

    def __enter__(self) -> Self:
        """Send it."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up, if it has not ended yet."""
        self.stop.set()
        self._thread.join(CALL_TIMEOUT_S)

    @property
    def num_tokens(self) -> int:
        """Output tokens received so far."""
        return int(self.chunks[-1]["meta_info"]["completion_tokens"]) if self.chunks else 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._thread.is_alive()

    @property
    def finish_type(self) -> str | None:
        """What ended it: `length`, `stop`, `abort`."""
        reason = self.chunks[-1]["meta_info"]["finish_reason"] if self.chunks else None
        return reason["type"] if reason else None

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Return when so many tokens are here."""
        poll(lambda: (self.num_tokens, self.has_ended), lambda now: now[0] >= num_tokens or now[1])
        assert self.num_tokens >= num_tokens, f"ended early: {self._error or self.chunks[-1:]}"

    def wait(self) -> None:
        """Return when it has ended by itself."""
        self._thread.join(CALL_TIMEOUT_S)
        assert not self._thread.is_alive(), f"still streaming, {self.num_tokens} tokens so far"
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            with httpx.Client(
                base_url=self._base_url, timeout=CALL_TIMEOUT_S, trust_env=False
            ) as http:
                self._read_once(http)
                while self._again and not self.stop.is_set():
                    self._read_once(http)
        except Exception as error:
            self._error = error

    def _read_once(self, http: httpx.Client) -> None:
        with http.stream("POST", "/generate", json=self._body) as response:
            self.status = response.status_code
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {response.read()!r}")
            for line in response.iter_lines():
                if self.stop.is_set():
                    return
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data:"):
                    self.chunks.append(json.loads(line[5:]))


@contextmanager
def busy_engine(
    base_url: str, *, num_streams: int = MAX_BATCH + 4, max_tokens: int = 1000
) -> Iterator[list[Stream]]:
    """Keep every slot taken and a queue behind them, by long requests of the deadline class."""
    streams = [
        Stream(base_url, max_tokens=max_tokens, again=True, deadline=3600)
        for _ in range(num_streams)
    ]
    with httpx.Client(base_url=base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http:
        try:
            for stream in streams:
                stream.__enter__()
            _wait_for_a_standing_queue(http, num_streams)
            yield streams
        finally:
            # All at once: one that queues can only leave when those that run have left.
            for stream in streams:
                stream.stop.set()
            for stream in streams:
                stream.__exit__()
        wait_until_idle(http)


def _wait_for_a_standing_queue(http: httpx.Client, num_requests: int) -> None:
    """All have arrived, some run, and some still wait a few looks later."""
    looks: list[bool] = []

    def look() -> list[bool]:
        state = scheduler_state(http)
        queued = sum(int(state[key]) for key in ("num_waiting", "num_preempted", "num_parked"))
        has_queue = num_live(state) >= num_requests and state["num_running"] > 0 and queued > 0
        looks.append(has_queue)
        return looks[-4:]

    poll(look, lambda last: len(last) == 4 and all(last), pause_s=0.2)
