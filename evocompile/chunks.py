"""A part of a graph that is run for some rows after others, so that what it computes in between never exists whole.

The loop stands in a graph as one call. Its body is a graph of its own at the shapes of one chunk; what depends on where
the chunk lies (a window that ends within it) makes further bodies. Inputs are cut as their layouts say, or come whole;
of what the body returns the parts are put together, and sums over rows are added up in float32 (float64).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .layout import Layout, Sharding, Split

AXIS, MESH_AXIS = "rows", "chunk"  # the logical axis that is cut, and what counts the chunks

Body = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Returned:
    """A value that the loop returns. layout: of one chunk's part; pending over the chunks for a sum."""

    layout: Layout
    dtype: torch.dtype
    device: torch.device

    @property
    def is_sum(self) -> bool:
        return bool(self.layout.partial)

    @property
    def is_cast(self) -> bool:
        """Whether its sum has another type."""
        return self.is_sum and self.sum_dtype != self.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        return summed_in(self.dtype)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of this one are added up."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


@dataclass(frozen=True, eq=False)
class RowLoop:
    """What a graph calls: `loop(*inputs)` gives the list of its results.

    split:  how the axis `rows` is cut into chunks.
    bodies: graphs from a chunk's inputs to its results. numbers: for each chunk the body that it runs.
    given:  the layout of each input; one that is split is cut.
    what:   one phrase, for people.
    """

    split: Split
    bodies: tuple[fx.GraphModule, ...]
    numbers: tuple[int, ...]
    given: tuple[Layout, ...]
    returned: tuple[Returned, ...]
    what: str

    __name__ = "row_loop"

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Runs the bodies as they are, operator by operator."""
        return self._run([_as_body(each) for each in self.bodies], inputs)

    def __repr__(self) -> str:
        return f"<{len(self.numbers)} chunks of {self.what}>"

    def copies(self, index: int) -> bool:
        """Whether a chunk of an input is a copy of its own: where there are rows of several batches."""
        before = itertools.takewhile(lambda f: not f.split, (f for dim in self.given[index].dims for f in dim))
        return self.given[index].is_split and math.prod(factor.size for factor in before) > 1

    def compiled(self, compile_body: Callable[[fx.GraphModule], Body]) -> Callable[..., list[Tensor]]:
        """The loop with compiled bodies."""
        bodies = [compile_body(each) for each in self.bodies]

        def row_loop(*inputs: Tensor) -> list[Tensor]:
            return self._run(bodies, inputs)

        return row_loop

    def _run(self, bodies: Sequence[Body], inputs: Sequence[Tensor]) -> list[Tensor]:
        results = [_empty(each) for each in self.returned]
        for index, number in enumerate(self.numbers):
            sharding = Sharding({AXIS: self.split}, {MESH_AXIS: index})
            parts = [_cut(value, layout, sharding) for value, layout in zip(inputs, self.given, strict=True)]
            for result, part, each in zip(results, bodies[number](parts), self.returned, strict=True):
                if each.is_sum:
                    result.add_(part)
                else:
                    _cut(result, each.layout, sharding, in_place=True).copy_(
                        part.reshape(_factors(each.layout, sharding))
                    )
        return [value.to(each.dtype) for value, each in zip(results, self.returned, strict=True)]


def _as_body(graph_module: fx.GraphModule) -> Body:
    return lambda inputs: graph_module(*inputs)


def _empty(each: Returned) -> Tensor:
    if each.is_sum:
        return torch.zeros(each.layout.shape, dtype=each.sum_dtype, device=each.device)
    return torch.empty(each.layout.shape, dtype=each.dtype, device=each.device)


def _factors(layout: Layout, sharding: Sharding) -> list[int]:
    return [sharding.factor_size(factor) for dim in layout.dims for factor in dim]


def _cut(value: Tensor, layout: Layout, sharding: Sharding, in_place: bool = False) -> Tensor:
    """This chunk's part of a whole value. in_place: as a view, with a dim for each factor."""
    if not layout.is_split:
        return value
    part = value
    for dim in reversed(range(value.ndim)):
        part = part.unflatten(dim, [factor.size for factor in layout.dims[dim]])
    factors = [factor for dim in layout.dims for factor in dim]
    for dim, factor in enumerate(factors):
        if factor.split:
            assert factor.axis is not None
            lo, hi = next(iter(sharding.intervals(factor.axis)), (0, 0))
            part = part.narrow(dim, lo, hi - lo)
    return part if in_place else part.reshape(sharding.local_shape(layout))


def signature(layouts: Sequence[Layout], split: Split, index: int) -> tuple[Any, ...]:
    """Equal for chunks that can run one body: where their positions lie in every window, from the chunk's own start."""
    (start, end) = split.intervals(index)[0]
    axes = {axis for layout in layouts for axis in layout.split_axes()}
    windows = sorted({(axis.start, axis.size) for axis in axes})
    return (end - start, *(tuple(min(max(p - start, 0), end - start) for p in (lo, lo + n)) for lo, n in windows))
