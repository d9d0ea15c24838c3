"""overlap: places every start and every wait of the graphs, so that communication runs beside computation.

Three kinds of communication, told apart by the purpose of their group:

bulk ahead   gathers of parameters and their refreshes. Their data is there when the graph begins, so they could start
             at any time. Under "selective" those of a layer start one layer ahead, and there behind the layer's last
             ring step or all-to-all (InternEvo's rule, 2401.09149: at the attention's output projection):
             of the stretches between urgent communication in that layer, the one that multiplies by most of them. At
             most two layers are held whole. A refresh that a gather follows starts two layers ahead.
urgent       what the computation waits for: ring steps, all-to-alls, sums. Started where the earlier passes have put
             it or, where that is earlier, as soon as its operands are there, but behind the ring steps before it: some
             ranks of a ring are done sooner than others. Ring steps keep their places, one step ahead, as each holds a
             buffer.
bulk behind  reductions of gradients. Started as soon as a gradient is there, waited for at the end: the optimizer
             alone needs them.

Every wait moves to the first computation that reads its data. Computation keeps its order.

Under "all" everything starts as soon as its operands are there: all parameters at once, all blocks of a ring at once.

The starts of one group keep the order of the graph as it comes, which is the same on all ranks. Across groups, a place
is chosen by names, sizes and the order of parameters, which are equal on all ranks, never by time: so all ranks launch
in one order. Nothing more is sent, and nothing is computed twice.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from evocompile.collectives import exchange_start, is_start, is_wait, unpack
from evocompile.program import Program

from .ahead import Ahead, Unit, group_of, unit_of

_GRAPHS = ("forward", "backward", "first", "inner", "last")


def overlap(program: Program) -> Program:
    """Reorders the graphs in place, as `Plan.overlap` says."""
    placed: dict[fx.Node, str] = {}
    if program.plan.overlap != "none":
        for name in _GRAPHS:
            graph_module = program.graphs.get(name)
            if graph_module is not None:
                placed |= _place(program, graph_module, program.plan.overlap == "all")
    return replace(program, placed=placed)


def _place(program: Program, graph_module: fx.GraphModule, everything: bool) -> dict[fx.Node, str]:
    whys = {node: each.why for node, each in program.collectives.items()}
    spread = program.plan.cp * program.plan.ulysses > 1
    placed = schedule(graph_module.graph, whys, everything=everything, spread=spread)
    graph_module.recompile()
    return placed


def schedule(
    graph: fx.Graph, whys: Mapping[fx.Node, str], *, everything: bool = False, spread: bool = True
) -> dict[fx.Node, str]:
    """Reorders a graph; why each start stands where it does.

    whys: what each collective is for. everything: `overlap="all"`. spread: attentions communicate, on some rank.
    """
    new = _Schedule(graph, whys, everything, spread)
    (output,) = graph.find_nodes(op="output")
    for node in new.order():
        output.prepend(node)
    return {unit.start: unit.why for unit in new.units}


class _Schedule:
    """The new order of one graph."""

    def __init__(self, graph: fx.Graph, whys: Mapping[fx.Node, str], everything: bool, spread: bool) -> None:
        self._nodes = [node for node in graph.nodes if node.op != "output"]
        position = {node: i for i, node in enumerate(self._nodes)}
        self._lazy = _lazy(self._nodes)
        self.units = [unit_of(node, position) for node in self._nodes if is_start(node)]
        self._ahead = Ahead(self.units, self._nodes, whys, everything, spread)
        self._queues: dict[str, deque[Unit]] = defaultdict(deque)  # by group: the others, in the graph's order
        self._readers: dict[fx.Node, list[Unit]] = defaultdict(list)
        self._moved = {node for unit in self._ahead.units for node in unit.nodes}
        fence: fx.Node | None = None  # the last exchange: how long before it data is there differs from rank to rank
        for unit in self.units:
            if unit in self._ahead.units:
                continue
            self._queues[group_of(unit.start)].append(unit)
            exchanges = unit.start.target is exchange_start
            stays = bool(unit.inputs & self._lazy) or (exchanges and not (everything and unit.inputs))
            unit.why = "in its place" if stays else "as soon as its data is there"
            needs = unit.inputs if exchanges or fence is None else {*unit.inputs, fence}
            unit.missing = -1 if stays else len(needs)
            if not stays:
                self._moved.update(unit.nodes)
                for node in needs:
                    self._readers[node].append(unit)
            fence = unit.start if exchanges else fence
        self._done: dict[fx.Node, None] = {}

    def order(self) -> list[fx.Node]:
        for node in self._nodes:
            if node.op in ("placeholder", "get_attr"):
                self._emit(node)
        for unit in self._ahead.at_once():
            self._emit_unit(unit)
        for unit in self.units:
            if not unit.missing:
                self._start_ready(group_of(unit.start))
        for node in self._nodes:
            if node not in self._moved and node not in self._lazy:
                self._emit(node)
        for node in self._nodes:
            self._emit(node)
        assert len(self._done) == len(self._nodes)
        return list(self._done)

    def _emit(self, wanted: fx.Node) -> None:
        """The node, behind all that it needs and that is not there yet."""
        stack = [wanted]
        while stack:
            node = stack[-1]
            missing = [each for each in node.all_input_nodes if each not in self._done]
            if node in self._done or not missing:
                stack.pop()
                self._add(node)
            else:
                stack.extend(reversed(missing))

    def _add(self, node: fx.Node) -> None:
        if is_wait(node):
            for unit in self._ahead.due(node.args[0]):
                self._emit_unit(unit)
        if node in self._done:
            return
        self._done[node] = None
        for unit in self._readers.pop(node, ()):
            unit.missing -= 1
            self._start_ready(group_of(unit.start))
        if is_start(node):
            self._start_ready(group_of(node))

    def _start_ready(self, group: str) -> None:
        """Starts those of the group that can start, in their order."""
        queue = self._queues[group]
        while queue and (not queue[0].missing or queue[0].start in self._done):
            self._emit_unit(queue.popleft())

    def _emit_unit(self, unit: Unit) -> None:
        for node in unit.nodes:
            self._emit(node)


def _lazy(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Waits, and what only looks at their data: they come before the first computation that reads it."""
    lazy: set[fx.Node] = set()
    for node in nodes:
        looks = node.target in (operator.getitem, unpack) or getattr(node.target, "is_view", False)
        if (is_wait(node) and node.users) or (looks and any(each in lazy for each in node.all_input_nodes)):
            lazy.add(node)
    return lazy
