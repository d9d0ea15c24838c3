"""The schedules of sequence-parallel attention, as tables: which rank attends which queries to which keys, and when.

Everything here is plain arithmetic on coordinates 0 … P-1 of the ranks that exchange blocks. A *job* attends the
queries of one coordinate to the keys of one; `jobs[r][t]` is the job of rank r at step t. It is done by the owner of
the queries, who fetches keys and values, or by the owner of the keys (a helper), who fetches queries and returns the
result. Of keys and values only those positions travel that the mask lets the job's queries see. What the schedules
send is in `volumes.py`, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from evocompile.kernels.blocks import blocks
from evocompile.kernels.mask import Tile, parse_mask
from evocompile.layout import Interval

Intervals = tuple[Interval, ...]


class Job(NamedTuple):
    """queries, keys: the coordinates that own them. via: who hands over what this rank lacks; itself if it lacks none.

    In a double ring keys can come by way of a rank that does not own them.
    """

    queries: int
    keys: int
    via: int


Jobs = tuple[tuple[Job | None, ...], ...]
Needs = Sequence[Sequence[bool]]  # needs[i][j]: some query of coordinate i may see a key of coordinate j


@dataclass(frozen=True)
class Schedule:
    """One attention's schedule, seen from the rank of coordinate `own`.

    ranks:   global ranks by coordinate.
    queries: the query positions of each coordinate; keys likewise.
    mask:    text of the predicate, which says what has to travel.
    window:  ranks of an inner ring (`double_ring`), 1 where there is none.
    """

    ranks: tuple[int, ...]
    own: int
    queries: tuple[Intervals, ...]
    keys: tuple[Intervals, ...]
    jobs: Jobs
    mask: str = "True"
    window: int = 1

    @property
    def steps(self) -> range:
        return range(len(self.jobs[0]))

    def job(self, step: int) -> Job | None:
        """What this rank computes at `step`."""
        return self.jobs[self.own][step]

    def source(self, step: int) -> int | None:
        """The coordinate that hands over what this rank's job needs; None if it has none or needs nothing."""
        job = self.job(step)
        return None if job is None or job.via == self.own else job.via

    def consumer(self, step: int) -> int | None:
        """The coordinate whose job at `step` needs what this rank has."""
        for other, jobs in enumerate(self.jobs):
            job = jobs[step]
            if other != self.own and job is not None and job.via == self.own:
                return other
        return None

    def columns(self, coordinate: int, job: Job) -> Intervals:
        """The key positions that a job of `coordinate` works on: all it holds itself, of others' those that it sees."""
        if job.keys == coordinate:
            return self.keys[job.keys]
        return seen_keys(self.mask, self.queries[job.queries], self.keys[job.keys])

    @property
    def has_helpers(self) -> bool:
        """Whether some rank attends another's queries."""
        return any(job is not None and job.queries != r for r, jobs in enumerate(self.jobs) for job in jobs)

    # --- double ring: blocks that a rank holds for its window

    @property
    def windows(self) -> range:
        """The outer steps: `window` steps each."""
        return range(len(self.ranks) // self.window if self.window > 1 else 1)

    def visitor(self, coordinate: int, outer: int) -> int:
        """The owner of the block that `coordinate` holds during an outer step."""
        return (coordinate - outer * self.window) % len(self.ranks)

    def visiting(self, coordinate: int, outer: int) -> Intervals:
        """The positions of that block which travel to `coordinate`: what anyone of its window sees."""
        block = self.visitor(coordinate, outer)
        if block == coordinate:
            return self.keys[block]
        first = coordinate // self.window * self.window
        members = range(first, first + self.window)
        return union(seen_keys(self.mask, self.queries[each], self.keys[block]) for each in members)


def ring(needs: Needs) -> Jobs:
    """At step t everyone attends the own queries to the keys of the coordinate t before. The own block comes first."""
    count = len(needs)

    def job(r: int, t: int) -> Job | None:
        block = (r - t) % count
        return Job(r, block, block) if t == 0 or needs[r][block] else None

    return tuple(tuple(job(r, t) for t in range(count)) for r in range(count))


def double_ring(needs: Needs, window: int) -> Jobs:
    """LoongTrain's double ring (2406.18485, section 4.4): P/w windows of w neighbours, w dividing P.

    In outer step o rank r holds the block of r - o·w, which comes from its owner once, while the steps of o - 1 are
    under way. Inner step n attends to the block of the n-th neighbour before in the own window. So a block crosses
    between windows once for each window, not once for each rank.
    """
    count = len(needs)
    assert count % window == 0, "a window divides the ring"

    def job(r: int, t: int) -> Job | None:
        outer, inner = divmod(t, window)
        neighbour = r // window * window + (r - inner) % window
        block = (neighbour - outer * window) % count
        return Job(r, block, neighbour) if t == 0 or needs[r][block] else None

    return tuple(tuple(job(r, t) for t in range(count)) for r in range(count))


def balanced(needs: Needs) -> Jobs:
    """LightSeq's schedule (2310.03294, algorithm 1): ⌊P/2⌋ + 1 steps of equal work under a causal mask.

    At step t coordinate r ≥ t attends its queries to the keys of r-t; r < t, who would idle, helps h = r-t+P, attending
    h's queries to its own keys. For even P the last step needs no helpers. Each pair is done once.
    """
    count = len(needs)

    def job(r: int, t: int) -> Job | None:
        if r >= t:
            pair = Job(r, r - t, r - t)
        elif 2 * t < count or count % 2:
            pair = Job(r - t + count, r, r - t + count)
        else:
            return None
        return pair if t == 0 or needs[pair.queries][pair.keys] else None

    return tuple(tuple(job(r, t) for t in range(count // 2 + 1)) for r in range(count))


def is_causal(needs: Needs) -> bool:
    """No query sees a key of a later coordinate: what `balanced` is made for."""
    return not any(seen for i, row in enumerate(needs) for seen in row[i + 1 :])


@lru_cache(maxsize=65536)
def sees(mask: str, queries: Intervals, keys: Intervals) -> bool:
    """Whether some query may see a key."""
    predicate = parse_mask(mask)
    return any(predicate.classify(*q_part, *k_part) is not Tile.EMPTY for q_part in queries for k_part in keys)


@lru_cache(maxsize=65536)
def seen_keys(mask: str, queries: Intervals, keys: Intervals) -> Intervals:
    """The key positions that queries may see: in each key interval, for each query interval, from the first one seen to
    the last. What depends on data counts as seen."""
    return union(_hull(mask, q_part, k_part) for q_part in queries for k_part in keys)


def _hull(mask: str, queries: Interval, keys: Interval) -> Intervals:
    predicate = parse_mask(mask)
    lo, hi = keys

    def empty(k_lo: int, k_hi: int) -> bool:
        return predicate.classify(*queries, k_lo, k_hi) is Tile.EMPTY

    if empty(lo, hi):
        return ()
    if empty(lo, lo + 1):
        below, above = lo + 1, hi  # [lo, below) is empty, [lo, above) is not
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if empty(lo, middle) else (below, middle)
        lo = below
    if empty(hi - 1, hi):
        below, above = lo, hi - 1  # [above, hi) is empty, [below, hi) is not
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if empty(middle, hi) else (middle, above)
        hi = above
    return ((lo, hi),) if lo < hi else ()


def union(parts: Iterable[Intervals]) -> Intervals:
    """Sorted and joined."""
    joined: list[Interval] = []
    for lo, hi in sorted(interval for part in parts for interval in part):
        if joined and lo <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        elif lo < hi:
            joined.append((lo, hi))
    return tuple(joined)


def length(intervals: Intervals) -> int:
    return sum(hi - lo for lo, hi in intervals)


def bounds(intervals: Intervals) -> list[int]:
    """[lo, hi, lo, hi, …], as the attention operators take them."""
    return [bound for interval in intervals for bound in interval]


@lru_cache(maxsize=256)
def work(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """(query, key) pairs that are computed, by coordinate and step: the measure of balance."""

    def pairs(coordinate: int, job: Job | None) -> int:
        if job is None:
            return 0
        queries, keys = bounds(schedule.queries[job.queries]), bounds(schedule.columns(coordinate, job))
        return sum(block.pairs for block in blocks(schedule.mask, tuple(queries), tuple(keys)))

    return tuple(tuple(pairs(coordinate, job) for job in jobs) for coordinate, jobs in enumerate(schedule.jobs))
