"""What the schemas of all attention operators share, and their fakes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .form import Form
from .steps import contiguous, gradients_like, trained

FORM = "Tensor[]? params=None, Tensor? seed=None, str score='s', float dropout=0.0"
TRAINED = "int trained=0"


def as_operands(gradients: Sequence[Tensor], q: Tensor, form: Form) -> list[Tensor]:
    """Gradients contiguous and in the dtypes of what they are gradients of."""
    dtypes = [q.dtype] * 3 + [each.dtype for each in trained(form)]
    return [contiguous(each, dtype) for each, dtype in zip(gradients, dtypes, strict=True)]


def operands_like(q: Tensor, k: Tensor, v: Tensor, trained: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised gradients as of `as_operands`."""
    return gradients_like(q.dtype, q, k, v) + [each.new_empty(each.shape) for each in trained]
