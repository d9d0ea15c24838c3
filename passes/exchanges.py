"""The exchanges of one attention: fetching what a rank's next job needs, and giving back what a job made for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from evocompile.layout import Interval

from .build import Builder
from .schedules import Job, Schedule

Side = Literal["queries", "keys"]
_NAMES: Mapping[Side, str] = {"queries": "queries", "keys": "keys and values"}
Groups = Sequence[Sequence[fx.Node]]  # tensors that travel together, one message for each dtype


@dataclass(frozen=True)
class Coming:
    """Messages under way. side: whether queries' or keys' data comes, None if nothing does; shapes: of each message."""

    starts: tuple[fx.Node, ...]
    side: Side | None
    shapes: tuple[list[list[int]], ...]


class Exchanges:
    """Point-to-point exchanges along a schedule, straight from owner to consumer and back.

    queries, keys: this rank's tensors that a job needs, positions on dim 2; groups[i] becomes message i.
    """

    def __init__(
        self, builder: Builder, schedule: Schedule, group: str, is_backward: bool, queries: Groups, keys: Groups
    ) -> None:
        self._builder = builder
        self._schedule = schedule
        self._group = group
        self._again = ", again for backward" if is_backward else ""
        self._made = "gradients of {} to their owner" if is_backward else "a helper's result back to the owner of {}"
        self._own: Mapping[Side, Groups] = {"queries": queries, "keys": keys}

    def fetch(self, step: int) -> Coming | None:
        """Starts the exchange for the jobs of `step`; None if this rank neither sends nor receives."""
        schedule = self._schedule
        if step not in schedule.steps:
            return None
        source, consumer = schedule.source(step), schedule.consumer(step)
        side, sent_side = self._side(schedule.job(step)), self._lent(consumer, step)
        shapes = () if side is None or source is None else self._shapes(side, source)
        sent = [] if sent_side is None else self._own[sent_side]
        like = [] if side is None or not shapes else self._own[side]
        travels = sent_side or side
        why = f"{_NAMES[travels]}{self._again}, step {step}" if travels else ""
        return self._exchange(sent, consumer, source, side if shapes else None, shapes, like, why)

    def arrive(self, coming: Coming | None) -> list[list[fx.Node]]:
        """Waits for what `fetch` or `give_back` started: the groups that came, [] if nothing was to come."""
        if coming is None:
            return []
        groups = []
        for i, start in enumerate(coming.starts):
            shapes = coming.shapes[i] if i < len(coming.shapes) else []
            received = self._builder.receive(start, shapes)
            if shapes:
                groups.append(received)
        return groups

    def give_back(
        self, step: int, made: Sequence[fx.Node], expected: Mapping[Side, Sequence[fx.Node]]
    ) -> Coming | None:
        """Starts returning `made` to whose data the job of `step` used, and receiving what was made of this rank's.

        expected: this rank's own results, by the side of which another rank makes more: they tell the shapes.
        """
        schedule = self._schedule
        consumer = schedule.consumer(step)
        lent = self._lent(consumer, step)
        like = [] if lent is None else expected.get(lent, [])
        shapes = [list(each.meta["val"].shape) for each in like]
        returned = [made] if made else []
        side = self._side(schedule.job(step)) if made else lent
        why = f"{self._made.format(_NAMES[side])}, step {step}" if side else ""
        return self._exchange(
            returned,
            schedule.source(step) if made else None,
            consumer if shapes else None,
            lent if shapes else None,
            (shapes,) if shapes else (),
            [like],
            why,
        )

    def _exchange(
        self,
        sent: Groups,
        destination: int | None,
        source: int | None,
        side: Side | None,
        shapes: tuple[list[list[int]], ...],
        like: Groups,
        why: str,
    ) -> Coming | None:
        """Message i sends sent[i] and receives shapes[i], of the dtype of like[i]."""
        ranks = self._schedule.ranks
        starts = []
        for i in range(max(len(sent), len(shapes))):
            tensors = sent[i] if i < len(sent) else []
            wanted = shapes[i] if i < len(shapes) else []
            example = (tensors or like[i])[0].meta["val"]
            starts.append(
                self._builder.exchange(
                    tensors,
                    -1 if destination is None or not tensors else ranks[destination],
                    -1 if source is None or not wanted else ranks[source],
                    wanted,
                    example,
                    self._group,
                    why,
                )
            )
        return Coming(tuple(starts), side, shapes) if starts else None

    def _side(self, job: Job | None) -> Side | None:
        """What a job needs of another rank: queries for a helper, keys for the owner of the queries."""
        if job is None or job[0] == job[1]:
            return None
        return "queries" if job[0] != self._schedule.own else "keys"

    def _lent(self, consumer: int | None, step: int) -> Side | None:
        """What the consumer's job at `step` uses of this rank's."""
        if consumer is None:
            return None
        job = self._schedule.jobs[consumer][step]
        assert job is not None
        return "queries" if job[0] == self._schedule.own else "keys"

    def _shapes(self, side: Side, source: int) -> tuple[list[list[int]], ...]:
        """Shapes of the other's tensors: as the own ones, with its number of positions."""
        positions: Sequence[Sequence[Interval]] = getattr(self._schedule, side)
        count = sum(hi - lo for lo, hi in positions[source])

        def shape(node: fx.Node) -> list[int]:
            own = list(node.meta["val"].shape)
            return [*own[:2], count, *own[3:]]

        return tuple([shape(node) for node in group] for group in self._own[side])
