"""The example programs, against a server in this process: what they call, and by which seed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_server
import pytest
from openai import OpenAI

from engine.runtime.frontend import JITEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_server import FakeServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = ("map_reduce", "plan_and_execute", "self_refine", "tree_of_thought")
MODULES = {name: runpy.run_path(str(EXAMPLES / f"{name}.py")) for name in PROGRAMS}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fake_server.running() as fake:
        yield fake


@pytest.fixture
def endpoint(server: FakeServer) -> JITEndpoint:
    return JITEndpoint(server.url, deadline=60, chat_template_name="chatml")


def roles(server: FakeServer) -> list[str]:
    """Of the calls that a model answers, in the order in which they came."""
    named = [call["node"].split("#")[0] for call in server.calls]
    return [role for role in named if not role.endswith("prefix")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_seed_chooses_the_task_and_nothing_else_does(
    server: FakeServer, endpoint: JITEndpoint, name: str
) -> None:
    run = MODULES[name]["run"]
    runs = []
    for seed in (1, 2, 3, 4, 1):
        server.calls.clear()
        result = run(endpoint, seed)
        assert result["outcome"]["met"]
        assert result["outcome"]["calls"] == len(server.calls)
        assert {call["application"] for call in server.calls} == {name}
        sampling = [call["sampling_params"] for call in server.calls]
        assert all(params.get("temperature", 0) == 0 for params in sampling)
        assert all(params["max_new_tokens"] <= 64 for params in sampling)
        runs.append((result["task"], result["answer"], sorted(roles(server))))
    assert runs[0] == runs[-1]
    assert len({str(run) for run in runs}) > 1


def test_every_thought_is_scored_and_the_next_level_needs_all_scores(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    result = MODULES["tree_of_thought"]["run"](endpoint, seed=3)
    counts = {role: roles(server).count(role) for role in ("thought", "score", "answer")}
    assert counts["thought"] == counts["score"] > 1
    assert counts["answer"] == 1
    (answer,) = [call for call in server.calls if call["node"] == "answer"]
    assert {parent.split("#")[0] for parent in answer["parents"]} == {"score"}
    assert result["answer"] == " ok"


def test_the_reduction_needs_every_summary(server: FakeServer, endpoint: JITEndpoint) -> None:
    MODULES["map_reduce"]["run"](endpoint, seed=0)
    num_summaries = roles(server).count("summary")
    assert num_summaries >= 2
    assert len(server.calls[-1]["parents"]) == num_summaries
    assert server.calls[-1]["text"].count(" ok") == num_summaries


def test_the_calculator_runs_before_the_call_after_each_step(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    def write_a_sum(body: dict[str, Any]) -> Any:
        is_step = body["node"].startswith("step")
        return (200, {"text": "It is 2 + 3.", "meta_info": {}}) if is_step else None

    server.script = write_a_sum
    MODULES["plan_and_execute"]["run"](endpoint, seed=0)
    first, second, *others = server.calls
    assert "tools_run" not in first
    assert "tools_run" not in second
    assert others
    assert all(call["tools_run"] == ["calculator"] for call in others)
    assert "2 + 3 = 5" in others[-1]["text"]


@pytest.mark.parametrize(
    ("text", "value"), [("2 * 3 + 1", 7), ("12 - 20", -8), ("1+2*3", 7), ("7", 7)]
)
def test_the_calculator_calculates(text: str, value: float) -> None:
    assert MODULES["plan_and_execute"]["calculate"](text) == value


@pytest.mark.parametrize("text", ["", "two + two", "2 ** 9", "__import__('os')", "1 / 0", "(1"])
def test_the_calculator_does_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="not a sum"):
        MODULES["plan_and_execute"]["calculate"](text)


def test_refining_goes_on_as_long_as_the_critic_does(
    server: FakeServer, endpoint: JITEndpoint
) -> None:
    refine = MODULES["self_refine"]

    def rounds(critique: str) -> list[int]:
        def criticise(body: dict[str, Any]) -> Any:
            is_critique = body["node"].startswith("critique")
            return (200, {"text": critique, "meta_info": {}}) if is_critique else None

        server.script = criticise
        found = []
        for seed in range(8):
            server.calls.clear()
            refine["run"](endpoint, seed)
            found.append(roles(server).count("critique"))
        return found

    content, strict = rounds("It is good."), rounds("It is dull.")
    assert len(set(content)) >= 3
    assert set(strict) <= {0, refine["MAX_ROUNDS"]}
    assert all(easy <= hard for easy, hard in zip(content, strict, strict=True))


def test_the_openai_program_is_one_program_whose_last_call_says_so(server: FakeServer) -> None:
    run = runpy.run_path(str(EXAMPLES / "openai_program.py"))["run"]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        result = run(client, 1, 30.0)
    plan, answer = server.calls
    assert plan["program_id"] == answer["program_id"]
    assert plan["deadline"] == 30.0
    assert "final" not in plan
    assert (answer["final"], answer["parents"]) == (True, ["plan"])
    assert [message["role"] for message in answer["messages"]] == [
        *("user", "assistant", "tool", "user")
    ]
    assert result["outcome"]["met"]


@pytest.mark.parametrize("name", [*PROGRAMS, "openai_program"])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_each_runs_from_the_command_line(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    flags: list[str],
) -> None:
    script = str(EXAMPLES / f"{name}.py")
    arguments = ["--url", server.url, "--deadline", "50", "--seed", "2", *flags]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as `python FILE` does
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    if flags:
        assert json.loads(printed)["outcome"]["met"] is True
    else:
        assert "ok" in printed
        assert re.search(r"\d+ calls, in time: \d+ of \d+ tokens in time", printed)
    assert server.calls[0]["deadline"] == 50
