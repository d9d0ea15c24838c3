"""The gradients that a rank adds up in the backward of one attention: of its queries, and of the blocks it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from .build import Builder
from .exchanges import Coming, Part, Side, added
from .schedules import Intervals, Job

aten = torch.ops.aten


class Gradients:
    """Sums in the accumulation dtype. expected: tensors as those that other ranks return, by the side they are of.

    like:   this rank's queries, keys and values.
    params: this rank's terms of the gradients of params.
    blocks: gradients of keys and values, by the owner of the block.
    """

    def __init__(self, builder: Builder, own: int, like: Sequence[fx.Node]) -> None:
        self._builder = builder
        self._own = own
        values = [each.meta["val"] for each in like]
        sums = [value.new_empty(value.shape, dtype=torch.promote_types(value.dtype, torch.float32)) for value in values]
        self.expected: Mapping[Side, Sequence[torch.Tensor]] = {"queries": sums[:1], "keys": sums[1:]}
        self.queries: list[fx.Node] = []
        self.params: list[fx.Node] = []
        self.blocks: dict[int, Part] = {}
        self._positions: dict[int, Intervals] = {}

    def hold(self, held: Mapping[int, Part]) -> None:
        """These blocks are here from now on."""
        self._positions |= {block: part.positions for block, part in held.items()}

    def add_queries(self, gradient: fx.Node) -> None:
        held = self.queries
        self.queries = [self._builder.call(aten.add.Tensor, (held[0], gradient))] if held else [gradient]

    def add_keys(self, block: int, gradients: Sequence[fx.Node], part: Intervals) -> None:
        """Adds what was found for a `part` of the positions of a block that is or was held."""
        positions = self._positions[block]
        if block not in self.blocks and part == positions:
            self.blocks[block] = Part(tuple(gradients), positions)
            return
        totals = self.blocks[block].tensors if block in self.blocks else self._zeros(gradients, positions)
        sums = [
            added(self._builder, total, positions, gradient, part)
            for total, gradient in zip(totals, gradients, strict=True)
        ]
        self.blocks[block] = Part(tuple(sums), positions)

    def _zeros(self, like: Sequence[fx.Node], positions: Intervals) -> list[fx.Node]:
        count, zeros = sum(hi - lo for lo, hi in positions), []
        for each in like:
            batch, heads, _, width = (value := each.meta["val"]).shape
            kwargs = {"dtype": value.dtype, "device": value.device}
            zeros.append(self._builder.call(aten.full.default, ([batch, heads, count, width], 0), kwargs))
        return zeros

    def take(
        self, job: Job, columns: Intervals, gradients: Sequence[fx.Node], held: Mapping[int, Part]
    ) -> list[fx.Node]:
        """Adds what a job of this rank found; returns what goes to another rank."""
        of_queries, of_keys, of_params = gradients[0], gradients[1:3], gradients[3:]
        self.params = (
            [self._builder.call(aten.add.Tensor, pair) for pair in zip(self.params, of_params, strict=True)]
            if self.params
            else list(of_params)
        )
        if job.queries != self._own:
            self.add_keys(self._own, of_keys, columns)
            return [of_queries]
        self.add_queries(of_queries)
        if job.keys not in held:
            return list(of_keys)
        self.add_keys(job.keys, of_keys, columns)
        return []

    def came(self, coming: Coming | None, groups: Sequence[Sequence[fx.Node]]) -> None:
        """Adds what another rank returned."""
        if coming is None or not groups:
            return
        if coming.side == "queries":
            self.add_queries(groups[0][0])
        else:
            self.add_keys(coming.block, groups[0], coming.positions)
