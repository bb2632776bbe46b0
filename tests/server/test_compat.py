"""Clients that know nothing of us: the OpenAI client and SGLang frontend programs, unmodified."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from calls import REPORT_KEYS

if TYPE_CHECKING:
    from types import ModuleType

    import openai
    from serving import Server

# What the clients' own imports warn about is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = "SmolLM2-135M-Instruct"
CAPITAL = "What is the capital of France? Answer in one sentence."


def chat(client: openai.OpenAI, prompt: str = CAPITAL, **settings: Any) -> Any:
    """One greedy chat request of at most 24 tokens, unless told otherwise."""
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    messages = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        **(defaults | settings),
    )


def complete(client: openai.OpenAI, prompt: Any = "One, two, three,", **settings: Any) -> Any:
    """One greedy completion of at most 16 tokens, unless told otherwise."""
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    return client.completions.create(model=MODEL, prompt=prompt, **(defaults | settings))


# The OpenAI client --------------------------------------------------------------------------------


def test_the_model_answers_a_chat_request(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert len(client.models.list().data) == 1


def test_a_chat_stream_says_the_same_as_the_plain_answer(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == chat(client).choices[0].message.content


def test_a_chat_stream_ends_in_a_finish_reason_and_a_report(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, max_tokens=5, extra_body={"ignore_eos": True}))
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert chunks[-1].model_extra["metadata"]["slo"].keys() >= REPORT_KEYS


def test_a_stream_counts_its_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = list(
        chat(
            client,
            stream=True,
            max_tokens=5,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert usages[-1].completion_tokens == 5


def test_a_completion_stream_says_the_same_as_the_plain_answer(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    streamed = "".join(c.choices[0].text or "" for c in chunks if c.choices)
    assert streamed == complete(client).choices[0].text


def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    word = re.findall(r"\w+", whole)[2]
    answer = complete(client, stop=[word]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(word)]


def test_a_stop_string_ends_a_stream_before_itself(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    word = re.findall(r"\w+", whole)[2]
    chunks = list(complete(client, stop=[word], stream=True))
    streamed = "".join(c.choices[0].text or "" for c in chunks if c.choices)
    assert streamed == whole[: whole.index(word)]


def test_chat_logprobs_come_for_each_token(client: openai.OpenAI) -> None:
    answer = chat(
        client, max_tokens=6, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens == 6
    for token in tokens:
        assert len(token.top_logprobs) == 3
        # Greedy: what it said is what it found likeliest.
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))
        assert token.logprob <= 0


def test_completion_logprobs_come_for_each_token(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=6, logprobs=2, extra_body={"ignore_eos": True})
    assert len(answer.choices[0].logprobs.token_logprobs) == 6


def test_a_json_schema_holds_the_answer_to_its_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "is_warm": {"type": "boolean"},
        },
        "required": ["colour", "is_warm"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        "Describe the colour of the sky as JSON.",
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "colour", "schema": schema, "strict": True},
        },
    )
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == {"colour", "is_warm"}
    assert value["colour"] in {"red", "green", "blue"}
    assert isinstance(value["is_warm"], bool)


def test_two_choices_come_back_for_n_2(client: openai.OpenAI) -> None:
    answer = chat(client, n=2, temperature=0.8, max_tokens=5, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)
    assert answer.usage.completion_tokens == 10


def test_max_tokens_is_the_length_of_an_answer_that_does_not_stop(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=7, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_a_list_of_prompts_gets_a_list_of_choices(client: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "Monday, Tuesday,"]
    together = complete(client, prompts).choices
    assert [c.text for c in together] == [complete(client, p).choices[0].text for p in prompts]


def test_the_responses_api_answers(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input=CAPITAL, temperature=0, max_output_tokens=24
    )
    assert "Paris" in answer.output_text


def test_slo_fields_travel_in_the_clients_extra_body(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=4, extra_body={"deadline": 600})
    assert answer.metadata["slo"]["type"] == "deadline"
    assert answer.metadata["slo"]["met"] is True


def test_slo_headers_travel_in_the_clients_extra_headers(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=4, extra_headers={"x-slo-ttft-ms": "60000"})
    assert answer.metadata["slo"]["type"] == "latency"


# SGLang frontend programs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sgl() -> ModuleType:
    """SGLang's frontend language."""
    module: ModuleType = pytest.importorskip("sglang")
    return module


@pytest.fixture(scope="module")
def backend(sgl: ModuleType, server: Server) -> Any:
    """Its own client for a server."""
    return sgl.RuntimeEndpoint(server.base_url)


@pytest.mark.timeout(300, func_only=True)
def test_a_program_generates_into_its_variables(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def count(s: Any, start: str) -> None:
        s += start
        s += sgl.gen("first", max_tokens=6, temperature=0)
        s += "\nAnd then:"
        s += sgl.gen("second", max_tokens=6, temperature=0, stop="\n")

    state = count.run(start="One, two, three,", backend=backend)
    assert state["first"].strip()
    assert "\n" not in state["second"]
    assert state.text().startswith("One, two, three," + state["first"] + "\nAnd then:")


def test_a_program_speaks_in_roles(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def ask_twice(s: Any) -> None:
        s += sgl.system("You answer briefly.")
        s += sgl.user(CAPITAL)
        s += sgl.assistant(sgl.gen("first", max_tokens=16, temperature=0))
        s += sgl.user("And of Italy?")
        s += sgl.assistant(sgl.gen("second", max_tokens=16, temperature=0))

    state = ask_twice.run(backend=backend)
    assert state["first"]
    assert state["second"]


def test_a_program_forks_and_joins(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def tips(s: Any) -> None:
        s += "Three tips for a long life.\n"
        forks = s.fork(3)
        for number, fork in enumerate(forks):
            fork += f"Tip {number + 1}:"
            fork += sgl.gen("tip", max_tokens=8, temperature=0, stop="\n")
        for number, fork in enumerate(forks):
            s += f"Tip {number + 1}:" + fork["tip"] + "\n"
        s += "In one word:" + sgl.gen("summary", max_tokens=4, temperature=0)

    state = tips.run(backend=backend)
    assert state["summary"]
    assert all(f"Tip {number}:" in state.text() for number in (1, 2, 3))


def test_a_program_selects_the_likeliest_of_its_choices(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def choose(s: Any) -> None:
        s += "The capital of France is"
        s += sgl.select("capital", choices=[" Paris", " Xyzzy qwfp", " banana"])

    assert choose.run(backend=backend)["capital"] == " Paris"


def test_gen_with_choices_selects_too(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def choose(s: Any) -> None:
        s += "One, two, three,"
        s += sgl.gen("next", choices=[" four", " purple"])

    assert choose.run(backend=backend)["next"] == " four"


def test_a_program_streams_its_text(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def count(s: Any) -> None:
        s += "One, two, three,"
        s += sgl.gen("rest", max_tokens=12, temperature=0)

    streaming = count.run(stream=True, backend=backend)
    pieces = list(streaming.text_iter("rest"))
    assert len(pieces) > 1
    assert "".join(pieces) == count.run(backend=backend)["rest"]


def test_a_batch_of_programs_gives_what_each_gives_alone(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def go_on(s: Any, start: str) -> None:
        s += start + sgl.gen("rest", max_tokens=8, temperature=0)

    starts = ["One, two, three,", "Monday, Tuesday,", "Red, green,", "A, B, C,"]
    batch = go_on.run_batch([{"start": start} for start in starts], num_threads=4, backend=backend)
    alone = [go_on.run(start=start, backend=backend)["rest"] for start in starts]
    assert [state["rest"] for state in batch] == alone


def test_a_program_holds_its_output_to_a_pattern(sgl: ModuleType, backend: Any) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def year(s: Any) -> None:
        s += "The French Revolution began in the year "
        s += sgl.gen("year", max_tokens=8, temperature=0, regex=r"1[0-9]{3}")

    assert re.fullmatch(r"1[0-9]{3}", year.run(backend=backend)["year"])
