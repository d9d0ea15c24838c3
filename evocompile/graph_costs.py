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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .chunks import RowLoop
from .collectives import is_start
from .layout import FINE, SEQUENCE, Layout
from .mesh import group_name
from .plan import RECOMPUTE, Plan
from .program import InputKind, Program, nbytes, output_values, placeholders
from .storages import Storage, storages, values_of

aten = torch.ops.aten
WHOLE, NAMED, SPLIT = range(3)  # how an axis takes part in a size: not at all, whole on every rank, shared by ranks

# Two row counts, two lengths: both axes are named and split, whatever the model does with them. One row stays whole.
PROBE = Plan(dp=2, cp=2, attention="ring")
Levels = tuple[int, int, int]


class Amount(Counter[Levels]):
    """Σ coefficient · b · s / t over keys (batch, sequence, tensor), for k micro-batches.

    b is 1, B or B/(dp·k), s is 1, S or S/(cp·ulysses): `WHOLE`, `NAMED` or `SPLIT`. t is tp where the third is `SPLIT`.
    """

    def at(self, rows: float, positions: float, replicas: float, ranks: float, tensor: float = 1) -> float:
        """Its value on a rank. replicas: dp·k. ranks: cp·ulysses. tensor: tp."""
        batch, sequence = (1, rows, rows / replicas), (1, positions, positions / ranks)
        parts = (1, 1, tensor)
        return sum(coefficient * batch[b] * sequence[s] / parts[t] for (b, s, t), coefficient in self.items())

    def plus(self, other: Mapping[Levels, float], times: float = 1) -> Amount:
        """self + times · other."""
        total = Amount(self)
        for key, coefficient in other.items():
            total[key] += times * coefficient  # type: ignore[assignment]
        return Amount({key: coefficient for key, coefficient in total.items() if coefficient})


class Attention(NamedTuple):
    """A kind of attention. lengths: of queries and keys, `None` where it is the captured sequence.

    split: over tp: "" not at all, "heads", or "queries" where key/value heads are fewer, and at every rank.
    """

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    itemsize: int
    mask: str
    lengths: tuple[int | None, int | None]
    split: str = ""
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
    """A collective that layouts ask for. batch, sequence, tensor: whether it is over the ranks that share them.

    purpose: of its group.
    """

    kind: str
    batch: bool
    sequence: bool
    tensor: bool = False
    purpose: str = "reduce"

    @property
    def is_stream(self) -> bool:
        """Whether it gathers or scatters tokens among the ranks of tp."""
        return self.tensor and not self.batch and not self.sequence


@dataclass
class Counts:
    """Of one call under one mode of recomputation.

    forward, backward: FLOPs of products by dtype, the backward's with what it computes again.
    attended, again, attended_backward: calls of attention in the forward, again in the backward, and of its backward.
    saved:   bytes between forward and backward. peak: the most alive at once, saved ones included, parameters not.
    logits:  the largest value of a loss that can be computed by chunks of rows. chunked: the peak where it is.
    operators: that run on the device, in both graphs.
    small:   bytes before division by the ranks of a group. calls: of these collectives.
    """

    forward: dict[str, Amount] = field(default_factory=dict)
    backward: dict[str, Amount] = field(default_factory=dict)
    attended: Counter[Attention] = field(default_factory=Counter)
    again: Counter[Attention] = field(default_factory=Counter)
    attended_backward: Counter[Attention] = field(default_factory=Counter)
    parameters: Counter[Parameter] = field(default_factory=Counter)
    operators: float = 0
    small: dict[Small, Amount] = field(default_factory=dict)
    calls: Counter[Small] = field(default_factory=Counter)
    saved: Amount = field(default_factory=Amount)
    peak: Amount = field(default_factory=Amount)
    logits: Amount = field(default_factory=Amount)
    chunked: Amount = field(default_factory=Amount)

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


def count(captured: Program, tensor: int = 1) -> dict[str, Counts]:
    """The counts of a captured call by mode of recomputation. tensor: tp of the probe."""
    return {mode: _count(captured, mode, tensor) for mode in RECOMPUTE}


def tensor_pattern(captured: Program, degree: int) -> frozenset[tuple[str, str]]:
    """Which weights tp of this degree splits, and how. Degrees with equal patterns have equal counts."""
    from .passes.canonicalize import canonicalize
    from .passes.seed_random import seed_random
    from .passes.tensor_axes import tensor_layouts

    program = seed_random(canonicalize(captured.bind(Plan(tp=degree), 0)))
    layouts, _ = tensor_layouts(program)
    return frozenset((node.name, str(layout)) for node, layout in layouts.items())


def _count(captured: Program, mode: str, tensor: int) -> Counts:
    from .passes.annotate import annotate
    from .passes.canonicalize import canonicalize
    from .passes.chunk_rows import AUTOMATIC, CHUNK, chunk_rows, find_chunks
    from .passes.localize import localize
    from .passes.recompute import recompute
    from .passes.rematerialize import rematerialize
    from .passes.seed_random import seed_random

    rows = {each.shape[0] for each in captured.inputs_of(InputKind.USER) if each.shape}
    dp = 1 if rows == {1} else PROBE.dp
    plan = replace(PROBE, dp=dp, tp=tensor, recompute=mode, loss_chunk=CHUNK)

    def probed(*passes: Callable[[Program], Program]) -> Program:
        program = captured.bind(plan, 0)
        for run in (canonicalize, seed_random, recompute, *passes):
            program = run(program)
        return program

    counting = _Counting(probed(annotate, localize, rematerialize))
    counts = counting.counts()
    assert captured.joint is not None
    values = [node.meta.get("val") for node in captured.joint.graph.nodes]
    if max(nbytes(each) for each in values if isinstance(each, torch.Tensor)) > AUTOMATIC:
        sizes = [max(nbytes(node.meta["val"]) for node in each.members) for each in probed(find_chunks).regions]
        if sizes:
            counts.logits = counting.shared(max(sizes))
            program = probed(find_chunks, annotate, localize, chunk_rows, rematerialize)
            counts.chunked = _Counting(program).alive()[1]
    return counts


class _Counting:
    """One program's graphs."""

    def __init__(self, program: Program) -> None:
        assert program.forward is not None and program.sharding is not None
        self.program = program
        sizes = {name: split.size for name, split in program.sharding.splits.items()}
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
        counts.saved, counts.peak = self.alive()
        return counts

    def _add(self, counts: Counts, node: fx.Node, products: dict[str, Amount], is_forward: bool) -> None:
        from .passes.rules.attention import ATTENTION, ATTENTION_BACKWARD

        if node.target == ATTENTION:
            (counts.attended if is_forward else counts.again)[self._attention(node)] += 1
        elif node.target == ATTENTION_BACKWARD:
            counts.attended_backward[self._attention(node)] += 1
        elif is_start(node):
            self._add_collective(counts, node)
        else:
            flops = self._flops(node)
            if flops:
                value = _first_tensor(node.meta["val"])
                dtype = str(value.dtype).removeprefix("torch.")
                products[dtype] = products.get(dtype, Amount()).plus(self._scaled(flops, self._touched(node)))

    # --- sizes

    def _levels(self, layout: Layout) -> Levels:
        """Whether the axes of B and S, and one that tp splits, are in a value, and split."""
        assert self.program.sharding is not None
        levels = {"batch": WHOLE, "seq": WHOLE, "tensor": WHOLE}
        for factor in (factor for dim in layout.dims for factor in dim):
            if factor.axis is None:
                continue
            name, _, _ = factor.axis.name.partition("@")  # of rows in an order of their own, the axis of the rows
            name, level = name.removesuffix(FINE), SPLIT if factor.split else NAMED
            if name.startswith(SEQUENCE):
                name = SEQUENCE  # the lengths of all sequences are taken to grow together
            if name in levels:
                levels[name] = max(levels[name], level)
            split = self.program.sharding.splits.get(factor.axis.name)
            if factor.split and split is not None and "tp" in split.mesh_axes:
                levels["tensor"] = SPLIT
        return levels["batch"], levels["seq"], levels["tensor"]

    def _scaled(self, number: float, levels: Levels) -> Amount:
        """A count at the captured sizes as an amount."""
        per = (self.batch if levels[0] else 1) * (self.sequence if levels[1] else 1)
        return Amount({levels: number / per})  # type: ignore[dict-item]

    def shared(self, number: float) -> Amount:
        """A count at the captured sizes that all ranks share."""
        return self._scaled(number, (SPLIT, SPLIT, SPLIT))

    def _size(self, node: fx.Node) -> Amount:
        """Bytes of a value; of an operator with several results none, as these have nodes of their own."""
        value, layout = node.meta.get("val"), self.program.layouts.get(node)
        if not isinstance(value, torch.Tensor):
            return Amount()
        if node.op == "placeholder" and value.shape[:2] == (self.batch, self.sequence):
            return self._scaled(nbytes(value), (NAMED, NAMED, WHOLE))  # ids, labels: their axes are named by position
        if layout is not None:
            return self._scaled(math.prod(layout.shape) * value.element_size(), self._levels(layout))
        plan, levels = self.program.plan, self._on_the_way.get(node, (WHOLE, WHOLE, WHOLE))
        shares = zip(levels, (plan.dp, plan.cp, plan.tp), strict=True)
        return self._scaled(nbytes(value) * math.prod(n for level, n in shares if level == SPLIT), levels)

    @cached_property
    def _on_the_way(self) -> dict[fx.Node, Levels]:
        """The levels of values without a layout, between two layouts: those of what they are made of."""
        found: dict[fx.Node, Levels] = {}
        by_name: dict[str, Levels] = {}  # what the forward saves is an input of the backward, of the same name
        for graph in self.graphs:
            by_name = {node.name: levels for node, levels in found.items()}
            for node in graph.nodes:
                inputs = [found[each] for each in node.all_input_nodes if each in found]
                if node in self.program.layouts:
                    found[node] = self._levels(self.program.layouts[node])
                elif node.op == "placeholder" and node.name in by_name:
                    found[node] = by_name[node.name]
                elif node.op == "call_function" and inputs:
                    batch, sequence, tensor = (max(each) for each in zip(*inputs, strict=True))
                    found[node] = self._after(node, (batch, sequence, tensor))
        return found

    def _after(self, node: fx.Node, levels: Levels) -> Levels:
        """The levels of a collective's result, if a node is one, from those of its source."""
        if not is_start(node):
            return levels
        collective = self.program.collectives[node]
        axes = _mesh_axes(self.program, collective.group)
        if collective.kind == "reduce_scatter":
            return (levels[0], levels[1], SPLIT if "tp" in axes else levels[2])
        if collective.kind != "all_gather":
            return levels
        over = zip(levels, ("dp", "cp", "tp"), (NAMED, NAMED, WHOLE), strict=True)
        batch, sequence, tensor = (whole if axis in axes else level for level, axis, whole in over)
        return batch, sequence, tensor

    def _shape(self, node: fx.Node) -> torch.Size:
        layout = self.program.layouts.get(node)
        return torch.Size(layout.shape) if layout is not None else node.meta["val"].shape

    def _touched(self, node: fx.Node) -> Levels:
        """The axes that an operator works along: those of its operands and of its result."""
        layouts = [self.program.layouts[each] for each in (node, *node.all_input_nodes) if each in self.program.layouts]
        levels = [self._levels(layout) for layout in layouts]
        return max(b for b, _, _ in levels), max(s for _, s, _ in levels), max(t for _, _, t in levels)

    def _flops(self, node: fx.Node) -> float:
        """At global shapes."""
        packet: Any = getattr(node.target, "overloadpacket", None)
        formula: Any = _FLOPS.get(packet) or flop_registry.get(packet)
        if formula is None:
            return 0
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._shape)
        return formula(*args, **kwargs, out_val=self._result_shapes(node))

    def _result_shapes(self, node: fx.Node) -> Any:
        """Of an operator with several results a list, in which one that was not asked for is `None`."""
        value = node.meta["val"]
        if not isinstance(value, (tuple, list)):
            return self._shape(node)
        taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return [self._shape(taken[i]) if i in taken else None for i in range(len(value))]

    def _attention(self, node: fx.Node) -> Attention:
        from .passes.rules.attention import call_of

        call = call_of(node)
        (_, heads, queries, dim), (_, kv_heads, keys, _), v = (self._shape(each) for each in (call.q, call.k, call.v))
        lengths = tuple(None if length == self.sequence else length for length in (queries, keys))
        itemsize = call.q.meta["val"].element_size()
        queries_split, keys_split = (self._levels(self.program.layouts[each])[2] for each in (call.q, call.k))
        split = "heads" if keys_split else "queries" if queries_split else ""
        return Attention(heads, kv_heads, dim, v[3], itemsize, call.mask, lengths, split)  # type: ignore[arg-type]

    # --- communication that layouts ask for

    def _add_collective(self, counts: Counts, node: fx.Node) -> None:
        collective = self.program.collectives[node]
        axes, purpose = _mesh_axes(self.program, collective.group), collective.group.split(":")[0]
        key = Small(collective.kind, "dp" in axes, "cp" in axes, "tp" in axes, purpose)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        counts.small[key] = counts.small.get(key, Amount()).plus(self._size(source))
        counts.calls[key] += 1

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

    def alive(self) -> tuple[Amount, Amount]:
        """Bytes saved for backward, and the most alive at once in either graph."""
        parameters = {each.name for each in self._parameter_nodes()}
        peaks = [self._sweep(graph, parameters) for graph in self.graphs]
        saved = Amount()
        for graph in self.graphs[1:]:
            for node in placeholders(graph):
                if node.name not in parameters:
                    saved = saved.plus(self._size(node))
        return saved, max(peaks, key=self._at_probe)

    def _at_probe(self, amount: Amount) -> float:
        plan = self.program.plan
        return amount.at(self.batch, self.sequence, plan.dp, plan.cp, plan.tp)

    def _parameter_nodes(self) -> Iterator[fx.Node]:
        inputs = [each for each in self.program.inputs if each.kind is not InputKind.TANGENT]
        for node, each in zip(placeholders(self.graphs[0]), inputs, strict=True):
            if each.kind is InputKind.PARAMETER:
                yield node

    def _sweep(self, graph: fx.Graph, parameters: set[str]) -> Amount:
        """The most alive at once. A gradient leaves at once: it is reduced, and counted among the states."""
        from .memory import loop_workspace

        gradients = set() if graph is self.graphs[0] else set(output_values(graph))
        values = values_of(graph, [Storage(0, "", node.name, node) for node in placeholders(graph)])
        owners = self._owners(graph, values)
        nodes = list(graph.nodes)
        last: dict[Storage, int] = {}
        for i, node in enumerate(nodes):
            for each in node.all_input_nodes:
                if not (node.op == "output" and each in gradients):
                    last |= dict.fromkeys(storages(values[each]), i)
        ends: dict[int, list[fx.Node]] = {}
        begins: dict[fx.Node, list[fx.Node]] = {}
        for storage, end in last.items():
            owner = owners.get(storage)
            if owner is not None and owner.name not in parameters:
                ends.setdefault(end, []).append(owner)
                begins.setdefault(storage.node or owner, []).append(owner)
        alive, most, peak = Amount(), 0.0, Amount()
        for i, node in enumerate(nodes):
            for each in begins.get(node, ()):
                alive = alive.plus(self._size(each))
            works = Amount()
            if isinstance(node.target, RowLoop):
                own = sum(nbytes(each.meta["val"]) for each in node.users if each in gradients)
                works[WHOLE, WHOLE, WHOLE] = loop_workspace(node.target) + own
            now = self._at_probe(alive) + self._at_probe(works)
            if now > most:
                most, peak = now, alive.plus(works)
            for each in ends.get(i, ()):
                alive = alive.plus(self._size(each), -1)
        return peak

    def _owners(self, graph: fx.Graph, values: Mapping[fx.Node, Any]) -> dict[Storage, fx.Node]:
        """For each memory the node whose size it has: the first that is it, of an operator's several the choice."""
        found: dict[Storage, fx.Node] = {}
        for node in graph.nodes:
            value = values.get(node)
            if isinstance(value, Storage):
                found.setdefault(value, node)
        return found


def _runs(node: fx.Node) -> bool:
    """Whether an operator is a kernel of its own: no view, and no choice of one of several results."""
    from .passes.recompute import ALIASES

    return node.target is not operator.getitem and node.target not in ALIASES


def _mesh_axes(program: Program, group: str) -> set[str]:
    """The axes of the probe that a group of rank 0 is over."""
    purpose = group.split(":")[0]
    for axes in ({"dp"}, {"cp"}, {"tp"}, {"dp", "cp"}, {"cp", "tp"}, {"dp", "tp"}, {"dp", "cp", "tp"}):
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
