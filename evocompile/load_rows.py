"""Weights from safetensors files into a parallelised model on `meta`: each rank reads its own rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import StateError
from .safetensors_files import Entry, entries
from .state import as_gradient, local_shard, shard_rows
from .torch_private import Slot, tensor_slots


def load_rows(model: nn.Module, path: str | Path, device: torch.device) -> set[int]:
    """Give every parameter and buffer on `meta` whose name is in the files its memory and values.

    Held on the way: one shard of the files' type, beside the model's own shards. Returns the ids of what has values.
    """
    found = entries(path)
    places: dict[int, list[Slot]] = {}
    for slot in tensor_slots(model):
        if slot.tensor is not None and slot.tensor.device.type == "meta":
            places.setdefault(id(slot.tensor), []).append(slot)
    loaded, used = set(), set()
    for slots in places.values():
        names = [slot.name for slot in slots if slot.name in found]  # files hold tied weights under one of their names
        used |= set(names)
        if not names:
            continue
        tensor = slots[0].tensor
        assert tensor is not None
        _check_shape(names[0], tensor, found[names[0]], path)
        if isinstance(tensor, DTensor):
            put_shard(tensor, _shard(tensor, found[names[0]], device))
        else:
            tensor = found[names[0]].whole().to(device, tensor.dtype)
            for slot in slots:
                slot.holder[slot.key] = tensor
        loaded.add(id(tensor))
    _warn_of_unused(set(found) - used, model, path)
    return loaded


def put_shard(parameter: DTensor, shard: DTensor) -> None:
    """Give a parameter another tensor; the object, its `requires_grad` and its attributes stay."""
    attributes = dict(vars(parameter))
    torch.utils.swap_tensors(parameter, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    vars(parameter).update(attributes)


def names_on_meta(model: nn.Module) -> list[str]:
    return [slot.name for slot in tensor_slots(model) if slot.tensor is not None and slot.tensor.device.type == "meta"]


def _shard(parameter: DTensor, entry: Entry, device: torch.device) -> DTensor:
    mesh = parameter.device_mesh
    if parameter.placements[-1].is_shard():
        last = mesh.ndim - 1
        local = entry.rows(*shard_rows(entry.shape[0], mesh.size(last), mesh.get_local_rank(last)))
    else:
        local = entry.whole()
    assert local.shape == local_shard(parameter.detach()).shape
    shard = as_gradient(parameter, local.to(device, parameter.dtype))
    assert isinstance(shard, DTensor)
    return shard


def _check_shape(name: str, tensor: Tensor, entry: Entry, path: str | Path) -> None:
    if tuple(tensor.shape) != entry.shape:
        raise StateError(f"{name!r} is {tuple(tensor.shape)} in the model and {entry.shape} in {path}")


def _warn_of_unused(names: Iterable[str], model: nn.Module, path: str | Path) -> None:
    unused = sorted(set(names) - set(model.state_dict(keep_vars=True)))
    if unused and dist.get_rank() == 0:
        warnings.warn(
            f"the model has no place for {len(unused)} of the weights in {path}: {', '.join(unused[:5])}. Names have "
            "to be those of the model's state_dict; transformers' from_pretrained and save_pretrained with "
            "save_original_format=False rename older ones",
            stacklevel=4,
        )
