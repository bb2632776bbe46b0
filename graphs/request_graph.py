"""The graph of one program, built as its calls arrive and end.

Nodes are calls (model, input and output tokens) and tools (execution time); an edge says that
one needed the other. Calls that need nothing of each other form a stage, and a barrier is
where all calls of a stage have ended. Names are hashes; no text is kept.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import networkx

from graphs.shape import MAX_STAGES, Call, ProgramShape, StageShape, set_hash

MAX_NODES = 2048
"""Calls and tools kept as nodes; further ones count into their stages only."""
MAX_EDGES = 16_384
MIN_TOOL_S = 0.05
"""A shorter gap between two calls is no tool."""


class _Stage:
    """What a stage has come to so far."""

    __slots__ = (
        "_before_tokens",
        "ended_s",
        "identity",
        "input_tokens",
        "longest_tokens",
        "new_tokens",
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
        self.new_tokens = 0.0
        self._before_tokens = 0.0

    def go_on(self, tool_s: float) -> None:
        """Where no stage more is kept: what comes now comes after all that is in this one."""
        self.tool_s += tool_s
        self._before_tokens = self.longest_tokens

    def ended(self, output_tokens: int, cached_tokens: int, at_s: float) -> None:
        """One of its calls has ended."""
        self.num_live -= 1
        self.new_tokens = max(self.new_tokens - cached_tokens, 0.0)
        self.output_tokens += output_tokens
        longest_tokens = self._before_tokens + output_tokens
        self.longest_tokens = max(self.longest_tokens, longest_tokens)
        self.ended_s = max(self.ended_s, at_s)

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
            # As most are: all of it is new.
            -1.0 if self.new_tokens == self.input_tokens else self.new_tokens,
        )


class RequestGraph:
    """One program. ``graph`` is a networkx ``DiGraph``: for validation and export."""

    def __init__(self) -> None:
        self.graph: Any = networkx.DiGraph()
        self._stages: list[_Stage] = []
        self._stage_of: dict[int, int] = {}
        """Of each call's node."""
        self._drawn: dict[int, Hashable] = {}
        """The node of the graph that stands for a call."""
        self._live: dict[int, list[int]] = {}
        """Stages of the calls of a node that have not ended, the oldest first."""
        self._num_live = 0
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
        return self._num_live

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
        if stage == MAX_STAGES:
            stage -= 1
            if not self._stages[stage].num_live:
                self._stages[stage].go_on(self._tool_s(call))
        elif stage == len(self._stages):
            self._stages.append(_Stage(call, self._tool_s(call)))
        entry = self._stages[stage]
        entry.num_calls += 1
        entry.num_live += 1
        entry.input_tokens += call.input_tokens
        entry.new_tokens += call.input_tokens
        self._draw(call, stage)
        self._stage_of[call.node] = stage
        self._live.setdefault(call.node, []).append(stage)
        self._num_live += 1
        self.num_calls += 1
        return stage

    def ended(
        self,
        node: int,
        output_tokens: int,
        at_s: float,
        *,
        has_failed: bool,
        cached_tokens: int = 0,
    ) -> int:
        """A call has ended; its stage, or -1 for one that is not live.

        Args:
            cached_tokens: input that was in the prefix cache already.
        """
        stages = self._live.get(node)
        if not stages:
            return -1
        stage = stages.pop(0)
        if not stages:
            del self._live[node]
        self._num_live -= 1
        self._stages[stage].ended(output_tokens, cached_tokens, at_s)
        self.has_failed |= has_failed
        drawn = self._drawn.get(node)
        if drawn is not None:
            self.graph.nodes[drawn].update(output_tokens=output_tokens, ended_s=at_s)
        return stage

    def shape(self, application: int = 0, tenant: int = 0) -> ProgramShape:
        """The whole program in numbers."""
        return ProgramShape(application, tuple(entry.shape() for entry in self._stages), tenant)

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
        return stage

    def _tool_s(self, call: Call) -> float:
        """From the end of the last stage to a call, if that was a tool's time."""
        last = self._stages[-1] if self._stages else None
        if last is None or last.num_live:
            return 0.0
        gap_s = max(call.at_s - last.ended_s, 0.0)
        return gap_s if call.tools or gap_s >= MIN_TOOL_S else 0.0

    def _draw(self, call: Call, stage: int) -> None:
        """Enter the call, the tools before it and the edges that lead to it."""
        graph = self.graph
        if graph.number_of_nodes() + len(call.tools) + 2 > MAX_NODES:
            self._drawn.pop(call.node, None)
            return
        parents = [self._drawn[node] for node in call.parents if node in self._drawn]
        if not parents and stage > 0:
            before = [node for node, at in self._stage_of.items() if at == stage - 1]
            parents = [self._drawn[node] for node in before if node in self._drawn]
        # One that comes again under the same name is a node of its own.
        drawn: Hashable = call.node if call.node not in graph else (call.node, self.num_calls)
        graph.add_node(
            drawn,
            kind="llm",
            model=call.model,
            role=call.role,
            stage=stage,
            input_tokens=call.input_tokens,
            arrived_s=call.at_s,
        )
        self._drawn[call.node] = drawn
        room = max(MAX_EDGES - graph.number_of_edges(), 0)
        for source in self._draw_tools(call, drawn, parents[:room])[:room]:
            graph.add_edge(source, drawn, input_tokens=call.input_tokens)

    def _draw_tools(self, call: Call, drawn: Hashable, parents: list[Hashable]) -> list[Hashable]:
        """The tools between ``parents`` and the call; what the call's edges come from."""
        ends = [self.graph.nodes[parent].get("ended_s") for parent in parents]
        known = [end for end in ends if end is not None]
        gap_s = max(call.at_s - max(known), 0.0) if known else 0.0
        names = call.tools or ((0,) if gap_s >= MIN_TOOL_S else ())
        tools: list[Hashable] = []
        for place, name in enumerate(names):
            if self.graph.number_of_edges() + len(parents) > MAX_EDGES:
                break
            tool = ("tool", drawn, place)
            self.graph.add_node(tool, kind="tool", tool=name, time_s=gap_s)
            self.graph.add_edges_from((parent, tool) for parent in parents)
            tools.append(tool)
        return tools or parents


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
