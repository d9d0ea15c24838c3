"""The exchanges of one attention: fetching what a rank's next job needs, and giving back what a job made for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from .build import Builder
from .schedules import Intervals, Job, Schedule, length

aten = torch.ops.aten
Side = Literal["queries", "keys"]
_NAMES: Mapping[Side, str] = {"queries": "queries", "keys": "keys and values"}
Groups = Sequence[Sequence[fx.Node]]  # tensors that travel together, one message for each dtype
Values = Sequence[Sequence[Tensor]]  # fake ones of the same kind


@dataclass(frozen=True)
class Part:
    """Tensors whose dim 2 is these positions: a rank's own queries, a block of keys and values, gradients of those."""

    tensors: tuple[fx.Node, ...]
    positions: Intervals


@dataclass(frozen=True)
class Coming:
    """Messages under way, one for each dtype. shapes: of each message, () for one in which nothing comes.

    block, positions: what comes belongs to these positions of this coordinate.
    """

    starts: tuple[fx.Node, ...]
    shapes: tuple[list[list[int]], ...] = ()
    side: Side = "keys"
    block: int = -1
    positions: Intervals = ()


class Exchanges:
    """Point-to-point exchanges along a schedule, straight from who has it to who needs it, and back.

    group:       communicator of the steps; `outer_group`: of the blocks that come to a window (`double_ring`).
    queries:     this rank's tensors that a helper needs; groups[i] becomes message i.
    is_backward: for the words that describe the messages.
    """

    def __init__(
        self, builder: Builder, schedule: Schedule, group: str, outer_group: str, is_backward: bool, queries: Groups
    ) -> None:
        self._builder = builder
        self._schedule = schedule
        self._group = group
        self._outer_group = outer_group
        self._again = ", again for backward" if is_backward else ""
        self._made = "gradients of {} to their owner" if is_backward else "a helper's result back to the owner of {}"
        self._queries = queries

    # --- steps

    def fetch(self, step: int, held: Mapping[int, Part]) -> Coming | None:
        """Starts the exchange for the jobs of `step`; None if this rank neither sends nor receives.

        held: the blocks of keys and values that are here, by their owner.
        """
        schedule = self._schedule
        if step not in schedule.steps:
            return None
        consumer, job = schedule.consumer(step), schedule.job(step)
        sent: Groups = []
        lent = self._lent(consumer, step)
        if consumer is not None and lent is not None:
            columns = schedule.columns(consumer, lent)
            sent = self._queries if self._helps(lent, consumer) else [self.part(held[lent.keys], columns)]
        coming = Coming(())
        if job is not None and schedule.source(step) is not None:
            if self._helps(job, schedule.own):
                positions = schedule.queries[job.queries]
                coming = Coming(
                    (), self._shapes(self._like("queries", held), positions), "queries", job.queries, positions
                )
            else:
                positions = schedule.columns(schedule.own, job)
                shapes = self._shapes(self._like("keys", held), positions)
                coming = Coming((), shapes, "keys", job.keys, positions)
        travels = "queries" if lent and consumer is not None and self._helps(lent, consumer) else "keys"
        why = f"{_NAMES[travels if lent else coming.side]}{self._again}, step {step}"
        source = schedule.source(step)
        return self._exchange(sent, consumer, source, coming, self._like(coming.side, held), self._group, why)

    def give_back(self, step: int, made: Sequence[fx.Node], expected: Mapping[Side, Sequence[Tensor]]) -> Coming | None:
        """Starts returning `made` to whose data the job of `step` used, and receiving what was made of this rank's.

        expected: tensors as those that come back, by the side of which another rank makes more: they tell the shapes.
        """
        schedule = self._schedule
        consumer = schedule.consumer(step)
        lent = self._lent(consumer, step)
        coming = Coming(())
        like: list[Tensor] = []
        side: Side | None = None
        if consumer is not None and lent is not None:
            side = "queries" if self._helps(lent, consumer) else "keys"
            block, positions = (
                (lent.queries, schedule.queries[lent.queries])
                if side == "queries"
                else (lent.keys, schedule.columns(consumer, lent))
            )
            like = list(expected.get(side, ()))
            coming = Coming((), self._shapes([like], positions) if like else (), side, block, positions)
        if made:
            job = schedule.job(step)
            assert job is not None
            side = "queries" if self._helps(job, schedule.own) else "keys"
        why = f"{self._made.format(_NAMES[side])}, step {step}" if side else ""
        destination = schedule.source(step) if made else None
        return self._exchange([made] if made else [], destination, consumer, coming, [like], self._group, why)

    # --- blocks for a window

    def invite(self, outer: int, own: Part) -> Coming | None:
        """Starts the exchange of the blocks that stay for the steps of `outer` of a double ring."""
        schedule = self._schedule
        if outer not in schedule.windows or outer == 0:
            return None
        block = schedule.visitor(schedule.own, outer)
        host = self._host(outer)
        positions, lent = schedule.visiting(schedule.own, outer), schedule.visiting(host, outer)
        coming = Coming(
            (), self._shapes([_values(own.tensors)], positions) if positions else (), "keys", block, positions
        )
        why = f"keys and values for a window{self._again}, round {outer}"
        sent = [self.part(own, lent)] if lent else []
        return self._exchange(sent, host, block, coming, [_values(own.tensors)], self._outer_group, why)

    def send_home(self, outer: int, made: Sequence[fx.Node], expected: Sequence[fx.Node]) -> Coming | None:
        """Starts returning the gradients that a window made of a block to its owner, and receiving those of the own."""
        schedule = self._schedule
        host = self._host(outer)
        positions = schedule.visiting(host, outer)
        shapes = self._shapes([_values(expected)], positions) if positions else ()
        coming = Coming((), shapes, "keys", schedule.own, positions)
        why = f"gradients of keys and values from a window to their owner, round {outer}"
        block = schedule.visitor(schedule.own, outer)
        sent = [made] if schedule.visiting(schedule.own, outer) else []
        return self._exchange(sent, block, host, coming, [_values(expected)], self._outer_group, why)

    def _host(self, outer: int) -> int:
        """The coordinate at which this rank's block stays in an outer step."""
        return self._schedule.visitor(self._schedule.own, -outer)

    # --- messages

    def arrive(self, coming: Coming | None) -> list[list[fx.Node]]:
        """Waits for what was started: the groups that came, [] if nothing was to come."""
        if coming is None:
            return []
        groups = []
        for i, start in enumerate(coming.starts):
            shapes = coming.shapes[i] if i < len(coming.shapes) else []
            received = self._builder.receive(start, shapes)
            if shapes:
                groups.append(received)
        return groups

    def part(self, held: Part, positions: Intervals) -> tuple[fx.Node, ...]:
        """Some positions of what is held."""
        return tuple(rows(self._builder, tensor, held.positions, positions) for tensor in held.tensors)

    def _exchange(
        self,
        sent: Groups,
        destination: int | None,
        source: int | None,
        coming: Coming,
        like: Values,
        group: str,
        why: str,
    ) -> Coming | None:
        """Message i sends sent[i] and receives coming.shapes[i], of the dtype of like[i]."""
        ranks = self._schedule.ranks
        starts = []
        for i in range(max(len(sent), len(coming.shapes))):
            tensors = sent[i] if i < len(sent) else []
            wanted = coming.shapes[i] if i < len(coming.shapes) else []
            example = tensors[0].meta["val"] if tensors else like[i][0]
            to = -1 if destination is None or not tensors else ranks[destination]
            come_from = -1 if source is None or not wanted else ranks[source]
            starts.append(self._builder.exchange(tensors, to, come_from, wanted, example, group, why))
        return Coming(tuple(starts), coming.shapes, coming.side, coming.block, coming.positions) if starts else None

    def _like(self, side: Side, held: Mapping[int, Part]) -> Values:
        groups = self._queries if side == "queries" else [held[self._schedule.own].tensors]
        return [_values(group) for group in groups]

    def _lent(self, consumer: int | None, step: int) -> Job | None:
        """The job of another rank at `step` that uses what this rank has."""
        return None if consumer is None else self._schedule.jobs[consumer][step]

    def _helps(self, job: Job, coordinate: int) -> bool:
        return job.queries != coordinate

    def _shapes(self, groups: Values, positions: Intervals) -> tuple[list[list[int]], ...]:
        """Shapes of another's tensors: as these, with its number of positions."""

        def shape(own: Tensor) -> list[int]:
            return [*own.shape[:2], length(positions), *own.shape[3:]]

        return tuple([shape(each) for each in group] for group in groups)


def _values(nodes: Sequence[fx.Node]) -> list[Tensor]:
    return [node.meta["val"] for node in nodes]


def rows(builder: Builder, tensor: fx.Node, held: Intervals, wanted: Intervals) -> fx.Node:
    """The `wanted` positions of a tensor whose dim 2 is the positions `held`."""
    if wanted == held:
        return tensor
    parts = [builder.call(aten.slice.Tensor, (tensor, 2, lo, hi)) for lo, hi in places(held, wanted)]
    if not parts:
        return builder.call(aten.slice.Tensor, (tensor, 2, 0, 0))
    return parts[0] if len(parts) == 1 else builder.call(aten.cat.default, (parts, 2))


def places(held: Intervals, wanted: Intervals) -> Intervals:
    """Where in rows of the positions `held` the `wanted` ones lie."""
    found, offset = [], 0
    for lo, hi in held:
        for want_lo, want_hi in wanted:
            a, b = max(lo, want_lo), min(hi, want_hi)
            if a < b:
                found.append((offset + a - lo, offset + b - lo))
        offset += hi - lo
    assert length(tuple(found)) == length(wanted), f"{wanted} is not within {held}"
    return tuple(found)


def added(builder: Builder, total: fx.Node, held: Intervals, part: fx.Node, positions: Intervals) -> fx.Node:
    """`total` with `part` added at some of its positions."""
    if positions == held:
        return builder.call(aten.add.Tensor, (total, part))
    offset = 0
    for lo, hi in places(held, positions):
        there = builder.call(aten.slice.Tensor, (total, 2, lo, hi))
        more = builder.call(aten.slice.Tensor, (part, 2, offset, offset + hi - lo))
        total = builder.call(
            aten.slice_scatter.default, (total, builder.call(aten.add.Tensor, (there, more)), 2, lo, hi)
        )
        offset += hi - lo
    return total
