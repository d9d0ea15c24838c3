"""What a step holds in memory, known before it runs: each tensor of the scheduled graphs from allocation to last use.

The walk does what the driver (compile.py) and the runtime (variant.py) do: a value lives until its last use, views
share its storage, what the forward saves lives until the backward's last use of it, and what a communication reads
lives until its wait. Not counted: what a library allocates by itself (workspaces of matrix products, copies that gloo
sums in, buffers of NCCL), what the caller keeps of the outputs, and what an optimizer needs while it steps.

The segments of the eager backend run operator by operator, which is what is counted. Inductor fuses them, and holds
less: `fused=True` counts nothing that is made and used up within one segment, which is a lower bound.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from .chunks import RowLoop
from .collectives import STARTS, exchange_start, is_start, is_wait, start_arguments, unpack
from .errors import PlanError
from .optimizers import ADAM
from .passes.micro_batches import is_copied
from .program import InputKind, OutputKind, Program, nbytes, output_values, placeholders, source_line
from .segments import Segment, Step, cut
from .shards import shard_shape
from .workspace import Workspaces

PARAMETERS = "parameters"
COPIES = "copies of parameters"
OPTIMIZER = "optimizer states"
GRADIENTS = "gradients"
INPUTS = "inputs and buffers"
SAVED = "saved for backward"
OUTPUTS = "outputs"
COMMUNICATION = "communication"
TEMPORARIES = "temporaries"
_LARGEST, _SHOWN = 12, 5  # lines of what is alive at the peak, and those that a table shows
_WIDTH, _BARS = 96, "▁▂▃▄▅▆▇█"  # of the curve in a table
TERMS = (PARAMETERS, COPIES, OPTIMIZER, GRADIENTS, INPUTS, SAVED, OUTPUTS, COMMUNICATION, TEMPORARIES)


@dataclass(frozen=True)
class Held:
    """One tensor that is alive at the peak. what: a parameter's name, or the source line that made it."""

    term: str
    bytes: int
    what: str


@dataclass(frozen=True)
class Moment:
    """bytes: alive while this node runs, the states included."""

    graph: str
    node: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """The memory of a step on one rank.

    peak:    bytes. at: the moment of it; source: the line of the model that runs then.
    terms:   the bytes at the peak, by term; they add up to it.
    largest: the tensors of most bytes at the peak, those of one line together.
    curve:   every node of the step in the order in which they run.
    """

    peak: int
    at: Moment
    source: str
    terms: dict[str, int]
    largest: list[Held]
    curve: list[Moment]

    def __str__(self) -> str:
        """The terms as a table, the largest tensors, and the curve."""
        lines = [
            f"memory of a step: {self.peak:,} bytes at the peak, in {self.at.graph}, {self.at.node}: {self.source}"
        ]
        lines += [f"  {size:>{len(f'{self.peak:,}')},}  {term}" for term, size in self.terms.items()]
        lines.append("  largest at the peak:")
        lines += [f"    {each.bytes:,} bytes, {each.term}: {each.what}" for each in self.largest[:_SHOWN]]
        lines += [f"  {line}" for line in self._drawn()]
        return "\n".join(lines)

    def _drawn(self) -> list[str]:
        """The curve, a character for many nodes, at the most of them; below, the graphs' names where they begin."""
        most, least = self.peak, min(each.bytes for each in self.curve)
        step = max(len(self.curve) / _WIDTH, 1)
        starts = [round(i * step) for i in range(min(_WIDTH, len(self.curve)))]
        parts = [self.curve[start:end] for start, end in pairwise([*starts, len(self.curve)])]
        heights = [max(each.bytes for each in part) for part in parts]
        bars = "".join(_BARS[round((height - least) / max(most - least, 1) * (len(_BARS) - 1))] for height in heights)
        names = ""
        for i, part in enumerate(parts):
            if (i == 0 or part[0].graph != parts[i - 1][0].graph) and len(names) <= i:
                names = names.ljust(i) + part[0].graph + " "
        return [bars, names.rstrip(), f"(from {least:,} to {most:,} bytes)"]

    def to_json(self) -> str:
        """All of it, the curve as a list of [graph, node, bytes]."""
        curve = [[each.graph, each.node, each.bytes] for each in self.curve]
        return json.dumps(dataclasses.asdict(self) | {"curve": curve}, ensure_ascii=False)


def step_memory(programs: Sequence[Program], *, states: float = ADAM, fused: bool = False) -> Memory:
    """The memory of one training step (or one call without gradients) of a rank, from zeroed gradients.

    programs: of its micro-batches, in order.
    states:   elements in the optimizer's state for each of a trained parameter (Adam 2).
    fused:    segments are compiled by Inductor (see above).
    """
    walk = _Walk(fused)
    own = _hold_states(walk, programs[0], states)
    copies: dict[str, _Storage] = {}
    left: list[_Value] = []
    for number, program in enumerate(programs):
        outputs, saved = _run_forward(walk, program, number == 0, own, copies)
        if program.backward is not None:
            gradients = _run_backward(walk, program, saved)
            left = walk.added(left, gradients)
        walk.drop(outputs)
    if programs[0].micro is not None and left:
        _deliver(walk, programs[0], left)
    walk.note("optimizer", "step")
    return walk.memory()


def _hold_states(walk: _Walk, program: Program, states: float) -> dict[str, _Storage]:
    """What is there before the step, forever: by the name of the input, what the graphs read of it."""
    own: dict[str, _Storage] = {}
    for each in program.inputs:
        if each.kind is InputKind.TANGENT:
            continue
        size = math.prod(each.shape) * each.dtype.itemsize
        term = INPUTS
        if each.kind is InputKind.PARAMETER:
            optimizer = program.plan.shard_degrees.optimizer
            elements = math.prod(shard_shape(each.shape, optimizer, optimizer, program.rank))
            size, term = elements * each.state_dtype.itemsize, PARAMETERS
            if each.requires_grad and program.backward is not None:
                walk.hold([_Storage(round(states * size), OPTIMIZER, f"optimizer states of {each.name}")])
        own[each.name] = _Storage(size, term, each.name)
        walk.hold([own[each.name]])
    return own


def _run_forward(
    walk: _Walk, program: Program, refreshes: bool, own: dict[str, _Storage], copies: dict[str, _Storage]
) -> tuple[list[_Value], list[_Value]]:
    """Runs the forward graph, which fills `copies` where it refreshes: its outputs, and what it saves for backward.

    Of the outputs, a loss is computed outside from those that take a gradient; others are the caller's to keep.
    """
    is_first = refreshes and program.first is not None
    graph_module = program.first if is_first else program.forward
    assert graph_module is not None
    inputs = [each for each in program.inputs if each.kind is not InputKind.TANGENT]
    given: list[_Value] = [own[each.name] if is_first else copies.get(each.name, own[each.name]) for each in inputs]
    users, updates = program.outputs_of(OutputKind.USER), program.outputs_of(OutputKind.BUFFER)
    copied = [each for each in inputs if is_copied(program, each)] if is_first else []
    values = output_values(graph_module.graph)
    first, end = len(users) + len(updates), len(values) - len(copied)
    terms = [OUTPUTS] * first + [SAVED] * (end - first) + [COPIES] * len(copied)
    results = walk.run("first" if is_first else "forward", graph_module.graph, given, terms)
    copies |= {each.name: value for each, value in zip(copied, results[end:], strict=True)}
    differentiable = [each.differentiable for each in users] + [False] * len(updates)
    walk.drop([value for value, takes in zip(results[:first], differentiable, strict=True) if not takes])
    return [value for value, takes in zip(results[:first], differentiable, strict=True) if takes], results[first:end]


def _run_backward(walk: _Walk, program: Program, saved: list[_Value]) -> list[_Value]:
    is_inner = program.micro is not None and program.inner is not None
    graph_module = program.inner if is_inner else program.backward
    assert graph_module is not None
    arriving = [
        _Storage(nbytes(node.meta["val"]), OUTPUTS, "the gradient of an output")
        for node in placeholders(graph_module.graph)[len(saved) :]
    ]
    walk.hold(arriving)
    values = output_values(graph_module.graph)
    return walk.run(
        "inner" if is_inner else "backward",
        graph_module.graph,
        [*saved, *arriving],
        [GRADIENTS] * len(values),
        owned=True,
    )


def check_fits(memory: Memory, limit: int, rank: int) -> None:
    """Raises PlanError where the peak is above the limit, in bytes."""
    if memory.peak <= limit:
        return
    terms = sorted(memory.terms.items(), key=lambda each: -each[1])
    most = next(iter(memory.largest))
    raise PlanError(
        f"a step of this plan takes {memory.peak:,} bytes of memory on rank {rank}, which may use {limit:,}: "
        + ", ".join(f"{term} {size:,}" for term, size in terms[:3])
        + f"; most of one line are {most.bytes:,} bytes of {most.term}, {most.what}. {_way_out(terms[0][0])}, or pass "
        "a larger memory= to parallelize()"
    )


def _way_out(term: str) -> str:
    if term in (PARAMETERS, OPTIMIZER, GRADIENTS, COPIES):
        return "Shard the states over more ranks, Plan(shard=Shard(params, grads, optimizer)), or plan more ranks"
    if term == COMMUNICATION:
        return "Plan more ranks, which makes what each of them sends smaller"
    if term == SAVED:
        return "Compute more again in backward, Plan(recompute='attention') or 'full', or split the sequence further"
    return "Split the sequence over more ranks (cp, ulysses), or the batch (dp, microbatches)"


def _deliver(walk: _Walk, program: Program, left: list[_Value]) -> None:
    """The gradients of several micro-batches, over G, become those of the optimizer, one after the other."""
    degree = program.plan.shard_degrees.optimizer
    types = {each.name: each.state_dtype for each in program.inputs_of(InputKind.PARAMETER)}
    for value, each in zip(left, program.outputs_of(OutputKind.GRADIENT), strict=True):
        if value is not None:
            elements = math.prod(shard_shape(each.shape, degree, degree, program.rank))
            walk.hold([_Storage(elements * types[each.name].itemsize, GRADIENTS, f"gradient of {each.name}")])
            walk.note("gradients", each.name)
            walk.drop([value])


# --- walking -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Storage:
    """Memory of one tensor and its views. holders: values and others that keep it alive, `wires` of them
    communications under way. node: that made it."""

    bytes: int
    term: str
    what: str
    node: fx.Node | None = None
    holders: int = 0
    wires: int = 0
    counted: bool = False


_Value = Any  # of a node: a storage, a list of values, or None


def _storages(value: _Value) -> Iterator[_Storage]:
    if isinstance(value, _Storage):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _storages(each)


class _Walk:
    """Runs graphs on storages instead of tensors, and writes down what is allocated and freed, and when."""

    def __init__(self, fused: bool) -> None:
        self._fused = fused
        self._workspaces = Workspaces()
        self._events: list[tuple[_Storage, int]] = []  # allocated (1), freed (-1), now held by communications alone (0)
        self._moments: list[tuple[str, str, int, fx.Node | None, int]] = []  # … bytes, node, events before
        self._now = 0

    # --- holding ---

    def hold(self, values: _Value) -> None:
        for each in _storages(list(values)):
            each.holders += 1
            self._count(each)

    def drop(self, values: _Value) -> None:
        for each in _storages(list(values)):
            each.holders -= 1
            assert each.holders >= 0, f"{each.what} is freed twice"
            if not each.holders and each.counted:
                each.counted = False
                self._now -= each.bytes
                self._events.append((each, -1))
            elif each.holders and each.holders == each.wires:
                self._events.append((each, 0))

    def _count(self, storage: _Storage) -> None:
        if not storage.counted:
            storage.counted = True
            self._now += storage.bytes
            self._events.append((storage, 1))

    def note(self, graph: str, name: str, node: fx.Node | None = None, workspace: int = 0) -> None:
        """A moment: what is alive now, and what an operator needs while it runs."""
        self._moments.append((graph, name, self._now + workspace, node, len(self._events)))

    @property
    def most(self) -> int:
        return max(moment[2] for moment in self._moments)

    def added(self, first: list[_Value], second: list[_Value]) -> list[_Value]:
        """The sums of two lists of gradients, one after the other."""
        if not first:
            return second
        sums: list[_Value] = []
        for a, b in zip(first, second, strict=True):
            if a is None or b is None:
                sums.append(b if a is None else a)
                continue
            total = _Storage(a.bytes, GRADIENTS, a.what, a.node)
            self.hold([total])
            self.note("sums of micro-batches", a.what)
            self.drop([a, b])
            sums.append(total)
        return sums

    # --- graphs ---

    def run(
        self, name: str, graph: fx.Graph, given: Sequence[_Value], terms: Sequence[str], *, owned: bool = False
    ) -> list[_Value]:
        """What the graph returns, held.

        terms: of the memory of what it returns, SAVED before others. owned: what is given is the graph's to free.
        """
        values = _values(graph, given)
        returned = output_values(graph)
        results = [values[each] if isinstance(each, fx.Node) else None for each in returned]
        before = set(_storages(list(given)))
        for value, term in sorted(zip(results, terms, strict=True), key=lambda pair: pair[1] == SAVED):
            for each in _storages(value):
                if each not in before:
                    each.term = term
        steps = cut(graph)
        if self._fused:
            _forget_inner(steps, values)
        order = [node for step in steps for node in (step.nodes if isinstance(step, Segment) else (step,))]
        last_use = {used: i for i, node in enumerate(order) for used in (node, *node.all_input_nodes)}
        kept = {each for each in returned if isinstance(each, fx.Node)}
        inputs = placeholders(graph) if owned else []
        own = {*order, *inputs}
        self.drop([values[each] for each in inputs if each not in last_use and each not in kept])
        in_flight: dict[fx.Node, list[_Storage]] = {}
        for i, node in enumerate(order):
            self.hold([values[node]])
            if is_start(node):
                in_flight[node] = self._put_on_wire(node, values)
            self.note(name, node.name, node, self._workspace(node))
            if is_wait(node):
                self._take_off_wire(in_flight.pop(node.args[0]))  # type: ignore[arg-type]
            over = [each for each in dict.fromkeys((*node.all_input_nodes, node)) if last_use[each] == i]
            self.drop([values[each] for each in over if each not in kept and each in own])
        self.hold(results)
        self.drop([values[node] for node in kept & own])
        return results

    def _put_on_wire(self, start: fx.Node, values: dict[fx.Node, _Value]) -> list[_Storage]:
        read = _wire(start, values)
        self.hold(read)
        for each in read:
            each.wires += 1
        return read

    def _take_off_wire(self, read: list[_Storage]) -> None:
        for each in read:
            each.wires -= 1
        self.drop(read)

    def _workspace(self, node: fx.Node) -> int:
        return _of_loop(node.target) if isinstance(node.target, RowLoop) else self._workspaces.of(node)

    def memory(self) -> Memory:
        at = max(range(len(self._moments)), key=lambda i: self._moments[i][2])
        graph, name, peak, node, events = self._moments[at]
        alive: dict[_Storage, str] = {}
        for storage, change in self._events[:events]:
            if change < 0:
                del alive[storage]
            else:
                alive[storage] = storage.term if change else COMMUNICATION
        terms, lines = Counter[str](), Counter[tuple[str, str]]()
        for each, term in alive.items():
            terms[term] += each.bytes
            lines[term, each.what if each.node is None else source_line(each.node)] += each.bytes
        terms[TEMPORARIES] += peak - sum(terms.values())  # what the operator itself needs
        return Memory(
            peak,
            Moment(graph, name, peak),
            source_line(node) if node is not None else "",
            {term: terms[term] for term in TERMS if terms[term]},
            [Held(term, size, what) for (term, what), size in lines.most_common(_LARGEST)],
            [Moment(*each[:3]) for each in self._moments],
        )


def _of_loop(loop: RowLoop) -> int:
    """What a loop needs beside its results: one chunk, and sums that are not in the type of their result."""
    most = 0
    for body in loop.bodies:
        walk = _Walk(False)
        given = [
            _Storage(nbytes(node.meta["val"]) if loop.copies(i) else 0, TEMPORARIES, node.name)
            for i, node in enumerate(placeholders(body.graph))
        ]
        walk.hold(given)
        walk.run("body", body.graph, given, [TEMPORARIES] * len(loop.returned), owned=True)
        most = max(most, walk.most)
    return most + sum(math.prod(each.layout.shape) * each.sum_dtype.itemsize for each in loop.returned if each.is_cast)


def _forget_inner(steps: Sequence[Step], values: dict[fx.Node, _Value]) -> None:
    """What is made and used up within a segment takes no memory."""
    for segment in steps:
        if isinstance(segment, Segment):
            seen = set(_storages([values[node] for node in (*segment.inputs, *segment.outputs)]))
            for each in _storages([values[node] for node in segment.nodes]):
                if each not in seen:
                    each.bytes = 0


def _values(graph: fx.Graph, given: Sequence[_Value]) -> dict[fx.Node, _Value]:
    """For each node its memory: new, or that of what it is a view of."""
    values: dict[fx.Node, _Value] = dict(zip(placeholders(graph), given, strict=True))
    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = None  # a constant of the program
        elif node.op == "call_function":
            values[node] = _value(node, values)
    return values


def _value(node: fx.Node, values: dict[fx.Node, _Value]) -> _Value:
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]  # type: ignore[index]
    source = node.args[0] if node.args else None
    result = node.meta.get("val")
    if isinstance(source, fx.Node) and (is_wait(node) or node.target is unpack or _is_view(node, source)):
        return [values[source]] * len(result) if isinstance(result, (list, tuple)) else values[source]
    return _new(result, COMMUNICATION if is_start(node) else TEMPORARIES, node)


def _new(result: Any, term: str, node: fx.Node) -> _Value:
    if isinstance(result, Tensor):
        return _Storage(nbytes(result), term, node.name, node)
    return [_new(each, term, node) for each in result] if isinstance(result, (list, tuple)) else None


def _is_view(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node's value has the memory of its source's. A reshape has, if strides allow."""
    if node.target in (torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default):
        given, result = source.meta["val"], node.meta["val"]
        meta = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        return meta.reshape(result.shape).untyped_storage()._cdata == meta.untyped_storage()._cdata
    return bool(getattr(node.target, "is_view", False))


def _wire(start: fx.Node, values: dict[fx.Node, _Value]) -> list[_Storage]:
    """What a communication reads until its wait: its input, or the buffer into which an exchange packs several.

    Not the input of an all_reduce, which works on its result, nor on CPU that of a reduce_scatter: gloo makes a copy.
    """
    arguments = start_arguments(start, start.args, start.kwargs)
    if start.target is not exchange_start:
        kind = STARTS[start.target][0]  # type: ignore[index]
        device = arguments["input"].meta["val"].device.type
        on_copy = kind == "all_reduce" or (kind == "reduce_scatter" and device == "cpu")
        return [] if on_copy else list(_storages(values[arguments["input"]]))
    tensors = arguments["tensors"]
    if arguments["destination"] < 0 or not tensors:
        return []
    if len(tensors) == 1 and tensors[0].meta["val"].is_contiguous():
        return list(_storages(values[tensors[0]]))
    return [_Storage(sum(nbytes(each.meta["val"]) for each in tensors), COMMUNICATION, start.name, start)]
