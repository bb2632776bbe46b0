"""SGLang's own frontend, unmodified, on a server in this process that notes what it is sent."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_server
import pytest
import sglang as sgl

from engine.runtime.frontend import CallError, JITEndpoint, RunOutcome, tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_server import FakeServer

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fake_server.running() as fake:
        yield fake


@pytest.fixture
def endpoint(server: FakeServer) -> JITEndpoint:
    return JITEndpoint(server.url, deadline=60)


def run(body: Callable[[Any], Any], endpoint: JITEndpoint, **options: Any) -> Any:
    """Run a function of a state as a program and wait until the server knows that it is over."""

    def program(s: Any) -> Any:
        return body(s)

    state = sgl.function(program).run(backend=endpoint, **options)
    endpoint.outcome_of(state, 30)
    return state


def refused(status: int, message: str, **error: Any) -> tuple[int, Any]:
    """An error as our server sends it."""
    return status, {"error": {"message": message, "type": "refused", **error}}


def wait_for_threads_since(before: set[threading.Thread]) -> None:
    """Until the threads that programs have started are gone."""
    for thread in set(threading.enumerate()) - before:
        if "process_request" not in thread.name:
            thread.join(30)
            assert not thread.is_alive()


@sgl.function
def two_steps(s: Any, topic: str) -> None:
    s += "About " + topic
    s += sgl.gen("draft", max_tokens=8)
    s += "Better:" + sgl.gen("final", max_tokens=8)


# What every call carries


def test_the_calls_of_a_run_share_a_program_and_its_terms(server: FakeServer) -> None:
    endpoint = JITEndpoint(
        server.url, deadline=30, on_miss="cancel", waiting_time=5, user="team", application="app"
    )
    endpoint.outcome_of(two_steps.run(topic="bees", backend=endpoint))
    first, second = server.calls
    terms = {"deadline": 30, "on_miss": "cancel", "waiting_time": 5, "user": "team"}
    for call in (first, second):
        assert terms.items() <= call.items()
        assert call["application"] == "app"
    assert first["program_id"] == second["program_id"]
    assert len(first["program_id"]) == 32


def test_what_was_not_given_is_not_sent(server: FakeServer) -> None:
    endpoint = JITEndpoint(server.url)
    endpoint.outcome_of(two_steps.run(topic="bees", backend=endpoint))
    absent = {"deadline", "on_miss", "waiting_time", "user", "tools_run", "final"}
    assert not absent & set(server.calls[0])


def test_the_application_is_called_like_the_function(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    endpoint.outcome_of(two_steps.run(topic="bees", backend=endpoint))
    (named,) = {call["application"] for call in server.calls}
    assert named == "two_steps"


def test_what_sglang_sends_is_unchanged_but_for_our_fields(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    for backend in (sgl.RuntimeEndpoint(server.url), endpoint):
        two_steps.run(topic="bees", temperature=0, backend=backend)["final"]
    stock, ours = server.calls[:2], server.calls[2:]
    added = {"program_id", "application", "deadline", "node", "parents"}
    assert [set(call) for call in ours] == [set(call) | added for call in stock]
    assert [{key: call[key] for key in call if key not in added} for call in ours] == stock


def test_the_default_backend_may_be_one(
    server: FakeServer, endpoint: JITEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    sgl.set_default_backend(endpoint)
    state = two_steps.run(topic="bees")
    assert endpoint.outcome_of(state) is not None
    assert sgl.flush_cache() is None
    assert sgl.get_server_info() == {"model_path": "fake", "status": "ok"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("deadline", value) for value in (0, -1, float("nan"), float("inf"), True, "60", 1e12)),
        *(("waiting_time", value) for value in (0, float("nan"))),
        ("on_miss", "drop"),
        *(("user", value) for value in ("", "x" * 257, 5)),
        *(("application", value) for value in ("", "x" * 257, "\ud800")),
    ],
)
def test_an_argument_that_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: takes "):
        JITEndpoint("http://127.0.0.1:1", **{name: value})


# Names and lineage


def test_calls_in_a_line_need_the_one_before(server: FakeServer, endpoint: JITEndpoint) -> None:
    def line(s: Any) -> None:
        for _ in range(3):
            s += sgl.gen("step")
        s += sgl.gen()

    run(line, endpoint)
    assert server.nodes() == ["step", "step#2", "step#3", "gen"]
    assert server.parents() == {
        "step": set(),
        "step#2": {"step"},
        "step#3": {"step#2"},
        "gen": {"step#3"},
    }


def test_a_role_ends_where_a_number_would_begin(server: FakeServer, endpoint: JITEndpoint) -> None:
    def names(s: Any) -> None:
        for name in ("a#7", "a", "x" * 300, "x" * 300 + "y", "#"):
            s += sgl.gen(name)

    run(names, endpoint)
    nodes = server.nodes()
    assert nodes[:2] == ["a", "a#2"]
    assert len(set(nodes)) == 5
    assert max(map(len, nodes)) <= 256
    assert nodes[4] == "call"


def test_roles_and_chat_templates_work_as_ever(server: FakeServer) -> None:
    def chat(s: Any) -> None:
        s += sgl.system("Be brief.")
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("reply"))
        with s.user():
            s += "And?"
        with s.assistant():
            s += sgl.gen("reply")

    run(chat, JITEndpoint(server.url, chat_template_name="chatml"))
    assert server.nodes() == ["reply", "reply#2"]
    assert server.calls[0]["text"].endswith("<|im_start|>assistant\n")
    assert "<|im_end|>" in server.calls[0]["sampling_params"]["stop"]


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_after_a_join_a_call_needs_the_forks_last_calls(
    server: FakeServer, endpoint: JITEndpoint, mode: str
) -> None:
    def map_reduce(s: Any) -> None:
        s += "Topic" + sgl.gen("plan")
        s["plan"]
        forks = s.fork(3)
        for index, fork in enumerate(forks):
            fork += f"Part {index}:" + sgl.gen("part")
            if index == 2:
                fork += sgl.gen("more")
        forks.join(mode)
        s += sgl.gen("whole")

    state = run(map_reduce, endpoint)
    parents = server.parents()
    assert parents["prefix"] == {"plan"}  # SGLang has the text before a fork computed once
    assert parents["part"] == parents["part#2"] == parents["part#3"] == {"plan"}
    (with_more,) = parents["more"]
    assert parents["whole"] == {"part", "part#2", "part#3", "more"} - {with_more}
    if mode == "gather_variable":
        assert state["part"] == [" ok"] * 3
    else:
        assert server.calls[-1]["text"].count("Part") == 3


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_forks_of_a_state_that_has_not_called(
    server: FakeServer, endpoint: JITEndpoint, mode: str
) -> None:
    def fork_first(s: Any) -> None:
        forks = s.fork(2)
        forks += sgl.gen("part")
        forks.join(mode)
        s += sgl.gen("whole")

    run(fork_first, endpoint)
    assert server.parents() == {"part": set(), "part#2": set(), "whole": {"part", "part#2"}}


def test_a_join_of_forks_that_did_not_call_changes_nothing(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def idle(s: Any) -> None:
        s += sgl.gen("a")
        with s.copy() as other:
            other += "nothing"
        s += sgl.gen("b")

    run(idle, endpoint)
    assert server.parents() == {"a": set(), "b": {"a"}}


def test_nested_forks(server: FakeServer, endpoint: JITEndpoint) -> None:
    def tree(s: Any) -> None:
        s += sgl.gen("root")
        outer = s.fork(2)
        for index, fork in enumerate(outer):
            fork += sgl.gen(f"left{index}")
            inner = fork.fork(2)
            inner[0] += sgl.gen(f"leaf{index}a")
            inner[1] += sgl.gen(f"leaf{index}b")
            inner.join()
            fork += sgl.gen(f"node{index}")
        outer.join()
        s += sgl.gen("top")

    run(tree, endpoint)
    parents = server.parents()
    assert parents["left0"] == parents["left1"] == {"root"}
    for index in (0, 1):
        assert parents[f"leaf{index}a"] == parents[f"leaf{index}b"] == {f"left{index}"}
        assert parents[f"node{index}"] == {f"leaf{index}a", f"leaf{index}b"}
    assert parents["top"] == {"node0", "node1"}


def test_a_second_round_of_forks_needs_the_first_that_was_joined(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def rounds(s: Any) -> None:
        for round_ in (1, 2):
            forks = s.fork(2)
            for fork in forks:
                fork += sgl.gen(f"round{round_}")
            forks.join()

    run(rounds, endpoint)
    assert server.parents() == {
        "round1": set(),
        "round1#2": set(),
        "round2": {"round1", "round1#2"},
        "round2#2": {"round1", "round1#2"},
    }


def test_forks_that_were_read_but_not_joined_were_needed(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def tips(s: Any) -> None:
        s += "Tips:" + sgl.gen("tips")
        forks = s.fork(2)
        forks += "More:" + sgl.gen("detail")
        s += forks[0]["detail"] + forks[1]["detail"] + sgl.gen("summary")

    run(tips, endpoint)
    assert server.parents()["summary"] == {"detail", "detail#2"}


def test_a_fork_that_still_runs_was_not_needed(server: FakeServer, endpoint: JITEndpoint) -> None:
    has_overtaken = threading.Event()

    def hold(body: Any) -> None:
        if body["node"] == "slow":
            has_overtaken.wait(30)

    def race(s: Any) -> None:
        fork = s.fork(1)[0]
        fork += sgl.gen("slow")
        server.wait_for(lambda: "slow" in server.nodes())
        s += sgl.gen("quick")
        s["quick"]
        has_overtaken.set()
        fork["slow"]
        s += sgl.gen("last")

    server.script = hold
    run(race, endpoint)
    assert server.parents() == {"slow": set(), "quick": set(), "last": {"quick", "slow"}}


def test_a_choice_is_made_of_calls_in_a_line(server: FakeServer, endpoint: JITEndpoint) -> None:
    def choose(s: Any) -> None:
        s += "Good?" + sgl.select("verdict", choices=["yes", "no"])
        s += sgl.gen(
            "again",
            choices=["yes", "no"],
            choices_method=sgl.unconditional_likelihood_normalized,
        )
        s += sgl.gen("why")

    state = run(choose, endpoint)
    assert state["verdict"] == "yes"
    assert server.nodes() == [
        "verdict.prefix",
        "verdict",
        "again.prefix",
        "again",
        "again.prior",
        "why",
    ]
    nodes = server.nodes()
    assert [call["parents"] for call in server.calls] == [[], *([node] for node in nodes[:-1])]


def test_streaming_tags_calls_and_streams(server: FakeServer, endpoint: JITEndpoint) -> None:
    state = two_steps.run(topic="bees", backend=endpoint, stream=True)
    assert "".join(state.text_iter()) == "About bees okBetter: ok"
    outcome = endpoint.outcome_of(state)
    assert outcome is not None
    assert outcome.calls == 2
    assert [call["stream"] for call in server.calls] == [True, True]
    assert server.parents() == {"draft": set(), "final": {"draft"}}


def test_without_a_thread(server: FakeServer, endpoint: JITEndpoint) -> None:
    def forked(s: Any) -> None:
        s += "Go" + sgl.gen("a")
        forks = s.fork(2)
        forks += sgl.gen("b")
        with tool(s, "search"):
            pass
        forks.join()
        s += sgl.gen("c")

    run(forked, endpoint, use_thread=False)
    assert server.parents()["c"] == {"b", "b#2"}
    assert server.calls[-1]["tools_run"] == ["search"]


def test_each_run_of_a_batch_is_a_program(server: FakeServer, endpoint: JITEndpoint) -> None:
    topics = [{"topic": f"{'long ' * 20}{index}"} for index in range(5)]
    states = two_steps.run_batch(topics, backend=endpoint, num_threads=3)
    outcomes = [endpoint.outcome_of(state) for state in states]
    ids = {outcome.program_id for outcome in outcomes if outcome is not None}
    assert len(ids) == 5
    assert {call["program_id"] for call in server.calls if "node" in call} == ids
    assert sorted(server.nodes()) == ["draft"] * 5 + ["final"] * 5
    assert len(server.closed) == 5


@pytest.mark.parametrize("options", [{"num_threads": 1}, {"generator_style": True}])
def test_batches_of_the_other_kinds(
    server: FakeServer, endpoint: JITEndpoint, options: dict[str, Any]
) -> None:
    states = two_steps.run_batch([{"topic": "a"}, {"topic": "b"}], backend=endpoint, **options)
    outcomes = [endpoint.outcome_of(state) for state in states]
    assert [outcome.calls for outcome in outcomes if outcome is not None] == [2, 2]


def test_a_prefix_shared_by_a_batch_belongs_to_no_program(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    @sgl.function
    def shared(s: Any, topic: str) -> None:
        s += "These words are the same in every run of the batch, and there are many of them."
        s += topic
        s += sgl.gen("a")

    for state in shared.run_batch([{"topic": "a"}, {"topic": "b"}], backend=endpoint):
        endpoint.outcome_of(state)
    shared_call, *others = server.calls
    assert "program_id" not in shared_call
    assert len({call["program_id"] for call in others}) == 2


def test_computing_a_prefix_takes_no_tool_from_the_call_after_it(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def agent(s: Any) -> None:
        s += "Go"
        with tool(s, "search"):
            s.sync()
        forks = s.fork(2)
        forks += sgl.gen("part")
        forks.join()

    run(agent, endpoint)
    assert {call["node"]: call.get("tools_run") for call in server.calls} == {
        "prefix": None,
        "part": ["search"],
        "part#2": ["search"],
    }


def test_many_forks_at_once_have_names_of_their_own(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def wide(s: Any) -> None:
        forks = s.fork(40)
        forks += sgl.gen("part")
        forks.join()
        s += sgl.gen("whole")

    run(wide, endpoint)
    nodes = server.nodes()
    assert len(set(nodes)) == len(nodes) == 41
    assert len(server.parents()["whole"]) == 40


# Tools


def test_a_tool_goes_with_the_call_after_it(server: FakeServer, endpoint: JITEndpoint) -> None:
    def agent(s: Any) -> None:
        s += sgl.gen("plan")  # not awaited: the tools still come after it
        with tool(s, "search"):
            pass
        with tool(s, "calculator"):
            pass
        s += sgl.gen("act")
        s += sgl.gen("end")

    run(agent, endpoint)
    tools = [call.get("tools_run") for call in server.calls]
    assert tools == [None, ["search", "calculator"], None]


def test_a_tool_before_a_fork_ran_before_all_of_its_calls(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def agent(s: Any) -> None:
        with tool(s, "search"):
            pass
        forks = s.fork(2)
        with tool(forks[0], "calculator"):
            pass
        forks[0] += sgl.gen("a")
        forks[1] += sgl.gen("b")
        forks.join()

    run(agent, endpoint)
    tools = {call["node"]: call["tools_run"] for call in server.calls}
    assert tools == {"a": ["search", "calculator"], "b": ["search"]}


def test_a_tool_that_fails_has_run(server: FakeServer, endpoint: JITEndpoint) -> None:
    def agent(s: Any) -> None:
        with contextlib.suppress(OSError), tool(s, "search"):
            raise OSError
        s += sgl.gen("a")

    run(agent, endpoint)
    assert server.calls[0]["tools_run"] == ["search"]


def test_on_another_backend_a_tool_is_nothing(server: FakeServer) -> None:
    def agent(s: Any) -> None:
        with tool(s, "search"):
            pass
        s += sgl.gen("a")

    state = sgl.function(agent).run(backend=sgl.RuntimeEndpoint(server.url))
    assert state["a"] == " ok"
    assert "tools_run" not in server.calls[0]
    with pytest.raises(ValueError, match=r"^state: "):
        JITEndpoint.outcome_of(state)


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_tool_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: takes "), tool(None, name):
        pass


# The end


def test_the_outcome_is_the_servers(server: FakeServer) -> None:
    endpoint = JITEndpoint(server.url, deadline=7, user="team")
    state = two_steps.run(topic="bees", backend=endpoint)
    program_id = server.calls[0]["program_id"] if state["final"] else ""
    assert endpoint.outcome_of(state) == RunOutcome(program_id, 2, 20, 20, True, 7.0, 0.5)
    assert server.closed == [("end", {"program_id": program_id, "user": "team"})]


def test_the_end_comes_after_the_last_answer(server: FakeServer, endpoint: JITEndpoint) -> None:
    may_answer = threading.Event()

    def hold(body: Any) -> None:
        may_answer.wait(30)

    server.script = hold
    state = two_steps.run(topic="bees", backend=endpoint)  # returns before its calls are answered
    with pytest.raises(TimeoutError):
        endpoint.outcome_of(state, 0.05)
    assert not server.closed
    may_answer.set()
    endpoint.outcome_of(state, 30)
    assert server.num_calls_at_close == [2]


def test_the_end_waits_for_forks_that_nobody_joined(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def forgetful(s: Any) -> None:
        forks = s.fork(3)
        for fork in forks:
            fork += sgl.gen("a")
            fork += sgl.gen("b")

    run(forgetful, endpoint)
    assert server.num_calls_at_close == [6]


def test_a_fork_that_goes_on_after_its_program_ends_it_again(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def leave_fork(s: Any) -> Any:
        s += sgl.gen("a")
        return s.fork(1)

    state = run(leave_fork, endpoint)
    assert server.num_calls_at_close == [1]
    fork = state.ret_value[0]
    fork += sgl.gen("b")
    fork.sync()
    outcome = endpoint.outcome_of(state, 30)
    assert outcome is not None
    assert outcome.calls == 2
    assert server.num_calls_at_close == [1, 2]


def test_a_program_without_calls_has_nothing_to_end(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def silent(s: Any) -> None:
        s += "only words"

    state = run(silent, endpoint)
    assert endpoint.outcome_of(state) is None
    assert not server.closed


def test_an_exception_cancels_the_program_at_once(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    before = set(threading.enumerate())
    may_answer = threading.Event()

    def hold(body: Any) -> None:
        if body["node"] == "slow":
            may_answer.wait(30)

    def broken(s: Any) -> None:
        s += sgl.gen("slow")
        s += sgl.gen("never")
        server.wait_for(lambda: server.nodes() == ["slow"])
        raise LookupError("lost")

    server.script = hold
    with pytest.raises(LookupError, match="lost"):
        sgl.function(broken).run(backend=endpoint)
    server.wait_for(lambda: bool(server.closed))
    ((how, body),) = server.closed
    assert (how, body["program_id"]) == ("cancel", server.calls[0]["program_id"])
    may_answer.set()
    wait_for_threads_since(before)
    assert server.nodes() == ["slow"]  # what was queued behind it was not asked any more


def test_an_exception_that_is_handled_around_the_run_is_not_the_programs(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    try:
        raise LookupError
    except LookupError:
        state = two_steps.run(topic="bees", backend=endpoint)
    assert endpoint.outcome_of(state) is not None
    assert [how for how, _ in server.closed] == ["end"]


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_cannot_end_programs_costs_a_line_in_the_log(
    server: FakeServer, endpoint: JITEndpoint, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server.close_status = status
    with caplog.at_level(logging.WARNING):
        state = two_steps.run(topic="bees", backend=endpoint)
        assert endpoint.outcome_of(state) is None
    assert state["final"] == " ok"
    assert f"HTTPError {status}" in caplog.text


# Failures


FAILURES = [
    (refused(400, "deadline: takes seconds", param="deadline", code="400"), "400", "deadline"),
    (
        refused(409, "the program was cancelled", code="program_cancelled"),
        "program_cancelled",
        None,
    ),
    (refused(503, "the request was dropped: waiting_time", code="waiting_time"), "waiting", None),
]


@pytest.mark.parametrize(("answer", "code", "field"), FAILURES)
@pytest.mark.parametrize("options", [{}, {"use_thread": False}])
def test_a_refusal_reaches_whoever_reads_the_answer(
    server: FakeServer,
    endpoint: JITEndpoint,
    answer: Any,
    code: str,
    field: str | None,
    options: dict[str, Any],
) -> None:
    def reader(s: Any) -> None:
        s += sgl.gen("first")
        s += sgl.gen("second")
        s["second"]

    server.script = lambda body: answer if body["node"] == "first" else None
    with pytest.raises(CallError, match=f"^{answer[0]}: ") as caught:
        sgl.function(reader).run(backend=endpoint, **options)
    assert caught.value.code.startswith(code)
    assert caught.value.field == field
    assert caught.value.status == answer[0]
    assert server.nodes() == ["first"]
    server.wait_for(lambda: [how for how, _ in server.closed] == ["cancel"])


def test_a_refusal_that_the_program_did_not_read_is_kept_for_its_caller(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    server.script = lambda body: refused(503, "dropped") if body["node"] == "final" else None
    state = two_steps.run(topic="bees", backend=endpoint)
    assert endpoint.outcome_of(state) is None
    assert [how for how, _ in server.closed] == ["cancel"]
    assert state["draft"] == " ok"
    for _ in range(2):
        with pytest.raises(CallError, match="503: dropped"):
            state["final"]
    assert isinstance(state.error(), CallError)
    assert "final" not in state


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_joining_a_failed_fork_says_why(
    server: FakeServer, endpoint: JITEndpoint, mode: str
) -> None:
    def map_reduce(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += sgl.gen("good")
        forks[1] += sgl.gen("bad")
        forks.join(mode)

    server.script = lambda body: refused(503, "dropped") if body["node"] == "bad" else None
    with pytest.raises(CallError, match="503: dropped"):
        sgl.function(map_reduce).run(backend=endpoint)
    server.wait_for(lambda: [how for how, _ in server.closed] == ["cancel"])


def test_a_failed_state_does_not_keep_the_program_waiting(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def go_on(s: Any) -> None:
        s += "Go" + sgl.gen("bad")
        s.sync()
        forks = s.fork(2)  # stock SGLang would wait here for ever
        forks += sgl.gen("part")
        forks[0]["part"]

    server.script = lambda body: refused(503, "dropped")
    with pytest.raises(CallError, match="503: dropped"):
        sgl.function(go_on).run(backend=endpoint)
    assert server.nodes() == ["bad"]


def test_a_program_may_do_without_a_fork_that_failed(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def tolerant(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += sgl.gen("good")
        forks[1] += sgl.gen("bad")
        found = []
        for fork, name in zip(forks, ("good", "bad"), strict=True):
            with contextlib.suppress(CallError):
                found.append(fork[name])
        s += found[0] + sgl.gen("whole")

    server.script = lambda body: refused(503, "dropped") if body["node"] == "bad" else None
    state = run(tolerant, endpoint)
    assert state["whole"] == " ok"
    assert [how for how, _ in server.closed] == ["end"]


@pytest.mark.parametrize("call", ["select", "prefix"])
def test_the_other_kinds_of_calls_fail_alike(
    server: FakeServer, endpoint: JITEndpoint, call: str
) -> None:
    def program(s: Any) -> None:
        s += "Go"
        if call == "select":
            s += sgl.select("verdict", choices=["yes", "no"])
            s["verdict"]
        else:
            s.sync()  # else it depends on SGLang's threads whether the prefix is computed
            forks = s.fork(2)
            forks += sgl.gen("part")
            forks.join()

    server.script = lambda body: refused(400, "text: too long")
    with pytest.raises(CallError, match="text: too long"):
        sgl.function(program).run(backend=endpoint)
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    "answer", [refused(503, "no room"), (200, {"error": {"message": "no room", "code": 503}})]
)
def test_a_stream_that_fails_tells_its_reader(
    server: FakeServer, endpoint: JITEndpoint, answer: Any
) -> None:
    server.script = lambda body: answer
    state = two_steps.run(topic="bees", backend=endpoint, stream=True)
    with pytest.raises(CallError, match="503: no room"):
        list(state.text_iter("draft"))
    assert endpoint.outcome_of(state) is None
    assert [how for how, _ in server.closed] == ["cancel"]
    assert "".join(state.text_iter()) == "About beesBetter:"


def test_a_server_that_is_gone_is_an_error_too(server: FakeServer, endpoint: JITEndpoint) -> None:
    endpoint.base_url = "http://127.0.0.1:9"  # the discard port: nobody listens

    state = two_steps.run(topic="bees", backend=endpoint)
    with pytest.raises(CallError, match="URLError"):
        state["draft"]
    assert endpoint.outcome_of(state) is None


def test_who_is_not_let_in_is_told_so(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "answer", lambda path, body: refused(401, "Unauthorized"))
    with pytest.raises(CallError, match="401: Unauthorized"):
        JITEndpoint(server.url)


def test_threads_of_failed_programs_end(server: FakeServer, endpoint: JITEndpoint) -> None:
    before = set(threading.enumerate())

    def broken(s: Any) -> None:
        forks = s.fork(3)
        forks += sgl.gen("part")
        for fork in forks:
            fork["part"]

    server.script = lambda body: refused(503, "dropped") if body["node"] == "part" else None
    with pytest.raises(CallError) as caught:
        sgl.function(broken).run(backend=endpoint)
    server.wait_for(lambda: bool(server.closed))
    assert caught.tb is not None  # and with it the program's variables
    wait_for_threads_since(before)


def test_a_script_that_ends_still_tells_the_server(server: FakeServer) -> None:
    script = f"""
import sglang as sgl
from engine.runtime.frontend import JITEndpoint

def program(s):
    s += sgl.gen("a")

sgl.function(program).run(backend=JITEndpoint({server.url!r}, deadline=60))
import sys, torch
assert not torch.cuda.is_initialized()
"""
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("JITSERVE")}
    subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment, check=True, timeout=150
    )
    assert server.nodes() == ["a"]
    assert [how for how, _ in server.closed] == ["end"]
