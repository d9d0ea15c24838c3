"""Hugging Face's Accelerate, and its Trainer: what keeps them from wrapping the model and splitting the batches, and
lets them save and load it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import StateError
from .runtime import parallel_forward
from .unsharded import unsharded
from .whole_values import give_whole_states_once, take_whole_states, whole_values


def adapt(target: Any) -> Any:
    """Let an `accelerate.Accelerator`, or a `transformers.Trainer`, train and save parallelised models; returns it.

    By itself Accelerate wraps a model in DistributedDataParallel, which refuses `DTensor` parameters, gives each rank
    other batches, and saves what rank 0 holds. Afterwards, of this one object, `prepare` (and `prepare_model`, …)

    - leaves a parallelised model as it is, but for autocast when the accelerator has `mixed_precision`;
    - gives every rank each whole batch, as a model with `inputs="global"` takes it, and counts it once: a prepared
      schedule moves once for each step;

    and `save_state`, `load_state`, `get_state_dict` write and read whole tensors, in Accelerate's own files. Rank 0
    holds the model, or the optimizer's state, whole in host memory meanwhile; `Checkpoints` does without.

    Of a Trainer that is its accelerator, and its own checkpoints (`save_strategy`, `resume_from_checkpoint`) and
    `save_model`: every rank holds the whole model while it is saved. Any other number of ranks, or one device without
    evocompile, can resume from them.

    The rest is the library's own: optimizer, schedule, accumulation, clipping, logging. Raises StateError for a model
    that is not parallelised: in `prepare`, or at once if it is a Trainer's.
    """
    if not hasattr(target, "accelerator"):
        return _adapt_accelerator(target)
    _adapt_accelerator(target.accelerator)
    return _adapt_trainer(target)


def _adapt_accelerator(accelerator: Any) -> Any:
    prepare_model, get_state_dict = accelerator.prepare_model, accelerator.get_state_dict
    prepare_optimizer = accelerator.prepare_optimizer

    def as_it_is(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        if parallel_forward(model) is None:
            raise StateError("an accelerator after adapt() prepares parallelised models: call parallelize() before")
        return prepare_model(model, device_placement=False, evaluation_mode=True)  # wrapped are those to be trained

    def whole_batches(loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        from accelerate.data_loader import prepare_data_loader

        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),  # rank 0's generators on all ranks, so the same order
            dispatch_batches=False,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )

    def with_whole_states(optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = prepare_optimizer(optimizer, device_placement=device_placement)
        take_whole_states(prepared.optimizer)
        return prepared

    def whole_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        own = model.state_dict(keep_vars=True)
        names: dict[str, str] = {}
        first: dict[int, str] = {}
        state = get_state_dict(model, unwrap=unwrap)
        for name in state:  # tied values stay one tensor, which Accelerate writes once
            names[name] = first.setdefault(id(own[name]), name)
        whole = whole_values({name: state[name] for name in names.values()}, keep=accelerator.is_local_main_process)
        return OrderedDict((name, whole[tied]) for name, tied in names.items())  # its mark of a model's state

    def before_saving(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        for each in accelerator._optimizers:  # as save_state does next
            give_whole_states_once(each.optimizer, keep=accelerator.is_local_main_process)

    def before_loading(models: list[nn.Module], folder: str) -> None:
        for number, model in enumerate(models):
            _load_weights(model, Path(folder), f"_{number}" if number else "")
        models.clear()  # so that load_state, which writes to plain tensors, finds nothing left to do

    accelerator.dataloader_config.split_batches = True  # Accelerate's name for: a loader's batch is the global one
    accelerator.prepare_model = as_it_is
    accelerator.prepare_data_loader = whole_batches
    accelerator.prepare_optimizer = with_whole_states
    accelerator.get_state_dict = whole_state_dict
    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
    return accelerator


def _load_weights(model: nn.Module, folder: Path, suffix: str) -> None:
    """The weights as `save_state` has written them, here or on one device; tied ones are there under one name."""
    from safetensors.torch import load_file

    safe, pickled = folder / f"model{suffix}.safetensors", folder / f"pytorch_model{suffix}.bin"
    weights = load_file(safe) if safe.exists() else torch.load(pickled, map_location="cpu", weights_only=True)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in weights if name in own}
    missing = [name for name in missing if id(own[name]) not in given]
    if missing or unexpected:
        raise StateError(f"{folder} is of another model: it lacks {missing[:3]}, the model lacks {unexpected[:3]}")


def _adapt_trainer(trainer: Any) -> Any:
    if parallel_forward(trainer.model) is None:
        raise StateError("adapt() takes a Trainer of a parallelised model: call parallelize() before")
    save_model = trainer.save_model

    def save_whole_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        """On all ranks, as Trainer calls it; rank 0 writes. With _internal_call the optimizer is saved next."""
        with unsharded(trainer.model):
            save_model(output_dir, _internal_call=_internal_call)
        if _internal_call and not trainer.args.save_only_model:
            give_whole_states_once(trainer.optimizer.optimizer, keep=trainer.args.should_save)

    trainer.save_model = save_whole_model
    return trainer
