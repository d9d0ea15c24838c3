"""What an attention step needs beside its operands and results while it runs: masks of blocks, results to be merged.

Found by running the operator's own function on fake tensors and counting what its operators allocate. On CPU: on CUDA a
step is one kernel, which evaluates masks in registers (docs/kernels.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import torch_private
from .kernels import dispatch
from .kernels.band import forget_bands

STEPS = ("evocompile::attention_step", "evocompile::attention_backward_step")


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators allocate under this mode, each once, until they are freed.

    now, peak: bytes. Tensors that existed before are not counted; those inside of evocompile's operators are.
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


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


class Workspaces:
    """The bytes of steps, each kind found once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, node: fx.Node) -> int:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name not in STEPS or dispatch.forced() == "triton":
            return 0
        values: tuple[Any, dict[str, Any]] = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        if any(each.device.type != "cpu" for each in _tensors(values)):
            return 0
        key = (name, repr([_described(each) for each in tree_leaves(values)]))
        if key not in self._known:
            self._known[key] = _workspace(node.target, *values)
        return self._known[key]


def _described(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _workspace(operator: Any, args: Any, kwargs: Any) -> int:
    forget_bands()  # real ones must not meet fake ones
    try:
        with torch_private.new_fake_mode(), LiveBytes() as live:
            args, kwargs = tree_map_only(Tensor, _like, (args, kwargs))
            before = live.now
            live.peak = before
            results = torch_private.implementation(operator)(*args, **kwargs)
            return live.peak - before - sum(each.untyped_storage().nbytes() for each in _tensors(results))
    finally:
        forget_bands()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
