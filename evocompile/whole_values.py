"""Whole values in and out of shards, by torch's own hooks around `state_dict` and `load_state_dict`.

So that libraries whose checkpoints are files of whole tensors can write and read those of a parallelised model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def rows_of(shard: DTensor, whole: Tensor) -> DTensor:
    """A whole tensor, cut as the shard is; without communication, so all ranks have to pass the same."""
    return distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)


def whole_values(values: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """The values with each `DTensor` whole, in host memory; an empty tensor on ranks that do not keep it. Collective.

    One after the other, so that a device holds at most one of them whole.
    """
    return {name: _whole(value, keep) if isinstance(value, DTensor) else value for name, value in values.items()}


def _whole(value: DTensor, keep: bool) -> Tensor:
    whole: Tensor = value.full_tensor().detach()
    return whole.to("cpu", copy=True) if keep else whole.new_empty(0, device="cpu")


# --- models ----------------------------------------------------------------------------------------------------------


def take_whole_values(module: nn.Module) -> None:
    """Let `load_state_dict`, of the module and its parts, take whole tensors for shards: each rank keeps its rows."""
    for each in module.modules():
        if each._parameters:
            each.register_load_state_dict_pre_hook(_cut)


def _cut(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """A pre-hook of `load_state_dict`. What does not fit is left for torch to say; what is to be assigned, as it is."""
    if metadata.get("assign_to_params_buffers"):
        return
    for name, shard in module._parameters.items():
        whole = state.get(prefix + name)
        if isinstance(shard, DTensor) and not shard.is_meta and _is_whole(whole, shard):
            state[prefix + name] = rows_of(shard, whole.to(shard.device))


def _is_whole(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape


# --- optimizers ------------------------------------------------------------------------------------------------------


def take_whole_states(optimizer: Optimizer) -> None:
    """Let `optimizer.load_state_dict` take states that are whole tensors: each rank keeps its rows of them."""
    optimizer.register_load_state_dict_pre_hook(_cut_states)


def _cut_states(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    cut = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # torch says itself where they do not fit
        if isinstance(parameter, DTensor) and number in cut:
            cut[number] = {
                name: rows_of(parameter, value.to(parameter.device))
                if name != "step" and _is_whole(value, parameter)
                else value
                for name, value in cut[number].items()
            }
    return {**state, "state": cut}


def give_whole_states_once(optimizer: Optimizer, *, keep: bool) -> None:
    """The next `optimizer.state_dict()`, on ranks that keep them, has whole tensors in host memory. Collective.

    They are gathered now, as libraries may ask for the state on one rank alone.
    """
    whole = {number: whole_values(each, keep=keep) for number, each in optimizer.state_dict()["state"].items()}
    if keep:

        def give(optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
            handle.remove()
            return {**found, "state": whole}

        handle = optimizer.register_state_dict_post_hook(give)
