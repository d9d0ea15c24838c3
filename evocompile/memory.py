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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from .chunks import RowLoop
from .collectives import is_start, is_wait
from .errors import PlanError
from .optimizers import ADAM
from .passes.micro_batches import is_copied
from .program import InputKind, OutputKind, Program, nbytes, output_values, placeholders, source_line
from .segments import Segment, Step, cut
from .shards import shard_shape
from .storages import COMMUNICATION, TEMPORARIES, Storage, Value, storages, values_of, wire_of
from .workspace import Workspaces

PARAMETERS = "parameters"
COPIES = "copies of parameters"
OPTIMIZER = "optimizer states"
GRADIENTS = "gradients"
INPUTS = "inputs and buffers"
SAVED = "saved for backward"
OUTPUTS = "outputs"
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
    host:    bytes at the most in host memory, of what `Plan.offload` keeps there.
    """

    peak: int
    at: Moment
    source: str
    terms: dict[str, int]
    largest: list[Held]
    curve: list[Moment]
    host: int = 0

    def __str__(self) -> str:
        """The terms as a table, the largest tensors, and the curve."""
        lines = [
            f"memory of a step: {self.peak:,} bytes at the peak, in {self.at.graph}, {self.at.node}: {self.source}"
        ]
        lines += [f"  {size:>{len(f'{self.peak:,}')},}  {term}" for term, size in self.terms.items()]
        if self.host:
            lines.append(f"  and {self.host:,} bytes of host memory")
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
    walk.hold_pool(programs)
    copies: dict[str, Storage] = {}
    left: list[Value] = []
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


def _hold_states(walk: _Walk, program: Program, states: float) -> dict[str, Storage]:
    """What is there before the step, forever: by the name of the input, what the graphs read of it."""
    own: dict[str, Storage] = {}
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
                walk.hold([Storage(round(states * size), OPTIMIZER, f"optimizer states of {each.name}")])
        own[each.name] = Storage(size, term, each.name)
        walk.hold([own[each.name]])
    return own


def _run_forward(
    walk: _Walk, program: Program, refreshes: bool, own: dict[str, Storage], copies: dict[str, Storage]
) -> tuple[list[Value], list[Value]]:
    """Runs the forward graph, which fills `copies` where it refreshes: its outputs, and what it saves for backward.

    Of the outputs, a loss is computed outside from those that take a gradient; others are the caller's to keep.
    """
    is_first = refreshes and program.first is not None
    graph_module = program.first if is_first else program.forward
    assert graph_module is not None
    inputs = [each for each in program.inputs if each.kind is not InputKind.TANGENT]
    given: list[Value] = [own[each.name] if is_first else copies.get(each.name, own[each.name]) for each in inputs]
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


def _run_backward(walk: _Walk, program: Program, saved: list[Value]) -> list[Value]:
    is_inner = program.micro is not None and program.inner is not None
    graph_module = program.inner if is_inner else program.backward
    assert graph_module is not None
    arriving = [
        Storage(nbytes(node.meta["val"]), OUTPUTS, "the gradient of an output")
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
    raise PlanError(
        f"a step of this plan takes {memory.peak:,} bytes of memory on rank {rank}, which may use {limit:,}: "
        f"{largest_terms(memory)}. {way_out(memory)}, or pass a larger memory= to parallelize()"
    )


def largest_terms(memory: Memory) -> str:
    """What most of the peak is, for an error."""
    terms = sorted(memory.terms.items(), key=lambda each: -each[1])
    most = next(iter(memory.largest))
    shown = ", ".join(f"{term} {size:,}" for term, size in terms[:3])
    return f"{shown}; most of one line are {most.bytes:,} bytes of {most.term}, {most.what}"


def way_out(memory: Memory) -> str:
    """What makes the largest term smaller, for an error."""
    term = max(memory.terms, key=memory.terms.__getitem__)
    if term in (PARAMETERS, OPTIMIZER, GRADIENTS, COPIES):
        return "Shard the states over more ranks, Plan(shard=Shard(params, grads, optimizer)), or plan more ranks"
    if term == COMMUNICATION:
        return "Plan more ranks, which makes what each of them sends smaller"
    if term == SAVED:
        return "Compute more again in backward, Plan(recompute='attention') or 'full', or split the sequence further"
    return "Split the sequence over more ranks (cp, ulysses), or the batch (dp, microbatches)"


def _deliver(walk: _Walk, program: Program, left: list[Value]) -> None:
    """The gradients of several micro-batches, over G, become those of the optimizer, one after the other."""
    degree = program.plan.shard_degrees.optimizer
    types = {each.name: each.state_dtype for each in program.inputs_of(InputKind.PARAMETER)}
    for value, each in zip(left, program.outputs_of(OutputKind.GRADIENT), strict=True):
        if value is not None:
            elements = math.prod(shard_shape(each.shape, degree, degree, program.rank))
            walk.hold([Storage(elements * types[each.name].itemsize, GRADIENTS, f"gradient of {each.name}")])
            walk.note("gradients", each.name)
            walk.drop([value])


# --- walking -------------------------------------------------------------------------------------------------------


class _Walk:
    """Runs graphs on storages instead of tensors, and writes down what is allocated and freed, and when."""

    def __init__(self, fused: bool) -> None:
        self._fused = fused
        self._pooled: set[fx.Node] = set()
        self._workspaces = Workspaces()
        self._events: list[tuple[Storage, int]] = []  # allocated (1), freed (-1), now held by communications alone (0)
        self._moments: list[tuple[str, str, int, fx.Node | None, int]] = []  # … bytes, node, events before
        self._now = self._on_host = self._most_on_host = 0

    # --- holding ---

    def hold(self, values: Value) -> None:
        for each in storages(list(values)):
            each.holders += 1
            self._count(each)

    def drop(self, values: Value) -> None:
        for each in storages(list(values)):
            each.holders -= 1
            assert each.holders >= 0, f"{each.what} is freed twice"
            if not each.holders and each.counted:
                each.counted = False
                if each.on_host:
                    self._on_host -= each.bytes
                    continue
                self._now -= each.bytes
                self._events.append((each, -1))
            elif each.holders and each.holders == each.wires:
                self._events.append((each, 0))

    def hold_pool(self, programs: Sequence[Program]) -> None:
        """The buffers that the programs' communications write into are there in every step but the first."""
        for program in programs:
            self._pooled |= program.pool.keys()
        buffers = {buffer for program in programs for buffer in program.pool.values()}
        if buffers:
            self.hold(
                [Storage(sum(each.bytes for each in buffers), COMMUNICATION, "buffers of gathers and reductions")]
            )

    def _count(self, storage: Storage) -> None:
        if not storage.counted:
            storage.counted = True
            if storage.on_host:
                self._on_host += storage.bytes
                self._most_on_host = max(self._most_on_host, self._on_host)
                return
            self._now += storage.bytes
            self._events.append((storage, 1))

    def note(self, graph: str, name: str, node: fx.Node | None = None, workspace: int = 0) -> None:
        """A moment: what is alive now, and what an operator needs while it runs."""
        self._moments.append((graph, name, self._now + workspace, node, len(self._events)))

    @property
    def most(self) -> int:
        return max(moment[2] for moment in self._moments)

    def added(self, first: list[Value], second: list[Value]) -> list[Value]:
        """The sums of two lists of gradients, one after the other."""
        if not first:
            return second
        sums: list[Value] = []
        for a, b in zip(first, second, strict=True):
            if a is None or b is None:
                sums.append(b if a is None else a)
                continue
            total = Storage(a.bytes, GRADIENTS, a.what, a.node)
            self.hold([total])
            self.note("sums of micro-batches", a.what)
            self.drop([a, b])
            sums.append(total)
        return sums

    # --- graphs ---

    def run(
        self, name: str, graph: fx.Graph, given: Sequence[Value], terms: Sequence[str], *, owned: bool = False
    ) -> list[Value]:
        """What the graph returns, held.

        terms: of the memory of what it returns, SAVED before others. owned: what is given is the graph's to free.
        """
        values = values_of(graph, given)
        for node in graph.nodes:
            if node in self._pooled:
                values[node].bytes = 0
        returned = output_values(graph)
        results = [values[each] if isinstance(each, fx.Node) else None for each in returned]
        before = set(storages(list(given)))
        for value, term in sorted(zip(results, terms, strict=True), key=lambda pair: pair[1] == SAVED):
            for each in storages(value):
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
        in_flight: dict[fx.Node, list[Storage]] = {}
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

    def _put_on_wire(self, start: fx.Node, values: dict[fx.Node, Value]) -> list[Storage]:
        read = wire_of(start, values)
        self.hold(read)
        for each in read:
            each.wires += 1
        return read

    def _take_off_wire(self, read: list[Storage]) -> None:
        for each in read:
            each.wires -= 1
        self.drop(read)

    def _workspace(self, node: fx.Node) -> int:
        return loop_workspace(node.target) if isinstance(node.target, RowLoop) else self._workspaces.of(node)

    def memory(self) -> Memory:
        at = max(range(len(self._moments)), key=lambda i: self._moments[i][2])
        graph, name, peak, node, events = self._moments[at]
        alive: dict[Storage, str] = {}
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
            self._most_on_host,
        )


def loop_workspace(loop: RowLoop) -> int:
    """What a loop needs beside its results: one chunk, and sums that are not in the type of their result."""
    most = 0
    for body in loop.bodies:
        walk = _Walk(False)
        given = [
            Storage(nbytes(node.meta["val"]) if loop.copies(i) else 0, TEMPORARIES, node.name)
            for i, node in enumerate(placeholders(body.graph))
        ]
        walk.hold(given)
        walk.run("body", body.graph, given, [TEMPORARIES] * len(loop.returned), owned=True)
        most = max(most, walk.most)
    return most + sum(math.prod(each.layout.shape) * each.sum_dtype.itemsize for each in loop.returned if each.is_cast)


def _forget_inner(steps: Sequence[Step], values: dict[fx.Node, Value]) -> None:
    """What is made and used up within a segment takes no memory."""
    for segment in steps:
        if isinstance(segment, Segment):
            seen = set(storages([values[node] for node in (*segment.inputs, *segment.outputs)]))
            for each in storages([values[node] for node in segment.nodes]):
                if each not in seen:
                    each.bytes = 0
