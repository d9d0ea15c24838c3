"""Block sizes by architecture, kernel and head dim: (rows M, columns N, warps, stages).

How the entries were found: by compiling ahead of time (`benchmarks/kernels.py --aot`, triton 3.9) and reading
registers, stack and shared memory; of the blocks that were tried, the largest that leave the stack at 0 (no spills)
within the shared memory of a block, 227 KiB from sm_90 on and 163 KiB on sm_80. With 4-byte inputs, and at head dim 256
on sm_100, a few hundred bytes stay on the stack. No entry has been timed on a card yet.
"""

from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


# kernel -> (largest padded head dim -> blocks), for 2-byte inputs
_HOPPER = {
    "forward": {64: Blocks(128, 128, 8, 2), 128: Blocks(128, 128, 8, 2), 256: Blocks(128, 32, 8, 2)},
    "specialised": {64: Blocks(128, 128, 4, 2), 128: Blocks(128, 128, 4, 2)},
    "dkdv": {64: Blocks(64, 128, 8, 2), 128: Blocks(64, 64, 8, 2), 256: Blocks(32, 32, 8, 1)},
    "dq": {64: Blocks(128, 64, 8, 2), 128: Blocks(128, 64, 8, 2), 256: Blocks(64, 32, 8, 2)},
}
_AMPERE = {
    "forward": {64: Blocks(128, 64, 4, 3), 128: Blocks(128, 32, 8, 3), 256: Blocks(64, 32, 8, 2)},
    "dkdv": {64: Blocks(32, 64, 4, 2), 128: Blocks(32, 64, 8, 2), 256: Blocks(32, 32, 8, 1)},
    "dq": {64: Blocks(64, 64, 8, 2), 128: Blocks(64, 32, 8, 2), 256: Blocks(32, 32, 8, 1)},
}
_SINGLE = {  # 4-byte inputs: products in three passes of tf32
    "forward": {64: Blocks(64, 32, 4, 2), 128: Blocks(64, 32, 8, 2), 256: Blocks(32, 32, 8, 1)},
    "dkdv": {64: Blocks(32, 32, 4, 1), 128: Blocks(32, 32, 8, 1), 256: Blocks(16, 16, 8, 1)},
    "dq": {64: Blocks(32, 32, 4, 1), 128: Blocks(32, 32, 8, 1), 256: Blocks(16, 16, 8, 1)},
}
_INTERPRETER = {kernel: {256: Blocks(32, 16, 4, 1)} for kernel in ("forward", "dkdv", "dq")}


def blocks_for(kernel: str, major: int | None, padded_dim: int, itemsize: int) -> Blocks:
    """major: of the compute capability; None in the interpreter, where small blocks make small cases have several."""
    if major is None:
        table = _INTERPRETER
    elif itemsize == 4:
        table = _SINGLE
    else:
        table = _HOPPER if major >= 9 else _AMPERE
    found = table[kernel]
    return found[min(limit for limit in found if padded_dim <= limit)]
