"""The load of ``bench serve``: its mix, programs as their client runs them, and the verdicts."""

import asyncio
import json
from collections import Counter

import httpx
import openai
import pytest

from bench import compound, serve
from bench.answers import Answer, Ask, Session
from bench.load import CHAT_MIX, FULL_MIX, Result, Targets, make_offers, parse_mix, play
from core.clock import ManualClock
from core.slo import LatencySlo, OutcomeTracker, RequestTerms

TARGETS = Targets(1.0, ttft_s=2.0, tbt_s=0.2, deadline_s=10.0, tokens_per_s=100.0)


def call(end_s, ending="finished", tokens=(10, 5)):
    return Answer(0.0, end_s, end_s, *tokens, 0, ending)


def test_a_program_counts_whole_if_its_last_call_is_in_time():
    assert compound.judge([call(3.0), call(9.0)], 2, due_s=9.0) == (True, 30)


@pytest.mark.parametrize(
    ("calls", "planned"),
    [
        ([call(3.0), call(9.1)], 2),
        ([call(9.1), call(3.0)], 2),
        ([call(3.0)], 2),
        ([call(3.0), call(4.0, "cut")], 2),
        ([call(3.0), call(4.0, "dropped", (0, 0))], 2),
    ],
    ids=["late", "an earlier one late", "a call missing", "a call cut", "a call dropped"],
)
def test_else_nothing_of_it_counts(calls, planned):
    assert compound.judge(calls, planned, due_s=9.0) == (False, 0)


def test_a_mix_is_shares_of_the_classes_in_their_order():
    assert parse_mix("1:1:1") == FULL_MIX
    assert parse_mix("2:0:1:0.5") == {"latency": 2.0, "compound": 1.0, "best_effort": 0.5}
    for text in ("", "a", "1:-1", "0:0", "1:1:1:1:1"):
        with pytest.raises(ValueError, match="a mix is"):
            parse_mix(text)


def test_a_load_has_its_mix_and_is_the_same_for_a_seed():
    offers = make_offers(10.0, 100.0, 50, None, 3, FULL_MIX)
    assert offers == make_offers(10.0, 100.0, 50, None, 3, FULL_MIX)
    counts = Counter(offer.slo_type for offer in offers)
    assert set(counts) == {"latency", "deadline", "compound"}
    assert min(counts.values()) > len(offers) / 4
    assert all(bool(offer.application) == (offer.slo_type == "compound") for offer in offers)
    assert len({offer.prompt for offer in offers}) == len(offers)
    assert {offer.slo_type for offer in make_offers(10.0, 50.0, 50, None, 3)} == set(CHAT_MIX)


def result(slo_type, *, met, tokens, calls=1):
    answers = (call(1.0),) * calls
    return Result(slo_type, met, tokens, 1.0, 1.0, 5, "finished", 0.0, answers)


def test_summary_has_ratios_to_each_policy_and_the_calls_of_the_one_with_the_fewest():
    results = {
        "edf": [result("deadline", met=True, tokens=20), result("best_effort", met=True, tokens=0)],
        "gmax": [
            result("compound", met=True, tokens=50, calls=4),
            result("latency", met=True, tokens=10),
            result("deadline", met=True, tokens=0),
        ],
    }
    assert serve.summarise(["edf", "gmax"], results) == {
        "requests": 2,
        "requests_edf": 2,
        "requests_gmax": 6,
        "token_goodput_ratio_vs_edf": 3.0,
        "request_goodput_ratio_vs_edf": 3.0,
    }


def test_speed_is_that_of_the_time_in_which_batches_are_full():
    calls = [call(1.0 + second, tokens=(9, 10)) for second in range(7)]
    assert serve.speed_of([*calls, call(100.0, tokens=(9, 30))]) == pytest.approx(10.0)
    with pytest.raises(RuntimeError, match="nothing to measure"):
        serve.speed_of([])


class Server:
    """Answers chat completions with one word; notes the bodies, and how programs were closed."""

    def __init__(self, fails=lambda body: False, finish="stop"):
        self.bodies, self.closed = [], []
        self._fails, self._finish = fails, finish

    def answer(self, request):
        body = json.loads(request.content)
        if request.url.path.startswith("/slo/programs/"):
            self.closed.append((request.url.path.rpartition("/")[2], body["program_id"]))
            return httpx.Response(200, json={})
        self.bodies.append(body)
        if self._fails(body):
            return httpx.Response(503, json={"error": {"message": "late"}})
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 7},
        }
        message = {"role": "assistant", "content": f"word{len(self.bodies)}"}
        choice = {"index": 0, "finish_reason": self._finish, "message": message}
        identity = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        return httpx.Response(200, json={**identity, "choices": [choice], "usage": usage})


async def run_program(server, application):
    transport = httpx.MockTransport(server.answer)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://s") as http,
        openai.AsyncOpenAI(
            base_url="http://s/v1", api_key="x", max_retries=0, http_client=http
        ) as client,
    ):
        session = Session(client, http, ManualClock())
        task = compound.Task("p-1", application, "Why?", 30)
        return await compound.run(session, task, deadline_s=20.0, until_s=100.0)


@pytest.mark.parametrize("application", compound.NAMES)
def test_a_program_makes_its_calls_stage_by_stage_and_says_what_they_are(application):
    server = Server()
    calls = asyncio.run(run_program(server, application))
    stages = compound.APPLICATIONS[application]
    assert [one.node for one in calls] == [role.name for stage in stages for role in stage]
    assert [body["node"] for body in server.bodies] == [one.node for one in calls]
    assert {body["program_id"] for body in server.bodies} == {"p-1"}
    assert {body["application"] for body in server.bodies} == {application}
    first = len(stages[0])
    assert [body.get("deadline") for body in server.bodies[:first]] == [20.0] * first
    assert not any("deadline" in body for body in server.bodies[first:])
    assert "word1" in server.bodies[first]["messages"][0]["content"]
    assert server.bodies[first]["parents"] == [role.name for role in stages[0]]
    assert [body.get("final", False) for body in server.bodies] == [False] * (len(calls) - 1) + [
        True
    ]
    assert server.closed == [("end", "p-1")]
    assert all(
        (one.input_tokens, one.output_tokens, one.cached_tokens) == (10, 2, 7) for one in calls
    )


def test_no_call_follows_one_that_failed_and_the_rest_is_cancelled():
    server = Server(fails=lambda body: body["node"] == "begin")
    calls = asyncio.run(run_program(server, "plan"))
    assert sorted(one.ending for one in calls) == ["dropped", "finished", "finished"]
    assert server.closed == [("cancel", "p-1")]


def test_an_answer_that_was_cut_is_not_finished():
    calls = asyncio.run(run_program(Server(finish="abort"), "refine"))
    assert [one.ending for one in calls] == ["cut"]


STREAM = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}},
]


def test_a_token_without_a_chunk_of_its_own_came_with_the_end():
    identity = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    lines = [f"data: {json.dumps({**identity, **chunk})}\n\n" for chunk in STREAM]
    raw = "".join([*lines, "data: [DONE]\n\n"])
    headers = {"Content-Type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=raw, headers=headers))
    tracker = OutcomeTracker(RequestTerms(0.0, LatencySlo(1.0, 1.0)))

    async def ask():
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://s") as http,
            openai.AsyncOpenAI(
                base_url="http://s/v1", api_key="x", max_retries=0, http_client=http
            ) as client,
        ):
            session = Session(client, http, ManualClock())
            return await session.ask(Ask("Why?", 9, {}, is_stream=True), 100.0, tracker)

    answer, _ = asyncio.run(ask())
    assert (answer.input_tokens, answer.output_tokens, len(answer.gaps_ms)) == (4, 3, 2)
    assert answer.ending == "finished"
    assert tracker.finish(4, 0.0).goodput_tokens == 3


def test_nothing_is_played_for_no_offers():
    assert asyncio.run(play("http://127.0.0.1:9", [], TARGETS, 1.0)) == []
