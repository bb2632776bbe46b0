"""The graph of one program, built as its calls arrive and end.

Nodes are calls (model, input and output tokens) and tools (execution time); an edge says that
one needed the other. Calls that need nothing of each other form a stage, and a barrier is
where all calls of a stage have ended. Names are hashes; no text is kept.
"""

from collections.abc import Mapping
from typing import Any

import networkx

from graphs.shape import MAX_STAGES, Call, ProgramShape, StageShape, set_hash

MAX_NODES = 2048
"""Calls and tools kept as nodes; further ones count into their stages only."""
MIN_TOOL_S = 0.05
"""A shorter gap between two calls is no tool."""


class _Stage:
    """What a stage has come to so far."""

    __slots__ = (
        "ended_s",
        "identity",
        "input_tokens",
        "longest_tokens",
        "num_calls",
        "num_live",
        "output_tokens",
        "role",
        "started_s",
        "tool_s",
        "tools",
    )

    def __init__(self, call: Call, tool_s: float) -> None:
        self.identity = call.model
        self.tools = set_hash(call.tools)
        self.role = call.role
        self.started_s = self.ended_s = call.at_s
        self.tool_s = tool_s
        self.num_calls = self.num_live = 0
        self.input_tokens = self.output_tokens = self.longest_tokens = 0.0

    def shape(self) -> StageShape:
        return StageShape(
            self.identity,
            self.role,
            self.num_calls,
            self.input_tokens,
            self.output_tokens,
            self.longest_tokens,
            self.tool_s,
            self.tools,
        )


class RequestGraph:
    """One program. ``graph`` is a networkx ``DiGraph``: for validation and export."""

    def __init__(self) -> None:
        self.graph: Any = networkx.DiGraph()
        self._stages: list[_Stage] = []
        self._stage_of: dict[int, int] = {}
        """Of each call's node."""
        self._live: dict[int, float] = {}
        """When each call that has not ended arrived."""
        self.has_failed = False
        """A call of it ended in another way than by finishing."""
        self.num_calls = 0

    @property
    def num_stages(self) -> int:
        """Stages begun so far."""
        return len(self._stages)

    @property
    def num_live(self) -> int:
        """Calls that have not ended."""
        return len(self._live)

    def stage(self, index: int) -> StageShape:
        """A stage as far as it is known."""
        return self._stages[index].shape()

    def num_live_in(self, index: int) -> int:
        """Calls of a stage that have not ended."""
        return self._stages[index].num_live

    def started_s(self, index: int) -> float:
        """When the first call of a stage arrived."""
        return self._stages[index].started_s

    def ended_s(self, index: int) -> float:
        """When the last call of a stage ended, so far."""
        return self._stages[index].ended_s

    def arrived(self, call: Call) -> int:
        """A call has arrived; its stage. A node that is known already is a call of its own kind.

        With parents, its stage is the one after theirs. Without, time decides: beside the calls
        that are live, else after the last barrier.
        """
        stage = self._stage_for(call)
        if stage == len(self._stages):
            gap_s = 0.0 if stage == 0 else max(call.at_s - self._stages[-1].ended_s, 0.0)
            tool_s = gap_s if call.tools or gap_s >= MIN_TOOL_S else 0.0
            self._stages.append(_Stage(call, tool_s))
        entry = self._stages[stage]
        entry.num_calls += 1
        entry.num_live += 1
        entry.input_tokens += call.input_tokens
        self._draw(call, stage)
        self._stage_of[call.node] = stage
        self._live[call.node] = call.at_s
        self.num_calls += 1
        return stage

    def ended(self, node: int, output_tokens: int, at_s: float, *, has_failed: bool) -> int:
        """A call has ended; its stage, or -1 for one that is not live."""
        if self._live.pop(node, None) is None:
            return -1
        stage = self._stage_of[node]
        entry = self._stages[stage]
        entry.num_live -= 1
        entry.output_tokens += output_tokens
        entry.longest_tokens = max(entry.longest_tokens, float(output_tokens))
        entry.ended_s = max(entry.ended_s, at_s)
        self.has_failed |= has_failed
        if node in self.graph:
            self.graph.nodes[node].update(output_tokens=output_tokens, ended_s=at_s)
        return stage

    def shape(self, application: int = 0) -> ProgramShape:
        """The whole program in numbers."""
        return ProgramShape(application, tuple(entry.shape() for entry in self._stages))

    def knows(self, node: int) -> bool:
        """Whether a call of that name has arrived."""
        return node in self._stage_of

    def _stage_for(self, call: Call) -> int:
        known = [self._stage_of[node] for node in call.parents if node in self._stage_of]
        last = len(self._stages) - 1
        if known:
            stage = max(known) + 1
        elif last >= 0 and self._stages[last].num_live:
            stage = last
        else:
            stage = last + 1
        return min(stage, MAX_STAGES - 1)

    def _draw(self, call: Call, stage: int) -> None:
        """Enter the call, the tools before it and the edges that lead to it."""
        graph = self.graph
        if graph.number_of_nodes() + len(call.tools) + 2 > MAX_NODES:
            return
        parents = [node for node in call.parents if node in graph and node != call.node]
        if not parents and stage > 0:
            parents = [node for node, at in self._stage_of.items() if at == stage - 1]
        graph.add_node(
            call.node,
            kind="llm",
            model=call.model,
            role=call.role,
            stage=stage,
            input_tokens=call.input_tokens,
            arrived_s=call.at_s,
        )
        sources = self._draw_tools(call, parents)
        graph.add_edges_from(
            ((source, call.node) for source in sources), input_tokens=call.input_tokens
        )

    def _draw_tools(self, call: Call, parents: list[int]) -> list[Any]:
        """The tools between ``parents`` and the call; what the call's edges come from."""
        ends = [self.graph.nodes[node].get("ended_s") for node in parents if node in self.graph]
        known = [end for end in ends if end is not None]
        gap_s = max(call.at_s - max(known), 0.0) if known else 0.0
        names = call.tools or ((0,) if gap_s >= MIN_TOOL_S else ())
        tools = [("tool", call.node, place) for place in range(len(names))]
        for tool, name in zip(tools, names, strict=True):
            self.graph.add_node(tool, kind="tool", tool=name, time_s=gap_s)
            self.graph.add_edges_from((node, tool) for node in parents if node in self.graph)
        return tools or [node for node in parents if node in self.graph]


def validate(graph: Any) -> None:
    """Raise ValueError unless ``graph`` is one that ``RequestGraph`` could have drawn.

    It has no cycle, every node is a call or a tool with what belongs to it, and no call is in
    an earlier stage than one it needed, or in the same.
    """
    if not networkx.is_directed_acyclic_graph(graph):
        raise ValueError("a program's graph has no cycles")
    for node, facts in graph.nodes(data=True):
        needed = _FACTS.get(str(facts.get("kind")))
        if needed is None or not needed <= set(facts):
            raise ValueError(f"node {node!r:.60} is neither a call nor a tool")
    reached: dict[Any, int] = {}
    for node in networkx.topological_sort(graph):
        before = max((reached[parent] for parent in graph.predecessors(node)), default=-1)
        facts = graph.nodes[node]
        if facts["kind"] == "llm" and facts["stage"] <= before:
            raise ValueError(f"call {node!r:.60} is in no later stage than what it needed")
        reached[node] = facts["stage"] if facts["kind"] == "llm" else before


_FACTS: Mapping[str, set[str]] = {
    "llm": {"model", "stage", "input_tokens", "arrived_s"},
    "tool": {"tool", "time_s"},
}


def export(graph: Any) -> dict[str, Any]:
    """``graph`` as plain data: node-link form, which ``networkx.node_link_graph`` reads."""
    data: dict[str, Any] = networkx.node_link_data(graph, edges="edges")
    return data
