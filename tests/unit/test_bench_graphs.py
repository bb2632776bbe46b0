"""`python -m bench graphs`: programs from logs, made-up ones, and errors of their shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import calls, graphs, shares
from bench.calls import PACE, Program, Stage
from bench.shares import (
    COLUMNS,
    EqualShares,
    Errors,
    Matching,
    NoForecast,
    PerSource,
    PlainAverage,
    Spread,
    Times,
    errors_of,
    figure,
    is_better,
    judge,
    over_seeds,
    split,
    true_times,
)
from core.names import name_hash
from graphs.request_graph import RequestGraph
from graphs.shape import Pace

HEADER = "source,task,call,stage,role,start_s,input_tokens,output_tokens,tools_after\n"
LOG = HEADER + "\n".join(
    (
        "agents,a0,0,0,plan,0.000,100,10,0",
        "agents,a0,1,1,work,3.000,200,20,1",
        "agents,a0,2,2,work,9.000,300,30,0",
        "trees,t0,0,0,propose,,50,5,0",
        "trees,t0,1,3,value,,60,6,0",
        "trees,t0,2,3,value,,70,9,2",
        "trees,t0,3,4,value,,80,8,0",
    )
)
SECONDS = Pace(prefill_s=0.0, step_s=0.1, token_s=0.0)
"""Ten tokens of the longest answer a second, and nothing else takes time."""


def log_of(tmp_path: Path, text: str = LOG) -> list[Program]:
    path = tmp_path / "calls.csv"
    path.write_text(text)
    return calls.read(path, SECONDS)


def chain(*outputs: int, source: str = "chains", task: str = "0", role: str = "step") -> Program:
    """One call a stage, with answers of these lengths."""
    stages = tuple(Stage(role, False, 0.0, ((100, output),)) for output in outputs)
    return Program(source, task, stages)


# Reading.


def test_stages_are_read_in_order_and_without_holes(tmp_path):
    trees = log_of(tmp_path)[1]
    assert (trees.source, trees.task) == ("trees", "t0")
    assert [stage.role for stage in trees.stages] == ["propose", "value", "value"]
    assert trees.stages[1].calls == ((60, 6), (70, 9))


def test_tools_ran_before_a_stage_that_follows_calls_with_tools(tmp_path):
    agents, trees = log_of(tmp_path)
    assert [stage.has_tools for stage in agents.stages] == [False, False, True]
    assert [stage.has_tools for stage in trees.stages] == [False, False, True]


def test_tools_took_what_generation_leaves_of_a_gap(tmp_path):
    agents, trees = log_of(tmp_path)
    # Answers of 10 and 20 tokens took 1 s and 2 s of gaps of 3 s and 6 s.
    assert [stage.tool_s for stage in agents.stages] == pytest.approx([0.0, 2.0, 4.0])
    assert [stage.tool_s for stage in trees.stages] == [0.0, 0.0, 0.0]


def test_a_gap_shorter_than_its_answer_is_no_tool(tmp_path):
    log = LOG.replace("work,3.000", "work,0.500")
    assert log_of(tmp_path, log)[0].stages[1].tool_s == 0.0


@pytest.mark.parametrize(
    ("old", "new"),
    [("200,20,1", "two hundred,20,1"), ("200,20,1", "-1,20,1"), ("agents,a0,1,", ",a0,1,")],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, old, new):
    with pytest.raises(ValueError, match="line 3"):
        log_of(tmp_path, LOG.replace(old, new))


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match="output_tokens"):
        log_of(tmp_path, "source,task,stage,role,start_s,input_tokens\na,b,0,r,,1\n")


# Shapes.


def test_an_opening_knows_the_first_call_alone(tmp_path):
    stage = log_of(tmp_path)[1].stages[1]
    whole, opened = stage.shape(), stage.opening()
    assert (whole.num_calls, whole.input_tokens, whole.output_tokens) == (2, 130.0, 15.0)
    assert whole.longest_tokens == 9.0
    assert (opened.num_calls, opened.input_tokens, opened.output_tokens) == (1, 60.0, 0.0)
    assert (opened.identity, opened.role) == (whole.identity, name_hash("value"))


def test_a_stage_tells_whether_tools_ran(tmp_path):
    first, second, third = (stage.shape() for stage in log_of(tmp_path)[0].stages)
    assert first.tools == second.tools == 0 != third.tools
    assert first.identity == second.identity == third.identity


def test_events_draw_the_graph_that_the_shape_says(tmp_path):
    for program in [*log_of(tmp_path), *calls.synthetic(12, seed=3)]:
        graph = RequestGraph()
        for stage in calls.unfold(program, 7, opened_s=5.0, deadline_s=60.0):
            for arrived in stage.arrived:
                graph.arrived(arrived.call)
            for ended in stage.finished:
                graph.ended(ended.node, ended.output_tokens, ended.at_s, has_failed=False)
        drawn, told = graph.shape(), program.shape()
        assert len(drawn.stages) == len(told.stages)
        for one, other in zip(drawn.stages, told.stages, strict=True):
            assert one.tool_s == pytest.approx(other.tool_s, abs=0.051)
            assert (one.identity, one.role, one.num_calls) == (
                other.identity,
                other.role,
                other.num_calls,
            )
            assert (one.input_tokens, one.output_tokens, one.longest_tokens) == (
                other.input_tokens,
                other.output_tokens,
                other.longest_tokens,
            )


def test_events_carry_places_and_the_deadline():
    first, second = calls.unfold(chain(10, 20), 7, opened_s=5.0, deadline_s=60.0)
    assert [stage.arrived[0].place for stage in (first, second)] == [0, 1]
    assert first.arrived[0].deadline_at_s == 65.0
    assert second.arrived[0].call.at_s == first.finished[0].at_s > 5.0


# More programs.


def test_the_same_seed_makes_the_same_programs():
    assert calls.synthetic(20, seed=1) == calls.synthetic(20, seed=1)
    assert calls.synthetic(20, seed=1) != calls.synthetic(20, seed=2)
    pool = calls.synthetic(5, seed=1)
    assert calls.jittered(pool, 9, seed=4) == calls.jittered(pool, 9, seed=4)


def test_made_up_programs_are_of_all_kinds():
    names = {program.source for program in calls.synthetic(300, seed=1)}
    assert names == {kind.name for kind in calls.KINDS}


def test_a_jittered_program_keeps_its_structure():
    (program,) = calls.synthetic(1, seed=1)
    (other,) = calls.jittered([program], 1, seed=1)
    assert other != program
    for one, two in zip(program.stages, other.stages, strict=True):
        assert (one.role, one.has_tools, len(one.calls)) == (
            two.role,
            two.has_tools,
            len(two.calls),
        )
        assert all(min(call) >= 1 for call in two.calls)


# Forecasts.


def test_true_times_add_up_and_count_tools_as_over(tmp_path):
    agents = log_of(tmp_path)[0]
    found = true_times(agents, SECONDS)
    assert [tuple(times) for times in found] == [
        pytest.approx((0.0, 1.0, 11.0)),
        pytest.approx((3.0, 2.0, 7.0)),
        pytest.approx((9.0, 3.0, 0.0)),
    ]


def test_a_plain_average_is_of_those_that_came_so_far():
    plain = PlainAverage([chain(10, 20), chain(30, 40, 50)], SECONDS)
    found = plain.forecasts(chain(5, 5, 5, 5))
    assert [None if times is None else tuple(times) for times in found] == [
        pytest.approx((0.0, 2.0, 5.5)),
        pytest.approx((0.5, 3.0, 2.5)),
        pytest.approx((1.0, 5.0, 0.0)),
        None,
    ]


def test_equal_shares_count_stages():
    equal = EqualShares([chain(1, 1), chain(1, 1, 1, 1)])
    found = equal.forecasts(chain(9, 9, 9, 9))
    assert found == [(0, 1, 2), (1, 1, 1), (2, 1, 0), (3, 1, 0)]


def test_a_program_like_all_others_is_foretold():
    program = chain(100, 200, 400)
    errors = judge(Matching([program] * 3), [program])
    assert errors.is_known.all()
    assert errors.values.max() < 0.08


def test_matching_tells_apart_by_role_where_roles_are_told():
    train = [chain(100, 100, source="a", role="a"), chain(100, 900, source="b", role="b")] * 4
    program = chain(100, 900, source="b", role="b")
    told, untold = (judge(Matching(train, has_roles=has), [program]) for has in (True, False))
    column = "share_accumulated"
    assert told.of(column, seen=0)[0] < untold.of(column, seen=0)[0]


def test_per_source_learns_from_that_source_alone():
    train = [chain(10, 10, source="a"), chain(10, 90, source="b")]
    found = PerSource(lambda part: PlainAverage(part, SECONDS), train)
    assert found.forecasts(chain(10, 10, source="a"))[0] == pytest.approx((0.0, 1.0, 1.0))
    assert found.forecasts(chain(10, 10, source="b"))[0] == pytest.approx((0.0, 1.0, 9.0))
    assert found.forecasts(chain(10, 10, source="c")) == [None, None]


# Errors.


def test_the_truth_has_no_error():
    truth = Times(2.0, 3.0, 5.0)
    assert errors_of(truth, truth) == pytest.approx([0.0] * len(COLUMNS))


def test_errors_by_hand():
    truth, forecast = Times(2.0, 3.0, 5.0), Times(2.0, 3.0, 15.0)
    found = dict(zip(COLUMNS, errors_of(truth, forecast), strict=True))
    assert found["share_accumulated"] == pytest.approx(0.5)
    assert found["share_stage_share"] == pytest.approx(0.5)
    assert found["share_remaining_share"] == pytest.approx((3 / 8 - 3 / 18) / (3 / 8))
    # Due at half of the deadline, having begun at a fifth.
    assert found["due_phi"] == pytest.approx(0.25)
    assert found["due_stage_share"] == pytest.approx(abs(0.2 + 0.15 - 0.5))
    assert found["due_remaining_share"] == pytest.approx(abs(0.2 + 0.8 * 3 / 18 - 0.5))


def test_sharing_out_anew_is_the_remaining_share():
    found = dict(zip(COLUMNS, errors_of(Times(1.0, 2.0, 4.0), Times(1.0, 5.0, 1.0)), strict=True))
    assert found["due_accumulated"] == pytest.approx(found["due_remaining_share"])


def test_without_a_forecast_every_stage_has_the_whole_deadline():
    errors = judge(NoForecast(), [chain(10, 10, 20)], SECONDS)
    assert not errors.is_known.any()
    assert errors.of("due_accumulated") == pytest.approx([0.75, 0.5, 0.0])
    assert errors.of("due_phi") == pytest.approx([0.75, 0.5, 0.0])


def test_errors_are_kept_by_source_and_stage():
    errors = judge(NoForecast(), [chain(10, 10, source="a"), chain(10, 30, source="b")], SECONDS)
    assert errors.of("due_accumulated", source="b") == pytest.approx([0.75, 0.0])
    assert errors.of("due_accumulated", seen=0) == pytest.approx([0.5, 0.75])
    assert len(judge(NoForecast(), []).of("due_phi")) == 0


# Splits and seeds.


def test_a_split_takes_the_same_part_of_every_source():
    programs = [chain(1, task=str(i), source=s) for s, n in (("a", 10), ("b", 5)) for i in range(n)]
    train, test = split(programs, seed=1)
    assert sorted(map(repr, train + test)) == sorted(map(repr, programs))
    assert [sum(p.source == source for p in train) for source in "ab"] == [6, 3]
    assert split(programs, seed=1).train == train != split(programs, seed=2).train


def test_a_source_with_one_program_is_learnt_not_judged():
    assert split([chain(1)], seed=1) == ([chain(1)], [])


def test_a_figure_is_over_seeds():
    assert over_seeds([1.0, 3.0]) == Spread(2.0, pytest.approx(2**0.5))
    assert over_seeds([1.0]) == Spread(1.0, 0.0)
    assert over_seeds([]) is None
    assert str(Spread(0.5, 0.25)) == "0.5 ±0.25"


def made(*values: float) -> Errors:
    """Errors of one source, all columns alike."""
    num = len(values)
    return Errors(
        np.array(["a"] * num),
        np.arange(num),
        np.ones(num, dtype=bool),
        np.repeat(np.array(values)[:, None], len(COLUMNS), axis=1),
    )


def test_a_figure_is_a_mean_or_a_median_of_what_is_asked_for():
    runs = [{"x": made(0.1, 0.2, 0.9)}]
    assert figure(runs, "x", "due_phi") == Spread(pytest.approx(0.4), 0.0)
    assert figure(runs, "x", "due_phi", is_median=True) == Spread(pytest.approx(0.2), 0.0)
    assert figure(runs, "x", "due_phi", seen=2) == Spread(pytest.approx(0.9), 0.0)
    assert figure(runs, "x", "due_phi", source="b") is None


def test_better_is_better_by_more_than_the_spread():
    steady = [{"x": made(0.1), "y": made(0.2)}, {"x": made(0.2), "y": made(0.31)}]
    shaky = [{"x": made(0.1), "y": made(0.5)}, {"x": made(0.3), "y": made(0.1)}]
    assert is_better(steady, "x", "y", "due_phi", "a")
    assert not is_better(steady, "y", "x", "due_phi", "a")
    assert not is_better(shaky, "x", "y", "due_phi", "a")
    assert not is_better(steady, "x", "y", "due_phi", "another")


# The command.


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert graphs.main(["--calls", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_programs_that_leave_nothing_to_judge_by_are_refused(tmp_path, capsys):
    (tmp_path / "calls.csv").write_text(LOG)
    assert graphs.main(["--calls", str(tmp_path / "calls.csv")]) == 2
    assert "two programs" in capsys.readouterr().err


def test_shares_of_a_log_are_summed_up(tmp_path, monkeypatch, capsys):
    rows = [f"agents,a{i},{k},{k},plan,,100,{10 + i + k},0" for i in range(5) for k in range(3)]
    (tmp_path / "calls.csv").write_text(HEADER + "\n".join(rows))
    monkeypatch.setattr(graphs, "HISTORY", (2,))
    monkeypatch.setattr(graphs, "CAPACITIES", (2,))
    path = tmp_path / "out.json"
    argv = ["--calls", str(tmp_path / "calls.csv"), "--only", "shares", "--seeds", "1"]
    assert graphs.main([*argv, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "Tool times are known of: none" in printed
    assert "made-up" not in printed
    assert '"share_error_accumulated"' in path.read_text()
    assert '"share_error_best_alternative"' in path.read_text()


def test_what_is_told_of_made_up_programs():
    told = graphs._told(calls.synthetic(10, seed=1), is_made_up=True)
    assert "made-up programs" in told
    assert f"{PACE.step_s:g} s a step" in told


def test_every_part_of_the_deadline_is_judged():
    assert COLUMNS[:3] == ("share_accumulated", "share_stage_share", "share_remaining_share")
    assert shares.COLUMNS[3:] == (
        "due_phi",
        "due_accumulated",
        "due_stage_share",
        "due_remaining_share",
    )
