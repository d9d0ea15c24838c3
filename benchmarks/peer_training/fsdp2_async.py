"""FSDP2 with its private asynchronous unshard, and each layer's gather started in the layer before it."""

from itertools import pairwise

from torch import nn

from . import fsdp2
from .workload import Batch, Training


def prepare(model: nn.Module, batch: Batch) -> Training:
    training = fsdp2.prepare(model, batch)
    layers = list(model.model.layers)
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(layers[:1])
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    return training
