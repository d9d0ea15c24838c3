"""Batches brought to a few lengths, so that a program is compiled for each length and not for every batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .errors import InputError


def pad_batch(
    batch: Mapping[str, Any],
    values: Mapping[str, float],
    *,
    multiple_of: int | None = None,
    lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The batch, padded on the right of dim 1 (the sequence) to the next multiple or to the next of `lengths`.

    values: for every input that has the sequence as dim 1, what to pad it with:
            {"input_ids": 0, "labels": -100, "attention_mask": 0}. Inputs without that dim stay as they are.

    Whether the result is that of the unpadded batch is up to the model: see docs/inputs.md. Raises InputError for an
    input that has the sequence and no value, and for a batch longer than all `lengths`.
    """
    if (multiple_of is None) == (lengths is None):
        raise InputError("pad_batch() takes either multiple_of=… or lengths=…")
    missing = [name for name in values if not isinstance(batch.get(name), Tensor) or batch[name].ndim < 2]
    if missing or not values:
        raise InputError(
            f"values names {missing or 'nothing'}; name inputs of the batch that have the sequence as dim 1 (the batch "
            f"has {list(batch)})"
        )
    length = {name: batch[name].shape[1] for name in values}
    size = next(iter(length.values()))
    if any(each != size for each in length.values()):
        raise InputError(f"the inputs that are to be padded have different lengths: {length}")
    for name, each in batch.items():
        if name not in values and isinstance(each, Tensor) and size in each.shape[1:]:
            raise InputError(
                f"input {name!r} of shape {tuple(each.shape)} has a dim of the sequence's length {size}, but no value "
                "to be padded with: add it to values if that is dim 1, or build it after padding"
            )
    target = _target(size, multiple_of, lengths)
    return {
        name: F.pad(each, [0, 0] * (each.ndim - 2) + [0, target - size], value=values[name]) if name in values else each
        for name, each in batch.items()
    }


def _target(size: int, multiple_of: int | None, lengths: Sequence[int] | None) -> int:
    if multiple_of is not None:
        return -(-size // multiple_of) * multiple_of
    assert lengths is not None
    fitting = [length for length in lengths if length >= size]
    if not fitting:
        raise InputError(f"the batch has {size} positions, more than every one of lengths={list(lengths)}")
    return min(fitting)
