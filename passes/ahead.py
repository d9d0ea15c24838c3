"""ahead: before which use each gather of a parameter, and each refresh, starts.

Their data is there when a graph begins, so they could start at any time. They start one layer ahead, and there at the
stretch between urgent communication that multiplies by most gathered bytes: in a transformer over a ring or
all-to-alls, behind them at the attention's output projection, where the link is otherwise idle (InternEvo, 2401.09149).
At most two layers' weights are whole at once, by the largest layer.

Decided by names, sizes and the order of the parameters, which are equal on all ranks.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from evocompile.collectives import is_start, is_wait, unpack
from evocompile.offload import TRANSFERS
from evocompile.program import nbytes
from evocompile.rates import has_flops

AHEAD = ("params", "refresh")
BEHIND = ("grads", "grads.on", "grads.copies")


def group_of(start: fx.Node) -> str:
    return str(start.kwargs.get("group", start.args[-1]))


def purpose(start: fx.Node) -> str:
    """What the group of a start is for."""
    return group_of(start).partition(":")[0]


@dataclass(eq=False)
class Unit:
    """A start, with the cheap operators that only prepare its operands.

    nodes:  in order, the start last. inputs: what they read from outside.
    anchor: for bulk ahead: it starts before the wait for this weight (its index among those of the graph).
    why:    why it stands where it does, for people.
    """

    start: fx.Node
    nodes: list[fx.Node]
    inputs: set[fx.Node]
    anchor: int = -1
    why: str = "where its data is needed"
    missing: int = 0


def unit_of(start: fx.Node, position: dict[fx.Node, int]) -> Unit:
    nodes, stack = {start}, list(start.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in nodes or not _is_light(node) or any(user not in nodes for user in node.users):
            continue
        nodes.add(node)
        stack.extend(node.all_input_nodes)
    inputs = {each for node in nodes for each in node.all_input_nodes if each not in nodes}
    return Unit(start, sorted(nodes, key=position.__getitem__), inputs)


def _is_light(node: fx.Node) -> bool:
    """An operator that only moves or casts elements, or adds some up."""
    tuples = node.target in (operator.getitem, unpack, *TRANSFERS)
    return node.op == "call_function" and not (is_start(node) or is_wait(node) or tuples or has_flops(node))


class Ahead:
    """Bulk communication that starts ahead of its use, and before which use each does.

    A *weight* is what such a communication brings to the computation; a refresh that a gather follows is none.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        nodes: Sequence[fx.Node],
        whys: Mapping[fx.Node, str],
        everything: bool,
        spread: bool,
    ) -> None:
        found = _from_inputs(units)
        followers = {each.args[0]: unit for unit in found for each in unit.inputs if is_wait(each)}
        weights = [unit for unit in found if unit.start not in followers]
        self._index = {unit.start: i for i, unit in enumerate(weights)}
        runs = _runs(weights, whys, _behind_urgent(weights, nodes, spread))
        run_of = {i: number for number, run in enumerate(runs) for i in run.indices}
        earliest = _within_cap(weights, whys)
        for unit in found:
            layers = 1 if unit.start in self._index else 2
            weight = self._index[(unit if layers == 1 else followers[unit.start]).start]
            before = run_of[weight] - layers
            unit.anchor, unit.why = 0, "before everything else"
            if before >= 0 and not everything:
                run = runs[before]
                unit.anchor = run.anchor
                where = "behind the urgent communication of" if run.is_behind else "with"
                unit.why = f"ahead, {where} {run.name}"
            if not everything and layers == 1:
                unit.anchor = max(unit.anchor, earliest[weight])
        found.sort(key=lambda unit: (unit.anchor, unit.start not in followers))  # stable
        self.units = dict.fromkeys(found)
        self._waiting = deque(found)

    def at_once(self) -> Iterator[Unit]:
        """What starts before everything else and waits for nothing."""
        while self._waiting and not self._waiting[0].anchor and not any(map(is_wait, self._waiting[0].inputs)):
            yield self._waiting.popleft()

    def due(self, start: fx.Node) -> Iterator[Unit]:
        """What has to start before the wait for this start."""
        index = self._index.get(start, -1)
        while self._waiting and self._waiting[0].anchor <= index:
            yield self._waiting.popleft()


@dataclass(frozen=True)
class _Run:
    """The weights of one layer. anchor: the use before which the next layer's start. name: of the layer."""

    indices: range
    anchor: int
    name: str
    is_behind: bool


def _from_inputs(units: Sequence[Unit]) -> list[Unit]:
    """Those of parameters that depend on the graph's inputs alone. A group keeps its order, so it is all or none."""
    found: dict[fx.Node, Unit] = {}
    left: set[str] = set()
    for unit in units:
        known = all(
            each.op in ("placeholder", "get_attr") or (is_wait(each) and each.args[0] in found) for each in unit.inputs
        )
        if purpose(unit.start) in AHEAD and known:
            found[unit.start] = unit
        else:
            left.add(group_of(unit.start))
    return [unit for unit in found.values() if not left & {group_of(unit.start), *map(_group_of_wait, unit.inputs)}]


def _group_of_wait(node: fx.Node) -> str:
    return group_of(node.args[0]) if is_wait(node) else ""  # type: ignore[arg-type]


def _behind_urgent(weights: Sequence[Unit], nodes: Sequence[fx.Node], spread: bool) -> list[bool]:
    """For each weight: is there urgent communication between the use of the one before and its own?"""
    index = {unit.start: i for i, unit in enumerate(weights)}
    behind = [False] * len(weights)
    seen = False
    for node in nodes:
        if is_wait(node) and node.args[0] in index:
            behind[index[node.args[0]]], seen = seen, False  # type: ignore[index]
        elif is_start(node):
            seen = seen or purpose(node) not in AHEAD + BEHIND
        elif spread and getattr(node.target, "namespace", "") == "evocompile":  # also where this rank exchanges nothing
            seen = seen or "attention" in str(node.target)
    return behind


def _runs(weights: Sequence[Unit], whys: Mapping[fx.Node, str], behind: Sequence[bool]) -> list[_Run]:
    """The weights by layers. A layer too small to hide the next one's gathers behind goes with it (a norm, a head)."""
    sizes = [nbytes(unit.start.meta["val"]) for unit in weights]
    layers: list[tuple[list[int], str]] = []
    for name, indices in _by_layer(weights, whys):
        while layers and 2 * sum(sizes[i] for i in layers[-1][0]) < sum(sizes[i] for i in indices):
            indices = layers.pop()[0] + indices
        layers.append((indices, name))
    runs = []
    for indices, name in layers:
        stretches = {
            indices[0]: 0
        }  # by the first weight of each stretch without urgent communication, bytes of factors in products
        for i in indices:
            if behind[i] and i != indices[0]:
                stretches[i] = 0
            stretches[next(reversed(stretches))] += sizes[i] * _is_multiplied(weights[i])
        anchor = max(stretches, key=lambda i: (stretches[i], i))
        runs.append(_Run(range(indices[0], indices[-1] + 1), anchor, name, behind[anchor]))
    return runs


def _within_cap(weights: Sequence[Unit], whys: Mapping[fx.Node, str]) -> list[int]:
    """For each weight the first use before which it may start, so that no more is whole at once than two layers take,
    by the largest one. A weight that is used again later is not counted until then."""
    sizes = [nbytes(unit.start.meta["val"]) for unit in weights]
    layers = [sum(sizes[i] for i in group) for _, group in _by_layer(weights, whys)]
    cap, first, held, earliest = 2 * max(layers, default=0), 0, 0, []
    for size in sizes:
        held += size
        while held > cap:
            held -= sizes[first]
            first += 1
        earliest.append(first)
    return earliest


def _by_layer(weights: Sequence[Unit], whys: Mapping[fx.Node, str]) -> Iterator[tuple[str, list[int]]]:
    for name, group in groupby(range(len(weights)), lambda i: layer_of(whys[weights[i].start])):
        yield name, list(group)


def _is_multiplied(unit: Unit) -> bool:
    """Whether the weight is a factor of a product, which takes time: an embedding is looked up."""
    seen, stack = {unit.start}, [unit.start]
    while stack:
        for user in stack.pop().users:
            if has_flops(user):
                return True
            if user not in seen and (is_wait(user) or getattr(user.target, "is_view", False)):
                seen.add(user)
                stack.append(user)
    return False


def layer_of(why: str) -> str:
    """The layer of "parameter NAME, …": the path up to its first number, or the module that holds the parameter."""
    name = why.split()[1].rstrip(",")
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0]
