"""Which attention kernels a program uses: checked when it is compiled, and printed by the doctor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .kernels import dispatch
from .kernels.attention import attention_backward_step, attention_step  # registers the operators
from .kernels.blocks import blocks
from .kernels.dispatch import CAUSAL, FULL, TENSOR, Case
from .kernels.mask import Tile
from .program import Program

_BLOCK_MASK = {Tile.FULL: FULL, Tile.CAUSAL: CAUSAL, Tile.MASKED: TENSOR}
_KINDS = {"full": FULL, "causal": CAUSAL, "masked": TENSOR}


def check_backends(program: Program) -> None:
    """Raise KernelError, before anything runs, where the backend that was asked for does not serve an attention step.

    Ranks hold different blocks, so one rank alone could fail in the middle of a step.
    """
    if dispatch.forced() is None:
        return
    for graph in program.graphs.values():
        for node in graph.graph.nodes:
            if node.target in (attention_step._opoverload, attention_backward_step._opoverload):
                for case in _cases(node):
                    dispatch.choose(case)


def _cases(node: fx.Node) -> Iterator[Case]:
    """The blocks of a step."""
    given: dict[str, Any] = {
        argument.name: value
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)  # type: ignore[union-attr]
    }
    q, v = given["q"].meta["val"], given["v"].meta["val"]
    found = blocks(given["mask"], tuple(given["q_intervals"]), tuple(given["k_intervals"]))
    for tile in {block.tile for block in found}:
        yield dispatch.case_of(q, v, _BLOCK_MASK[tile])


def attention_table(device: torch.device) -> list[str]:
    """Which backend each kind of attention gets on a device, and why those before it do not serve: lines of text."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    rows = [("dtype", "head dims", *_KINDS)]
    reasons: dict[tuple[str, str], str] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for dims in ((64, 64), (128, 128), (192, 128)):
            name = str(dtype).removeprefix("torch.")
            chosen = []
            for kind in _KINDS.values():
                case = Case(device.type, capability, dtype, *dims, kind)
                backend, passed_over = dispatch.explain(case)
                chosen.append(backend)
                for other, reason in passed_over:
                    reasons.setdefault((other, reason), f"{name}, head dims {dims[0]} and {dims[1]}, mask {kind}")
            rows.append((name, "{} and {}".format(*dims) if dims[0] != dims[1] else str(dims[0]), *chosen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"not {other}: {reason} (first: {where})" for (other, reason), where in reasons.items()]
