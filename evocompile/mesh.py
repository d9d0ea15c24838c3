"""The mesh of ranks as plain arithmetic. Nothing here needs a process group, so any (world, rank) can be inspected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import PlanError
from .plan import Plan


@dataclass(frozen=True)
class Mesh:
    """Named mesh axes with their degrees, outermost first; rank 0 has coordinate 0 on all of them."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(plan: Plan) -> Mesh:
        """The axis written last varies fastest: its ranks are neighbours."""
        context, heads = ("cp", plan.cp), ("ulysses", plan.ulysses)
        sequence = [context, heads] if plan.placement == "head-first" else [heads, context]
        optional = [axis for axis in (*sequence, ("tp", plan.tp)) if axis[0] == "cp" or axis[1] > 1]
        return Mesh((("dp", plan.dp), *optional))

    @property
    def world(self) -> int:
        world = 1
        for _, degree in self.axes:
            world *= degree
        return world

    def degree(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every mesh axis."""
        if not 0 <= rank < self.world:
            raise PlanError(f"rank {rank} is outside of a world of {self.world}")
        coordinate = {}
        for axis, degree in reversed(self.axes):
            rank, coordinate[axis] = divmod(rank, degree)
        return coordinate

    def rank(self, coordinate: dict[str, int]) -> int:
        rank = 0
        for axis, degree in self.axes:
            rank = rank * degree + coordinate[axis]
        return rank

    def peers(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on `axes`, itself included, ascending."""
        axes = set(axes)
        own = self.coordinate(rank)

        def same(other: int) -> bool:
            coordinate = self.coordinate(other)
            return all(coordinate[axis] == own[axis] for axis in own if axis not in axes)

        return tuple(other for other in range(self.world) if same(other))

    def shard_group(self, rank: int, degree: int) -> tuple[int, ...]:
        """The `degree` consecutive ranks that together hold one copy of the states."""
        first = rank // degree * degree
        return tuple(range(first, first + degree))

    def nested_group(self, rank: int, inner: int, outer: int) -> tuple[int, ...]:
        """The ranks of one shard group of degree `outer` whose shards over `outer` make up this rank's over `inner`."""
        first = rank // outer * outer
        return tuple(range(first + rank % inner, first + outer, inner))

    def replica_group(self, rank: int, degree: int) -> tuple[int, ...]:
        """The ranks that hold the same shard as `rank` when states are sharded over `degree` ranks."""
        return tuple(range(rank % degree, self.world, degree))


def group_name(purpose: str, ranks: tuple[int, ...]) -> str:
    """Name of a communicator in the graph: "cp:0,1", "params:0-63", or "grads.copies:1-61/4" for every fourth rank.

    Equal ranks under two purposes are two communicators.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if step and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{purpose}:{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return f"{purpose}:{','.join(map(str, ranks))}"


def group_ranks(name: str) -> tuple[int, ...]:
    """The ranks of a communicator, from its name in the graph."""
    ranks = name.split(":")[1]
    if "-" not in ranks:
        return tuple(int(rank) for rank in ranks.split(","))
    bounds, _, step = ranks.partition("/")
    first, last = map(int, bounds.split("-"))
    return tuple(range(first, last + 1, int(step or 1)))
