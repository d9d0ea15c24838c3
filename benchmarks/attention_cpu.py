"""What an attention step costs on the CPU over the bare ATen kernel on the same block: ratios, measured in pairs.

    python benchmarks/attention_cpu.py [--rounds 30] [--lengths 512 1024] [--dtype float32]

One thread. Each round runs the step and the kernel one after the other, in turns first; the ratio is the median of the
rounds' ratios of CPU time, which other work on the machine disturbs less than the clock. Steps: `fresh` starts a state,
`carried` merges with one, `backward` has the global out and lse; the kernel has the same tensors, and its output is
used as it is. `of_full` is the time of a causal and of a window step over that of the full one on the same rows and
columns, `live` the share of pairs that attend: a step that computed the dead part would have 1.

One line of text for each case, and last one JSON object {"cases": [{step, mask, length, heads, head_dim, dtype, ratio,
milliseconds}, …], "dead_part": [{mask, length, of_full, live}, …], "machine": …}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import evocompile.kernels.attention  # noqa: F401  registers the operators

ops, aten = torch.ops.evocompile, torch.ops.aten
SCALE = 0.125


def paired(one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median ratio of the CPU times of `one` and `other`, and the median milliseconds of `one`."""
    ratios, times = [], []
    for index in range(rounds + 2):
        seconds = {}
        for call in (one, other) if index % 2 else (other, one):
            start = time.process_time()
            call()
            seconds[call] = time.process_time() - start
        if index >= 2:  # the first rounds warm up
            ratios.append(seconds[one] / seconds[other])
            times.append(seconds[one] * 1e3)
    return statistics.median(ratios), statistics.median(times)


def cases(length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Steps of `length` rows and columns: all that attend, and the diagonal block of a causal mask."""
    q, d_out = (torch.randn(1, heads[0], length, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, heads[1], length, head_dim, dtype=dtype) for _ in range(2))
    rows = [length, 2 * length]
    before = ops.attention_step(q, k, v, [], None, None, "True", rows, [0, length], SCALE)
    found = []
    for mask, columns in (("True", [0, length]), ("k <= q", rows)):
        where = mask, rows, columns, SCALE
        causal = mask != "True"
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=SCALE)
        state = out.float().contiguous(), lse.contiguous()

        def kernel(causal: bool = causal) -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=SCALE)

        def backward_kernel(causal: bool = causal, out: Any = out, lse: Any = lse) -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out, q, k, v, out, lse, 0.0, causal, scale=SCALE
            )

        steps: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
            ("fresh", lambda where=where: ops.attention_step(q, k, v, [], None, None, *where), kernel),
            ("carried", lambda where=where: ops.attention_step(q, k, v, [], *before, *where), kernel),
            (
                "backward",
                lambda where=where, state=state: ops.attention_backward_step(d_out, q, k, v, *state, [], *where),
                backward_kernel,
            ),
        ]
        for name, step, bare in steps:
            ratio, milliseconds = paired(step, bare, rounds)
            found.append(
                {
                    "step": name,
                    "mask": mask,
                    "length": length,
                    "heads": f"{heads[0]}/{heads[1]}",
                    "head_dim": head_dim,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ratio": round(ratio, 3),
                    "milliseconds": round(milliseconds, 2),
                }
            )
            print(found[-1], flush=True)
    return found


def dead_part(length: int, rounds: int) -> list[dict[str, Any]]:
    """Time of steps that are partly dead over that of a full one."""
    q, k, v = (torch.randn(1, 4, length, 64) for _ in range(3))
    where = [0, length], [0, length], SCALE
    found = []
    window = length // 4
    for mask, pairs in (
        ("k <= q", length * (length + 1) // 2),
        (f"(k <= q) & (k > q - {window})", window * (window + 1) // 2 + (length - window) * window),
    ):
        ratio, _ = paired(
            lambda mask=mask: ops.attention_step(q, k, v, [], None, None, mask, *where),
            lambda: ops.attention_step(q, k, v, [], None, None, "True", *where),
            rounds,
        )
        found.append({"mask": mask, "length": length, "of_full": round(ratio, 3), "live": round(pairs / length**2, 3)})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = []
    for length in options.lengths:
        for heads in ((4, 4), (8, 2)):
            found += cases(length, heads, 64, getattr(torch, options.dtype), options.rounds)
    dead = dead_part(2 * max(options.lengths), max(3, options.rounds // 8))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"cases": found, "dead_part": dead, "machine": machine}))


if __name__ == "__main__":
    main()
