"""Compiling the kernels ahead of time, for architectures that need not be there: registers, stack, instructions.

    python -m evocompile.kernels.triton.aot sm_90 sm_100      # one JSON object per line
    python -m evocompile.kernels.triton.aot sm_90:32,256      # for these head dims, the MASKED variants alone

Cannot share a process with Triton's interpreter. Results are kept in TRITON_CACHE_DIR.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import tiles
from .backward import attention_backward_dkdv, attention_backward_dq, attention_backward_prepare
from .forward import attention_forward
from .tuning import blocks_for

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
GROUP = 4
_FUNCTIONS: dict[str, Any] = {
    "forward": attention_forward,
    "specialised": attention_forward,
    "dkdv": attention_backward_dkdv,
    "dq": attention_backward_dq,
    "prepare": attention_backward_prepare,
}
_TILES = {"q": "BLOCK_M", "k": "BLOCK_N", "v": "BLOCK_N", "d_out": "BLOCK_M"}
_FP32 = ("carried_out", "carried_lse", "lse", "lse2", "delta", "dk", "dv", "dq", "slopes")
_INT32 = ("work", "q_pos", "k_pos", "q_doc", "k_doc")


class Kernel(NamedTuple):
    """One variant. name: of the kernel. masked: causal, with a carried state; else FULL."""

    name: str
    arch: str
    head_dim: int
    masked: bool = False
    dtype: str = "bf16"
    read: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.name == "prepare" else f"{self.name} {'MASKED' if self.masked else 'FULL'}"


def kernels(arch: str, head_dims: tuple[int, ...] = (64, 128)) -> list[Kernel]:
    """What the table shows for an architecture."""
    names = ["forward", *(["specialised"] if arch == "sm_90" else []), "dkdv", "dq"]
    found = [Kernel(name, arch, dim, masked) for dim in head_dims for name in names for masked in (False, True)]
    found = [each for each in found if not (each.name == "specialised" and each.masked)]  # does not compile
    return found + [Kernel("prepare", arch, dim) for dim in head_dims]


def report(kernel: Kernel) -> dict[str, Any]:
    """Compile a kernel and say what it uses. stack_bytes: spilled registers, per thread."""
    compiled = compile_kernel(kernel)
    usage = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return {
        "name": kernel.label,
        "arch": kernel.arch,
        "head_dim": kernel.head_dim,
        "dtype": kernel.dtype,
        "blocks": _constants(kernel).get("BLOCK_M"),
        "registers": usage["REG"],
        "shared_bytes": compiled.metadata.shared,
        "stack_bytes": usage["STACK"],
        "wgmma": "wgmma.mma_async" in ptx,
        "tma": "cp.async.bulk.tensor" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
        "setmaxnreg": "setmaxnreg" in ptx,
        "config": "{}x{}, {} warps, {} stages".format(*_blocks(kernel)) if kernel.name != "prepare" else "128, 4 warps",
    }


def compile_kernel(kernel: Kernel) -> Any:
    function, constants = _FUNCTIONS[kernel.name], _constants(kernel)
    signature = {name: _type(name, kernel, constants) for name in function.arg_names}
    # Pointers are aligned, and so are strides, as `launch._describable` asks of descriptors.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or (re.fullmatch(r"[qkvdo]_[bhs]", name) and signature[name] == "i32")
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    blocks = _blocks(kernel)
    options = {"num_warps": blocks[2], "num_stages": blocks[3], "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", int(kernel.arch[3:]), 32), options=options)


def _blocks(kernel: Kernel) -> tuple[int, int, int, int]:
    if kernel.name == "prepare":
        return 128, 0, 4, 2
    itemsize = 4 if kernel.dtype == "fp32" else 2
    return blocks_for(kernel.name, int(kernel.arch[3:]) // 10, triton.next_power_of_2(kernel.head_dim), itemsize)


def _read(kernel: Kernel) -> int:
    if kernel.read is not None:
        return kernel.read
    if kernel.name == "specialised":
        return tiles.DEVICE_DESCRIPTORS.value
    bulk = int(kernel.arch[3:]) >= 90 and kernel.dtype != "fp32"  # as `launch._readable` chooses
    return tiles.DESCRIPTORS.value if bulk else tiles.POINTERS.value


def _constants(kernel: Kernel) -> dict[str, Any]:
    rows, columns, _, _ = _blocks(kernel)
    padded = triton.next_power_of_2(kernel.head_dim)
    known: dict[str, Any] = {
        "GROUP": GROUP,
        "HEAD_DIM": kernel.head_dim,
        "VALUE_DIM": kernel.head_dim,
        "BLOCK_D": padded,
        "BLOCK_E": padded,
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "CARRIED": True,
        "ACCUMULATE": True,
        "MASKED": kernel.masked,
        "HAS_LOWER": False,
        "HAS_UPPER": kernel.masked,
        "DOCUMENTS": False,
        "SOFTCAP": False,
        "SLOPES": False,
        "EVEN": True,
        "READ": _read(kernel),
        "PRECISION": "tf32x3" if kernel.dtype == "fp32" else "tf32",
        "SPECIALIZE": kernel.name == "specialised",
    }
    return {name: known[name] for name in _FUNCTIONS[kernel.name].arg_names if name in known}


def _type(name: str, kernel: Kernel, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _TILES and kernel.name != "prepare":
        if constants["READ"] == tiles.DESCRIPTORS.value:
            padded = constants["BLOCK_E" if name in ("v", "d_out") else "BLOCK_D"]
            return f"tensordesc<{kernel.dtype}[1,1,{constants[_TILES[name]]},{padded}]>"
        return f"*{kernel.dtype}"
    if name in _FP32 or (name == "out" and kernel.name != "prepare"):
        return "*fp32"
    if name in _INT32:
        return "*i32"
    if name in ("out", "d_out"):
        return f"*{kernel.dtype}"
    return "fp32" if name in ("scale", "softcap") else "i32"


def _usage(cubin: bytes) -> dict[str, int]:
    """Resources of the one kernel of a cubin, by cuobjdump's names."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def _reports(wanted: list[str]) -> Iterator[dict[str, Any]]:
    for each in wanted:
        arch, _, dims = each.partition(":")
        if dims:
            found = [kernel for kernel in kernels(arch, tuple(map(int, dims.split(",")))) if kernel.masked]
        else:
            found = kernels(arch)
        yield from map(report, found)


if __name__ == "__main__":
    for line in _reports(sys.argv[1:] or list(ARCHITECTURES)):
        print(json.dumps(line), flush=True)
