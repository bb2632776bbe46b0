"""Which tools ran before a call, read from what its messages carry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tools import MAX_NAME_CHARS, MAX_TOOLS, tool_names

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "What is the weather?"}
SAID: Json = {"role": "assistant", "content": "It rains."}


# Chat completions ---------------------------------------------------------------------------------


def asked(**names: str) -> Json:
    """An answer of the model that wants these tools, by the ids of its calls."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in names.items()
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str, **more: Any) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": "rain", **more}


def in_chat(*messages: Any) -> list[str]:
    return tool_names({"model": "m", "messages": list(messages)})


def test_a_call_without_tool_results_ran_no_tools() -> None:
    assert in_chat(USER) == in_chat(USER, SAID, USER) == in_chat() == []
    assert tool_names({}) == tool_names({"prompt": "a", "text": "b"}) == []


def test_a_tool_result_is_named_by_the_call_that_it_answers() -> None:
    assert in_chat(USER, asked(c1="weather"), result("c1")) == ["weather"]


def test_results_are_named_in_the_order_in_which_they_stand() -> None:
    wanted = asked(c1="weather", c2="search", c3="weather")
    assert in_chat(USER, wanted, result("c3"), result("c2"), result("c1")) == [
        "weather",
        "search",
        "weather",
    ]


def test_only_results_behind_the_last_answer_are_new() -> None:
    old = (USER, asked(c1="weather"), result("c1"))
    assert in_chat(*old, SAID, USER) == []
    assert in_chat(*old, asked(c2="search"), result("c2")) == ["search"]
    assert in_chat(*old, asked(c2="search")) == []


def test_what_the_user_says_after_the_results_does_not_hide_them() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert in_chat(USER, asked(c1="weather"), result("c1"), USER, system) == ["weather"]


def test_an_id_that_is_used_again_is_the_latest_call_of_that_id() -> None:
    old = (USER, asked(c1="weather"), result("c1"))
    assert in_chat(*old, asked(c1="search"), result("c1")) == ["search"]


def test_a_result_that_names_its_tool_itself_needs_no_call() -> None:
    assert in_chat(USER, result("c1", name="weather")) == ["weather"]


def test_a_result_of_nothing_that_was_called_has_no_name() -> None:
    assert in_chat(USER, asked(c1="weather"), result("c2"), result("c1")) == ["weather"]


# Responses ----------------------------------------------------------------------------------------


def wants(call_id: str, name: str) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def output(call_id: str) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": "rain"}


def in_response(*items: Any) -> list[str]:
    return tool_names({"model": "m", "input": list(items)})


def test_the_responses_api_has_results_as_items_of_the_input() -> None:
    assert in_response(USER, wants("c1", "weather"), output("c1")) == ["weather"]


def test_calls_that_the_model_made_together_are_all_answered() -> None:
    items = (USER, wants("c1", "weather"), wants("c2", "search"), output("c1"), output("c2"))
    assert in_response(*items) == ["weather", "search"]


def test_what_the_model_has_thought_stands_in_nobodys_way() -> None:
    thinking = {"type": "reasoning", "summary": []}
    items = (USER, thinking, wants("c1", "weather"), output("c1"))
    assert in_response(*items) == ["weather"]


def test_in_responses_too_only_what_stands_behind_the_last_answer_is_new() -> None:
    old = (USER, wants("c1", "weather"), output("c1"))
    said = {"type": "message", "role": "assistant", "content": []}
    assert in_response(*old, said, USER) == []
    assert in_response(*old, wants("c2", "search"), output("c2")) == ["search"]


def test_an_input_that_is_a_text_ran_no_tools() -> None:
    assert tool_names({"input": "What is the weather?"}) == []


# What nobody should send --------------------------------------------------------------------------


def test_a_name_that_no_field_would_take_is_cut_or_left_out() -> None:
    long = "x" * 10_000
    assert in_chat(asked(c1=long), result("c1")) == ["x" * MAX_NAME_CHARS]
    assert in_chat(asked(c1=""), result("c1")) == []


def test_half_of_a_surrogate_pair_becomes_something_that_can_be_written() -> None:
    (name,) = in_chat(asked(c1="a\ud800b"), result("c1"))
    assert name.encode()


def test_so_many_results_are_named_and_no_more() -> None:
    wanted = asked(**{f"c{number}": f"tool{number}" for number in range(MAX_TOOLS + 50)})
    results = [result(f"c{number}") for number in range(MAX_TOOLS + 50)]
    assert len(in_chat(wanted, *results)) == MAX_TOOLS


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": None},
        {"messages": {}},
        {"messages": "text"},
        {"messages": 7, "input": 7},
        {"messages": [None, 7, "text", [], [[]], True]},
        {"messages": [{}, {"role": None}, {"role": ["tool"]}, {"role": {"tool": 1}}]},
        {"messages": [{"role": "tool"}]},
        {"messages": [{"role": "tool", "tool_call_id": ["c1"], "name": {"a": 1}}]},
        {"messages": [{"role": "assistant", "tool_calls": {"id": "c1"}}, result("c1")]},
        {"messages": [{"role": "assistant", "tool_calls": [None, 7, []]}, result("c1")]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c1", "function": "f"}]},
                result("c1"),
            ]
        },
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": ["c1"], "function": {"name": "f"}}]},
                result("c1"),
            ]
        },
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": 7}}]},
                result("c1"),
            ]
        },
        {"input": [{"type": "function_call_output"}]},
        {"input": [{"type": "function_call", "call_id": {}, "name": []}, output("c1")]},
    ],
)
def test_what_is_not_as_it_should_be_is_left_out(odd: Json) -> None:
    assert tool_names(odd) == []


def test_a_good_result_beside_bad_ones_is_still_named() -> None:
    wanted = asked(c1="weather")
    wanted["tool_calls"] = [None, {"id": 7}, *wanted["tool_calls"], {"function": {"name": "x"}}]
    bad = {"role": "tool", "tool_call_id": {}}
    assert in_chat(7, wanted, bad, None, result("c1"), "text") == ["weather"]


words = st.sampled_from(
    [
        *("messages", "input", "role", "type", "tool", "assistant", "tool_calls", "tool_call_id"),
        *("id", "function", "name", "call_id", "function_call", "function_call_output", "c1"),
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=5),
    max_leaves=30,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["tool", "assistant", "user"]) | values,
            "type": st.sampled_from(["function_call", "function_call_output"]) | values,
            "tool_call_id": st.sampled_from(["c1", "c2"]) | values,
            "call_id": st.sampled_from(["c1", "c2"]) | values,
            "name": values,
            "tool_calls": values,
        },
    )
    | values,
    max_size=8,
)


@given(st.dictionaries(words, values, max_size=4) | st.builds(lambda m: {"messages": m}, messages))
def test_any_json_gives_names_that_a_field_would_take(body: Json) -> None:
    before = json.dumps(body)
    names = tool_names(body)
    assert len(names) <= MAX_TOOLS
    for name in names:
        assert isinstance(name, str)
        assert 1 <= len(name) <= MAX_NAME_CHARS
        assert name.encode()
    assert json.dumps(body) == before
