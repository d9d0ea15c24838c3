"""Masks that a model keeps in a buffer, as nanoGPT's S×S triangle: their values are part of what a program is for."""

from __future__ import annotations

import torch
from torch import fx

from evocompile.program import InputKind, OutputKind, Program, placeholders

_FORWARD = torch.ops.evocompile.dense_attention.default


def mask_buffers(program: Program) -> list[str]:
    """The buffers of a captured program that an attention's mask or bias reads and that the step does not write."""
    assert program.joint is not None
    graph = program.joint.graph
    written = {each.name for each in program.outputs_of(OutputKind.BUFFER)}
    read: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=_FORWARD):
        grids = node.args[10] if len(node.args) > 10 else []
        waiting = [each for each in (node.args[3], *(grids or [])) if isinstance(each, fx.Node)]  # type: ignore[misc]
        while waiting:
            each = waiting.pop()
            if each not in read:
                read.add(each)
                waiting += each.all_input_nodes
    return [
        each.name
        for node, each in zip(placeholders(graph), program.inputs, strict=True)
        if each.kind is InputKind.BUFFER and node in read and each.name not in written
    ]


def band_of(matrix: torch.Tensor) -> tuple[tuple[int | None, int], tuple[int | None, int]] | None:
    """The rows' intervals of a bool matrix as ((slope, start), (slope, end)): row q is true on [start, end].

    slope None: the same column in every row; 1: q further. Cut off at the matrix' edges. None if it has another form.
    """
    queries, keys = matrix.shape
    if not bool(matrix.any(1).all()):
        return None
    numbers = matrix.long()
    starts, counts = numbers.argmax(1), numbers.sum(1)
    ends = starts + counts - 1
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    if not torch.equal(matrix, (columns >= starts[:, None]) & (columns <= ends[:, None])):
        return None
    line = rows[:, 0]
    found = []
    for bounds, edge in ((starts, 0), (ends, keys - 1)):
        inner = (bounds != edge).nonzero()
        if not len(inner):
            found.append((None, edge))
        elif bool((bounds == bounds[0]).all()):
            found.append((None, int(bounds[0])))
        else:
            shift = int(bounds[inner[0]] - inner[0])
            if not torch.equal(bounds, (line + shift).clamp(0, keys - 1)):
                return None
            found.append((1, shift))
    return found[0], found[1]
