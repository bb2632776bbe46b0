"""Classes, objectives and reproducibility of workloads."""

import itertools
import json
from collections import Counter

import msgspec
import pytest

from bench.workloads import (
    ApplicationShares,
    AzureLike,
    ClassShares,
    Gamma,
    Poisson,
    Surge,
    Targets,
    WorkloadSpec,
    build,
    describe,
    from_calls,
    paper_spec,
    stages_of,
)
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, OnMiss, slo_type

HEAD = "source,task,call,stage,role,start_s,input_tokens,output_tokens,tools_after\n"


def small(rate=2.0, window_s=300.0, **changes):
    return paper_spec(rate, window_s, **({"arrivals": Poisson()} | changes))


@pytest.fixture(scope="module")
def many():
    return build(small(8.0), 0)


@pytest.mark.parametrize("arrivals", [Poisson(), AzureLike(), Gamma(), Surge()])
def test_a_seed_says_all(arrivals):
    encoded = [msgspec.json.encode(build(small(arrivals=arrivals), seed)) for seed in (4, 4, 5)]
    assert encoded[0] == encoded[1]
    assert encoded[0] != encoded[2]


@pytest.mark.parametrize("other", [{"rate": 5.0}, {"window_s": 700.0}, {"arrivals": Gamma(cv=2.0)}])
def test_rate_window_and_arrivals_do_not_change_the_requests(other):
    one, another = build(small(), 7).programs, build(small(**other), 7).programs
    pairs = list(itertools.islice(zip(one, another, strict=False), 400))
    assert len(pairs) >= 400
    assert all(
        (left.stages, left.slo, left.application) == (right.stages, right.slo, right.application)
        for left, right in pairs
    )


def test_the_default_mix_is_a_third_of_each_class(many):
    counts = Counter(slo_type(program.slo) for program in many.programs)
    assert set(counts) == {"latency", "deadline", "compound"}
    assert all(
        num / len(many.programs) == pytest.approx(1 / 3, abs=0.02) for num in counts.values()
    )


def test_applications_of_a_class_are_weighted_by_the_user_study(many):
    compound = [one.application for one in many.programs if slo_type(one.slo) == "compound"]
    counts = Counter(compound)
    assert counts["code_generation"] / counts["deep_research"] == pytest.approx(
        31.4 / 14.3, rel=0.2
    )


def test_classes_of_an_application_follow_the_user_study():
    only_code = ApplicationShares(chatbot=0, deep_research=0, math_reasoning=0)
    workload = build(small(8.0, tags="study", applications=only_code), 0)
    counts = Counter(slo_type(program.slo) for program in workload.programs)
    assert counts["latency"] / len(workload.programs) == pytest.approx(0.381, abs=0.03)
    assert counts["deadline"] / len(workload.programs) == pytest.approx(0.305, abs=0.03)


@pytest.mark.parametrize("tags", ["mix", "study"])
def test_best_effort_has_its_share(tags):
    shares = ClassShares(best_effort=1.0)
    workload = build(small(8.0, tags=tags, shares=shares), 0)
    counts = Counter(slo_type(program.slo) for program in workload.programs)
    assert counts["best_effort"] / len(workload.programs) == pytest.approx(0.25, abs=0.03)


def test_objectives_are_the_papers():
    for program in build(small(), 1).programs:
        match program.slo:
            case LatencySlo(target_ttft_s=ttft_s, target_tbt_s=tbt_s):
                assert (ttft_s, tbt_s) == (2.0, 0.1)
            case DeadlineSlo(deadline_s=deadline_s):
                assert deadline_s == 20.0
            case CompoundSlo(deadline_s=deadline_s, application=application):
                assert deadline_s == 20.0 * len(program.stages)
                assert application == program.application


def test_a_scale_multiplies_every_objective_but_best_effort():
    shares = ClassShares(best_effort=1.0)
    one = build(small(shares=shares), 1).programs
    scaled = build(small(shares=shares, slo_scale=1.5), 1).programs
    for program, other in zip(one, scaled, strict=True):
        match program.slo, other.slo:
            case LatencySlo(ttft_s, tbt_s), LatencySlo(other_ttft_s, other_tbt_s):
                assert (other_ttft_s, other_tbt_s) == (ttft_s * 1.5, pytest.approx(tbt_s * 1.5))
            case BestEffortSlo(deadline_s), BestEffortSlo(other_s):
                assert deadline_s == other_s == Targets().best_effort_s
            case left, right:
                assert right.deadline_s == pytest.approx(left.deadline_s * 1.5)


def test_what_all_programs_have_is_told_to_all():
    spec = small(on_miss=OnMiss.CANCEL, waiting_time_s=5.0)
    assert {(one.on_miss, one.waiting_time_s) for one in build(spec, 0).programs} == {
        (OnMiss.CANCEL, 5.0)
    }


def test_programs_have_ids_and_prefixes_of_their_own(many):
    compound = [one for one in many.programs if isinstance(one.slo, CompoundSlo)]
    assert len({one.slo.program_id for one in compound}) == len(compound)
    left = Counter(
        name
        for one in compound
        for name in {call.leaves for stage in one.stages for call in stage.calls if call.leaves}
    )
    assert max(left.values()) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"rate_per_s": 0.0}, {"window_s": float("inf")}, {"slo_scale": -1.0}],
)
def test_what_is_no_positive_number_is_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorkloadSpec(**({"rate_per_s": 1.0} | wrong))


def test_shares_are_weights():
    with pytest.raises(ValueError, match="not all of them 0"):
        ClassShares(latency=0, deadline=0, compound=0)
    with pytest.raises(ValueError, match="shares"):
        ApplicationShares(chatbot=-1)


def test_a_spec_survives_json():
    spec = small(arrivals=Surge(base=Gamma(cv=2.0)), sources=("a",), tags="study")
    assert msgspec.json.decode(msgspec.json.encode(spec), type=WorkloadSpec) == spec


def test_a_description_counts_every_program_once_in_each_way(many):
    groups = describe(many)
    classes = sum(groups[name].programs for name in ("latency", "deadline", "compound"))
    kinds = sum(group.programs for name, group in groups.items() if " " in name)
    assert groups["all"].programs == classes == kinds == len(many.programs)
    assert groups["latency"].calls == groups["latency"].stages == 1
    tokens = sum(program.input_tokens for program in many.programs)
    assert groups["all"].input.mean == pytest.approx(tokens / len(many.programs))


# Files.


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "calls.csv"
    path.write_text(
        HEAD + "agent,a,0,0,coder,,100,20,1\n"
        "agent,a,1,1,coder,,150,30,0\n"
        "agent,a,2,2,coder,,160,5,0\n"
        "agent,a,3,3,coder,,40,5,0\n"
        "tree,b,0,0,propose,,0,7,0\n"
        "tree,b,1,1,value,,9,8,0\n"
        "tree,b,2,1,value,,9,9,0\n"
    )
    return path


def test_recorded_prompts_continue_what_they_have_room_for(log):
    stages = stages_of(from_calls(log, sources=["agent"])[0], itertools.count(1))
    found = [(stage.calls[0].prefix, stage.calls[0].prefix_tokens) for stage in stages]
    # The whole context, then the prompt without its answer, then nothing.
    assert found == [(0, 0), (1, 120), (2, 150), (0, 0)]
    assert [stage.tools for stage in stages] == [(), ("tool",), (), ()]


def test_recorded_calls_keep_their_stages(log):
    stages = stages_of(from_calls(log, sources=["tree"])[0], itertools.count(1))
    assert [[call.output_tokens for call in stage.calls] for stage in stages] == [[7], [8, 9]]
    assert stages[0].calls[0].input_tokens == 1


def test_a_source_that_the_log_lacks_is_named(log):
    with pytest.raises(ValueError, match=r"calls\.csv: no calls of nobody"):
        from_calls(log, sources=["nobody", "agent"])


def test_a_broken_line_of_the_log_is_named(log):
    log.write_text(log.read_text() + "tree,b,x,1,value,,9,-9,0\n")
    with pytest.raises(ValueError, match=r"calls\.csv, line 9"):
        build(small(calls=str(log)), 0)


def test_compound_programs_are_those_of_the_log(log):
    workload = build(small(calls=str(log)), 0)
    compound = [one for one in workload.programs if isinstance(one.slo, CompoundSlo)]
    assert {one.application for one in compound} == {"agent", "tree"}
    for one in compound:
        assert len(one.stages) == (4 if one.application == "agent" else 2)
        assert one.slo.deadline_s == 20.0 * len(one.stages)
        if one.application == "agent":
            assert one.stages[1].calls[0].prefix == one.stages[0].calls[0].leaves > 0


def test_single_requests_have_a_traces_lengths_in_its_order(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,11,1\n1,12,0\n2,13,9000\n")
    workload = build(small(requests=str(path)), 0)
    singles = [one.stages[0].calls[0] for one in workload.programs if one.application == "trace"]
    assert [call.input_tokens for call in singles[:5]] == [11, 12, 13, 11, 12]
    assert [call.output_tokens for call in singles[:3]] == [1, 1, 9000]
    assert any(isinstance(one.slo, CompoundSlo) for one in workload.programs)


def test_prefixes_of_a_trace_are_shared_within_a_round_of_it(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [1]},
        {"timestamp": 9, "input_length": 900, "output_length": 5, "hash_ids": [1, 2]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = build(small(requests=str(path), shares=ClassShares(compound=0)), 0)
    first, second, third, fourth = (one.stages[0].calls[0] for one in workload.programs[:4])
    assert second.prefix == first.leaves
    assert second.prefix_tokens == 512
    assert fourth.prefix == third.leaves != first.leaves


def test_single_requests_have_the_lengths_of_servegens_clients(tmp_path):
    path = tmp_path / "clients.json"
    client = {
        "windows": [[0, 5.0, 1.0, "Gamma", 1.0, 0.2]],
        "lengths": {"0": {"input_tokens": [10, 20], "output_tokens": [30]}},
    }
    path.write_text(json.dumps({"pool": {"window_s": 600, "clients": [client]}}))
    spec = small(requests=str(path), pool="pool", shares=ClassShares(compound=0))
    calls = [one.stages[0].calls[0] for one in build(spec, 0).programs]
    assert {(call.input_tokens, call.output_tokens) for call in calls} == {(10, 30), (20, 30)}
