"""What a prompt says of its answer: numbers only, whatever a client sends, at a bounded cost."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.features import (
    ENGINE_FEATURES,
    FEATURES,
    HEAD_CHARS,
    MAX_PIECES,
    MAX_WORDS,
    NO_CUES,
    NUM_FEATURES,
    TAIL_CHARS,
    TEXT_FEATURES,
    WORD_BUCKETS,
    Cues,
    EngineFacts,
    cues_of,
    feature_row,
)

PROMPT = "Write a poem about the sea."


def chat(*texts: Any, **more: Any) -> dict[str, Any]:
    """A chat body; users and assistants take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **more}


def values(body: Any) -> dict[str, float]:
    """The text features by name."""
    return dict(zip(TEXT_FEATURES, cues_of(body).values, strict=True))


def of(name: str, *texts: str, **more: Any) -> float:
    """One text feature of a chat."""
    return values(chat(*texts, **more))[name]


def row_of(**facts: Any) -> dict[str, float]:
    """A whole row by name."""
    row = feature_row(
        NO_CUES, EngineFacts(**{"input_tokens": 10, "max_output_tokens": 100, **facts})
    )
    return dict(zip(FEATURES, row.tolist(), strict=True))


def is_sane(cues: Cues) -> bool:
    return (
        len(cues.values) == len(TEXT_FEATURES)
        and all(isinstance(value, float) and math.isfinite(value) for value in cues.values)
        and len(cues.words) <= MAX_WORDS
        and all(isinstance(word, int) and 0 <= word < WORD_BUCKETS for word in cues.words)
    )


# Where the text is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        chat(PROMPT),
        chat([{"type": "text", "text": PROMPT}]),
        {"prompt": PROMPT},
        {"prompt": [PROMPT]},
        {"input": PROMPT},
        {"input": [{"role": "user", "content": PROMPT}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]},
        {"text": PROMPT},
        {"text": [PROMPT]},
    ],
    ids=[
        "chat",
        "chat-parts",
        "completions",
        "completions-list",
        "responses",
        "responses-messages",
        "responses-parts",
        "generate",
        "generate-list",
    ],
)
def test_every_route_s_prompt_is_read_alike(body: dict[str, Any]) -> None:
    assert cues_of(body) == cues_of(chat(PROMPT))
    assert values(body)["task_verse"] > 0
    assert values(body)["has_text"] == 1
    assert cues_of(body).words


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": None},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"input_ids": [1, 2, 3]},
        {"prompt": ""},
    ],
)
def test_a_body_without_text_says_nothing(body: dict[str, Any]) -> None:
    assert cues_of(body) == NO_CUES


def test_instructions_count_as_a_system_message() -> None:
    body = {"instructions": "Be kind.", "input": PROMPT}
    assert values(body)["has_system"] == 1
    assert values({"input": PROMPT})["has_system"] == 0
    assert values(body)["task_verse"] > 0


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_is_noted_and_is_not_the_task(role: str) -> None:
    messages = [{"role": role, "content": "Translate to French."}]
    messages += [{"role": "user", "content": PROMPT}]
    found = values({"messages": messages})
    assert found["has_system"] == 1
    assert found["task_translate"] == 0
    assert found["task_verse"] > 0


def test_the_last_thing_the_user_said_is_the_task() -> None:
    found = values(chat("Translate this to French.", "Voilà.", PROMPT))
    assert (found["task_translate"], found["task_verse"] > 0) == (0, True)


def test_turns_and_the_answer_before_are_noted() -> None:
    once = values(chat(PROMPT))
    again = values(chat(PROMPT, "word " * 500, "Another one?"))
    assert again["log_messages"] > once["log_messages"]
    assert again["log_user_turns"] > once["log_user_turns"]
    assert once["log_assistant_chars"] == 0
    assert again["log_assistant_chars"] == pytest.approx(math.log1p(2500))


def test_pictures_are_noted() -> None:
    parts = [{"type": "text", "text": PROMPT}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert of("has_media", parts) == 1
    assert of("has_media", parts[:1]) == 0
    assert values({"text": PROMPT, "image_data": ["x"]})["has_media"] == 1


# What it asks for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "feature", "count"),
    [
        ("Describe it in 300 words", "log_asked_words", 300),
        ("Write a 500-word essay.", "log_asked_words", 500),
        ("In exactly 50 words, please", "log_asked_words", 50),
        ("five bullet points", "log_asked_items", 5),
        ("Give me ten tips", "log_asked_items", 10),
        ("List 12 ideas for a party", "log_asked_items", 12),
        ("Three paragraphs on cats", "log_asked_paragraphs", 3),
        ("Answer in one sentence.", "log_asked_sentences", 1),
        ("Reply in two short sentences.", "log_asked_sentences", 2),
        ("Use a single paragraph", "log_asked_paragraphs", 1),
        ("IN 300 WORDS", "log_asked_words", 300),
    ],
)
def test_a_length_asked_for_in_numbers_is_read(text: str, feature: str, count: int) -> None:
    assert of(feature, text) == pytest.approx(math.log1p(count))


def test_a_thousand_with_a_comma_is_a_thousand() -> None:
    assert of("log_asked_words", "Write a 1,000-word essay.") == pytest.approx(math.log1p(1000))


def test_a_number_of_something_else_is_not_a_length() -> None:
    found = values(chat("Who won the cup in 1998 and in 2002"))
    assert not any(value for name, value in found.items() if name.startswith("log_asked"))


def test_limits_are_told_apart() -> None:
    assert (of("is_least", "At least 300 words"), of("is_most", "At least 300 words")) == (1, 0)
    assert (of("is_least", "At most 300 words"), of("is_most", "At most 300 words")) == (0, 1)


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        ("Write a Python function that sorts.", "task_code"),
        ("Calculate the integral of x.", "task_math"),
        ("List the planets.", "task_list"),
        ("Translate this to German.", "task_translate"),
        ("Summarize the text.", "task_summarize"),
        ("Write an essay on trees.", "task_long_form"),
        ("Write a haiku.", "task_verse"),
        ("Explain gravity.", "task_explain"),
        ("Return JSON.", "task_json"),
        ("Be brief.", "task_brief"),
        ("A comprehensive guide", "task_thorough"),
    ],
)
def test_tasks_are_recognised(text: str, feature: str) -> None:
    assert of(feature, text) > 0
    assert of(feature, "Mmm") == 0


def test_code_in_the_prompt_is_noted() -> None:
    assert of("code_fences", "Fix:\n```\nx = 1\n```") > 0
    assert of("code_fences", "Fix it") == 0


def test_questions_are_noted() -> None:
    assert of("ends_in_question", "What is this? ") == 1
    assert of("ends_in_question", "What is this? Tell me.") == 0
    assert of("question_marks", "What? Who?") == 2


def test_shares_are_shares() -> None:
    assert of("digit_share", "1234") == 1
    assert of("non_ascii_share", "写一首诗") == 1
    assert of("non_ascii_share", "poem") == 0
    assert of("digit_share", "ab12") == 0.5


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"sampling_params": {"json_schema": '{"type": "object"}'}},
    ],
)
def test_json_that_must_come_is_noted(more: dict[str, Any]) -> None:
    assert of("wants_json", PROMPT, **more) == 1
    assert of("wants_json", PROMPT) == 0


def test_json_that_the_responses_route_must_give_is_noted() -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": {"properties": {"a": {}, "b": {}}}}
    body = {"input": PROMPT, "text": {"format": wanted}}
    assert values(body)["wants_json"] == 1
    assert values({"input": PROMPT, "text": {"format": {"type": "text"}}})["wants_json"] == 0


def test_a_response_format_of_text_is_not_json() -> None:
    assert of("wants_json", PROMPT, response_format={"type": "text"}) == 0


def test_a_larger_schema_counts_as_larger() -> None:
    def size(count: int) -> float:
        schema = {"properties": {f"p{i}": {"type": "string"} for i in range(count)}}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return of("log_schema_chars", PROMPT, response_format=wanted)

    assert 0 < size(1) < size(5) < size(50)


def test_tools_are_counted_and_forced_ones_noted() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert of("log_tools", PROMPT) == 0
    assert 0 < of("log_tools", PROMPT, tools=[tool]) < of("log_tools", PROMPT, tools=[tool] * 5)
    assert of("is_tool_forced", PROMPT, tools=[tool]) == 0
    assert of("is_tool_forced", PROMPT, tools=[tool], tool_choice="auto") == 0
    assert of("is_tool_forced", PROMPT, tools=[tool], tool_choice="required") == 1
    assert of("is_tool_forced", PROMPT, tools=[tool], tool_choice=tool) == 1


# Privacy ------------------------------------------------------------------------------------------


def test_nothing_of_the_text_is_in_what_is_kept() -> None:
    cues = cues_of(chat("My password is hunter2swordfish", "Noted, hunter2swordfish.", PROMPT))
    assert is_sane(cues)
    data = msgspec.msgpack.encode(cues)
    assert not re.search(rb"[A-Za-z]{6,}", data)
    assert not re.search(r"[A-Za-z]{3,}", msgspec.json.encode(cues).decode())


def test_equal_prompts_have_equal_cues_and_others_have_other_words() -> None:
    assert cues_of(chat(PROMPT)) == cues_of(chat(PROMPT))
    assert cues_of(chat(PROMPT)).words != cues_of(chat("Explain the tides of the sea")).words


def test_case_makes_no_difference_to_the_words() -> None:
    assert cues_of(chat(PROMPT)).words == cues_of(chat(PROMPT.upper())).words


# Cost ---------------------------------------------------------------------------------------------

HEAD = "Explain the poem in 300 words. " * (HEAD_CHARS // 30 + 2)
TAIL = " and then translate the list?" * (TAIL_CHARS // 25 + 2)
COUNTS = {"log_last_chars", "log_all_chars", "log_lines"}


def test_what_lies_between_head_and_tail_is_not_looked_at() -> None:
    assert cues_of(chat(HEAD + "a" * 5000 + TAIL)) == cues_of(chat(HEAD + "9é? `" * 1000 + TAIL))


@pytest.mark.parametrize("size", [10, 10_000, 3_000_000])
def test_a_longer_middle_changes_nothing_but_the_counts(size: int) -> None:
    short, long = cues_of(chat(HEAD + TAIL)), cues_of(chat(HEAD + "code\n" * size + TAIL))
    assert short.words == long.words
    pairs = zip(TEXT_FEATURES, short.values, long.values, strict=True)
    assert {name for name, a, b in pairs if a != b} <= COUNTS
    assert is_sane(long)


def test_the_middle_of_a_prompt_within_the_window_is_looked_at() -> None:
    middle = "x " * (HEAD_CHARS // 2 - 40) + " translate " + "x " * 100
    assert of("task_translate", middle) > 0


def test_only_the_last_messages_are_looked_at() -> None:
    recent = ["hello"] * MAX_PIECES
    few, many = chat("```code?", "y", *recent), chat(*["```code " * 50] * 5000, *recent)
    assert cues_of(few) == cues_of(many)


def test_parts_of_a_message_are_looked_at_up_to_a_number() -> None:
    parts = [{"type": "text", "text": "hello"}] * MAX_PIECES
    assert cues_of(chat(parts)).values == cues_of(chat([*parts, *parts * 100])).values


# Whatever comes in --------------------------------------------------------------------------------

TEXTS = st.text(st.characters(), max_size=40) | st.sampled_from(
    [
        "\ud800 broken \udfff",
        "in 9999999999999999999999 words",
        "²³ points",
        "a" * 5000,
        "\x00",
        "٣ words",
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | TEXTS
    | st.sampled_from(["user", "assistant", "system", "json_schema", "required", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "json_schema", "schema", "properties", "format"]
            )
            | TEXTS,
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
ROUTE_KEYS = [
    "messages",
    "input",
    "prompt",
    "text",
    "instructions",
    "tools",
    "tool_choice",
    "response_format",
    "text_format",
    "sampling_params",
    "image_data",
]
HOSTILE = st.dictionaries(st.sampled_from(ROUTE_KEYS), JSON, max_size=5)


@settings(max_examples=600)
@given(HOSTILE)
def test_any_body_gives_numbers(body: dict[str, Any]) -> None:
    cues = cues_of(body)
    assert is_sane(cues)
    row = feature_row(cues, EngineFacts(5, 5))
    assert row.shape == (NUM_FEATURES,)
    assert np.isfinite(row).all()


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content"]), JSON), max_size=4))
def test_any_messages_give_numbers(messages: list[dict[str, Any]]) -> None:
    assert is_sane(cues_of({"messages": messages}))


@given(TEXTS)
def test_any_prompt_gives_numbers(text: str) -> None:
    assert is_sane(cues_of({"prompt": text}))
    assert is_sane(cues_of(chat(text)))


@pytest.mark.parametrize("body", [None, 5, "text", [], [1], b"x", {"messages": {"role": "user"}}])
def test_a_body_that_is_no_object_says_nothing(body: Any) -> None:
    assert cues_of(body) == NO_CUES


def test_a_body_nested_beyond_all_measure_says_what_can_be_read() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    try:
        assert is_sane(cues_of({"messages": nested, "tools": nested, "response_format": nested}))
        assert is_sane(cues_of(chat(nested)))
    finally:
        while isinstance(nested, list):  # freed by hand: a deep list ends badly in some builds
            nested = nested[0]


@pytest.mark.parametrize(
    "text",
    ["x" * 20_000_000, "\n" * 5_000_000, "? " * 5_000_000, "写" * 3_000_000, "7" * 5_000_000],
)
def test_huge_prompts_give_numbers(text: str) -> None:
    assert is_sane(cues_of(chat(text)))


# The row ------------------------------------------------------------------------------------------


def test_names_and_columns_belong_together() -> None:
    assert len(FEATURES) == len(set(FEATURES)) == NUM_FEATURES
    assert FEATURES == TEXT_FEATURES + ENGINE_FEATURES


def test_what_the_engine_knows_is_in_the_row() -> None:
    row = row_of(input_tokens=99, max_output_tokens=999, temperature=0.7, top_p=0.5, has_stop=True)
    assert row["log_input_tokens"] == pytest.approx(math.log(100))
    assert row["log_max_tokens"] == pytest.approx(math.log(1000))
    assert row["temperature"] == pytest.approx(0.7)
    assert row["top_p"] == 0.5
    assert (row["has_stop"], row["has_grammar"], row["is_streamed"]) == (1, 0, 0)


@pytest.mark.parametrize("name", [n for n in ENGINE_FEATURES if n.startswith(("has_", "is_"))])
def test_each_flag_has_its_column(name: str) -> None:
    without, with_it = row_of(), row_of(**{name: True})
    assert {n for n in FEATURES if without[n] != with_it[n]} == {name}


def test_cues_of_another_version_count_as_no_text() -> None:
    facts = EngineFacts(5, 5)
    other = Cues((1.0, 2.0), (5,))
    assert feature_row(other, facts).tolist() == feature_row(NO_CUES, facts).tolist()


NUMBERS = st.floats() | st.integers(-(1 << 70), 1 << 70) | st.sampled_from([1e39, -1e300, math.inf])


@given(st.lists(NUMBERS, min_size=5, max_size=5), st.lists(st.floats(), min_size=60, max_size=60))
def test_any_numbers_give_a_finite_row(numbers: list[Any], text: list[float]) -> None:
    cues = Cues(tuple((text * 2)[: len(TEXT_FEATURES)]))
    with np.errstate(over="ignore"):
        row = feature_row(cues, EngineFacts(*numbers))
    assert row.shape == (NUM_FEATURES,)
    assert row.dtype == np.float32
    assert np.isfinite(row).all()


@pytest.mark.parametrize("temperature", [1e39, -1e300])
def test_numbers_too_large_for_a_column_are_no_warning(temperature: float) -> None:
    assert math.isfinite(row_of(temperature=temperature)["temperature"])


def test_numbers_too_large_for_a_float_give_a_finite_row() -> None:
    huge = 10**400
    row = feature_row(NO_CUES, EngineFacts(huge, huge, huge))
    assert np.isfinite(row).all()


def test_cues_survive_the_way_between_processes() -> None:
    cues = cues_of(chat("Write five bullet points in 300 words"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cues), type=Cues) == cues
    assert msgspec.json.decode(msgspec.json.encode(cues), type=Cues) == cues
