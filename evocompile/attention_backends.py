"""Which attention kernels a program uses: checked when it is compiled, and printed by the doctor."""

from __future__ import annotations

import torch
from torch import fx

import evocompile.kernels.attention  # noqa: F401 (registers the operators)

from .kernels import dispatch
from .kernels.blocks import blocks
from .kernels.dispatch import CAUSAL, CHANGED, FULL, TENSOR, Case
from .kernels.form import Form
from .kernels.mask import Tile
from .program import Program
from .torch_private import OpOverload, arguments_by_name

_BLOCK_MASK = {Tile.FULL: FULL, Tile.CAUSAL: CAUSAL, Tile.MASKED: TENSOR}
# A step by its predicate; where no backend takes whole steps of it, what its masked blocks get.
_STEPS = (torch.ops.evocompile.attention_step.default, torch.ops.evocompile.attention_backward_step.default)
_KINDS = {
    "full": (FULL, FULL),
    "causal": (CAUSAL, CAUSAL),
    "window": ("(k <= q) & (k > q - 4096)", TENSOR),
    "documents": ("(k <= q) & (t0(b, q) == t0(b, k))", TENSOR),
    "others": ("(k <= q) | (k <= 99)", TENSOR),
    "scores": (CHANGED, CHANGED),
}


def check_backends(program: Program) -> None:
    """Raise KernelError, before anything runs, where the backend that was asked for does not serve an attention step.

    Ranks hold different blocks, so one rank alone could fail in the middle of a step.
    """
    if dispatch.forced() is None:
        return
    for graph in program.graphs.values():
        for node in graph.graph.nodes:
            if node.target in _STEPS:
                _check_step(node)


def _check_step(node: fx.Node) -> None:
    assert isinstance(node.target, OpOverload)
    given = arguments_by_name(node.target, node.args, node.kwargs)
    q, v = given["q"].meta["val"], given["v"].meta["val"]
    form = Form(given["params"] or (), None, given["score"], given["dropout"], trained=given.get("trained", 0))
    if dispatch.step_kernel(q, v, given["mask"], form) is not None:
        return
    found = blocks(given["mask"], tuple(given["q_intervals"]), tuple(given["k_intervals"]))
    for tile in {block.tile for block in found}:
        dispatch.choose(dispatch.case_of(q, v, _BLOCK_MASK[tile] if form.is_plain else CHANGED))


def attention_table(device: torch.device) -> list[str]:
    """Which backend each kind of attention gets on a device, and why those before it do not serve: lines of text."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    rows = [("dtype", "head dims", *_KINDS)]
    reasons: dict[tuple[str, str], str] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for dims in ((64, 64), (128, 128), (192, 128)):
            name = str(dtype).removeprefix("torch.")
            chosen = []
            for step, block in _KINDS.values():
                backend, passed_over = dispatch.explain(Case(device.type, capability, dtype, *dims, step))
                if backend not in dispatch.TAKE_STEPS:
                    own = [each for each in passed_over if each[0] in dispatch.TAKE_STEPS]
                    backend, of_blocks = dispatch.explain(Case(device.type, capability, dtype, *dims, block))
                    passed_over = own + [each for each in of_blocks if each[0] not in dispatch.TAKE_STEPS]
                chosen.append(backend)
                for other, reason in passed_over:
                    reasons.setdefault((other, reason), f"{name}, head dims {dims[0]} and {dims[1]}, mask {step}")
            rows.append((name, "{} and {}".format(*dims) if dims[0] != dims[1] else str(dims[0]), *chosen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"not {other}: {reason} (first: {where})" for (other, reason), where in reasons.items()]
