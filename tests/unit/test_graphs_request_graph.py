"""The graph of one program: stages and barriers, from parents or from time; no text."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import msgspec
import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import MODEL, PACE, Part, call, seconds_of

from graphs.request_graph import MAX_NODES, MIN_TOOL_S, RequestGraph, export, validate
from graphs.shape import MAX_STAGES, StageShape, cut_to, set_hash


def drawn(*happened: tuple[str, int, float]) -> RequestGraph:
    """A graph after some calls without parents have arrived (+) and ended (-)."""
    graph = RequestGraph()
    for sign, node, at_s in happened:
        if sign == "+":
            graph.arrived(call(node, at_s))
        else:
            graph.ended(node, 10, at_s, has_failed=False)
    return graph


def end(graph: RequestGraph, node: int, tokens: int = 10, at_s: float = 1.0) -> int:
    return graph.ended(node, tokens, at_s, has_failed=False)


def kinds(graph: RequestGraph) -> list[str]:
    return [data["kind"] for _, data in graph.graph.nodes(data=True)]


# Stages from time ---------------------------------------------------------------------------------


def test_the_first_call_begins_the_first_stage() -> None:
    graph = RequestGraph()
    assert graph.num_stages == graph.num_live == 0
    assert graph.arrived(call(1)) == 0
    assert graph.num_stages == graph.num_live == 1


def test_calls_beside_live_ones_are_of_one_stage() -> None:
    graph = RequestGraph()
    assert [graph.arrived(call(node)) for node in (1, 2, 3)] == [0, 0, 0]
    assert graph.num_live_in(0) == 3


def test_a_call_after_all_have_ended_begins_the_next_stage() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1))
    assert graph.arrived(call(2, 1.0)) == 1
    assert (graph.num_live_in(0), graph.num_live_in(1)) == (0, 1)


def test_while_one_call_of_a_stage_is_live_there_is_no_barrier() -> None:
    graph = drawn(("+", 1, 0), ("+", 2, 0), ("+", 3, 0), ("-", 1, 1), ("-", 3, 1))
    assert graph.arrived(call(4, 2.0)) == 0
    assert graph.num_live_in(0) == 2
    assert end(graph, 2) == end(graph, 4) == 0
    assert graph.arrived(call(5, 3.0)) == 1


def test_a_barrier_is_where_the_last_call_ended() -> None:
    graph = drawn(("+", 1, 5), ("+", 2, 6), ("-", 2, 9), ("-", 1, 7))
    assert graph.started_s(0) == 5
    assert graph.ended_s(0) == 9


def test_an_end_tells_the_stage_of_its_call() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1), ("+", 2, 2))
    assert end(graph, 2, at_s=3.0) == 1


@pytest.mark.parametrize("node", [1, 99])
def test_the_end_of_what_is_not_live_is_none(node: int) -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1), ("+", 2, 1))
    before = graph.shape()
    assert end(graph, node, 500, 2.0) == -1
    assert graph.shape() == before
    assert graph.num_live == 1


# Stages from parents ------------------------------------------------------------------------------


def test_with_parents_a_call_is_in_the_stage_after_theirs() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1), ("+", 2, 1), ("-", 2, 2), ("+", 3, 2))
    assert graph.arrived(call(4, 2.5, parents=(1,))) == 1
    assert graph.arrived(call(5, 2.5, parents=(1, 2))) == 2
    assert graph.arrived(call(6, 2.5, parents=(2, 1))) == 2


def test_with_parents_a_call_does_not_wait_for_others_of_their_stage() -> None:
    graph = drawn(("+", 1, 0), ("+", 2, 0), ("-", 1, 1))
    assert graph.arrived(call(3, 1.0, parents=(1,))) == 1
    assert graph.num_live_in(0) == graph.num_live_in(1) == 1


def test_forks_and_joins_are_stages_whatever_the_order_of_time() -> None:
    graph = RequestGraph()
    graph.arrived(call(1))
    end(graph, 1)
    for node in (2, 3, 4):
        assert graph.arrived(call(node, node, parents=(1,))) == 1
        end(graph, node, at_s=node + 0.5)
    # One after the other on the clock, and yet side by side.
    assert graph.arrived(call(5, 9.0, parents=(2, 3, 4))) == 2
    assert [stage.num_calls for stage in graph.shape().stages] == [1, 3, 1]


@pytest.mark.parametrize("parents", [(99,), (2,), (99, 98)])
def test_parents_that_nobody_knows_say_nothing(parents: tuple[int, ...]) -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1))
    assert graph.arrived(call(2, 1.0, parents=parents)) == 1
    validate(graph.graph)


def test_of_some_parents_those_that_are_known_count() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1), ("+", 2, 1), ("-", 2, 2))
    assert graph.arrived(call(3, 2.0, parents=(99, 1, 3))) == 1
    validate(graph.graph)


def test_edges_lead_from_parents_to_their_children() -> None:
    graph = drawn(("+", 1, 0), ("+", 2, 0), ("-", 1, 1), ("-", 2, 1))
    graph.arrived(call(3, 1.0, parents=(2,), input_tokens=321))
    assert networkx.has_path(graph.graph, 2, 3)
    assert not networkx.has_path(graph.graph, 1, 3)
    assert graph.graph.edges[2, 3]["input_tokens"] == 321


def test_without_parents_edges_lead_from_the_stage_before() -> None:
    graph = drawn(("+", 1, 0), ("+", 2, 0), ("-", 1, 1), ("-", 2, 1), ("+", 3, 1))
    assert networkx.has_path(graph.graph, 1, 3)
    assert networkx.has_path(graph.graph, 2, 3)
    assert not networkx.has_path(graph.graph, 1, 2)


# Names that come again ----------------------------------------------------------------------------


def test_a_node_that_comes_again_is_a_call_of_its_own() -> None:
    # A loop whose author named the call once.
    graph = RequestGraph()
    for turn in range(4):
        assert graph.arrived(call(5, turn)) == turn
        assert end(graph, 5, 100, turn + 1) == turn
    assert graph.num_live == 0
    assert [stage.num_calls for stage in graph.shape().stages] == [1] * 4
    assert [stage.output_tokens for stage in graph.shape().stages] == [100] * 4
    validate(graph.graph)


def test_it_knows_which_nodes_have_arrived() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1), ("+", 2, 1))
    assert [graph.knows(node) for node in (1, 2, 3)] == [True, True, False]


# What a stage comes to ----------------------------------------------------------------------------


def test_a_stage_adds_up_its_calls() -> None:
    graph = RequestGraph()
    for node in (1, 2, 3):
        graph.arrived(call(node, 0.0, input_tokens=10 * node, role=40 + node))
        assert graph.stage(0).num_calls == node
    for node, tokens in ((1, 100), (2, 250), (3, 50)):
        end(graph, node, tokens)
    stage = graph.stage(0)
    assert (stage.num_calls, stage.input_tokens) == (3, 60)
    assert (stage.output_tokens, stage.longest_tokens) == (400, 250)
    assert (stage.identity, stage.tools, stage.role) == (MODEL, 0, 41)


def test_the_whole_program_in_numbers() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 1), ("+", 2, 4), ("-", 2, 5))
    shape = graph.shape(application=8)
    assert shape.application == 8
    assert shape.stages == (graph.stage(0), graph.stage(1))
    assert graph.shape().application == 0


def test_a_failed_call_ends_and_is_remembered() -> None:
    graph = drawn(("+", 1, 0))
    assert not graph.has_failed
    assert graph.ended(1, 5, 1.0, has_failed=True) == 0
    assert graph.has_failed
    assert graph.num_live == 0
    assert graph.arrived(call(2, 2.0)) == 1


def test_execution_time_is_tools_prompts_and_the_longest_answer_slowed_by_the_others() -> None:
    stage = Part((100, 300, 50), 200, tool_s=2.5).shape()
    assert stage.time_s(PACE) == pytest.approx(2.5 + 600 * 1e-4 + 300 * 0.01 + 450 * 0.001)
    assert stage.time_s(PACE) == pytest.approx(seconds_of(stage))


# Tools --------------------------------------------------------------------------------------------


def test_a_gap_that_nobody_names_is_a_tool_of_its_length() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 3), ("+", 2, 5.5))
    assert graph.stage(0).tool_s == 0
    assert graph.stage(1).tool_s == pytest.approx(2.5)
    assert graph.stage(1).tools == 0
    (tool,) = [data for _, data in graph.graph.nodes(data=True) if data["kind"] == "tool"]
    assert tool["time_s"] == pytest.approx(2.5)
    assert networkx.has_path(graph.graph, 1, 2)
    validate(graph.graph)


def test_a_gap_that_is_too_short_is_no_tool() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 3), ("+", 2, 3 + MIN_TOOL_S / 2))
    assert kinds(graph) == ["llm", "llm"]
    assert graph.graph.has_edge(1, 2)
    assert 0 <= graph.stage(1).tool_s < MIN_TOOL_S


def test_tools_that_are_named_are_nodes_however_short_the_gap_is() -> None:
    graph = drawn(("+", 1, 0), ("-", 1, 3))
    graph.arrived(call(2, 3.0, tools=(11, 12)))
    tools = [data["tool"] for _, data in graph.graph.nodes(data=True) if data["kind"] == "tool"]
    assert sorted(tools) == [11, 12]
    assert graph.stage(1).tools == set_hash((11, 12))
    assert graph.stage(1).identity == MODEL
    validate(graph.graph)


def test_a_tool_lasts_from_the_barrier_to_the_first_call_after_it() -> None:
    graph = drawn(("+", 1, 0), ("+", 2, 0), ("-", 1, 1), ("-", 2, 4), ("+", 3, 6), ("+", 4, 9))
    assert graph.stage(1).tool_s == pytest.approx(2)


def test_no_tool_takes_less_than_no_time() -> None:
    graph = drawn(("+", 1, 10), ("-", 1, 13), ("+", 2, 5), ("-", 2, 4), ("+", 3, 1))
    assert all(stage.tool_s >= 0 for stage in graph.shape().stages)
    validate(graph.graph)


def test_while_the_stage_before_still_runs_there_is_no_tool() -> None:
    graph = RequestGraph()
    graph.arrived(call(1, 0.0))
    graph.arrived(call(2, 1.0, parents=(1,)))
    assert graph.stage(1).tool_s == 0
    assert kinds(graph) == ["llm", "llm"]


def test_a_set_of_tools_is_one_number_whatever_its_order() -> None:
    assert set_hash((2, 3)) == set_hash((3, 2)) == set_hash((3, 2, 2))
    assert set_hash(()) == 0
    apart = [set_hash(names) for names in ((1,), (2,), (1, 2), (1, 3), (0,), (0, 1))]
    assert len(set(apart)) == len(apart)
    assert all(0 < found < 1 << 63 for found in apart)


# Bounds -------------------------------------------------------------------------------------------


def test_only_so_many_nodes_are_kept_and_all_calls_count() -> None:
    graph = RequestGraph()
    for node in range(3 * MAX_NODES):
        graph.arrived(call(node, 1.0, input_tokens=10))
    for node in range(3 * MAX_NODES):
        assert end(graph, node, 7, 2.0) == 0
    assert graph.graph.number_of_nodes() <= MAX_NODES
    assert graph.num_live == 0
    assert graph.arrived(call(10**6, 5.0, tools=tuple(range(100)))) == 1
    assert graph.graph.number_of_nodes() <= MAX_NODES
    first, second = graph.shape().stages
    assert (first.num_calls, first.input_tokens) == (3 * MAX_NODES, 30 * MAX_NODES)
    assert first.output_tokens == 21 * MAX_NODES
    assert second.tool_s == 3
    validate(graph.graph)


def test_many_tools_of_many_calls_are_bounded_too() -> None:
    graph = RequestGraph()
    for node in range(100):
        graph.arrived(call(node, 2.0 * node, tools=tuple(range(200))))
        end(graph, node, 7, 2.0 * node + 1)
    assert graph.graph.number_of_nodes() <= MAX_NODES
    assert len(graph.shape().stages) == 100
    validate(graph.graph)


def test_edges_of_wide_stages_are_bounded() -> None:
    # Two stages of a thousand calls are a million edges if each is drawn to each.
    graph = RequestGraph()
    for stage in range(2):
        for node in range(1000):
            graph.arrived(call(stage * 1000 + node, stage * 2.0))
        for node in range(1000):
            end(graph, stage * 1000 + node, 5, stage * 2.0 + 1)
    assert graph.shape().stages[1].num_calls == 1000
    assert graph.graph.number_of_edges() <= 50 * MAX_NODES


def test_of_a_long_program_the_rest_counts_into_the_last_stage() -> None:
    graph, parts = RequestGraph(), []
    for node in range(MAX_STAGES + 100):
        graph.arrived(call(node, 3.0 * node, input_tokens=20))
        end(graph, node, 10, 3.0 * node + 1)
        parts.append(Part((10,), 20, tool_s=2.0 if node else 0.0).shape())
    stages = graph.shape().stages
    assert len(stages) <= MAX_STAGES
    assert sum(stage.num_calls for stage in stages) == len(parts)
    assert sum(stage.output_tokens for stage in stages) == 10 * len(parts)
    assert sum(stage.input_tokens for stage in stages) == 20 * len(parts)
    # What came one after the other takes as long as that.
    expected_s = sum(part.time_s(PACE) for part in parts)
    assert sum(stage.time_s(PACE) for stage in stages) == pytest.approx(expected_s)


PARTS = st.tuples(
    st.lists(st.integers(0, 500), min_size=1, max_size=4), st.integers(0, 1000), st.floats(0, 100)
).map(lambda drawn: Part(tuple(drawn[0]), drawn[1], drawn[2]))


@given(st.lists(PARTS, min_size=1, max_size=8), st.integers(1, 10))
def test_cutting_loses_nothing_but_the_places(parts: list[Part], most: int) -> None:
    stages = [part.shape() for part in parts]
    cut = cut_to(stages, most)
    assert len(cut) == min(len(stages), most)
    assert cut[:-1] == tuple(stages[: len(cut) - 1])
    assert cut[-1].identity == stages[len(cut) - 1].identity

    def totals(of: Any) -> list[float]:
        return [
            sum(stage.input_tokens for stage in of),
            sum(stage.output_tokens for stage in of),
            sum(stage.time_s(PACE) for stage in of),
        ]

    assert totals(cut) == pytest.approx(totals(stages))


# Checking and export ------------------------------------------------------------------------------


def program() -> RequestGraph:
    graph = drawn(("+", 1, 0), ("+", 2, 0), ("-", 1, 1), ("-", 2, 1), ("+", 3, 4), ("-", 3, 5))
    graph.arrived(call(4, 5.0, parents=(1, 3), tools=(77,), role=9))
    return graph


def test_a_program_s_graph_is_valid_at_any_time() -> None:
    validate(RequestGraph().graph)
    validate(program().graph)


def test_what_is_exported_is_read_by_networkx_and_is_the_same() -> None:
    graph = program()
    data = json.loads(json.dumps(export(graph.graph)))
    back = networkx.node_link_graph(data, edges="edges" if "edges" in data else "links")
    validate(back)
    assert networkx.utils.graphs_equal(
        networkx.convert_node_labels_to_integers(back),
        networkx.convert_node_labels_to_integers(graph.graph),
    )


def test_no_text_is_kept() -> None:
    graph = program()
    values = [value for _, data in graph.graph.nodes(data=True) for value in data.values()]
    values += [value for *_, data in graph.graph.edges(data=True) for value in data.values()]
    assert {value for value in values if isinstance(value, str)} <= {"llm", "tool"}
    assert all(isinstance(value, str | int | float) for value in values)


def first_call(graph: Any) -> dict[str, Any]:
    return graph.nodes[1]


def tool_of(graph: Any) -> Any:
    return next(node for node, data in graph.nodes(data=True) if data["kind"] == "tool")


def cycle(graph: Any) -> None:
    graph.add_edge(4, 1, input_tokens=5)


def loop(graph: Any) -> None:
    graph.add_edge(3, 3, input_tokens=5)


def backwards(graph: Any) -> None:
    graph.nodes[3]["stage"] = 0


def same_stage(graph: Any) -> None:
    graph.nodes[4]["stage"] = graph.nodes[3]["stage"]


def unknown_kind(graph: Any) -> None:
    first_call(graph)["kind"] = "spoon"


def no_kind(graph: Any) -> None:
    del first_call(graph)["kind"]


def bare_node(graph: Any) -> None:
    graph.add_node(55)


def no_model(graph: Any) -> None:
    del first_call(graph)["model"]


def no_stage(graph: Any) -> None:
    del first_call(graph)["stage"]


def no_tokens(graph: Any) -> None:
    del first_call(graph)["input_tokens"]


def tool_without_time(graph: Any) -> None:
    del graph.nodes[tool_of(graph)]["time_s"]


@pytest.mark.parametrize(
    "spoil",
    [
        cycle,
        loop,
        backwards,
        same_stage,
        unknown_kind,
        no_kind,
        bare_node,
        no_model,
        no_stage,
        no_tokens,
        tool_without_time,
    ],
)
def test_a_graph_that_cannot_be_is_refused(spoil: Any) -> None:
    graph = program().graph
    spoil(graph)
    with pytest.raises(ValueError, match=r"."):
        validate(graph)


def test_a_graph_without_directions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        validate(program().graph.to_undirected())


# Whatever comes -----------------------------------------------------------------------------------

NODES = st.integers(0, 8)
CALLS = st.builds(
    lambda node, at_s, parents, tools, tokens: call(
        node, at_s, parents=tuple(parents), tools=tuple(tools), input_tokens=tokens
    ),
    NODES,
    st.floats(-100, 100),
    st.lists(NODES, max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1000),
)
ENDS = st.tuples(NODES, st.integers(0, 1000), st.floats(-100, 100), st.booleans())


def followed(happened: list[Any]) -> None:
    """Draw all of it, and hold the graph against an account of our own."""
    graph = RequestGraph()
    num_calls = input_tokens = output_tokens = num_ended = 0
    stage_of: dict[int, int] = {}
    for event in happened:
        if isinstance(event, tuple):
            node, tokens, at_s, has_failed = event
            stage = graph.ended(node, tokens, at_s, has_failed=has_failed)
            assert stage == -1 or 0 <= stage < graph.num_stages
            num_ended += stage >= 0
            output_tokens += tokens if stage >= 0 else 0
        else:
            known = [stage_of[parent] for parent in event.parents if parent in stage_of]
            stage = graph.arrived(event)
            assert 0 <= stage < graph.num_stages
            if known and event.node not in event.parents:
                assert stage == 1 + max(known)
            stage_of[event.node] = stage
            num_calls += 1
            input_tokens += event.input_tokens
        validate(graph.graph)
        assert graph.num_live == num_calls - num_ended
        assert graph.num_live == sum(graph.num_live_in(i) for i in range(graph.num_stages))
    stages: tuple[StageShape, ...] = graph.shape().stages
    assert sum(stage.num_calls for stage in stages) == num_calls
    assert sum(stage.input_tokens for stage in stages) == input_tokens
    assert sum(stage.output_tokens for stage in stages) == output_tokens
    for stage in stages:
        assert 0 <= stage.longest_tokens <= stage.output_tokens
        assert stage.tool_s >= 0
        assert stage.num_calls > 0


@settings(max_examples=150)
@given(st.lists(CALLS | ENDS, max_size=30))
def test_whatever_comes_the_graph_is_valid_and_nothing_is_lost(happened: list[Any]) -> None:
    number = itertools.count()
    followed(
        [
            event if isinstance(event, tuple) else msgspec.structs.replace(event, node=next(number))
            for event in happened
        ]
    )


@settings(max_examples=150)
@given(st.lists(CALLS | ENDS, max_size=30))
def test_whatever_comes_again_the_graph_is_valid_and_nothing_is_lost(happened: list[Any]) -> None:
    followed(happened)


def test_of_two_equal_histories_the_graphs_are_equal() -> None:
    # Order of parents and tools within a call does not matter.
    rng = random.Random(3)
    graphs = [RequestGraph(), RequestGraph()]
    for node in range(30):
        parents = [rng.randrange(30) for _ in range(3)]
        tools = [rng.randrange(5) for _ in range(2)]
        for graph in graphs:
            graph.arrived(call(node, node, parents=tuple(parents), tools=tuple(tools)))
            end(graph, node, node, node + 0.5)
            parents.reverse()
            tools.reverse()
    assert graphs[0].shape() == graphs[1].shape()
