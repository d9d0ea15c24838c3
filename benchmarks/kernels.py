"""The attention kernels: TFLOP/s and bytes on a GPU, or, without one, what they compile to.

    python benchmarks/kernels.py [--head-dims 64 128] [--lengths 4096 16384] [--masks full causal window] [--batch 1]
    python benchmarks/kernels.py --aot [--arch sm_90]

On a GPU: forward and backward of every backend that serves the case (ours, flash-attn 2/3/4, ATen's, cuDNN's through
scaled_dot_product_attention, FlexAttention), all in one run: the median of `--rounds` calls, each timed by CUDA events
after the cache was flushed. TFLOP/s count the pairs that attend: 2 (D + E) FLOPs forward, 2 (3 D + 2 E) backward.
`floor_bytes` is what has to move (q, k, v and out once; backward besides d_out and the gradients), and `floor_share`
the time of that at the rate of a copy over the measured time: 1 would be bound by memory. Last line: one JSON object
{"gpu": name, "cases": [{backend, direction, head_dim, length, mask, tflops, milliseconds, floor_bytes, floor_share},
…]}.

With --aot, or where there is no GPU: registers, shared memory, stack (spills) and instructions of every kernel compiled
for the architectures, as a table, and last one JSON object {"kernels": [{name, arch, head_dim, registers, shared_bytes,
stack_bytes, wgmma, tma, …}, …]}.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

import evocompile.kernels.attention  # noqa: F401  registers the operators
from evocompile.errors import KernelError
from evocompile.kernels import dispatch
from evocompile.kernels.blocks import blocks

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MASKS = {"full": "True", "causal": "k <= q", "window": "(k <= q) & (k > q - 1024)"}
Pass = Callable[[], Any]


# ---- ahead of time ----


def ahead_of_time(architectures: list[str]) -> None:
    try:
        from evocompile.kernels.triton import aot
    except ImportError:
        raise SystemExit("triton is not installed: pip install evocompile[kernels]") from None
    found = []
    header = ("kernel", "arch", "head dim", "rows x columns", "registers", "shared", "stack", "instructions")
    print("{:20} {:7} {:>8}  {:32} {:>9} {:>7} {:>5}  {}".format(*header))
    for arch in architectures:
        for kernel in aot.kernels(arch):
            each = aot.report(kernel)
            has = ", ".join(name for name in ("wgmma", "tcgen05", "tma", "setmaxnreg") if each[name])
            print(
                f"{each['name']:20} {arch:7} {each['head_dim']:8}  {each['config']:32} {each['registers']:9} "
                f"{each['shared_bytes']:7} {each['stack_bytes']:5}  {has}",
                flush=True,
            )
            found.append(each)
    print(json.dumps({"kernels": found}))


# ---- on a GPU ----


def attention_inputs(length: int, head_dim: int, batch: int, heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, d_out in bfloat16, four query heads for each key/value head."""
    shapes = (heads, heads // 4, heads // 4, heads)
    q, k, v, d_out = (
        torch.randn(batch, each, length, head_dim, dtype=torch.bfloat16, device="cuda") for each in shapes
    )
    return q, k, v, d_out


def contestants(mask: str, tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Pass, Pass]]:
    """(name, forward, backward) of everything that serves the case here."""
    q, k, v, d_out = tensors
    scale = q.shape[3] ** -0.5
    for name in dispatch.NAMES[:-1]:

        def forward(name: str = name) -> Any:
            with dispatch.use(name):
                return torch.ops.evocompile.attention(q, k, v, [], MASKS[mask], scale)

        try:
            out, lse = forward()
        except KernelError:
            continue

        def backward(name: str = name, out: torch.Tensor = out, lse: torch.Tensor = lse) -> Any:
            with dispatch.use(name):
                return torch.ops.evocompile.attention_backward(d_out, q, k, v, out, lse, [], MASKS[mask], scale)

        yield name, forward, backward
    yield from _torch_contestants(mask, tensors)


def _torch_contestants(mask: str, tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Pass, Pass]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
    length = q.shape[2]
    window = 1024

    def attends(b: Any, h: Any, row: Any, column: Any) -> Any:
        return (column <= row) & (column > row - window) if mask == "window" else column <= row

    compiled = torch.compile(flex_attention)
    block_mask = None if mask == "full" else create_block_mask(attends, None, None, length, length, device="cuda")

    def flex() -> torch.Tensor:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=True)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", enable_gqa=True)

    for name, forward in (("flex_attention", flex), *([] if mask == "window" else [("cudnn", cudnn)])):
        try:
            out = forward()
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
            continue
        yield name, forward, lambda out=out: torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True)


def milliseconds(call: Pass, rounds: int, flush: torch.Tensor) -> float:
    """Median time of a call on the device, with nothing of it in the cache."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    rate = _memory_rate(flush, options.rounds)
    found = []
    for head_dim in options.head_dims:
        for length in options.lengths:
            heads = max(4, 2048 // head_dim)
            tensors = attention_inputs(length, head_dim, options.batch, heads)
            for mask in options.masks:
                pairs = sum(block.pairs for block in blocks(MASKS[mask], (0, length), (0, length)))
                for name, forward, backward in contestants(mask, tensors):
                    for direction, call in (("forward", forward), ("backward", backward)):
                        time = milliseconds(call, options.rounds, flush)
                        factor = 4 * head_dim if direction == "forward" else 10 * head_dim
                        floor = _floor(tensors, direction)
                        case = {
                            "backend": name,
                            "direction": direction,
                            "head_dim": head_dim,
                            "length": length,
                            "mask": mask,
                            "tflops": round(factor * pairs * heads * options.batch / time / 1e9, 1),
                            "milliseconds": round(time, 3),
                            "floor_bytes": floor,
                            "floor_share": round(floor / rate / (time / 1e3), 3),
                        }
                        print(case, flush=True)
                        found.append(case)
    return found


def _floor(tensors: tuple[torch.Tensor, ...], direction: str) -> int:
    """Bytes that have to move: inputs and results once. out has the size of d_out."""
    q, k, v, out = (x.numel() * x.itemsize for x in tensors)
    return q + k + v + out if direction == "forward" else 2 * (q + k + v) + 2 * out


def _memory_rate(buffer: torch.Tensor, rounds: int) -> float:
    """Bytes per second of a copy, both ways counted."""
    other = torch.empty_like(buffer)
    return 2 * buffer.numel() / (milliseconds(lambda: other.copy_(buffer), rounds, other[:1]) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aot", action="store_true", help="compile only, also where there is a GPU")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.aot or not torch.cuda.is_available():
        if not options.aot:
            print("no GPU here: nothing is timed; what the kernels compile to:")
        ahead_of_time(options.arch)
        return
    cases = measure(options)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "cases": cases}))


if __name__ == "__main__":
    main()
