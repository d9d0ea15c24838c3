"""In which types a model computes, its gradients are summed over ranks, and are accumulated over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import PlanError

_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """Dtypes, or their names ("bf16", "fp16", "fp32"). `None` everywhere is the model as it was written.

    compute:    floating-point parameters and inputs of a call are cast to it; the optimizer keeps the parameters in
                their own dtype, and gathers move this one. `None`: as the parameters are.
    reduce:     in which gradients are summed over ranks. `None`: the gradient's own, but never below float32.
    accumulate: in which gradients are summed over micro-batches. `None`: the gradient's own, but never below float32.
    """

    compute: torch.dtype | str | None = None
    reduce: torch.dtype | str | None = None
    accumulate: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "accumulate"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))

    @staticmethod
    def of(value: Precision | torch.dtype | str | None) -> Precision:
        """What `parallelize(precision=…)` was given: a Precision, or the type to compute in."""
        return value if isinstance(value, Precision) else Precision(compute=value)

    def computes(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a parameter or an input of `dtype` takes part in the computation."""
        wanted = self.compute
        return wanted if isinstance(wanted, torch.dtype) and dtype.is_floating_point else dtype

    def reduces(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a gradient of `dtype` is summed over ranks."""
        return self.reduce if isinstance(self.reduce, torch.dtype) else _at_least_float32(dtype)

    def accumulates(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a gradient of `dtype` is summed over micro-batches."""
        return self.accumulate if isinstance(self.accumulate, torch.dtype) else _at_least_float32(dtype)


def _dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    dtype = _NAMES.get(value) if isinstance(value, str) else value
    if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError(f"precision: {name}={value!r} is no floating-point type; choose 'bf16', 'fp16' or 'fp32'")
    return dtype


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
