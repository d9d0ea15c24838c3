"""Hugging Face's Accelerate, and its Trainer: what keeps them from wrapping the model and splitting the batches."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import StateError
from .runtime import parallel_forward


def adapt(accelerator: Any) -> Any:
    """Let an `accelerate.Accelerator` take parallelised models and their batches as they are; returns it.

    By itself it wraps a model in DistributedDataParallel, which refuses `DTensor` parameters, and gives each rank
    other batches. Afterwards, of this one object, `prepare` (and `prepare_model`, `prepare_data_loader`)

    - leaves a parallelised model as it is, but for autocast when the accelerator has `mixed_precision`;
    - gives every rank each whole batch, as a model with `inputs="global"` takes it, and counts it once: a prepared
      schedule moves once for each step.

    The rest is Accelerate's own: optimizer, schedule, accumulation, clipping, logging. Of a Trainer it is
    `adapt(trainer.accelerator)`. Raises StateError for a model in `prepare` that is not parallelised.
    """
    prepare_model = accelerator.prepare_model

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

    accelerator.dataloader_config.split_batches = True  # Accelerate's name for: a loader's batch is the global one
    accelerator.prepare_model = as_it_is
    accelerator.prepare_data_loader = whole_batches
    return accelerator
