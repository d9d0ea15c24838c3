"""What a rank holds of a model's states, and what it sends of them in a step: the formulas of redundant sharding.

InternEvo and AMSP count 2Φ/P + 2Φ/G + 12Φ/O bytes for bf16 with fp32 Adam (2401.09149, 2311.00257). Here gradients are
accumulated in fp32 unless `Precision` says otherwise, 4Φ/G, and the optimizer's `.grad` is 4Φ/O while it steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from .optimizers import ADAM
from .passes.micro_batches import is_copied
from .program import Input, InputKind, Program
from .shards import shard_shape

MOVED = {
    "refresh": ("copies from the optimizer's shards", "{c}Φ(O-P)/(P·O), once a step"),
    "params": ("gathers of parameters", "{c}Φ(P-1)/P, in forward and backward of each micro-batch"),
    "grads": ("gradients within G", "{r}Φ(G-1)/G, each micro-batch"),
    "grads.on": ("gradients from G to O", "{r}Φ(O-G)/(G·O), once a step"),
    "grads.copies": ("gradients over the copies of O", "2·{r}Φ/O·(R/O-1)/(R/O), once a step"),
}


@dataclass(frozen=True)
class Share:
    """One line of the account: a formula and its bytes on this rank. exact: the formula's value, without padding."""

    what: str
    formula: str
    bytes: int
    exact: float = 0.0


def held(program: Program, states: int = ADAM) -> list[Share]:
    """What this rank holds: copies of parameters, accumulated gradients, the optimizer's shards and its gradients.

    states: tensors of a parameter's shape in the optimizer's state.
    """
    degrees = program.plan.shard_degrees
    parameters = program.inputs_of(InputKind.PARAMETER)
    trained = [each for each in parameters if each.requires_grad]

    def share(what: str, per: str, degree: int, sizes: Iterable[tuple[Input, int]]) -> Share:
        sizes = list(sizes)
        size = sum(_elements(each, degree, program) * bytes_ for each, bytes_ in sizes)
        exact = sum(math.prod(each.shape) * bytes_ for each, bytes_ in sizes) / degree
        return Share(what, f"{_coefficient(bytes_ for _, bytes_ in sizes)}Φ/{per}", size, exact)

    accumulates = program.precision.accumulates
    return [
        share(
            "parameters to compute with",
            "P",
            degrees.params,
            [(each, each.dtype.itemsize) for each in parameters if is_copied(program, each)],
        ),
        share(
            "gradients of micro-batches",
            "G",
            degrees.grads,
            [(each, accumulates(each.dtype).itemsize) for each in trained],
        ),
        share(
            "optimizer: parameters",
            "O",
            degrees.optimizer,
            [(each, each.state_dtype.itemsize) for each in parameters],
        ),
        share(
            f"optimizer: {states} states",
            "O",
            degrees.optimizer,
            [(each, states * each.state_dtype.itemsize) for each in trained],
        ),
        share(
            "optimizer: .grad, while it steps",
            "O",
            degrees.optimizer,
            [(each, each.state_dtype.itemsize) for each in trained],
        ),
    ]


def moved(program: Program) -> list[Share]:
    """What this rank sends for its states in a step of one micro-batch, by purpose."""
    parameters = program.inputs_of(InputKind.PARAMETER)
    computed = _coefficient(each.dtype.itemsize for each in parameters)
    reduced = _coefficient(program.precision.reduces(each.dtype).itemsize for each in parameters)
    sent = dict.fromkeys(MOVED, 0)
    for node in _starts(program):
        purpose = program.collectives[node].group.split(":")[0]
        if purpose in sent:
            sent[purpose] += program.collectives[node].sent
    return [
        Share(what, formula.format(c=computed, r=reduced), sent[purpose])
        for purpose, (what, formula) in MOVED.items()
        if sent[purpose]
    ]


def sent_in_step(program: Program) -> tuple[int, int]:
    """Bytes that this rank sends in a step of one micro-batch, and in how many collectives."""
    sent = [program.collectives[node].sent for node in _starts(program)]
    return sum(sent), len(sent)


def states_table(program: Program) -> str:
    """Both accounts as text."""
    degrees = program.plan.shard_degrees
    parameters = program.inputs_of(InputKind.PARAMETER)
    elements = sum(math.prod(each.shape) for each in parameters)
    trained = sum(math.prod(each.shape) for each in parameters if each.requires_grad)
    lines = [
        f"states: Φ = {elements:,} elements"
        + (f", {trained:,} of them trained" if trained < elements else "")
        + f"; P = {degrees.params}, G = {degrees.grads}, O = {degrees.optimizer}, R = {program.plan.replicas}"
    ]
    shares = [each for each in held(program) if each.bytes]
    for each in shares:
        uneven = round(each.bytes - each.exact)
        lines.append(
            f"  held  {each.what}: {each.formula} = {each.bytes:,} bytes"
            + (f", {uneven:+,} of them as rows do not divide" if uneven else "")
        )
    for each in moved(program):
        lines.append(f"  sent  {each.what}: {each.formula} = {each.bytes:,} bytes")
    return "\n".join(lines)


def _starts(program: Program) -> list[fx.Node]:
    """The collectives of a step of one micro-batch."""
    if program.joint is not None:
        graphs = [program.joint]
    else:
        graphs = [each for each in (program.first or program.forward, program.backward) if each is not None]
    return [node for graph in graphs for node in graph.graph.nodes if node in program.collectives]


def _elements(each: Input, degree: int, program: Program) -> int:
    optimizer = program.plan.shard_degrees.optimizer
    return math.prod(shard_shape(each.shape, degree, optimizer, program.rank))


def _coefficient(sizes: Iterable[int]) -> str:
    """Bytes of an element, where they are the same for all parameters."""
    known = sorted(set(sizes))
    return str(known[0]) if len(known) == 1 else "…".join(map(str, known[:1] + known[-1:])) if known else "0"
