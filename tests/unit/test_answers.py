"""Following the answers of a request through SGLang's tokenizer manager, and the guards there."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from core.clock import ManualClock
from core.programs import ProgramClock, ProgramRecord
from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    RequestTerms,
    Slo,
    SloOutcome,
)
from engine.runtime import answers, sampling_guard, wire
from engine.runtime.answers import AnswerLog, combine, follow, to_json
from engine.runtime.drops import drop_message, reason_of_drop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TERMS = RequestTerms(1000.0, DeadlineSlo(5.0))


def output(tokens: int, finish: Any = None, answer_id: str = "a") -> dict[str, Any]:
    """An output of SGLang's tokenizer manager."""
    meta = {"id": answer_id, "completion_tokens": tokens, "prompt_tokens": 7}
    return {"meta_info": {**meta, "finish_reason": finish}}


def followed(
    obj: Any, *outputs: Any, log: AnswerLog | None = None, error: Exception | None = None
) -> list[Any]:
    """What comes out of the hook around a generator that yields these and then may fail."""

    async def generate(_manager: Any, _obj: Any, _request: Any) -> AsyncIterator[Any]:
        for item in outputs:
            yield item
        if error is not None:
            raise error

    async def collect() -> list[Any]:
        token = answers.current.set(log)
        try:
            return [item async for item in follow(generate, None, obj)]
        finally:
            answers.current.reset(token)

    return asyncio.run(collect())


def request_object(sampling_params: Any) -> SimpleNamespace:
    """SGLang's request object, as far as the hook looks at it."""
    return SimpleNamespace(sampling_params=sampling_params)


# The hook -----------------------------------------------------------------------------------------


def test_the_terms_travel_with_the_sampling_parameters_of_every_prompt() -> None:
    log = AnswerLog(TERMS, ManualClock(1000.0))
    for params in ({}, [{}, {"custom_params": {"theirs": 1}}], None):
        obj = request_object(params)
        followed(obj, log=log)
        items = (
            obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
        )
        assert [wire.detach(item["custom_params"]) for item in items] == [TERMS] * len(items)
    assert items[0]["custom_params"].keys() == {wire.KEY}


def test_outputs_pass_as_they_are_and_the_last_says_how_it_went() -> None:
    log = AnswerLog(TERMS, ManualClock(1002.0))
    outputs = [output(1), output(2, {"type": "stop"})]
    assert followed(request_object({}), *outputs, log=log) == outputs
    assert "metadata" not in outputs[0]
    assert outputs[1]["metadata"]["slo"]["met"] is True
    assert outputs[1]["metadata"]["slo"]["e2el_s"] == 2.0
    assert log.is_complete


def test_each_answer_of_a_batch_gets_its_own_report() -> None:
    log = AnswerLog(TERMS, ManualClock(1002.0))
    batch = [output(1, {"type": "stop"}, "a"), output(2, {"type": "stop"}, "b")]
    followed(request_object({}), batch, log=log)
    assert [item["metadata"]["slo"]["output_tokens"] for item in batch] == [1, 2]
    summary = log.summary()
    assert summary is not None
    assert summary["output_tokens"] == 3


def test_without_a_log_nothing_is_added_and_a_clients_own_terms_are_taken_out() -> None:
    obj = request_object({"custom_params": {wire.KEY: msgspec.to_builtins(TERMS), "theirs": 1}})
    outputs = [output(2, {"type": "stop"})]
    assert followed(obj, *outputs) == [output(2, {"type": "stop"})]
    assert obj.sampling_params == {"custom_params": {"theirs": 1}}
    obj = request_object({"custom_params": {wire.KEY: 1}})
    followed(obj)
    assert obj.sampling_params == {}


@pytest.mark.parametrize("n", [0, -1, 129, True, 1.0, "2"])
def test_a_senseless_number_of_answers_is_refused_before_anything_is_generated(n: Any) -> None:
    with pytest.raises(ValueError, match=r"^n: takes a whole number from 1 to 128"):
        followed(request_object({"n": n}), "never reached")


def test_a_drop_that_sglang_raises_is_known_as_a_drop() -> None:
    log = AnswerLog(TERMS, ManualClock(1000.0))
    error = ValueError(drop_message("waiting_time_exceeded"))
    with pytest.raises(ValueError, match="waiting_time_exceeded"):
        followed(request_object({}), log=log, error=error)
    assert log.drop_reason == "waiting_time_exceeded"


def test_an_error_that_is_no_drop_stays_one() -> None:
    log = AnswerLog(TERMS, ManualClock(1000.0))
    with pytest.raises(ValueError, match="too long"):
        followed(request_object({}), log=log, error=ValueError("too long"))
    assert log.drop_reason is None


def test_outputs_without_an_answer_in_them_are_passed_over() -> None:
    log = AnswerLog(TERMS, ManualClock(1000.0))
    odd = [{"embedding": [1.0]}, {"meta_info": None}, {"meta_info": {}}, "text", [3]]
    assert followed(request_object({}), *odd, log=log) == odd
    assert not log.is_complete
    assert log.summary() is None


def test_an_answer_is_complete_when_every_one_that_began_has_ended() -> None:
    log = AnswerLog(TERMS, ManualClock(1000.0))
    states = []
    for item in (
        output(1, answer_id="a"),
        output(1, answer_id="b"),
        output(2, {"type": "stop"}, "a"),
        output(2, {"type": "length"}, "b"),
    ):
        log.observe(item)
        states.append(log.is_complete)
    assert states == [False, False, False, True]


# Reports ------------------------------------------------------------------------------------------


def outcome(**changed: Any) -> SloOutcome:
    """An outcome with the given differences."""
    plain = SloOutcome(
        type="latency",
        met=True,
        goodput_tokens=3,
        ttft_s=1.0,
        worst_lateness_s=-0.5,
        e2el_s=2.0,
        output_tokens=4,
    )
    return msgspec.structs.replace(plain, **changed)


def test_several_answers_are_met_together_and_as_late_as_the_latest() -> None:
    together = combine(
        [
            outcome(),
            outcome(met=False, ttft_s=0.5, worst_lateness_s=0.25, e2el_s=9.0, reason="aborted"),
            outcome(ttft_s=None, worst_lateness_s=None),
        ]
    )
    assert together == outcome(
        met=False,
        goodput_tokens=9,
        ttft_s=0.5,
        worst_lateness_s=0.25,
        e2el_s=9.0,
        output_tokens=12,
        reason="aborted",
    )


def test_a_report_keeps_what_is_unknown_as_null_and_leaves_out_what_does_not_apply() -> None:
    report = to_json(outcome(ttft_s=None, worst_lateness_s=math.inf))
    assert report == {
        "type": "latency",
        "met": True,
        "goodput_tokens": 3,
        "ttft_s": None,
        "worst_lateness_s": None,
        "e2el_s": 2.0,
        "output_tokens": 4,
    }


# Programs -----------------------------------------------------------------------------------------


def program_log(deadline_at_s: float = 1060.0, *, now_s: float = 1002.0) -> AnswerLog:
    """The log of a call of a program that has begun at 1,000."""
    record = ProgramRecord(ProgramClock(1000.0, deadline_at_s))
    terms = RequestTerms(1000.0, CompoundSlo(deadline_at_s - 1000, "p"))
    return AnswerLog(terms, ManualClock(now_s), program=record)


def test_each_answer_of_a_batch_says_how_the_program_has_gone_so_far() -> None:
    log = program_log()
    batch = [output(1, {"type": "stop"}, "a"), output(2, {"type": "length"}, "b")]
    followed(request_object({}), batch, log=log)
    assert [item["metadata"]["slo"]["program"]["tokens"] for item in batch] == [8, 17]
    summary = log.summary()
    assert summary is not None
    assert summary["program"]["tokens"] == summary["program"]["goodput_tokens"] == 17


def test_an_answer_that_goes_on_is_no_part_of_its_program_yet() -> None:
    log = program_log()
    outputs = [output(1), output(2)]
    followed(request_object({}), *outputs, log=log)
    assert all("metadata" not in item for item in outputs)
    assert log.program is not None
    assert log.program.outcome().tokens == 0


def test_an_answer_that_failed_or_was_late_gains_its_program_nothing() -> None:
    log = program_log()
    abort = output(9, {"type": "abort", "message": "program_cancelled"})
    followed(request_object({}), abort, log=log)
    program = {"calls": 0, "tokens": 0, "goodput_tokens": 0}
    assert abort["metadata"]["slo"]["program"] == program
    late = output(9, {"type": "stop"})
    followed(request_object({}), late, log=program_log(now_s=1060.5))
    assert late["metadata"]["slo"]["program"] == {"calls": 1, "tokens": 16, "goodput_tokens": 0}


def test_a_request_of_no_program_says_nothing_of_one() -> None:
    answer = output(2, {"type": "stop"})
    followed(request_object({}), answer, log=AnswerLog(TERMS, ManualClock(1002.0)))
    assert "program" not in answer["metadata"]["slo"]


# On the way to the scheduler ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "slo",
    [
        LatencySlo(1.0, 0.2),
        DeadlineSlo(5.0),
        CompoundSlo(-2.0, "p", ("a", "b"), "c", final=True),
        CompoundSlo(9.0, "p", program_age_s=1.5, application="agent", tools=("search", "clock")),
        BestEffortSlo(600.0),
    ],
)
def test_terms_of_every_class_arrive_as_they_were_sent(slo: Slo) -> None:
    terms = RequestTerms(1000.25, slo, 3.5, OnMiss.CANCEL, "ann", closes_program="p")
    params: dict[str, Any] = {}
    wire.attach(params, terms)
    plain = msgspec.json.decode(msgspec.json.encode(params))
    assert wire.detach(plain["custom_params"]) == terms


@pytest.mark.parametrize("custom_params", [None, {}, {"theirs": 1}, "text", 5])
def test_requests_that_did_not_come_through_our_http_layer_have_no_terms(
    custom_params: Any,
) -> None:
    assert wire.detach(custom_params) is None


def test_only_our_own_drops_are_drops() -> None:
    assert reason_of_drop(drop_message("deadline_passed")) == "deadline_passed"
    assert reason_of_drop("Abort in waiting queue") is None


# Sampling parameters ------------------------------------------------------------------------------


def sampling_params(**changed: Any) -> SimpleNamespace:
    """SGLang's sampling parameters, as far as they are looked at."""
    return SimpleNamespace(
        **({"top_k": -1, "stop_token_ids": None, "stream_interval": None} | changed)
    )


@pytest.mark.parametrize(
    "good",
    [{}, {"top_k": 1}, {"top_k": 2**31 - 1}, {"stop_token_ids": {0, 99}}, {"stream_interval": 1}],
)
def test_sampling_parameters_that_the_tensors_hold_pass(good: dict[str, Any]) -> None:
    sampling_guard.check(sampling_params(**good), vocab_size=100)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"stop_token_ids": {100}}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": {999_999}}, "stop_token_ids"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
)
def test_sampling_parameters_that_could_kill_the_scheduler_are_refused_by_name(
    bad: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: takes "):
        sampling_guard.check(sampling_params(**bad), vocab_size=100)
