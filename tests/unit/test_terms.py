"""Reading a request's SLO out of its body and headers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.programs import ProgramBook, ProgramCancelledError
from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    ReasoningSlo,
)
from core.terms import (
    HEADERS,
    MAX_NAME_CHARS,
    MAX_PARENTS,
    MAX_TIME_S,
    SLO_FIELDS,
    FieldError,
    SloDefaults,
    read_program,
    read_terms,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from core.slo import RequestTerms

NOW_S = 1000.0
TIME_FIELDS = ("target_ttft", "target_tbt", "deadline", "waiting_time")
TIME_HEADERS = {
    "x-llm-d-slo-ttft-ms": "target_ttft",
    "x-slo-ttft-ms": "target_ttft",
    "x-llm-d-slo-tpot-ms": "target_tbt",
    "x-slo-tpot-ms": "target_tbt",
    "x-llm-d-inference-ttl": "waiting_time",
}


def read(
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    defaults: SloDefaults | None = None,
    programs: ProgramBook | None = None,
    now_s: float = NOW_S,
    tenant: str = "",
) -> RequestTerms:
    """`read_terms` with everything it needs."""
    return read_terms(
        body or {},
        headers or {},
        defaults or SloDefaults(),
        programs if programs is not None else ProgramBook(),
        now_s,
        tenant,
    )


def refusal(
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> FieldError:
    """The error that a bad request gets."""
    with pytest.raises(FieldError) as caught:
        read(body, headers, **more)
    return caught.value


def value_of(terms: RequestTerms, field: str) -> float | None:
    """What a time field has become."""
    if field == "waiting_time":
        return terms.waiting_time_s
    return getattr(terms.slo, f"{field}_s")


# Classes and defaults -----------------------------------------------------------------------------


def test_a_plain_request_without_fields_is_best_effort_and_never_dropped() -> None:
    terms = read()
    assert terms.slo == BestEffortSlo(600.0)
    assert terms.waiting_time_s is None
    assert terms.on_miss is OnMiss.FINISH
    assert terms.arrival_s == NOW_S
    assert terms.tenant == ""


def test_a_streaming_request_without_fields_has_the_papers_latency_targets() -> None:
    assert read({"stream": True}).slo == LatencySlo(5.0, 0.2)


def test_a_server_can_say_that_streams_without_fields_are_best_effort() -> None:
    defaults = SloDefaults(streaming_is_latency_sensitive=False, best_effort_deadline=42)
    assert read({"stream": True}, defaults=defaults).slo == BestEffortSlo(42)


@pytest.mark.parametrize("stream", [False, True])
def test_both_latency_targets_make_a_latency_request(stream: bool) -> None:
    body = {"target_ttft": 2, "target_tbt": 0.5, "stream": stream}
    assert read(body).slo == LatencySlo(2.0, 0.5)


def test_one_latency_target_takes_the_other_from_the_defaults() -> None:
    defaults = SloDefaults(target_ttft=7, target_tbt=0.7)
    assert read({"target_ttft": 2}, defaults=defaults).slo == LatencySlo(2.0, 0.7)
    assert read({"target_tbt": 0.1}, defaults=defaults).slo == LatencySlo(7.0, 0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_makes_a_deadline_request_streaming_or_not(stream: bool) -> None:
    assert read({"deadline": 30, "stream": stream}).slo == DeadlineSlo(30.0)


def test_defaults_fill_in_waiting_time_and_on_miss_and_the_body_overrules_them() -> None:
    defaults = SloDefaults(waiting_time=9, on_miss=OnMiss.CANCEL)
    terms = read(defaults=defaults)
    assert (terms.waiting_time_s, terms.on_miss) == (9, OnMiss.CANCEL)
    terms = read({"waiting_time": 3, "on_miss": "finish"}, defaults=defaults)
    assert (terms.waiting_time_s, terms.on_miss) == (3.0, OnMiss.FINISH)


@pytest.mark.parametrize("field", SLO_FIELDS)
def test_null_means_not_given(field: str) -> None:
    assert read({field: None}) == read()


def test_a_waiting_time_alone_does_not_change_the_class() -> None:
    assert read({"waiting_time": 3}).slo == BestEffortSlo(600.0)
    assert read({"waiting_time": 3, "stream": True}).slo == LatencySlo(5.0, 0.2)


@pytest.mark.parametrize("name", ["target_ttft", "target_tbt", "deadline", "best_effort_deadline"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, MAX_TIME_S + 1])
def test_a_default_that_no_request_could_have_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: takes a number of seconds"):
        SloDefaults(**{name: value})


def test_a_default_waiting_time_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^waiting_time: takes"):
        SloDefaults(waiting_time=0)


# Times --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", TIME_FIELDS)
@pytest.mark.parametrize("value", [1e-6, 0.25, 1, 30, MAX_TIME_S, int(MAX_TIME_S)])
def test_a_time_above_zero_and_up_to_a_year_is_taken(field: str, value: float) -> None:
    assert value_of(read({field: value}), field) == value


@pytest.mark.parametrize("field", TIME_FIELDS)
@pytest.mark.parametrize(
    "value",
    [
        0,
        -0.0,
        -1,
        math.nan,
        math.inf,
        -math.inf,
        MAX_TIME_S + 1,
        10**400,
        -(10**5000),
        True,
        False,
        "5",
        "soon",
        "",
        [1],
        [],
        {"s": 1},
    ],
    ids=lambda value: (
        f"{type(value).__name__}-{str(value)[:8] if value != -(10**5000) else 'huge'}"
    ),
)
def test_any_other_time_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    error = refusal({field: value})
    assert error.field == field
    assert str(error).startswith(f"{field}: takes a number of seconds above 0 and at most ")
    assert len(str(error)) < 200


@given(st.sampled_from(TIME_FIELDS), st.floats() | st.integers() | st.text() | st.booleans())
def test_a_time_is_either_refused_or_finite_and_positive(field: str, value: Any) -> None:
    try:
        terms = read({field: value})
    except FieldError as error:
        assert error.field == field  # noqa: PT017  both ends of the alternative are asserted
    else:
        seconds = value_of(terms, field)
        assert seconds is not None
        assert 0 < seconds <= MAX_TIME_S


# The other fields ---------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", list(OnMiss))
def test_on_miss_takes_its_two_words(choice: OnMiss) -> None:
    assert read({"on_miss": choice.value, "deadline": 5}).on_miss is choice


@pytest.mark.parametrize("value", ["explode", "Cancel", "", 1, True, ["cancel"], {"cancel": 1}])
def test_any_other_on_miss_is_refused_and_the_words_are_listed(value: Any) -> None:
    error = refusal({"on_miss": value})
    assert error.field == "on_miss"
    assert '"finish" or "cancel"' in str(error)


def test_a_program_id_makes_a_compound_request_with_all_it_says_about_its_place() -> None:
    body = {
        "program_id": "trip",
        "deadline": 30,
        "parents": ["plan", "search"],
        "node": "answer",
        "final": True,
        "application": "travel agent",
        "tools_run": ["search", "search", "clock"],
    }
    assert read(body).slo == CompoundSlo(
        30.0,
        "trip",
        ("plan", "search"),
        "answer",
        final=True,
        application="travel agent",
        tools=("search", "search", "clock"),
    )


def test_a_program_without_a_deadline_gets_the_default_one() -> None:
    assert read({"program_id": "p"}, defaults=SloDefaults(deadline=77)).slo == CompoundSlo(77, "p")


@pytest.mark.parametrize("field", ["program_id", "node", "application"])
@pytest.mark.parametrize(
    "value", ["", "x" * (MAX_NAME_CHARS + 1), "\ud800", 7, True, ["a"], {"a": 1}]
)
def test_a_bad_name_is_refused_by_its_field(field: str, value: Any) -> None:
    error = refusal({"program_id": "p", field: value})
    assert error.field == field
    assert f"takes a string of 1 to {MAX_NAME_CHARS} characters" in str(error)
    assert len(str(error)) < 200


def test_names_may_be_as_long_as_the_limit_says() -> None:
    name = "n" * MAX_NAME_CHARS
    names = [name] * MAX_PARENTS
    body = {"program_id": name, "node": name, "application": name}
    slo = read({**body, "parents": names, "tools_run": names}).slo
    assert slo == CompoundSlo(60.0, name, tuple(names), name, application=name, tools=tuple(names))


lists_of_names = pytest.mark.parametrize("field", ["parents", "tools_run"])


@lists_of_names
@pytest.mark.parametrize("value", ["plan", {"plan": 1}, 1, True, ["p"] * (MAX_PARENTS + 1)])
def test_names_that_are_no_list_or_too_many_are_refused(field: str, value: Any) -> None:
    error = refusal({"program_id": "p", field: value})
    assert (error.field, error.takes) == (field, "takes a list of at most 256 names")


@lists_of_names
def test_a_bad_name_in_a_list_is_refused_by_its_position(field: str) -> None:
    assert refusal({"program_id": "p", field: ["a", ""]}).field == f"{field}[1]"
    assert refusal({"program_id": "p", field: [1]}).field == f"{field}[0]"
    assert refusal({"program_id": "p", field: [None]}).field == f"{field}[0]"
    assert refusal({"program_id": "p", field: ["a", "\ud800"]}).field == f"{field}[1]"


@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
def test_final_takes_only_true_or_false(value: Any) -> None:
    error = refusal({"program_id": "p", "final": value})
    assert error.field == "final"
    assert "takes true or false" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parents", ["a"]),
        ("node", "a"),
        ("final", True),
        ("application", "a"),
        ("tools_run", ["a"]),
    ],
)
def test_a_place_in_a_program_needs_the_program(field: str, value: Any) -> None:
    error = refusal({field: value, "deadline": 5})
    assert error.field == field
    assert "give program_id too" in str(error)


# Conflicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency", "field", "value"),
    [
        ("target_ttft", "deadline", 5),
        ("target_ttft", "program_id", "p"),
        ("target_tbt", "program_id", "p"),
    ],
)
def test_latency_targets_beside_a_deadline_or_a_program_are_refused_naming_both(
    latency: str, field: str, value: Any
) -> None:
    error = refusal({latency: 1, field: value})
    assert error.field == latency
    assert f"cannot be combined with {field}" in str(error)


def test_a_conflict_names_the_header_where_a_header_caused_it() -> None:
    error = refusal({"deadline": 5}, {"x-slo-ttft-ms": "100"})
    assert error.field == "x-slo-ttft-ms"
    error = refusal({"target_ttft": 5}, {"x-dynamo-session-id": "s"})
    assert error.field == "target_ttft"
    assert "cannot be combined with x-dynamo-session-id" in str(error)


# Requests that change their class ----------------------------------------------------------------


def test_a_deadline_with_a_time_between_tokens_is_thinking_and_then_streaming() -> None:
    assert read({"deadline": 20, "target_tbt": 0.1}).slo == ReasoningSlo(20, 0.1)
    assert read({"deadline": 20}, {"x-slo-tpot-ms": "100"}).slo == ReasoningSlo(20, 0.1)


def test_thinking_and_then_streaming_takes_no_time_to_first_token() -> None:
    error = refusal({"deadline": 20, "target_tbt": 0.1, "target_ttft": 1})
    assert error.field == "target_ttft"
    assert "deadline and target_tbt" in str(error)


def test_the_last_call_of_a_program_may_be_latency_sensitive_and_closes_it() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    last = {"program_id": "p", "final": True, "target_ttft": 2, "target_tbt": 0.1}
    terms = read_terms(last, {}, SloDefaults(), programs, 110.0, "t")
    assert terms.slo == LatencySlo(2, 0.1)
    programs.tidy("t", "p")
    assert len(programs) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"final": False},
        {"deadline": 5},
        {"node": ""},
        {"target_tbt": 0},
        {"application": 7},
        {"tools_run": "search"},
    ],
)
def test_a_refused_last_call_does_not_close_its_program(bad: dict[str, Any]) -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    last = {"program_id": "p", "final": True, "target_ttft": 2, **bad}
    refusal(last, programs=programs, tenant="t")
    assert len(programs) == 1


# Headers ------------------------------------------------------------------------------------------


def test_every_header_that_is_read_is_listed() -> None:
    listed = {*TIME_HEADERS, "x-dynamo-session-id", "x-llm-d-inference-fairness-id"}
    assert set(HEADERS) == listed


@pytest.mark.parametrize(("header", "field"), TIME_HEADERS.items())
def test_a_time_header_is_in_milliseconds_and_wins_over_the_body(header: str, field: str) -> None:
    assert value_of(read(headers={header: "12500.5"}), field) == pytest.approx(12.5005)
    assert value_of(read({field: 99}, {header: "250"}), field) == pytest.approx(0.25)


@pytest.mark.parametrize("header", TIME_HEADERS)
@pytest.mark.parametrize(
    "text", ["soon", "", "0", "-5", "nan", "inf", "-inf", "1e400", "[1]", "true", "1_000", "1e12"]
)
def test_a_bad_time_header_is_refused_by_its_own_name(header: str, text: str) -> None:
    error = refusal(headers={header: text})
    assert error.field == header
    assert "takes a number of milliseconds above 0" in str(error)


def test_the_request_ttl_limits_the_wait_in_the_queue_and_sets_no_deadline() -> None:
    terms = read({"target_ttft": 1}, {"x-llm-d-inference-ttl": "1500"})
    assert terms.waiting_time_s == 1.5
    assert isinstance(terms.slo, LatencySlo)


def test_a_session_header_is_the_program_and_wins_over_the_body() -> None:
    slo = read({"program_id": "body", "deadline": 5}, {"x-dynamo-session-id": "session"}).slo
    assert slo == CompoundSlo(5.0, "session")


@pytest.mark.parametrize("text", ["", "x" * (MAX_NAME_CHARS + 1)])
def test_a_bad_session_header_is_refused_by_its_own_name(text: str) -> None:
    assert refusal(headers={"x-dynamo-session-id": text}).field == "x-dynamo-session-id"


# Tenants ------------------------------------------------------------------------------------------


def test_the_tenant_is_the_header_before_user_before_the_callers_fallback() -> None:
    header = {"x-llm-d-inference-fairness-id": "fair"}
    assert read({"user": "ann"}, header, tenant="key").tenant == "fair"
    assert read({"user": "ann"}, tenant="key").tenant == "ann"
    assert read(tenant="key").tenant == "key"


@pytest.mark.parametrize("user", ["", 7, None, ["ann"]])
def test_a_user_that_is_no_name_is_passed_over(user: Any) -> None:
    assert read({"user": user}, tenant="key").tenant == "key"


def test_a_long_user_is_cut_and_not_refused_because_it_is_not_ours() -> None:
    assert read({"user": "u" * 5000}).tenant == "u" * MAX_NAME_CHARS


def test_an_empty_or_endless_tenant_header_is_refused_by_its_own_name() -> None:
    name = "x-llm-d-inference-fairness-id"
    assert refusal(headers={name: ""}).field == name
    assert refusal(headers={name: "x" * (MAX_NAME_CHARS + 1)}).field == name


# Programs -----------------------------------------------------------------------------------------


def call(programs: ProgramBook, at_s: float, tenant: str = "t", **fields: Any) -> CompoundSlo:
    """One call of program "p"."""
    slo = read({"program_id": "p", **fields}, programs=programs, now_s=at_s, tenant=tenant).slo
    assert isinstance(slo, CompoundSlo)
    return slo


def test_the_first_call_sets_the_deadline_of_all() -> None:
    programs = ProgramBook()
    assert call(programs, 100.0, deadline=30).deadline_s == 30
    assert call(programs, 110.0).deadline_s == 20
    assert call(programs, 120.0, deadline=500).deadline_s == 10


def test_a_call_after_the_programs_deadline_has_a_negative_one() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    assert call(programs, 140.0, deadline=30).deadline_s == -10


def test_tenants_do_not_share_programs() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    assert call(programs, 110.0, "another", deadline=30).deadline_s == 30
    assert len(programs) == 2


def test_a_final_call_shares_the_deadline_and_ends_the_program() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    last = call(programs, 110.0, final=True)
    assert (last.deadline_s, last.final) == (20, True)
    programs.tidy("t", "p")
    assert len(programs) == 0
    assert call(programs, 120.0, deadline=30).deadline_s == 30


def test_final_false_does_not_end_the_program() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30, final=False)
    assert call(programs, 110.0).deadline_s == 20


def test_a_final_call_ends_only_its_own_tenants_program() -> None:
    programs = ProgramBook()
    call(programs, 100.0, "a", deadline=30)
    call(programs, 100.0, "b", deadline=30, final=True)
    assert call(programs, 110.0, "a").deadline_s == 20


def test_the_least_recently_used_program_is_forgotten_first() -> None:
    programs = ProgramBook(max_programs=2)
    assert programs.join("t", "old", 1.0, 10).opened_s == 1.0
    assert programs.join("t", "used", 2.0, 10).opened_s == 2.0
    assert programs.join("t", "old", 9.0, 10).opened_s == 1.0
    assert programs.join("t", "new", 3.0, 10).opened_s == 3.0
    assert len(programs) == 2
    assert programs.join("t", "old", 9.0, 10).opened_s == 1.0
    assert programs.join("t", "used", 9.0, 10).opened_s == 9.0


@pytest.mark.parametrize(
    "bad",
    [
        {"deadline": -1},
        {"node": ""},
        {"parents": [1]},
        {"application": ""},
        {"tools_run": [""]},
        {"final": "yes"},
        {"waiting_time": 0},
        {"on_miss": "explode"},
        {"target_ttft": 0},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_a_refused_call_neither_opens_nor_closes_a_program(bad: dict[str, Any]) -> None:
    programs = ProgramBook()
    refusal({"program_id": "p", "deadline": 30, **bad}, programs=programs)
    assert len(programs) == 0
    call(programs, 100.0, deadline=30)
    refusal({"program_id": "p", "final": True, **bad}, programs=programs, tenant="t")
    assert call(programs, 110.0).deadline_s == 20


def test_a_call_of_a_cancelled_program_is_refused_as_such() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    programs.cancel("t", "p")
    with pytest.raises(ProgramCancelledError):
        call(programs, 101.0)
    assert call(programs, 101.0, "another", deadline=30).deadline_s == 30


def test_the_last_stream_of_a_cancelled_program_is_refused_too() -> None:
    programs = ProgramBook()
    call(programs, 100.0, deadline=30)
    programs.cancel("t", "p")
    last = {"program_id": "p", "final": True, "target_ttft": 2, "target_tbt": 0.1}
    with pytest.raises(ProgramCancelledError):
        read(last, programs=programs, now_s=101.0, tenant="t")


# Tools --------------------------------------------------------------------------------------------


def chat_with_results(*names: str) -> dict[str, Any]:
    """The body of a call that carries the results of these tools."""
    calls = [
        {"id": str(place), "type": "function", "function": {"name": name, "arguments": "{}"}}
        for place, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "tool_call_id": str(place), "content": "done"}
        for place in range(len(names))
    ]
    wanted = {"role": "assistant", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": "?"}, wanted, *results]}


def tools_of(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> tuple[str, ...]:
    slo = read(body, headers).slo
    assert isinstance(slo, CompoundSlo)
    return slo.tools


def test_where_nobody_says_which_tools_ran_the_messages_do() -> None:
    body = chat_with_results("search", "clock")
    assert tools_of({"program_id": "p", **body}) == ("search", "clock")
    assert tools_of(body, {"x-dynamo-session-id": "p"}) == ("search", "clock")


def test_what_the_field_says_wins_over_the_messages() -> None:
    body = {"program_id": "p", **chat_with_results("search", "clock")}
    assert tools_of({**body, "tools_run": ["mine"]}) == ("mine",)
    assert tools_of({**body, "tools_run": []}) == ()
    assert tools_of({**body, "tools_run": None}) == ("search", "clock")


def test_tool_results_without_a_program_are_nobodys_business() -> None:
    assert read({**chat_with_results("search"), "deadline": 5}).slo == DeadlineSlo(5.0)
    assert read(chat_with_results("search")).slo == BestEffortSlo(600.0)


@pytest.mark.parametrize("name", ["", "x" * 5000, "\ud800", 7, None, {"a": 1}])
def test_an_odd_name_of_a_tool_in_the_messages_is_for_the_engine_to_judge(name: Any) -> None:
    tools = tools_of({"program_id": "p", **chat_with_results(name, "clock")})
    assert tools[-1] == "clock"


def test_very_many_tool_results_are_no_reason_to_refuse() -> None:
    names = [f"tool{number}" for number in range(1000)]
    assert len(tools_of({"program_id": "p", **chat_with_results(*names)})) <= MAX_PARENTS


# Ending a program ---------------------------------------------------------------------------------


def test_who_ends_a_program_names_it_as_in_a_call() -> None:
    assert read_program({"program_id": "p"}, {}, "key") == ("key", "p")
    assert read_program({"program_id": "p", "user": "ann"}, {}, "key") == ("ann", "p")
    headers = {"x-llm-d-inference-fairness-id": "fair", "x-dynamo-session-id": "s"}
    assert read_program({"program_id": "p", "user": "ann"}, headers, "key") == ("fair", "s")
    assert read_program({}, {"x-dynamo-session-id": "s"}, "") == ("", "s")


@pytest.mark.parametrize("value", [None, "", "x" * (MAX_NAME_CHARS + 1), "\ud800", 7, ["p"], {}])
def test_who_ends_a_program_without_a_good_name_is_told_which_field(value: Any) -> None:
    with pytest.raises(FieldError) as caught:
        read_program({"program_id": value}, {}, "")
    assert caught.value.field == "program_id"
    assert "takes a string of 1 to" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_who_ends_a_program_by_a_bad_header_is_told_which_header() -> None:
    for header in ("x-dynamo-session-id", "x-llm-d-inference-fairness-id"):
        with pytest.raises(FieldError) as caught:
            read_program({"program_id": "p"}, {header: ""}, "")
        assert caught.value.field == header
