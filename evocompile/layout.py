"""Layouts: what part of a global tensor a rank holds, by logical axes instead of dimensions.

A dimension is a tuple of *factors* in row-major order; a factor has a size and may belong to a logical axis
("batch", "seq"). A plan splits logical axes over mesh axes. Because axes, not dimensions, carry the split,
`view(B * S, D)` of a `(B, S, D)` tensor is no special case: its first dimension is `(batch, seq)`.

Shards need not be equal: every rank knows the exact intervals of positions that each rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

Interval = tuple[int, int]  # half-open: lo <= position < hi


@dataclass(frozen=True)
class Axis:
    """A logical axis, or the window [start, start + size) of one: what `x[:, 1:]` leaves of "seq"."""

    name: str
    size: int
    start: int = 0

    def __str__(self) -> str:
        return self.name if not self.start else f"{self.name}+{self.start}"


@dataclass(frozen=True)
class Split:
    """How the plan spreads one logical axis: over which mesh axis, how many ways, in which order.

    order: "contiguous" (rank i holds chunk i of P) or "zigzag" (rank i holds chunks i and 2P-1-i of 2P).
    size:  number of positions of the whole axis.
    parts: the sizes of the contiguous chunks where they are given; () makes them as equal as possible.
    inner_axis, inner: a second mesh axis and its degree, if there is one: each interval of a coordinate of `mesh_axis`
           is cut again, in order, as equally as possible, over the coordinates of `inner_axis`.
    innermost_axis, innermost: a third one, likewise.
    """

    mesh_axis: str
    degree: int
    order: str
    size: int
    parts: tuple[int, ...] = ()
    inner_axis: str = ""
    inner: int = 1
    innermost_axis: str = ""
    innermost: int = 1

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the positions are spread, outermost first."""
        return tuple(axis for axis in (self.mesh_axis, self.inner_axis, self.innermost_axis) if axis)

    def finer(self, mesh_axis: str, degree: int) -> Split:
        """The same, with every interval cut once more over another mesh axis."""
        if self.inner_axis:
            return replace(self, innermost_axis=mesh_axis, innermost=degree)
        return replace(self, inner_axis=mesh_axis, inner=degree)

    def held(self, coordinate: Mapping[str, int]) -> tuple[Interval, ...]:
        """The positions of the rank at `coordinate` of the mesh, ascending, empty intervals left out."""
        inner = coordinate[self.inner_axis] if self.inner_axis else 0
        parts = self.intervals(coordinate[self.mesh_axis], inner)
        return _cut(parts, coordinate[self.innermost_axis], self.innermost) if self.innermost_axis else parts

    def intervals(self, index: int, inner_index: int = 0) -> tuple[Interval, ...]:
        """As `held`, by the coordinates of `mesh_axis` and `inner_axis`."""
        return _cut(self.outer_intervals(index), inner_index, self.inner)

    def outer_intervals(self, index: int) -> tuple[Interval, ...]:
        """The positions that coordinate `index` of `mesh_axis` holds, all coordinates of `inner_axis` together."""
        if self.parts:
            lo = sum(self.parts[:index])
            return ((lo, lo + self.parts[index]),) if self.parts[index] else ()
        if self.order == "contiguous":
            chunks, count = [index], self.degree
        else:
            chunks, count = [index, 2 * self.degree - 1 - index], 2 * self.degree
        intervals = [(self.size * c // count, self.size * (c + 1) // count) for c in chunks]
        if len(intervals) == 2 and intervals[0][1] == intervals[1][0]:  # the two middle chunks touch
            intervals = [(intervals[0][0], intervals[1][1])]
        return tuple((lo, hi) for lo, hi in intervals if lo < hi)


def _cut(intervals: tuple[Interval, ...], index: int, degree: int) -> tuple[Interval, ...]:
    """Part `index` of `degree` of each interval."""
    parts = [(lo + (hi - lo) * index // degree, lo + (hi - lo) * (index + 1) // degree) for lo, hi in intervals]
    return tuple((lo, hi) for lo, hi in parts if lo < hi)


SEQUENCE = "seq"  # the axis of a model's main sequence; those of other lengths are "seq2", "seq3", …
FINE = ".tp"  # what the name of an axis ends in that is split over tp besides: "seq.tp" is a finer split of "seq"


def finer(axis: Axis) -> Axis:
    return replace(axis, name=axis.name + FINE)


def is_finer(axis: Axis | None, than: Axis | None) -> bool:
    """Whether the parts of `axis` are parts of those of `than`."""
    return axis is not None and than is not None and axis == finer(than)


@dataclass(frozen=True)
class Factor:
    """One factor of a dimension. `split`: this value holds only the rank's own positions of `axis`."""

    size: int
    axis: Axis | None = None
    split: bool = False

    def __str__(self) -> str:
        name = str(self.axis) if self.axis else str(self.size)
        return f"{name}/" if self.split else name


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Layout:
    """Layout of one tensor: its dimensions, and the mesh axes over whose ranks it still has to be summed."""

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()

    @staticmethod
    def whole(shape: tuple[int, ...] | torch.Size) -> Layout:
        """The layout of a value that every rank holds whole, with no axis named."""
        return Layout(tuple((Factor(int(size)),) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(factor.size for factor in dim) for dim in self.dims)

    @property
    def is_split(self) -> bool:
        return any(factor.split for dim in self.dims for factor in dim)

    @property
    def is_whole(self) -> bool:
        """Every rank holds the complete value."""
        return not self.is_split and not self.partial

    def split_axes(self) -> set[Axis]:
        return {factor.axis for dim in self.dims for factor in dim if factor.split and factor.axis}

    def unsplit(self) -> Layout:
        """The same named axes, held whole."""
        dims = tuple(tuple(replace(factor, split=False) for factor in dim) for dim in self.dims)
        return Layout(dims)

    def reduced(self) -> Layout:
        """The same dimensions after the pending sum."""
        return Layout(self.dims)

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, dim)) for dim in self.dims)
        return f"[{dims}]" + (f" partial({'+'.join(sorted(self.partial))})" if self.partial else "")


@dataclass(frozen=True)
class Sharding:
    """What the plan does to logical axes, seen from one rank: splits by axis name, and this rank's coordinate."""

    splits: Mapping[str, Split]
    coordinate: Mapping[str, int]

    def at(self, coordinate: Mapping[str, int]) -> Sharding:
        """The same splits seen from another rank."""
        return Sharding(self.splits, coordinate)

    def intervals(self, axis: Axis) -> tuple[Interval, ...]:
        """This rank's positions of `axis`, relative to the axis' own start."""
        split = self.splits[axis.name]
        held = split.held(self.coordinate)
        window = [(max(lo - axis.start, 0), min(hi - axis.start, axis.size)) for lo, hi in held]
        return tuple((lo, hi) for lo, hi in window if lo < hi)

    def factor_size(self, factor: Factor) -> int:
        if not factor.split:
            return factor.size
        assert factor.axis is not None
        return sum(hi - lo for lo, hi in self.intervals(factor.axis))

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(math.prod(self.factor_size(factor) for factor in dim) for dim in layout.dims)

    def mesh_axes(self, layout: Layout) -> frozenset[str]:
        """The mesh axes over which a layout's factors are split."""
        return frozenset(mesh_axis for axis in layout.split_axes() for mesh_axis in self.splits[axis.name].mesh_axes)


def local_part(value: torch.Tensor, layout: Layout, sharding: Sharding) -> torch.Tensor:
    """This rank's part of a whole value (the definition of a layout, in eager code)."""
    whole = value.reshape([factor.size for dim in layout.dims for factor in dim])
    factors = [factor for dim in layout.dims for factor in dim]
    for dim, factor in enumerate(factors):
        if factor.split:
            assert factor.axis is not None
            parts = [whole.narrow(dim, lo, hi - lo) for lo, hi in sharding.intervals(factor.axis)]
            whole = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    return whole.reshape(sharding.local_shape(layout))


def whole_from_parts(parts: list[torch.Tensor], shardings: list[Sharding], layout: Layout) -> torch.Tensor:
    """The inverse of `local_part`: the whole value from every rank's part (one rank per distinct part suffices)."""
    factors = [factor for dim in layout.dims for factor in dim]
    whole = parts[0].new_zeros([factor.size for factor in factors])
    for part, sharding in zip(parts, shardings, strict=True):
        local = part.reshape([sharding.factor_size(factor) for factor in factors])
        index = [_positions(factor, sharding, whole.device) for factor in factors]
        if local.numel():
            whole[torch.meshgrid(*index, indexing="ij") if index else ()] = local
    return whole.reshape(layout.shape)


def _positions(factor: Factor, sharding: Sharding, device: torch.device) -> torch.Tensor:
    if not factor.split:
        return torch.arange(factor.size, device=device)
    assert factor.axis is not None
    ranges = [torch.arange(lo, hi, device=device) for lo, hi in sharding.intervals(factor.axis)]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long, device=device)
