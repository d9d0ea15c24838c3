"""The buffers of one model that gathers and reductions write into, kept from step to step (passes/pool.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .collectives import STARTS
from .program import Buffer

_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class PoolReport:
    """requests: of pooled communications so far. served: those that found their buffer there. bytes: of all buffers."""

    requests: int
    served: int
    buffers: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.buffers} buffers of {self.bytes:,} bytes together have served {self.served:,} of {self.requests:,} "
            "gathers and reductions"
        )


class BufferPool:
    """A buffer is made at its first request. Streams do not share one, as there is no order among them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Buffer, int], Tensor] = {}
        self._requests = 0

    def report(self) -> PoolReport:
        count = len(self._buffers)
        return PoolReport(self._requests, self._requests - count, count, sum(each.bytes for each, _ in self._buffers))

    def resolve(self, taken: Mapping[fx.Node, Buffer]) -> Callable[[fx.Node], Callable[..., Any]]:
        """For `compile_graph`: what executes a boundary, where these starts write into these buffers."""

        def resolve(node: fx.Node) -> Callable[..., Any]:
            assert callable(node.target)
            if node not in taken:
                return node.target
            gathers = STARTS[node.target][0] == "all_gather"
            return functools.partial(self._gather if gathers else self._reduce, taken[node])

        return resolve

    def _gather(self, buffer: Buffer, input: Tensor, group_size: int, group: str) -> Tensor:
        out = self._take(buffer, input, input.shape[0] * group_size)
        return _functional.all_gather_into_tensor_out(input, group_size, group, out=out)

    def _reduce(self, buffer: Buffer, input: Tensor, reduce: str, group_size: int, group: str) -> Tensor:
        out = self._take(buffer, input, input.shape[0] // group_size)
        return _functional.reduce_scatter_tensor_out(input, reduce, group_size, group, out=out)

    def _take(self, buffer: Buffer, like: Tensor, rows: int) -> Tensor:
        """The buffer as a tensor of so many rows as `like` has."""
        self._requests += 1
        stream = torch.cuda.current_stream(like.device).stream_id if like.device.type == "cuda" else 0
        memory = self._buffers.get((buffer, stream))
        if memory is None:
            memory = self._buffers[buffer, stream] = torch.empty(buffer.bytes, dtype=torch.uint8, device=like.device)
        return memory.view(like.dtype).view(rows, *like.shape[1:])
