"""The one intermediate representation: a joint forward+backward FX graph with typed tables beside it.

A `Program` starts at global shapes (capture), is rewritten by the passes to one rank's shapes, and is cut into a
forward and a backward graph by `rematerialize`. Nothing is kept in loose strings of `node.meta`; of `meta` we use
only what torch itself writes: "val" (a fake tensor: shape, dtype, device) and "stack_trace" (the model's source).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from .layout import Layout, Sharding
from .mesh import Mesh
from .plan import Plan
from .precision import Precision
from .torch_private import graph_module


class InputKind(Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    USER = "input"
    SEED = "random seed"
    TANGENT = "tangent"


class OutputKind(Enum):
    USER = "output"
    BUFFER = "buffer update"
    GRADIENT = "gradient"
    SAVED = "saved"


@dataclass(frozen=True)
class Input:
    """A placeholder of the graph.

    name:  fully qualified name of a parameter or buffer; path of a user input ("input_ids"); for a tangent the
           name of its output.
    shape: global shape.
    dtype: in which the graph computes with it. held: that of a parameter in the optimizer, where it is another one.
    is_part: a user input of which each replica passes its own rows of dim 0 (`Program.batch_parts`).
    """

    kind: InputKind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_part: bool = False
    held: torch.dtype | None = None

    @property
    def state_dtype(self) -> torch.dtype:
        return self.held or self.dtype


@dataclass(frozen=True, eq=False)
class Recipe:
    """How an output that is not computed before somebody reads it comes from the whole value that is returned for it.

    graph:      from that value and whole parameters to a list of one, at global shapes.
    parameters: their names, in order. shape, dtype: of the output.
    """

    graph: fx.GraphModule
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Output:
    """A value that the graph returns. `name`: a user output's index as text, or the buffer's or parameter's name.

    layout:         set by `localize` on user outputs: how the returned local value is laid out (`None`: whole).
    differentiable: a tangent arrives for it in the backward graph.
    recipe:         returned is only what the output is computed from, on demand; shape and dtype are of that.
    """

    kind: OutputKind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False
    layout: Layout | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Collective:
    """One communication in the graph: what `inspect`, the verifier and the schedulers need to know of it.

    kind:  "all_gather" | "reduce_scatter" | "all_reduce" | "all_to_all" | "exchange"
    group: name of the communicator (`evocompile.mesh.group_name`).
    sent:  bytes that this rank puts on the wire, by the ring algorithms' volume: v(n-1)/n, twice for all_reduce.
    why:   one phrase, for people.
    """

    kind: str
    group: str
    sent: int
    why: str


@dataclass(frozen=True)
class Note:
    """Something that the user may want to know: what was gathered, kept replicated or padded, where and why."""

    what: str
    why: str
    source: str
    bytes: int = 0


@dataclass(frozen=True)
class Attention:
    """How one attention of the model is spread: what `inspect` says of it.

    schedule, why: its name, and why it was chosen.
    mask:          text of the predicate.
    ranks:         how many share it; busy: of the `steps`, the most in which a rank computes.
    most_flops:    of the forward, at the rank with the most; `flops`: of all these ranks.
    received:      bytes of blocks and states in the forward, at the rank that gets the most.
    """

    schedule: str
    why: str
    mask: str
    ranks: int
    busy: int
    steps: int
    most_flops: int
    flops: int
    received: int
    source: str

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1 is even."""
        return self.most_flops * self.ranks / self.flops if self.flops else 1.0


@dataclass(frozen=True)
class Buffer:
    """A buffer that communications of a rank's programs write into in turn. number: among those of its size."""

    bytes: int
    number: int


Version = tuple[Layout, ...]  # one layout for each result of a node


@dataclass(frozen=True)
class Compute:
    """Make a version of a node by running its operator on these versions of its operands."""

    operands: tuple[Layout, ...]


@dataclass(frozen=True)
class Convert:
    """Make a version of a node by converting another one: reduce, gather, index."""

    source: Version


@dataclass(frozen=True)
class Annotations:
    """What `annotate` decides and `localize` carries out.

    natural:  the layouts in which each node comes out by itself.
    versions: the versions of each node that are needed, and how each is made.
    outputs:  the layout in which each output leaves; None for an output that is None.
    """

    versions: dict[fx.Node, dict[Version, Compute | Convert]]
    natural: dict[fx.Node, Version]
    outputs: list[Layout | None]


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a joint graph that widens rows and narrows them again (passes/row_regions.py).

    seed:    the matrix product that widens. members: values as wide, forward and backward.
    exits:   what narrows them. between: what leads from exits back to members.
    dim:     the dim of the seed's rows in the value that they come from.
    chunk:   bytes of a wide value that shall exist at once.
    """

    seed: fx.Node
    members: frozenset[fx.Node]
    exits: frozenset[fx.Node]
    between: frozenset[fx.Node]
    dim: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The program after one pass, as text, taken for `inspect`."""

    name: str
    text: str
    nodes: int
    seconds: float


@dataclass(frozen=True)
class MicroBatch:
    """Which micro-batch of a plan of several a program computes (passes/in_time.py).

    plan, rank: the real ones. loss_group: the ranks whose losses, summed over all micro-batches, add up to the loss.
    """

    plan: Plan
    rank: int
    number: int
    loss_group: str = ""

    def real(self, rank: int, inside: int) -> int:
        """The real rank of a rank of the plan with more replicas. inside: ranks of a replica."""
        return rank // inside // self.plan.microbatches * inside + rank % inside

    def virtual(self) -> tuple[Plan, int]:
        """The plan with more replicas, and the rank in it."""
        inside = self.plan.world // self.plan.dp
        replica = self.rank // inside * self.plan.microbatches + self.number
        plan = replace(self.plan, dp=self.plan.dp * self.plan.microbatches, microbatches=1)
        return plan, replica * inside + self.rank % inside


@dataclass
class Program:
    """One rank's program at some point of the pipeline.

    joint:    the joint graph, until `rematerialize` replaces it by `forward` and `backward`. Its placeholders align
              with `inputs`, the elements of its output with `outputs`.
    forward:  placeholders: `inputs` without tangents; output: user outputs, buffer updates, then saved values.
    backward: placeholders: saved values, then tangents; output: one gradient (or None) per GRADIENT in `outputs`.
              `None` for programs that were captured without gradients.
    attentions: by `split_attention`, in the graph's order: the schedule of each, and the work and bytes that it takes.
    first, inner, last: variants of forward and backward for accumulation and the refresh of parameters
              (passes/micro_batches.py); `None` where they would not differ.
    again:    what each layer computes again, where that was chosen for each (recompute_budget.py).
    precision: the types of computation, reduction and accumulation.
    placed:   start -> why it stands where it does (passes/overlap.py).
    pool:     start -> the buffer that it writes into (passes/pool.py); others get memory of their own.
    facts:    names of what the passes so far provide (the contract that the driver checks).
    micro:    which micro-batch of a step it is, where the plan splits the batch into several.
    regions:  parts of the joint graph that are to be run by chunks of rows, until `chunk_rows` has done so.
    batch_parts: where the batch arrives in parts, one for each replica, the rows of each; else ().
    constants: the values of the buffers that attention masks read; the program holds for these alone.
    """

    joint: fx.GraphModule | None
    inputs: list[Input]
    outputs: list[Output]
    plan: Plan
    mesh: Mesh
    rank: int
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    first: fx.GraphModule | None = None
    inner: fx.GraphModule | None = None
    last: fx.GraphModule | None = None
    again: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    sharding: Sharding | None = None
    annotations: Annotations | None = None
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    collectives: dict[fx.Node, Collective] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    placed: dict[fx.Node, str] = field(default_factory=dict)
    pool: dict[fx.Node, Buffer] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)
    snapshots: list[Snapshot] = field(default_factory=list)
    regions: tuple[Region, ...] = ()
    batch_parts: tuple[int, ...] = ()
    micro: MicroBatch | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs that exist now, by name."""
        named = {
            "joint": self.joint,
            "first": self.first,
            "forward": self.forward,
            "backward": self.backward,
            "inner": self.inner,
            "last": self.last,
        }
        return {name: graph for name, graph in named.items() if graph is not None}

    @property
    def coordinate(self) -> dict[str, int]:
        return self.mesh.coordinate(self.rank)

    def outputs_of(self, kind: OutputKind) -> list[Output]:
        return [output for output in self.outputs if output.kind is kind]

    @property
    def saved(self) -> list[fx.Node]:
        """What the forward graph computes and saves for the backward graph; inputs and shards are there anyway."""
        assert self.forward is not None
        first = len(self.outputs_of(OutputKind.USER)) + len(self.outputs_of(OutputKind.BUFFER))
        return [node for node in output_values(self.forward.graph)[first:] if node.op != "placeholder"]

    def inputs_of(self, *kinds: InputKind) -> list[Input]:
        return [each for each in self.inputs if each.kind in kinds]

    def bind(self, plan: Plan, rank: int, number: int = 0) -> Program:
        """The captured program for one plan and rank, on a graph of its own. number: of the micro-batch."""
        assert self.joint is not None
        micro = None
        if plan.microbatches > 1:
            micro = MicroBatch(plan, rank, number)
            plan, rank = micro.virtual()
        return replace(
            self,
            joint=graph_module(self.joint, clone_graph(self.joint.graph)),
            plan=plan,
            mesh=Mesh.of(plan),
            rank=rank,
            micro=micro,
            layouts={},
            collectives={},
            notes=list(self.notes),
            attentions=[],
            placed={},
            pool={},
            facts=set(self.facts),
            snapshots=[],
        )


def clone_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with its metadata."""
    clone = fx.Graph()
    clone.output(clone.graph_copy(graph, {}))
    return clone


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def output_values(graph: fx.Graph) -> list[Any]:
    """The nodes (or None) that the graph returns, flat."""
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def val(node: fx.Node) -> Any:
    """The fake value of a node: a fake tensor, or a tuple of them."""
    return node.meta["val"]


def nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_WRITTEN_OUT = os.path.join(os.path.dirname(__file__), "flash_calls.py")  # what stands for a call of the model


def source_line(node: fx.Node) -> str:
    """ "file.py:12 in forward: code" of the innermost line of the model that made this node, or its own name."""
    stack = _FRAME.finditer(node.meta.get("stack_trace") or "")
    modes = "__torch_function__"  # of a default device: they call what the model calls
    frames = [frame for frame in stack if frame["file"] != _WRITTEN_OUT and frame["function"] != modes]
    if not frames:
        return f"(no source line; graph node {node.name})"
    frame = frames[-1]
    return f"{frame['file']}:{frame['line']} in {frame['function']}: {frame['code'].strip()}"


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline: a function Program -> Program with its contract."""

    name: str
    run: Callable[[Program], Program]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
