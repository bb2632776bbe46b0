"""Programs on the real server: one deadline, one report, and an end that frees everything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from calls import (
    CHAT,
    EXACT,
    GENERATE,
    Answer,
    Json,
    Stream,
    ask,
    new_name,
    num_live,
    poll,
    scheduler_state,
    slo_of,
    wait_until_idle,
)

if TYPE_CHECKING:
    from serving import Server

ENDS = ("/slo/programs/end", "/slo/programs/cancel")
both_ends = pytest.mark.parametrize("path", ENDS)
LONG = 2000
"""Tokens of an answer that nobody here waits for."""


def over(http: httpx.Client, path: str, program: str, **fields: Any) -> Json:
    """End or cancel a program, and what the server says of it."""
    answer = http.post(path, json={"program_id": program, **fields})
    assert answer.status_code == 200, answer.text
    report: Json = answer.json()
    assert report["program_id"] == program
    return report


def error_of(answer: httpx.Response, status: int) -> Json:
    assert answer.status_code == status, answer.text
    error: Json = answer.json()["error"]
    return error


def assert_is_over(http: httpx.Client, program: str) -> None:
    """A call of that name is the first one of another program."""
    anew = call(http, program, deadline=300, final=True)
    assert (anew.slo["program"]["calls"], anew.slo["deadline"]) == (1, 300)


def call(http: httpx.Client, program: str, **fields: Any) -> Answer:
    """A short call of a program."""
    sampling = EXACT | fields.pop("sampling", {})
    return ask(http, CHAT, max_tokens=4, sampling=sampling, program_id=program, **fields)


def tokens_of(*answers: Answer) -> int:
    return sum(answer.num_prompt_tokens + answer.num_completion_tokens for answer in answers)


def wait_until_at_rest(http: httpx.Client) -> Json:
    """Nothing lives and nothing is held."""

    def is_at_rest(state: Json) -> bool:
        return (
            num_live(state) == 0
            and state["graphs"]["num_live"] == 0
            and state["free_kv_tokens"] + state["evictable_kv_tokens"] == state["total_kv_tokens"]
            and state["free_request_slots"] == state["total_request_slots"]
            and state["arrived"] == sum(state["ended"].values())
        )

    return poll(lambda: scheduler_state(http), is_at_rest, limit_s=30.0)


# One program, one report --------------------------------------------------------------------------


def test_a_program_through_the_openai_client_is_reported_whole(client: openai.OpenAI) -> None:
    program: Json = {"program_id": new_name("program"), "deadline": 600, "application": "test"}
    used, reports = [], []
    for place, node in enumerate(("plan", "draft", "answer")):
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"Say something about {node}."}],
            max_tokens=4,
            extra_body={**program, "node": node, "final": place == 2, "ignore_eos": True},
        )
        assert answer.usage is not None
        used.append(answer.usage.total_tokens)
        assert answer.model_extra is not None
        reports.append(answer.model_extra["metadata"]["slo"]["program"])
    for place, report in enumerate(reports, start=1):
        tokens = sum(used[:place])
        assert report == {"calls": place, "tokens": tokens, "goodput_tokens": tokens}


def test_a_session_header_is_enough_for_a_program(http: httpx.Client) -> None:
    session = new_name("session")
    headers = {"X-Dynamo-Session-ID": session}
    first = ask(http, CHAT, headers=headers, sampling=EXACT, deadline=600)
    second = ask(http, GENERATE, headers=headers, sampling=EXACT)
    last = ask(http, CHAT, stream=True, headers=headers, final=True, max_tokens=4, sampling=EXACT)
    assert second.slo["program"]["tokens"] == tokens_of(first, second)
    assert last.slo["type"] == "compound"
    assert last.slo["program"]["calls"] == 3
    assert last.slo["program"]["goodput_tokens"] == last.slo["program"]["tokens"]
    # Its last call has ended it.
    assert_is_over(http, session)


def test_a_program_that_is_late_counts_nothing(http: httpx.Client) -> None:
    program = new_name("program")
    answer = call(http, program, deadline=0.001)
    assert answer.slo["met"] is False
    tokens = tokens_of(answer)
    assert answer.slo["program"] == {"calls": 1, "tokens": tokens, "goodput_tokens": 0}
    report = over(http, ENDS[0], program)
    assert (report["met"], report["goodput_tokens"], report["tokens"]) == (False, 0, tokens)


# Its end ------------------------------------------------------------------------------------------


def test_ending_a_program_tells_how_it_went_and_its_name_is_free(http: httpx.Client) -> None:
    program = new_name("program")
    tokens = tokens_of(call(http, program, deadline=600), call(http, program))
    report = over(http, ENDS[0], program)
    assert 0 < report.pop("elapsed_s") < 600
    assert report == {
        "program_id": program,
        "calls": 2,
        "tokens": tokens,
        "goodput_tokens": tokens,
        "met": True,
        "deadline": 600,
    }
    assert_is_over(http, program)


def test_a_session_header_names_the_program_that_is_ended(http: httpx.Client) -> None:
    session = new_name("session")
    headers = {"X-Dynamo-Session-ID": session}
    ask(http, CHAT, headers=headers, deadline=600)
    answer = http.post(ENDS[0], json={"program_id": "another"}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["program_id"], answer.json()["calls"]) == (session, 1)


def test_a_program_that_is_ended_lets_its_live_call_go_on(
    server: Server, http: httpx.Client
) -> None:
    program = new_name("program")
    with Stream(server.base_url, max_tokens=30, program_id=program, deadline=600) as stream:
        stream.wait_for_tokens(1)
        assert over(http, ENDS[0], program)["calls"] == 0
        stream.wait()
    assert (stream.num_tokens, stream.finish_type) == (30, "length")
    report = slo_of(stream.chunks[-1])
    assert (report["met"], report["program"]["calls"]) == (True, 1)


@both_ends
def test_a_program_that_nobody_has_opened_is_unknown(http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, json={"program_id": new_name("never")}), 404)
    assert error["param"] == "program_id"


@both_ends
def test_another_tenants_program_is_unknown(http: httpx.Client, path: str) -> None:
    program = new_name("program")
    call(http, program, user="ann", deadline=600)
    for other in ({}, {"user": "bob"}):
        error_of(http.post(path, json={"program_id": program, **other}), 404)
    assert over(http, path, program, user="ann")["calls"] == 1


@both_ends
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[1]",
        b"{}",
        b'{"program_id": ""}',
        b'{"program_id": 7}',
        b'{"program_id": null}',
        b'{"program_id": ["a"]}',
        b'{"program_id": "\\ud800"}',
        b'{"program_id": "' + b"x" * 300 + b'"}',
    ],
)
def test_an_end_that_names_no_program_is_refused_by_name(
    http: httpx.Client, path: str, content: bytes
) -> None:
    error = error_of(http.post(path, content=content), 400)
    assert error["param"] == "program_id"
    assert "program_id" in error["message"]


def test_a_bad_session_header_is_refused_by_its_own_name(http: httpx.Client) -> None:
    answer = http.post(ENDS[0], json={}, headers={"X-Dynamo-Session-ID": "x" * 300})
    assert error_of(answer, 400)["param"].lower() == "x-dynamo-session-id"


# Cancelling ---------------------------------------------------------------------------------------


def test_cancelling_ends_running_and_waiting_calls_and_nobody_elses(
    server: Server, http: httpx.Client
) -> None:
    program, other = new_name("program"), new_name("program")
    url, prompt = server.base_url, "Name the days of the week."
    with Stream(url, max_tokens=24, text=prompt, deadline=600) as alone:
        alone.wait()
    wait_until_idle(http)
    with ExitStack() as streams:
        # More than there are places.
        doomed = [
            streams.enter_context(Stream(url, max_tokens=LONG, program_id=program, deadline=3600))
            for _ in range(10)
        ]
        poll(lambda: num_live(scheduler_state(http)), lambda count: count == len(doomed))
        poll(lambda: any(stream.num_tokens for stream in doomed), bool)
        bystanders = [
            streams.enter_context(Stream(url, max_tokens=24, text=prompt, **fields))
            for fields in ({"program_id": other, "deadline": 600}, {})
        ]
        poll(
            lambda: num_live(scheduler_state(http)),
            lambda count: count >= len(doomed) + 2 or any(s.has_ended for s in bystanders),
        )
        assert over(http, ENDS[1], program)["cancelled_calls"] == len(doomed)
        for stream in doomed:
            stream.wait()
            assert stream.finish_type == "abort"
            assert stream.num_tokens < LONG
            report = slo_of(stream.chunks[-1])
            assert report["reason"] == "program_cancelled"
            assert (report["met"], report["program"]["goodput_tokens"]) == (False, 0)
        for stream in bystanders:
            stream.wait()
            assert (stream.finish_type, stream.num_tokens) == ("length", 24)
            assert stream.chunks[-1]["text"] == alone.chunks[-1]["text"]
    wait_until_at_rest(http)
    refused = call(http, program)
    assert refused.status == 409
    assert refused.chunks[0]["error"]["code"] == "program_cancelled"
    assert refused.chunks[0]["error"]["param"] == "program_id"
    assert call(http, other, final=True).slo["program"]["calls"] == 2


def test_a_plain_call_that_is_cancelled_answers_with_what_it_has(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    program = new_name("program")
    wait_until_idle(http)
    with ThreadPoolExecutor(1) as pool:
        fields = {"program_id": program, "deadline": 3600}
        answer = pool.submit(ask, http, CHAT, max_tokens=LONG, sampling=EXACT, **fields)
        poll(lambda: scheduler_state(http)["num_running"], lambda count: count == 1)
        assert over(http, ENDS[1], program)["cancelled_calls"] == 1
        cancelled = answer.result(60)
    assert cancelled.status == 200, cancelled.text
    assert cancelled.finish_reason == "abort"
    assert cancelled.num_completion_tokens < LONG
    assert cancelled.slo["reason"] == "program_cancelled"
    with pytest.raises(openai.ConflictError) as caught:
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Go on."}],
            max_tokens=4,
            extra_body={"program_id": program},
            # A key makes another tenant, whose program it would not be.
            extra_headers={"Authorization": openai.Omit()},
        )
    assert (caught.value.code, caught.value.param) == ("program_cancelled", "program_id")


def test_the_last_stream_of_a_cancelled_program_is_refused_as_well(http: httpx.Client) -> None:
    program = new_name("program")
    call(http, program, deadline=600)
    over(http, ENDS[1], program)
    fields = {"program_id": program, "final": True, "target_ttft": 30, "target_tbt": 2}
    answer = ask(http, CHAT, stream=True, **fields)
    assert answer.status == 409


# A client that dies -------------------------------------------------------------------------------


def test_a_client_that_dies_mid_way_frees_everything(server: Server, http: httpx.Client) -> None:
    program = new_name("program")
    call(http, program, deadline=3600)
    with (
        Stream(server.base_url, max_tokens=LONG, program_id=program) as first,
        Stream(server.base_url, max_tokens=LONG, program_id=program) as second,
    ):
        first.wait_for_tokens(2)
        second.wait_for_tokens(2)
    body = CHAT.body(max_tokens=LONG, sampling=EXACT, program_id=program)
    with pytest.raises(httpx.TimeoutException):
        http.post(CHAT.path, json=body, timeout=0.5)
    wait_until_at_rest(http)
    report = poll(
        lambda: over(http, ENDS[1], program),
        lambda found: found["cancelled_calls"] == 0,
        limit_s=10.0,
    )
    assert report["calls"] == 1, "what did not finish does not count"


# What is foreseen ---------------------------------------------------------------------------------


def test_programs_are_told_to_the_graphs_process_and_foreseen(http: httpx.Client) -> None:
    def seen() -> Json:
        found: Json = scheduler_state(http)["graphs"]
        return found

    poll(lambda: seen()["is_alive"], bool)
    before = seen()
    assert before["is_used"] is True
    for _ in range(4):
        program = new_name("program")
        parents: list[str] = []
        for node in ("plan", "draft", "answer"):
            fields = {"application": "test", "node": node, "parents": parents}
            call(http, program, deadline=600, final=node == "answer", **fields)
            parents = [node]
    after = poll(seen, lambda now: now["num_outlooks"] >= before["num_outlooks"] + 4)
    assert after["channel"]["bad"] == before["channel"]["bad"] == 0
    assert after["channel"]["lost"] == before["channel"]["lost"]
    poll(seen, lambda now: now["num_live"] == 0 and now["num_programs"] <= before["num_programs"])


# SGLang's frontend --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # importing SGLang warns of missing GPUs
def test_a_program_of_sglangs_frontend_forks_and_joins_here(
    server: Server, http: httpx.Client
) -> None:
    import sglang as sgl

    from engine.runtime.frontend import JITEndpoint

    exact: Json = {"max_tokens": 4, "ignore_eos": True}

    @sgl.function
    def colours(s: Any) -> None:
        s += "Some colours are" + sgl.gen("first", **exact)
        forks = s.fork(2)
        for fork, kind in zip(forks, ("warm", "cold"), strict=True):
            fork += f" and of the {kind} ones" + sgl.gen("kind", **exact)
        forks.join()
        s += forks[0]["kind"] + forks[1]["kind"] + " and" + sgl.gen("last", **exact)

    endpoint = JITEndpoint(server.base_url, deadline=600)
    state = colours.run(backend=endpoint, temperature=0)
    outcome = endpoint.outcome_of(state, 60)
    assert state["last"]
    assert outcome is not None
    assert outcome.calls >= 4
    assert outcome.tokens >= outcome.calls
    assert (outcome.met, outcome.goodput_tokens) == (True, outcome.tokens)
    assert outcome.deadline == 600
    wait_until_at_rest(http)
    # The server was told that it is over.
    assert_is_over(http, outcome.program_id)
