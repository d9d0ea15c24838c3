"""Bytes of tensors that are alive, counted as operators make them: what an allocator's statistics say on a card."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evocompile import torch_private


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators allocate under this mode, each once, until they are freed.

    now, peak: bytes. Tensors that existed before are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "evocompile":  # one of our own, in which further operators run
            with self:
                result = torch_private.implementation(func)(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
