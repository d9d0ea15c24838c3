"""One process: the model as it is. What the others are compared with."""

from torch import nn

from .workload import Batch, Training, plain


def prepare(model: nn.Module, batch: Batch) -> Training:
    return plain(model, lambda: model(**batch).loss)
