"""Why a backend does not serve a case: a function for each, which imports nothing of the backend.

The limits are those of the libraries' own checks: flash-attn 2.8 (`csrc/flash_attn/flash_api.cpp`), 3
(`hopper/flash_api.cpp`) and 4 (`flash_attn/cute/interface.py`), and of torch 2.13.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .dispatch import Case

_HALVES = (torch.float16, torch.bfloat16)
_CPU = (torch.float32, torch.float64, *_HALVES)
_ONE_HEAD_DIM = "q and v must have one head dim"


@cache
def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def not_taken(mask: str) -> str | None:
    """Why a kernel that knows no mask tensors, score functions or dropout does not serve a kind of block."""
    if mask == "a tensor":
        return "it takes no mask tensor"
    return "it knows no score function and no dropout" if mask.startswith("any, ") else None


def aten_cpu(case: Case) -> str | None:
    if case.device != "cpu":
        return f"it runs on cpu, not on {case.device}"
    if case.dtype not in _CPU:
        return f"it takes no {_name(case.dtype)}"
    if case.head_dim != case.value_dim:
        return _ONE_HEAD_DIM
    return None if case.mask == "a tensor" else not_taken(case.mask)


def aten_cuda(case: Case) -> str | None:
    return _on_cuda(case, None, (8, 9, 10, 12), 256)


def flash_attn_2(case: Case) -> str | None:
    return _on_cuda(case, "flash_attn.flash_attn_interface", (8, 9, 10, 12), 256)


def flash_attn_3(case: Case) -> str | None:
    return _on_cuda(case, "flash_attn_interface", (9,), 256)


def flash_attn_4(case: Case) -> str | None:
    return _on_cuda(case, "flash_attn.cute.interface", (9, 10), 128)


def _on_cuda(case: Case, module: str | None, majors: tuple[int, ...], largest: int) -> str | None:
    """What the CUDA libraries have in common: halves only, no mask tensor, head dims in steps of 8.

    majors: of the compute capabilities that it has kernels for.
    """
    if case.device != "cuda":
        return f"it runs on cuda, not on {case.device}"
    if module and not importable(module):
        return f"{module} is not installed"
    if case.capability is None or case.capability[0] not in majors:
        return f"it has kernels for compute capability {', '.join(f'{major}.x' for major in majors)}"
    if case.dtype not in _HALVES:
        return f"it takes float16 and bfloat16, not {_name(case.dtype)}"
    if case.head_dim > largest or case.head_dim % 8:
        return f"head dims are multiples of 8 up to {largest}"
    if case.head_dim != case.value_dim:
        return _ONE_HEAD_DIM
    if case.mask in ("True", "k <= q"):
        return None
    return not_taken(case.mask) or "it serves full and causal blocks"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
