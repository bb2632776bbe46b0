"""The four applications: lengths against the paper's table, and how their programs are built."""

import itertools

import numpy as np
import pytest

from bench.workloads.applications import APPLICATIONS, HEADERS, Stages
from bench.workloads.command import PAPER, main, sample
from bench.workloads.lengths import Lengths, Part, lognormal, pick
from bench.workloads.mix import NAMES_PER_PROGRAM

TOLERANCE = {"mean": 0.06, "std": 0.12, "p50": 0.08, "p95": 0.12}
"""Of the models and of chance in 2,000 drawn, relative to the paper's table."""


@pytest.fixture(scope="module")
def groups():
    return sample(2000, 1)


@pytest.mark.parametrize("field", list(TOLERANCE))
@pytest.mark.parametrize("kind", list(PAPER))
def test_lengths_are_those_of_the_papers_table(groups, kind, field):
    for ours, paper in zip((groups[kind].input, groups[kind].output), PAPER[kind], strict=True):
        assert getattr(ours, field) == pytest.approx(getattr(paper, field), rel=TOLERANCE[field])


def test_math_programs_are_as_the_logged_trees_of_thought(groups):
    group = groups["math_reasoning compound"]
    assert group.stages == pytest.approx(7.8, abs=0.1)
    assert group.calls == pytest.approx(104.4, rel=0.08)
    assert group.input.mean == pytest.approx(35_143, rel=0.08)
    assert group.output.mean == pytest.approx(5_479, rel=0.08)
    assert group.output.p95 == pytest.approx(10_156, rel=0.15)


def test_code_programs_are_a_few_rounds_of_answers_to_code_prompts(groups):
    group = groups["code_generation compound"]
    single = groups["code_generation single"]
    assert group.stages == pytest.approx(5.0, rel=0.08)
    assert group.output.mean / group.stages == pytest.approx(single.output.mean, rel=0.08)
    assert group.input.mean == pytest.approx(11_000, rel=0.15)


def programs(name: str, num: int = 200) -> list[Stages]:
    rng = np.random.default_rng(5)
    return [
        APPLICATIONS[name].compound(rng, itertools.count((index + 1) * NAMES_PER_PROGRAM))
        for index in range(num)
    ]


@pytest.mark.parametrize("name", list(APPLICATIONS))
def test_a_program_has_several_stages_and_their_number_varies(name):
    counts = {len(stages) for stages in programs(name)}
    assert min(counts) >= 2
    assert len(counts) > 1


@pytest.mark.parametrize("name", list(APPLICATIONS))
def test_a_prefix_is_shared_by_all_or_was_left_by_an_earlier_stage(name):
    for stages in programs(name):
        left: dict[int, int] = {}
        for stage in stages:
            for call in stage.calls:
                if call.prefix >= HEADERS:
                    assert call.prefix_tokens <= left[call.prefix]
                elif not call.prefix:
                    assert not call.prefix_tokens
            left |= {
                call.leaves: call.input_tokens + call.output_tokens
                for call in stage.calls
                if call.leaves
            }


def test_a_coding_agent_says_again_all_that_was_said():
    for stages in programs("code_generation", 20):
        for before, after in itertools.pairwise(stages):
            (call,), (following,) = before.calls, after.calls
            assert following.prefix == call.leaves
            assert following.prefix_tokens == call.input_tokens + call.output_tokens
            assert following.input_tokens > following.prefix_tokens
            assert after.tools


def test_research_plans_searches_and_reports():
    for stages in programs("deep_research", 50):
        roles = [{call.role for call in stage.calls} for stage in stages]
        assert roles[0] == {"plan"}
        assert roles[-1] == {"report"}
        assert all(role == {"search"} for role in roles[1:-1])
        assert all(stage.tool_s > 0 for stage in stages[1:-1])
        longest = max(call.input_tokens for stage in stages for call in stage.calls)
        assert stages[-1].calls[0].input_tokens == longest


def test_lengths_stay_within_their_bounds():
    lengths = Lengths((Part(0.5, 10.0, 2.0), Part(0.5, 1000.0, 2.0)), high=500, low=3)
    tokens = lengths.tokens(np.random.default_rng(0), 2000)
    assert (min(tokens), max(tokens)) == (3, 500)


def test_parts_of_a_mixture_have_their_weights():
    lengths = Lengths((Part(0.3, 10.0, 0.01), Part(0.7, 1000.0, 0.01)), high=4096)
    drawn = lengths.draw(np.random.default_rng(0), 10_000)
    assert float((drawn < 100).mean()) == pytest.approx(0.3, abs=0.02)


def test_a_lognormal_has_its_median():
    drawn = lognormal(100.0, 0.5, 4096).draw(np.random.default_rng(0), 10_000)
    assert float(np.median(drawn)) == pytest.approx(100.0, rel=0.03)


@pytest.mark.parametrize(("at", "index"), [(0.0, 1), (0.24, 1), (0.26, 3), (0.999, 3), (1.0, 3)])
def test_a_weight_of_zero_is_never_picked(at, index):
    assert pick((0.0, 1.0, 0.0, 3.0, 0.0), at) == index


def test_the_command_prints_the_papers_numbers_beside_ours(capsys, tmp_path):
    path = tmp_path / "run.json"
    flags = ["--num", "20", "--rate", "0.5", "--window", "120", "--json", str(path)]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert "(29282)" in printed
    assert "like azure" in printed
    assert path.stat().st_size > 1000
