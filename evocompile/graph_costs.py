"""What one call of a model costs, counted in its captured graph: FLOPs, bytes saved, parameters, small collectives.

Counted are the graphs that the passes make of the capture, at global shapes. The layouts say which axes a plan splits,
so every count is known for any plan: it is an `Amount`, a polynomial in the rows B and the positions S, whole or
divided by the ranks that share them. Nothing here knows a model's name.

Repeated layers are counted once (`fold.py`): counts can be subtracted from one another, and multiplied.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .collectives import is_start
from .layout import Layout
from .mesh import group_name
from .plan import RECOMPUTE, Plan
from .program import InputKind, Program, nbytes, output_values, placeholders

aten = torch.ops.aten
WHOLE, NAMED, SPLIT = range(3)  # how an axis takes part in a size: not at all, whole on every rank, shared by ranks

# Two row counts, two lengths: both axes are named and split, whatever the model does with them.
PROBE = Plan(dp=2, cp=2, attention="ring")


class Amount(Counter[tuple[int, int]]):
    """Σ coefficient · b · s over keys (batch, sequence), where b is 1, B or B/(dp·k), and s is 1, S or S/(cp·ulysses).

    For k micro-batches. The keys are `WHOLE`, `NAMED` or `SPLIT`.
    """

    def at(self, rows: float, positions: float, replicas: float, ranks: float) -> float:
        """Its value on a rank. replicas: dp·k. ranks: cp·ulysses."""
        batch, sequence = (1, rows, rows / replicas), (1, positions, positions / ranks)
        return sum(coefficient * batch[b] * sequence[s] for (b, s), coefficient in self.items())

    def plus(self, other: Mapping[tuple[int, int], float], times: float = 1) -> Amount:
        """self + times · other."""
        total = Amount(self)
        for key, coefficient in other.items():
            total[key] += times * coefficient  # type: ignore[assignment]
        return Amount({key: coefficient for key, coefficient in total.items() if coefficient})


class Attention(NamedTuple):
    """A kind of attention. lengths: of queries and keys, `None` where it is the captured sequence."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    itemsize: int
    mask: str
    lengths: tuple[int | None, int | None]
    exchanged: int = 0

    @property
    def on_wire(self) -> int:
        """Bytes of an element of a state or a gradient that is exchanged: float32 at least, unless it is said."""
        return self.exchanged or max(4, self.itemsize)


class Parameter(NamedTuple):
    """A kind of parameter. passes: in how many of the two graphs of a step it is gathered."""

    shape: tuple[int, ...]
    itemsize: int
    held: int
    accumulated: int
    reduced: int
    trained: bool
    passes: int


class Small(NamedTuple):
    """A collective that layouts ask for. batch, sequence: whether it is over the ranks that share them."""

    kind: str
    batch: bool
    sequence: bool


@dataclass
class Counts:
    """Of one call under one mode of recomputation.

    forward, backward: FLOPs of products by dtype, the backward's with what it computes again.
    attended, again, attended_backward: calls of attention in the forward, again in the backward, and of its backward.
    saved:   bytes between forward and backward. peak: the most alive at once, saved ones included, parameters not.
    operators: that run on the device, in both graphs.
    small:   bytes before division by the ranks of a group.
    """

    forward: dict[str, Amount] = field(default_factory=dict)
    backward: dict[str, Amount] = field(default_factory=dict)
    attended: Counter[Attention] = field(default_factory=Counter)
    again: Counter[Attention] = field(default_factory=Counter)
    attended_backward: Counter[Attention] = field(default_factory=Counter)
    parameters: Counter[Parameter] = field(default_factory=Counter)
    operators: float = 0
    small: dict[Small, Amount] = field(default_factory=dict)
    saved: Amount = field(default_factory=Amount)
    peak: Amount = field(default_factory=Amount)

    def plus(self, other: Counts, times: float = 1) -> Counts:
        """self + times · other, everywhere."""
        return Counts(**{name: _plus(value, getattr(other, name), times) for name, value in vars(self).items()})


def _plus(one: Any, other: Any, times: float) -> Any:
    if isinstance(one, (int, float)):
        return one + times * other
    if isinstance(one, Amount):
        return one.plus(other, times)
    if isinstance(one, Counter):
        total = {key: one[key] + times * other[key] for key in [*one, *other]}
        return Counter({key: round(count) for key, count in total.items() if count})
    return {key: one.get(key, Amount()).plus(other.get(key, Amount()), times) for key in [*one, *other]}


def count(captured: Program) -> dict[str, Counts]:
    """The counts of a captured call by mode of recomputation."""
    return {mode: _count(captured, mode) for mode in RECOMPUTE}


def _count(captured: Program, mode: str) -> Counts:
    from .passes.annotate import annotate
    from .passes.canonicalize import canonicalize
    from .passes.localize import localize
    from .passes.recompute import recompute
    from .passes.rematerialize import rematerialize
    from .passes.seed_random import seed_random

    program = captured.bind(Plan(dp=PROBE.dp, cp=PROBE.cp, attention="ring", recompute=mode), 0)
    for run in (canonicalize, seed_random, recompute, annotate, localize, rematerialize):
        program = run(program)
    assert program.sharding is not None
    sizes = {name: split.size for name, split in program.sharding.splits.items()}
    return _Counting(program, sizes).counts()


class _Counting:
    """One program's graphs. sizes: B and S, by the names of their axes."""

    def __init__(self, program: Program, sizes: dict[str, int]) -> None:
        assert program.forward is not None
        self.program = program
        self.graphs = [each.graph for each in (program.forward, program.backward) if each is not None]
        self.batch, self.sequence = sizes.get("batch", 0), sizes.get("seq", 0)

    def counts(self) -> Counts:
        counts = Counts()
        for graph, products in zip(self.graphs, (counts.forward, counts.backward), strict=False):
            for node in graph.nodes:
                if node.op == "call_function":
                    counts.operators += _runs(node)
                    self._add(counts, node, products, graph is self.graphs[0])
        counts.parameters = self._parameters()
        counts.saved, counts.peak = self._alive()
        return counts

    def _add(self, counts: Counts, node: fx.Node, products: dict[str, Amount], is_forward: bool) -> None:
        from .passes.rules.attention import ATTENTION, ATTENTION_BACKWARD

        if node.target == ATTENTION:
            (counts.attended if is_forward else counts.again)[self._attention(node)] += 1
        elif node.target == ATTENTION_BACKWARD:
            counts.attended_backward[self._attention(node)] += 1
        elif is_start(node):
            self._add_collective(counts.small, node)
        else:
            flops = self._flops(node)
            if flops:
                value = _first_tensor(node.meta["val"])
                dtype = str(value.dtype).removeprefix("torch.")
                products[dtype] = products.get(dtype, Amount()).plus(self._scaled(flops, self._touched(node)))

    # --- sizes

    def _levels(self, layout: Layout) -> tuple[int, int]:
        """Whether the axes of B and S are in a value, and split."""
        levels = {"batch": WHOLE, "seq": WHOLE}
        for factor in (factor for dim in layout.dims for factor in dim):
            if factor.axis is not None and factor.axis.name in levels:
                level = SPLIT if factor.split else NAMED
                levels[factor.axis.name] = max(levels[factor.axis.name], level)
        return levels["batch"], levels["seq"]

    def _scaled(self, number: float, levels: tuple[int, int]) -> Amount:
        """A count at the captured sizes as an amount."""
        per = (self.batch if levels[0] else 1) * (self.sequence if levels[1] else 1)
        return Amount({levels: number / per})  # type: ignore[dict-item]

    def _size(self, node: fx.Node) -> Amount:
        """Bytes of a value; of an operator with several results none, as these have nodes of their own."""
        value, layout = node.meta.get("val"), self.program.layouts.get(node)
        if not isinstance(value, torch.Tensor):
            return Amount()
        if node.op == "placeholder" and value.shape[:2] == (self.batch, self.sequence):
            return self._scaled(nbytes(value), (NAMED, NAMED))  # ids, labels: their axes are named by position
        if layout is None:
            return self._scaled(nbytes(value), (WHOLE, WHOLE))
        return self._scaled(math.prod(layout.shape) * value.element_size(), self._levels(layout))

    def _shape(self, node: fx.Node) -> torch.Size:
        layout = self.program.layouts.get(node)
        return torch.Size(layout.shape) if layout is not None else node.meta["val"].shape

    def _touched(self, node: fx.Node) -> tuple[int, int]:
        """The axes that an operator works along: those of its operands and of its result."""
        layouts = [self.program.layouts[each] for each in (node, *node.all_input_nodes) if each in self.program.layouts]
        levels = [self._levels(layout) for layout in layouts]
        return max(b for b, _ in levels), max(s for _, s in levels)

    def _flops(self, node: fx.Node) -> float:
        """At global shapes."""
        packet: Any = getattr(node.target, "overloadpacket", None)
        formula: Any = _FLOPS.get(packet) or flop_registry.get(packet)
        if formula is None:
            return 0
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._shape)
        return formula(*args, **kwargs, out_val=self._shape(node) if node in self.program.layouts else None)

    def _attention(self, node: fx.Node) -> Attention:
        from .passes.rules.attention import call_of

        call = call_of(node)
        (_, heads, queries, dim), (_, kv_heads, keys, _), v = (self._shape(each) for each in (call.q, call.k, call.v))
        lengths = tuple(None if length == self.sequence else length for length in (queries, keys))
        itemsize = call.q.meta["val"].element_size()
        return Attention(heads, kv_heads, dim, v[3], itemsize, call.mask, lengths)  # type: ignore[arg-type]

    # --- communication that layouts ask for

    def _add_collective(self, small: dict[Small, Amount], node: fx.Node) -> None:
        collective = self.program.collectives[node]
        axes = _mesh_axes(self.program, collective.group)
        key = Small(collective.kind, "dp" in axes, "cp" in axes)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        small[key] = small.get(key, Amount()).plus(self._size(source))

    # --- parameters, and what is alive

    def _parameters(self) -> Counter[Parameter]:
        program, found = self.program, Counter[Parameter]()
        inputs = [each for each in program.inputs if each.kind is not InputKind.TANGENT]
        forward, *rest = self.graphs
        nodes = placeholders(forward)
        read_again = {node.name for graph in rest for node in placeholders(graph) if node.users}
        for node, each in zip(nodes, inputs, strict=True):
            if each.kind is InputKind.PARAMETER:
                types = [program.precision.accumulates(each.dtype), program.precision.reduces(each.dtype)]
                passes = bool(node.users) + (node.name in read_again)
                item, held, accumulated, reduced = (t.itemsize for t in (each.dtype, each.state_dtype, *types))
                found[Parameter(each.shape, item, held, accumulated, reduced, each.requires_grad, passes)] += 1
        return found

    def _alive(self) -> tuple[Amount, Amount]:
        """Bytes saved for backward, and the most alive at once in either graph."""
        parameters = {each.name for each in self._parameter_nodes()}
        peaks = [self._sweep(graph, parameters) for graph in self.graphs]
        saved = Amount()
        for graph in self.graphs[1:]:
            for node in placeholders(graph):
                if node.name not in parameters:
                    saved = saved.plus(self._size(node))
        return saved, max(peaks, key=lambda amount: amount.at(self.batch, self.sequence, 2, 2))

    def _parameter_nodes(self) -> Iterator[fx.Node]:
        inputs = [each for each in self.program.inputs if each.kind is not InputKind.TANGENT]
        for node, each in zip(placeholders(self.graphs[0]), inputs, strict=True):
            if each.kind is InputKind.PARAMETER:
                yield node

    def _sweep(self, graph: fx.Graph, parameters: set[str]) -> Amount:
        """The most alive at once. A gradient leaves at once: it is reduced, and counted among the states."""
        gradients = set() if graph is self.graphs[0] else set(output_values(graph))
        roots = _roots(graph)
        last: dict[fx.Node, int] = {}
        nodes = list(graph.nodes)
        for i, node in enumerate(nodes):
            for each in node.all_input_nodes:
                if not (node.op == "output" and each in gradients):
                    last[roots[each]] = i
        alive, most, peak = Amount(), 0.0, Amount()
        ends: dict[int, list[fx.Node]] = {}
        for node, end in last.items():
            ends.setdefault(end, []).append(node)
        for i, node in enumerate(nodes):
            if roots[node] is node and node.name not in parameters and node in last:
                alive = alive.plus(self._size(node))
            now = alive.at(self.batch, self.sequence, 2, 2)
            if now > most:
                most, peak = now, alive
            for each in ends.get(i, ()):
                if each.name not in parameters:
                    alive = alive.plus(self._size(each), -1)
        return peak


def _runs(node: fx.Node) -> bool:
    """Whether an operator is a kernel of its own: no view, and no choice of one of several results."""
    from .passes.recompute import ALIASES

    return node.target is not operator.getitem and node.target not in ALIASES


def _roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one that owns its memory."""
    from .passes.recompute import ALIASES

    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.target in ALIASES else None
        roots[node] = roots[source] if isinstance(source, fx.Node) else node
    return roots


def _mesh_axes(program: Program, group: str) -> set[str]:
    """The axes of the probe that a group of rank 0 is over."""
    purpose = group.split(":")[0]
    for axes in ({"dp"}, {"cp"}, {"dp", "cp"}):
        if group == group_name(purpose, program.mesh.peers(0, axes)):
            return axes
    raise AssertionError(f"a group of no mesh axes: {group}")


def _first_tensor(value: Any) -> torch.Tensor:
    while isinstance(value, (tuple, list)):
        value = next(each for each in value if each is not None)
    return value


def _grouped(a: torch.Size, b: torch.Size, *_rest: Any, **_out: Any) -> int:
    """Of (T, K) rows in groups with (E, K, N), or of (M, T) and (T, N) whose T are in groups: each row is in one."""
    return 2 * a[-2] * a[-1] * b[-1]


_FLOPS = {torch.ops.aten._grouped_mm: _grouped}
