"""Defects of stock SGLang 0.5.23 that a preempting engine must not inherit, seen over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from calls import (
    CALL_TIMEOUT_S,
    CHAT,
    CHUNKED_PREFILL_TOKENS,
    COMPLETIONS,
    EXACT,
    GENERATE,
    Answer,
    Stream,
    ask,
    busy_engine,
    new_name,
    num_live,
    poll,
    scheduler_state,
    token_ids,
    wait_until_idle,
)

if TYPE_CHECKING:
    from serving import RunServer, Server

sampling_routes = pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE], ids=str)


def assert_serves(http: httpx.Client) -> None:
    """The scheduler still makes tokens."""
    answer = ask(http, GENERATE, max_tokens=2, sampling=EXACT)
    assert answer.status == 200, answer.text
    assert answer.num_completion_tokens == 2


def abort(http: httpx.Client, rid: str) -> None:
    """What an operator sends to end a request."""
    assert http.post("/abort_request", json={"rid": rid}).status_code == 200


# Abort --------------------------------------------------------------------------------------------


def test_an_abort_ends_the_running_request_of_that_name_and_no_longer_one(
    server: Server, http: httpx.Client
) -> None:
    """Stock: the scheduler aborts every rid that starts with the given one, so `a` ends `ab`."""
    rid = new_name()
    with (
        Stream(server.base_url, rid=f"{rid}b", max_tokens=60) as longer_name,
        Stream(server.base_url, rid=rid, max_tokens=1500) as named,
    ):
        longer_name.wait_for_tokens(1)
        named.wait_for_tokens(1)
        abort(http, rid)
        named.wait()
        longer_name.wait()
    assert named.finish_type == "abort"
    assert named.num_tokens < 1500
    assert longer_name.finish_type == "length"
    assert longer_name.num_tokens == 60


def test_an_abort_ends_the_waiting_request_of_that_name_and_no_longer_one(
    server: Server, http: httpx.Client
) -> None:
    """Stock: the prefix match reaches into the waiting queue, too."""
    rid = new_name()
    with ExitStack() as load:
        others = load.enter_context(busy_engine(server.base_url))
        with (
            Stream(server.base_url, rid=f"{rid}b", max_tokens=40, deadline=7200) as longer_name,
            Stream(server.base_url, rid=rid, max_tokens=1500, deadline=7200) as named,
        ):
            poll(
                lambda: scheduler_state(http),
                lambda now: num_live(now) >= len(others) + 2 or longer_name.has_ended,
            )
            abort(http, rid)
            poll(lambda: named.has_ended, lambda has_ended: has_ended)
            load.close()
            longer_name.wait()
    assert named.num_tokens < 1500
    assert longer_name.finish_type == "length"
    assert longer_name.num_tokens == 40


def test_an_abort_of_an_unknown_name_ends_nothing(server: Server, http: httpx.Client) -> None:
    """Stock with several tokenizer workers: any name is passed on to the prefix match."""
    rid = new_name()
    with Stream(server.base_url, rid=f"{rid}b", max_tokens=30) as longer_name:
        longer_name.wait_for_tokens(1)
        abort(http, rid)
        longer_name.wait()
    assert longer_name.num_tokens == 30


# Health -------------------------------------------------------------------------------------------


def health(base_url: str) -> int:
    """The status of /health, asked as a load balancer asks: it gives up before stock does."""
    return httpx.get(f"{base_url}/health", timeout=15.0, trust_env=False).status_code


def test_health_is_200_while_every_slot_is_taken(server: Server, http: httpx.Client) -> None:
    """Stock: /health goes red when no output comes for 20 s, also when that is mere load."""
    with busy_engine(server.base_url) as streams:
        assert [health(server.base_url) for _ in range(3)] == [200, 200, 200]
        assert num_live(scheduler_state(http)) >= len(streams)


def test_health_is_200_while_a_long_prompt_gives_no_output(
    server: Server, http: httpx.Client
) -> None:
    """Stock: a prefill of 20 s makes no output, so a healthy server is taken out of service."""
    body = {"input_ids": token_ids(1500), "sampling_params": {"max_new_tokens": 1}}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(http.post, "/generate", json=body)
        statuses = [health(server.base_url)]
        while not prefill.done():
            statuses.append(health(server.base_url))
    assert set(statuses) == {200}
    assert prefill.result().status_code == 200


# Prefill against decode ---------------------------------------------------------------------------


def test_a_short_stream_gets_tokens_while_long_prompts_arrive(
    server: Server, http: httpx.Client
) -> None:
    """Stock: prefill always runs first, so a stream stands still until the prompts are through."""
    num_prompts, prompt_tokens = 3, 1000
    wait_until_idle(http)
    with (
        Stream(server.base_url, max_tokens=1000) as stream,
        ThreadPoolExecutor(num_prompts) as pool,
    ):
        stream.wait_for_tokens(3)
        before = stream.num_tokens
        prompts = [
            pool.submit(
                http.post,
                "/generate",
                json={
                    "input_ids": token_ids(prompt_tokens),
                    "sampling_params": {"max_new_tokens": 1},
                    # The class of the stream: it must not win by its class alone.
                    "target_ttft": 5,
                    "target_tbt": 0.2,
                },
            )
            for _ in range(num_prompts)
        ]
        assert {prompt.result().status_code for prompt in prompts} == {200}
        num_received = stream.num_tokens - before
    num_chunks = num_prompts * prompt_tokens // CHUNKED_PREFILL_TOKENS
    assert num_received >= num_chunks // 4, f"{num_received} tokens in {num_chunks} prefill chunks"


# Sampling parameters ------------------------------------------------------------------------------


def assert_refused(answer: Answer, field: str) -> None:
    """A 400 that names the field."""
    assert answer.status == 400, f"{answer.status}: {answer.text[:2000]}"
    assert answer.names(field), f"{field} is not named in: {answer.text[:2000]}"


@sampling_routes
@pytest.mark.parametrize("token_id", [999_999, 2**40, -1])
def test_a_stop_token_outside_the_vocabulary_is_refused(
    http: httpx.Client, route: Any, token_id: int
) -> None:
    """Stock: passes validation; with `min_tokens` the scheduler indexes out of range and dies."""
    answer = ask(http, route, sampling={"stop_token_ids": [token_id], "min_tokens": 1})
    assert_refused(answer, "stop_token_ids")
    assert_serves(http)


@sampling_routes
@pytest.mark.parametrize("top_k", [2**31, 2**40, 2**70])
def test_a_top_k_beyond_32_bits_is_refused_or_served(
    http: httpx.Client, route: Any, top_k: int
) -> None:
    """Stock: passes validation and overflows the scheduler's int32 tensor, which ends it."""
    answer = ask(http, route, sampling={"top_k": top_k, "temperature": 0.7})
    if answer.status != 200:
        assert_refused(answer, "top_k")
    assert_serves(http)


@sampling_routes
@pytest.mark.parametrize("n", [0, -1, 100_000])
def test_a_senseless_number_of_choices_is_refused(http: httpx.Client, route: Any, n: int) -> None:
    """Stock: accepts any n: none, less than none, or enough to flood the engine."""
    assert_refused(ask(http, route, sampling={"n": n, "temperature": 0.7}), "n")
    assert_serves(http)


# A full KV pool and a full queue ------------------------------------------------------------------


@pytest.mark.slow_server
@pytest.mark.timeout(400, func_only=True)
def test_a_full_kv_pool_gives_way_and_what_is_preempted_is_not_lost(run_server: RunServer) -> None:
    """Stock: a full pool blocks the urgent until someone is done, and a preempted request counts
    as a new one for `--max-queued-requests` and the waiting timeout, which then end it."""
    # Two of 200 + 140 tokens fit beside each other to their end, a third prompt of 200 does not.
    flags = ("--max-total-tokens", "700", "--max-queued-requests", "2")
    with (
        run_server(*flags, env={"SGLANG_REQ_WAITING_TIMEOUT": "6"}) as small,
        httpx.Client(base_url=small.base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http,
        ExitStack() as held,
    ):
        patient = []
        for _ in range(2):
            stream = Stream(small.base_url, input_ids=token_ids(200), max_tokens=140, deadline=3600)
            patient.append(held.enter_context(stream))
            stream.wait_for_tokens(1)
        urgent_body = GENERATE.body(max_tokens=80, sampling=EXACT, target_ttft=10, target_tbt=1)
        del urgent_body["text"]
        urgent_body["input_ids"] = token_ids(200)

        # Wait until the urgent one cannot fit beside them.
        poll(
            lambda: scheduler_state(http),
            lambda now: now["free_kv_tokens"] + now["evictable_kv_tokens"] < 200,
        )
        had_ended = [stream.has_ended for stream in patient]
        urgent = http.post("/generate", json=urgent_body)
        assert urgent.status_code == 200, urgent.text
        assert urgent.json()["meta_info"]["completion_tokens"] == 80
        assert [stream.has_ended for stream in patient] == had_ended, "it waited for someone's end"

        for stream in patient:
            stream.wait()
        assert [stream.num_tokens for stream in patient] == [140, 140]
        assert [stream.finish_type for stream in patient] == ["length", "length"]
        state = wait_until_idle(http)
        assert state["free_kv_tokens"] + state["evictable_kv_tokens"] == state["total_kv_tokens"]
