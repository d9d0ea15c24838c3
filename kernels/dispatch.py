"""The choice among attention kernels: one contract, several backends, the first that serves a case computes it.

Contract, as of `reference`: q (B, H, S, D), k (B, Hk, T, D), v (B, Hk, T, E), H % Hk == 0, any strides; lse is the
natural log-sum-exp in the accumulation dtype; a row that attends nothing has out 0 and lse -inf, and no gradient;
causal is `column <= row` of the block, top-left aligned (`blocks` puts the corner on the diagonal of the global
positions). What a library does otherwise is normalised in the file of its backend.

There are two levels. A backend with `step` computes a whole step, all its rectangles and the merge with what is carried
(Triton). The others compute one block, a rectangle that is full, causal, or masked by a tensor.

Which one is the backend of `use`, else of the environment variable EVOCOMPILE_ATTENTION_BACKEND, else the first of
`BACKENDS` that serves. One that was asked for and cannot serve is a KernelError; the choice never depends on a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evocompile.errors import KernelError

from . import cpu, flash, reference, refusals
from .form import Form
from .triton import backend as triton

VARIABLE = "EVOCOMPILE_ATTENTION_BACKEND"
# What a block's mask can be (a step's is any predicate), or that its scores are changed or its weights dropped.
FULL, CAUSAL, TENSOR, CHANGED = "True", "k <= q", "a tensor", "any, with a score function or dropout"


class Case(NamedTuple):
    """All that a choice depends on.

    mask: text of a predicate for a step; FULL, CAUSAL, TENSOR or CHANGED for a block.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    mask: str

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim} and {self.value_dim}"
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}, head dim {dims}, mask {self.mask!r}"


class Backend(NamedTuple):
    """refuses: why it does not serve a case, in a few words, or None.

    kernel: has `forward` and `backward` as of `reference`; results may be in q's dtype and not contiguous.
    """

    name: str
    refuses: Callable[[Case], str | None]
    kernel: Any


BACKENDS = (
    Backend("triton", triton.refuses, triton),
    Backend("flash-attn-4", refusals.flash_attn_4, flash.four),
    Backend("flash-attn-3", refusals.flash_attn_3, flash.three),
    Backend("flash-attn-2", refusals.flash_attn_2, flash.two),
    Backend("aten-cuda", refusals.aten_cuda, flash.aten),
    Backend("aten-cpu", refusals.aten_cpu, cpu),
    Backend("reference", lambda case: None, reference),
)
TAKE_STEPS = ("triton",)  # those that compute whole steps
NAMES = tuple(each.name for each in BACKENDS)


def case_of(q: Tensor, v: Tensor, mask: str) -> Case:
    device = q.device.type
    capability = torch.cuda.get_device_capability(q.device) if device == "cuda" else None
    return Case(device, capability, q.dtype, q.shape[-1], v.shape[-1], mask)


def block_kernel(q: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, changes: object | None) -> Any:
    """What has the `forward` and `backward` for this block."""
    kind = CHANGED if changes is not None else TENSOR if mask is not None else CAUSAL if is_causal else FULL
    return choose(case_of(q, v, kind)).kernel


def step_kernel(q: Tensor, v: Tensor, mask: str, form: Form) -> Any | None:
    """What has the `step` and `backward_step` for a whole step under a predicate, or None: then it goes by blocks."""
    return _step_kernel(case_of(q, v, mask), (form.score, form.dropout > 0, form.trained > 0), forced())


@lru_cache(maxsize=1024)
def _step_kernel(case: Case, form: tuple[str, bool, bool], name: str | None) -> Any | None:
    if name not in (None, "triton"):
        return None
    reason = triton.refuses(case) or triton.refuses_form(*form)
    if reason is not None and name == "triton":
        raise _refusal(name, case, reason)
    return triton if reason is None else None


def choose(case: Case) -> Backend:
    """The backend of a block. Raises KernelError where one was asked for that does not serve it."""
    return _choose(case, forced())


def explain(case: Case) -> tuple[str, list[tuple[str, str]]]:
    """The name of the backend that serves when none is asked for, and those before it, each with its reason."""
    passed_over = []
    for each in BACKENDS:
        reason = each.refuses(case)
        if reason is None:
            return each.name, passed_over
        passed_over.append((each.name, reason))
    raise AssertionError("the reference serves everything")


@lru_cache(maxsize=1024)
def _choose(case: Case, name: str | None) -> Backend:
    name = check_name(name) if name else explain(case)[0]
    backend = BACKENDS[NAMES.index(name)]
    reason = backend.refuses(case)
    if reason is not None:
        raise _refusal(name, case, reason)
    return backend


def _refusal(name: str, case: Case, reason: str) -> KernelError:
    return KernelError(
        f"attention backend {name!r}, which was asked for, does not serve {case}: {reason}. Leave out "
        f"parallelize(attention_backend=…) and {VARIABLE} to have one chosen for each block"
    )


# ---- asking for a backend ----

_asked: ContextVar[str | None] = ContextVar("attention_backend", default=None)


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Ask for a backend; `None` leaves things as they are."""
    token = _asked.set(check_name(name)) if name is not None else None
    try:
        yield
    finally:
        if token is not None:
            _asked.reset(token)


def forced() -> str | None:
    return _asked.get() or os.environ.get(VARIABLE) or None


def check_name(name: str) -> str:
    if name not in NAMES:
        raise KernelError(f"attention backend {name!r}: there are {', '.join(NAMES)}")
    return name
