"""The request API over HTTP: fields, header aliases, defaults, refusals, drops and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import openai
import pytest
from calls import (
    CHAT,
    COMPLETIONS,
    EXACT,
    GENERATE,
    REPORT_KEYS,
    RESPONSES,
    ROUTES,
    Answer,
    Json,
    ask,
    ask_with_raw,
    busy_engine,
    new_name,
    poll,
    reason_in,
    scheduler_state,
    slo_of,
    target,
    wait_until_idle,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from serving import Server

every_route = pytest.mark.parametrize("route", ROUTES, ids=str)
counting_routes = pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE], ids=str)
plain_and_streaming = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])

GENEROUS_LATENCY: Json = {"target_ttft": 60, "target_tbt": 30.5}
FIELD_SETS: dict[str, tuple[str, Json]] = {
    "both latency targets": ("latency", GENEROUS_LATENCY),
    "a TTFT target alone": ("latency", {"target_ttft": 60}),
    "a deadline": ("deadline", {"deadline": 600}),
    "a deadline to finish late": ("deadline", {"deadline": 600, "on_miss": "finish"}),
    "a deadline to cancel at": ("deadline", {"deadline": 600.5, "on_miss": "cancel"}),
    "a limit on the wait": ("latency", {**GENEROUS_LATENCY, "waiting_time": 60}),
    "a program": ("compound", {"program_id": "fresh", "deadline": 600}),
    "a program's last node": (
        "compound",
        {
            "program_id": "fresh",
            "deadline": 600,
            "node": "answer",
            "parents": ["plan", "search"],
            "final": True,
        },
    ),
}


def with_fresh_program(fields: Json) -> Json:
    """The same fields under a program id that nobody has used."""
    return fields | ({"program_id": new_name("program")} if "program_id" in fields else {})


def assert_is_a_report(report: Json, slo_type: str) -> None:
    """All keys are there, and the numbers can be true."""
    assert report.keys() >= REPORT_KEYS, f"missing: {REPORT_KEYS - report.keys()}"
    assert report["type"] == slo_type
    assert 0 < report["ttft_s"] <= report["e2el_s"]
    assert isinstance(report["goodput_tokens"], int)
    assert report["goodput_tokens"] >= 0
    if slo_type != "best_effort":  # which has no target to miss
        assert isinstance(report["met"], bool)
        assert isinstance(report["worst_lateness_s"], int | float)


# What is accepted, and what an answer says --------------------------------------------------------


@every_route
@plain_and_streaming
@pytest.mark.parametrize("fields", FIELD_SETS)
def test_every_field_is_accepted_and_the_answer_reports(
    http: httpx.Client, route: Any, stream: bool, fields: str
) -> None:
    slo_type, values = FIELD_SETS[fields]
    answer = ask(http, route, stream=stream, **with_fresh_program(values))
    assert answer.status == 200, answer.text
    assert answer.is_complete, answer.text
    assert_is_a_report(answer.slo, slo_type)
    for name in {"target_ttft", "target_tbt", "deadline"} & values.keys():
        assert target(answer.slo, name) == pytest.approx(values[name])


@every_route
def test_a_streaming_request_without_fields_is_latency_sensitive(
    http: httpx.Client, route: Any
) -> None:
    report = ask(http, route, stream=True).slo
    assert_is_a_report(report, "latency")
    assert target(report, "target_ttft") == pytest.approx(5)
    assert target(report, "target_tbt") == pytest.approx(0.2)


@every_route
def test_a_plain_request_without_fields_is_best_effort(http: httpx.Client, route: Any) -> None:
    assert_is_a_report(ask(http, route).slo, "best_effort")


@counting_routes
def test_generous_latency_targets_are_met_with_every_token(http: httpx.Client, route: Any) -> None:
    answer = ask(http, route, max_tokens=6, sampling=EXACT, **GENEROUS_LATENCY)
    assert answer.slo["met"] is True
    assert answer.slo["worst_lateness_s"] <= 0
    num_all_tokens = answer.num_prompt_tokens + answer.num_completion_tokens
    assert 6 == answer.num_completion_tokens <= answer.slo["goodput_tokens"] <= num_all_tokens


@counting_routes
def test_impossible_latency_targets_are_missed_with_every_token(
    http: httpx.Client, route: Any
) -> None:
    answer = ask(http, route, max_tokens=6, sampling=EXACT, target_ttft=1e-6, target_tbt=1e-6)
    assert answer.num_completion_tokens == 6
    assert answer.slo["met"] is False
    assert answer.slo["worst_lateness_s"] > 0
    assert answer.slo["goodput_tokens"] == 0


@counting_routes
def test_a_deadline_made_counts_input_and_output(http: httpx.Client, route: Any) -> None:
    answer = ask(http, route, max_tokens=6, sampling=EXACT, deadline=600)
    assert answer.slo["met"] is True
    num_all_tokens = answer.num_prompt_tokens + answer.num_completion_tokens
    assert answer.slo["goodput_tokens"] == num_all_tokens


@counting_routes
def test_a_deadline_missed_is_served_to_its_end_and_counts_nothing(
    http: httpx.Client, route: Any
) -> None:
    answer = ask(http, route, max_tokens=24, sampling=EXACT, deadline=0.001)
    assert answer.num_completion_tokens == 24
    assert answer.finish_reason == "length"
    assert answer.slo["met"] is False
    assert answer.slo["worst_lateness_s"] > 0
    assert answer.slo["goodput_tokens"] == 0


@counting_routes
@plain_and_streaming
def test_on_miss_cancel_ends_with_what_there_is_and_a_reason(
    http: httpx.Client, route: Any, stream: bool
) -> None:
    counted: Json = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask(
        http,
        route,
        stream=stream,
        max_tokens=3000,
        sampling=EXACT,
        deadline=1.5,
        on_miss="cancel",
        **(counted if route != GENERATE else {}),
    )
    assert answer.status == 200, answer.text
    assert answer.is_complete
    assert 0 < answer.num_completion_tokens < 3000
    assert answer.finish_reason in {"abort", "cancel", "cancelled", "canceled"}
    assert answer.slo["met"] is False
    assert answer.slo["goodput_tokens"] == 0
    assert reason_in(answer.slo)


def test_on_miss_cancel_ends_a_program_whose_deadline_has_passed(http: httpx.Client) -> None:
    answer = ask(
        http,
        GENERATE,
        max_tokens=3000,
        sampling=EXACT,
        program_id=new_name("program"),
        deadline=1.0,
        on_miss="cancel",
    )
    assert answer.num_completion_tokens < 3000
    assert answer.slo["type"] == "compound"
    assert answer.slo["met"] is False
    assert reason_in(answer.slo)


def test_the_first_call_of_a_program_sets_its_deadline(http: httpx.Client) -> None:
    program = new_name("program")
    first = ask(http, CHAT, program_id=program, deadline=600, node="plan")
    second = ask(
        http, GENERATE, program_id=program, deadline=5, node="answer", parents=["plan"], final=True
    )
    assert target(first.slo, "deadline") == pytest.approx(600)
    assert target(second.slo, "deadline") == pytest.approx(600)


def test_a_call_of_a_known_program_needs_no_deadline(http: httpx.Client) -> None:
    program = new_name("program")
    ask(http, CHAT, program_id=program, deadline=600)
    assert ask(http, CHAT, program_id=program, final=True).slo["type"] == "compound"


def test_a_limit_on_the_wait_never_ends_a_request_that_has_started(http: httpx.Client) -> None:
    wait_until_idle(http)
    answer = ask(http, GENERATE, max_tokens=120, sampling=EXACT, deadline=600, waiting_time=2.0)
    assert answer.status == 200, answer.text
    assert answer.num_completion_tokens == 120
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS], ids=str)
def test_several_choices_share_one_report(http: httpx.Client, route: Any) -> None:
    answer = ask(http, route, sampling={"n": 2, "temperature": 0.8}, deadline=600)
    assert [choice["index"] for choice in answer.chunks[0]["choices"]] == [0, 1]
    assert_is_a_report(answer.slo, "deadline")


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS], ids=str)
def test_several_streamed_choices_end_in_one_report(http: httpx.Client, route: Any) -> None:
    answer = ask(http, route, stream=True, sampling={"n": 2, "temperature": 0.8}, deadline=600)
    indices = {choice["index"] for chunk in answer.chunks for choice in chunk["choices"]}
    assert indices == {0, 1}
    assert_is_a_report(answer.slo, "deadline")


def test_generate_reports_on_each_answer_of_several_samples(http: httpx.Client) -> None:
    answer = ask(http, GENERATE, sampling={"n": 2, "temperature": 0.8}, deadline=600)
    assert len(answer.chunks) == 2
    for chunk in answer.chunks:
        assert_is_a_report(slo_of(chunk), "deadline")


def test_generate_reports_on_each_answer_of_a_batch(http: httpx.Client) -> None:
    answer = ask(http, GENERATE, text=["Red and", "Blue and", "Green and"], deadline=600)
    assert len(answer.chunks) == 3
    for chunk in answer.chunks:
        assert_is_a_report(slo_of(chunk), "deadline")


@plain_and_streaming
def test_the_callers_own_metadata_comes_back_beside_the_report(
    http: httpx.Client, stream: bool
) -> None:
    answer = ask(http, RESPONSES, stream=stream, metadata={"ticket": "7"})
    last = answer.chunks[-1]
    assert last.get("response", last)["metadata"]["ticket"] == "7"
    assert answer.slo["type"] == ("latency" if stream else "best_effort")


# What is refused ----------------------------------------------------------------------------------

BAD_TIMES = {
    "zero": "0",
    "negative zero": "-0.0",
    "negative": "-1",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "NaN in quotes": '"NaN"',
    "Infinity in quotes": '"Infinity"',
    "a word": '"soon"',
    "a number in quotes": '"5"',
    "a list": "[1]",
    "an object": '{"s": 1}',
    "true": "true",
    "false": "false",
    "1e400": "1e400",
    "a huge int": "1" + "0" * 400,
}
BAD_VALUES = {
    "an unknown word for on_miss": ("on_miss", '"explode"'),
    "a number for on_miss": ("on_miss", "1"),
    "a list for on_miss": ("on_miss", '["cancel"]'),
    "a number for program_id": ("program_id", "7"),
    "true for program_id": ("program_id", "true"),
    "a list for program_id": ("program_id", '["a"]'),
    "an empty program_id": ("program_id", '""'),
    "an over-long program_id": ("program_id", f'"{"x" * 5000}"'),
}
BAD_GRAPH_VALUES = {
    "a string for parents": ("parents", '"plan"'),
    "numbers for parents": ("parents", "[1, 2]"),
    "an object for parents": ("parents", '{"plan": 1}'),
    "a list for node": ("node", '["plan"]'),
    "a word for final": ("final", '"maybe"'),
    "a number for application": ("application", "7"),
    "an empty application": ("application", '""'),
    "a string for tools_run": ("tools_run", '"search"'),
    "numbers for tools_run": ("tools_run", "[1, 2]"),
}


def assert_refused(answer: Answer, name: str) -> None:
    """A 400 whose text says which field or header it is about."""
    assert answer.status == 400, f"{answer.status}: {answer.text[:2000]}"
    assert answer.names(name), f"{name} is not named in: {answer.text[:2000]}"


@every_route
@pytest.mark.parametrize("field", ["target_ttft", "target_tbt", "deadline", "waiting_time"])
@pytest.mark.parametrize("bad", BAD_TIMES)
def test_a_bad_time_is_refused_by_name(
    http: httpx.Client, route: Any, field: str, bad: str
) -> None:
    assert_refused(ask_with_raw(http, route, field, BAD_TIMES[bad]), field)


@every_route
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_a_bad_value_is_refused_by_name(http: httpx.Client, route: Any, bad: str) -> None:
    field, raw = BAD_VALUES[bad]
    assert_refused(ask_with_raw(http, route, field, raw), field)


@every_route
@pytest.mark.parametrize("bad", BAD_GRAPH_VALUES)
def test_a_bad_place_in_a_program_is_refused_by_name(
    http: httpx.Client, route: Any, bad: str
) -> None:
    field, raw = BAD_GRAPH_VALUES[bad]
    raw_with_program = f'{raw}, "program_id": "{new_name()}", "deadline": 600'
    assert_refused(ask_with_raw(http, route, field, raw_with_program), field)


@every_route
def test_a_deadline_beside_a_time_to_first_token_is_refused(http: httpx.Client, route: Any) -> None:
    answer = ask(http, route, deadline=60, target_ttft=1)
    assert_refused(answer, "deadline")
    assert_refused(answer, "target_ttft")


@every_route
def test_a_deadline_with_a_time_between_tokens_is_thinking_and_then_streaming(
    http: httpx.Client, route: Any
) -> None:
    report = ask(http, route, deadline=60, target_tbt=2).slo
    assert (report["type"], report["met"]) == ("reasoning", True)
    assert (report["deadline"], report["target_tbt"]) == (60, 2)


@every_route
def test_the_last_call_of_a_program_may_stream_with_targets_of_its_own(
    http: httpx.Client, route: Any
) -> None:
    program = new_name()
    assert ask(http, route, program_id=program, deadline=60).slo["type"] == "compound"
    last = ask(http, route, program_id=program, final=True, target_ttft=30, target_tbt=2)
    assert (last.slo["type"], last.slo["met"]) == ("latency", True)


@every_route
def test_a_refusal_of_a_streaming_request_is_a_400_and_no_stream(
    http: httpx.Client, route: Any
) -> None:
    answer = ask(http, route, stream=True, deadline=-1)
    assert_refused(answer, "deadline")
    assert "text/event-stream" not in answer.headers.get("content-type", "")


def test_refused_requests_never_reach_the_scheduler(http: httpx.Client) -> None:
    before = wait_until_idle(http)["arrived"]
    ask(http, CHAT, deadline=-1)
    assert scheduler_state(http)["arrived"] == before


# Headers ------------------------------------------------------------------------------------------

TIME_HEADERS = {
    "x-slo-ttft-ms": "target_ttft",
    "x-llm-d-slo-ttft-ms": "target_ttft",
    "x-slo-tpot-ms": "target_tbt",
    "x-llm-d-slo-tpot-ms": "target_tbt",
}


@every_route
@plain_and_streaming
def test_headers_in_milliseconds_overrule_the_body(
    http: httpx.Client, route: Any, stream: bool
) -> None:
    headers = {"x-slo-ttft-ms": "30000", "x-slo-tpot-ms": "7500"}
    report = ask(http, route, stream=stream, headers=headers, target_ttft=5, target_tbt=1).slo
    assert report["type"] == "latency"
    assert target(report, "target_ttft") == pytest.approx(30)
    assert target(report, "target_tbt") == pytest.approx(7.5)


@pytest.mark.parametrize("header", TIME_HEADERS)
@pytest.mark.parametrize("spell", [str.lower, str.upper, str.title], ids=lambda f: f.__name__)
def test_each_time_header_sets_its_target_in_any_spelling(
    http: httpx.Client, header: str, spell: Any
) -> None:
    report = ask(http, CHAT, stream=True, headers={spell(header): "12500.5"}).slo
    assert report["type"] == "latency"
    assert target(report, TIME_HEADERS[header]) == pytest.approx(12.5005)


@pytest.mark.parametrize("header", [*TIME_HEADERS, "x-llm-d-inference-ttl"])
@pytest.mark.parametrize("bad", ["soon", "0", "-5", "nan", "inf", "1e400", "[1]", "true"])
@pytest.mark.parametrize("route", [CHAT, GENERATE], ids=str)
def test_a_bad_time_header_is_refused_by_its_own_name(
    http: httpx.Client, route: Any, header: str, bad: str
) -> None:
    assert_refused(ask(http, route, headers={header: bad}), header)


def test_the_queue_limit_and_the_tenant_can_come_as_headers(http: httpx.Client) -> None:
    headers = {"x-llm-d-inference-ttl": "60000", "x-llm-d-inference-fairness-id": "tenant-7"}
    assert ask(http, CHAT, headers=headers).slo["type"] == "best_effort"


@every_route
def test_a_session_header_makes_calls_one_program(http: httpx.Client, route: Any) -> None:
    headers = {"X-Dynamo-Session-ID": new_name("session")}
    first = ask(http, route, headers=headers, deadline=600)
    second = ask(http, route, headers=headers, deadline=5)
    assert first.slo["type"] == second.slo["type"] == "compound"
    assert target(second.slo, "deadline") == pytest.approx(600)


def test_a_session_header_overrules_the_program_in_the_body(http: httpx.Client) -> None:
    session = new_name("session")
    ask(http, CHAT, program_id=session, deadline=600)
    headers = {"X-Dynamo-Session-ID": session}
    answer = ask(http, CHAT, headers=headers, program_id=new_name("program"), deadline=5)
    assert target(answer.slo, "deadline") == pytest.approx(600)


def test_an_over_long_session_header_is_refused_by_its_own_name(http: httpx.Client) -> None:
    headers = {"X-Dynamo-Session-ID": "x" * 5000}
    assert_refused(ask(http, CHAT, headers=headers, deadline=600), "X-Dynamo-Session-ID")


# Drops --------------------------------------------------------------------------------------------


class TestWhileEverySlotIsTaken:
    """Drops, with more long requests in the engine than it has slots."""

    @pytest.fixture(scope="class", autouse=True)
    def _busy(self, server: Server) -> Iterator[None]:
        with busy_engine(server.base_url):
            yield

    # As long as the others and less urgent, so that nothing speaks for running it at once.
    victim: ClassVar[Json] = {"max_tokens": 1000, "deadline": 7200}

    @staticmethod
    def assert_dropped(answer: Answer) -> None:
        """A 503 that a person, a proxy and a program can each understand."""
        assert answer.status == 503, f"{answer.status}: {answer.text[:2000]}"
        assert "text/event-stream" not in answer.headers.get("content-type", "")
        assert int(answer.headers["retry-after"]) > 0
        reason = answer.headers["x-llm-d-request-dropped-reason"]
        assert reason
        assert " " not in reason
        assert reason in answer.error_strings, f"{reason} is not in {answer.text}"

    @every_route
    @plain_and_streaming
    def test_a_request_that_waits_too_long_gets_a_503_with_a_reason(
        self, http: httpx.Client, route: Any, stream: bool
    ) -> None:
        self.assert_dropped(
            ask(http, route, stream=stream, waiting_time=0.05, sampling=EXACT, **self.victim)
        )

    def test_the_header_for_the_queue_limit_overrules_the_body(self, http: httpx.Client) -> None:
        headers = {"x-llm-d-inference-ttl": "50"}
        self.assert_dropped(
            ask(http, CHAT, headers=headers, waiting_time=600, sampling=EXACT, **self.victim)
        )

    def test_a_drop_is_counted_and_leaves_nothing_waiting(self, http: httpx.Client) -> None:
        before = scheduler_state(http)
        self.assert_dropped(ask(http, GENERATE, waiting_time=0.05, sampling=EXACT, **self.victim))
        poll(
            lambda: scheduler_state(http)["ended"]["dropped"] - before["ended"]["dropped"],
            lambda num_more: num_more == 1,
        )

    def test_the_openai_client_raises_its_error_for_a_503(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "Tell me a long story."}],
                max_tokens=1000,
                extra_body={"waiting_time": 0.05, "deadline": 7200, **EXACT},
            )
        assert caught.value.status_code == 503
        assert caught.value.response.headers["x-llm-d-request-dropped-reason"]


# The page -----------------------------------------------------------------------------------------


def property_names(document: Json, schema: Json) -> set[str]:
    """The fields of a schema, references and alternatives followed."""
    if reference := schema.get("$ref"):
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        return property_names(document, node)
    names = set(schema.get("properties", {}))
    for key in ("allOf", "anyOf", "oneOf"):
        for alternative in schema.get(key, []):
            names |= property_names(document, alternative)
    return names


@every_route
def test_the_openapi_page_lists_every_field(http: httpx.Client, route: Any) -> None:
    document = http.get("/openapi.json").json()
    body = document["paths"][route.path]["post"]["requestBody"]
    names = property_names(document, body["content"]["application/json"]["schema"])
    ours = {"target_ttft", "target_tbt", "deadline", "waiting_time", "on_miss"}
    ours |= {"program_id", "parents", "node", "final", "application", "tools_run"}
    assert ours <= names, f"missing: {ours - names}"
