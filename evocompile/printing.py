"""A program as text: its summary, its collectives, its notes, its graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .accounting import sent_in_step
from .offload import to_host
from .program import Program, nbytes, source_line
from .rates import Rates, device_of
from .simulate import simulate, work_of
from .torch_private import OpOverload

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def summary(program: Program) -> str:
    """Plan, rank, parameters and communication in a few lines."""
    parameters = [each for each in program.inputs if each.kind.value == "parameter"]
    elements = sum(torch.Size(each.shape).numel() for each in parameters)
    sent, count = sent_in_step(program)
    lines = [
        f"plan: {program.plan}",
        f"rank {program.rank} of {program.mesh.world}, at "
        + ", ".join(f"{axis} {program.coordinate[axis]}" for axis, _ in program.mesh.axes),
        f"parameters: {len(parameters)}, {elements:,} elements, sharded over {program.plan.shard_degrees.params} ranks",
        f"sent per step: {sent:,} bytes in {count} collectives",
    ]
    if program.sharding is not None:
        lines += [
            f"axis {name}: {split.size} over {' and '.join(split.mesh_axes)} "
            f"({' x '.join(str(program.mesh.degree(each)) for each in split.mesh_axes)}, {split.order}), here "
            + ", ".join(f"[{lo}, {hi})" for lo, hi in split.held(program.coordinate))
            for name, split in program.sharding.splits.items()
        ]
    if program.pool:
        buffers = set(program.pool.values())
        served = sum(node in program.pool for graph in _step_graphs(program) for node in graph.nodes)
        of = sum(node in program.collectives for graph in _step_graphs(program) for node in graph.nodes)
        lines.append(
            f"buffers that are kept: {len(buffers)} of {sum(each.bytes for each in buffers):,} bytes together, for "
            f"{served} of the {of} collectives of a step"
        )
    if program.backward is not None:
        saved = sum(nbytes(node.meta["val"]) for node in program.saved)
        lines.append(f"saved for backward: {saved:,} bytes in {len(program.saved)} tensors")
        hosted = [nbytes(node.meta["val"]) for node in program.saved if node.target is to_host]
        if hosted:
            lines[-1] += f", {sum(hosted):,} of them in host memory"
        if program.again:
            counts = Counter(program.again)
            lines.append("layers that compute again: " + ", ".join(f"{counts[each]} {each}" for each in sorted(counts)))
    return "\n".join(lines)


def _step_graphs(program: Program) -> list[fx.Graph]:
    """Those of a step of one micro-batch."""
    return [each.graph for each in (program.forward, program.backward) if each is not None]


def collectives_table(program: Program) -> str:
    """Every collective in order: graph, kind, group, bytes sent by this rank, how long that takes, how much of it is
    hidden and how much exposed, what it is for, and why it stands where it does.

    Times are predicted (`rates.py`), in milliseconds, with all ranks at this one's pace.
    """
    rows: list[tuple[str, ...]] = [("graph", "kind", "group", "sent", "ms", "hidden", "exposed", "why")]
    for name, module in program.graphs.items():
        times = _predicted(program, module.graph)
        for node in module.graph.nodes:
            if node in program.collectives:
                each = program.collectives[node]
                takes, exposed = times.get(node.name, (0.0, 0.0))
                shown = (f"{1e3 * seconds:.3f}" for seconds in (takes, max(0.0, takes - exposed), exposed))
                placed = f" ({program.placed[node]})" if node in program.placed else ""
                rows.append((name, each.kind, each.group, f"{each.sent:,}", *shown, each.why + placed))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _predicted(program: Program, graph: fx.Graph) -> dict[str, tuple[float, float]]:
    """By name of a start: seconds that its communication takes, and that the rank stands still for it."""
    work = work_of([graph], program.rank, Rates.of(device_of(graph)))
    times = simulate([work], alone=program.rank).of_starts(program.rank)
    return {work[position].name: seconds for position, seconds in times.items()}


def attention_table(program: Program) -> str:
    """The schedules of the attentions, equal ones together, with work and bytes of a forward and why they were chosen.

    work: of the busiest rank over the mean.
    """
    counts = Counter(replace(each, source="") for each in program.attentions)
    lines = [
        f"{count} x {each.schedule} over {each.ranks} ranks, mask {each.mask}: {each.why}\n"
        f"    {each.busy} of {each.steps} steps, work max/mean {each.imbalance:.3f}, "
        f"{each.most_flops:,} FLOPs and {each.received:,} bytes received at most"
        for each, count in counts.items()
        if each.ranks > 1
    ]
    return "\n".join(["attention, forward:", *lines]) if lines else ""


def notes_table(program: Program) -> str:
    """What was gathered, replicated or otherwise not done as one would hope, each with its reason and source line."""
    lines = [f"{note.what}: {note.why} ({note.bytes:,} bytes)\n    {note.source}" for note in program.notes]
    return "\n".join(["notes:", *lines]) if lines else ""


def program_text(program: Program) -> str:
    """The graphs of a program, a line a node: name, dtype and shape, layout, call, source line."""
    return "\n\n".join(
        f"{name}:\n" + "\n".join(_node_lines(program, module.graph)) for name, module in program.graphs.items()
    )


def _node_lines(program: Program, graph: fx.Graph) -> list[str]:
    lines, last = [], ""
    for node in graph.nodes:
        where = source_line(node) if node.meta.get("stack_trace") else ""
        if where and where != last:
            lines.append(f"  # {where}")
            last = where
        lines.append("  " + _node_line(program, node))
    return lines


def _node_line(program: Program, node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_format(node.args[0])}"
    layout = _layout(program, node)
    left = f"{node.name}: {_type(node.meta.get('val'))}{layout}"
    if node.op == "placeholder":
        return left
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    arguments = [_format(arg) for arg in node.args] + [f"{key}={_format(arg)}" for key, arg in node.kwargs.items()]
    line = f"{left} = {_target(node)}({', '.join(arguments)})"
    if node in program.collectives:
        each = program.collectives[node]
        line += f"  # {each.kind} over {each.group}, {each.sent:,} bytes: {each.why}"
    return line


def _layout(program: Program, node: fx.Node) -> str:
    if node in program.layouts:
        return f" {program.layouts[node]}"
    if program.annotations is None:
        return ""
    natural = program.annotations.natural.get(node, ())
    count = len(program.annotations.versions.get(node, ()))
    needed = "" if count == 1 else f" needed in {count} versions"
    return "".join(f" {layout}" for layout in natural) + needed


def _format(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format, value))}]"
    return value.name if isinstance(value, fx.Node) else repr(value)


def _target(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_DTYPES.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type, value))})"
    return type(value).__name__
