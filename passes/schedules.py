"""The schedules of sequence-parallel attention, as tables: which rank attends which queries to which keys, and when.

Everything here is plain arithmetic on coordinates 0 … P-1 of the ranks that split the sequence. A *job* (i, j) attends
the queries of coordinate i to the keys of coordinate j; it is done by i (the owner of the queries, who fetches keys and
values) or by j (a helper, who fetches queries and returns the result). `jobs[r][t]` is the job of rank r at step t.

Elements on the wire per rank, N tokens, batch B, Hk key/value heads of dims D and E, H query heads, uniform chunks and
a causal mask; a pair of chunks that no query sees costs nothing:

    ring, zigzag   forward at most (P-1)/P · N · B · Hk (D + E); backward the same again to fetch the blocks, and as
                   much (in fp32) to return their gradients.
    balanced       (LightSeq / DistFlashAttn, 2310.03294) a helper's job moves B · N/P · H D of queries there and
                   B · N/P · H (E + 1) of states (fp32) back, instead of B · N/P · Hk (D + E) of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evocompile.kernels.blocks import blocks
from evocompile.layout import Interval

Job = tuple[int, int]  # (coordinate of the queries, coordinate of the keys)
Jobs = tuple[tuple[Job | None, ...], ...]
Needs = Sequence[Sequence[bool]]  # needs[i][j]: some query of coordinate i may see a key of coordinate j


@dataclass(frozen=True)
class Schedule:
    """One attention's schedule, seen from the rank of coordinate `own`.

    ranks:   global ranks by coordinate.
    queries: the query positions of each coordinate; keys likewise.
    """

    ranks: tuple[int, ...]
    own: int
    queries: tuple[tuple[Interval, ...], ...]
    keys: tuple[tuple[Interval, ...], ...]
    jobs: Jobs

    @property
    def steps(self) -> range:
        return range(len(self.jobs[0]))

    def job(self, step: int) -> Job | None:
        """What this rank computes at `step`."""
        return self.jobs[self.own][step]

    def source(self, step: int) -> int | None:
        """The coordinate whose data this rank's job needs; None if it has none or needs no other's."""
        job = self.job(step)
        other = None if job is None else job[0] if job[0] != self.own else job[1]
        return None if other == self.own else other

    def consumer(self, step: int) -> int | None:
        """The coordinate whose job at `step` needs this rank's data: its keys and values, or its queries."""
        for other, jobs in enumerate(self.jobs):
            job = jobs[step]
            if other != self.own and job is not None and self.own in job:
                return other
        return None


def ring(needs: Needs) -> Jobs:
    """At step t everyone attends the own queries to the keys of the coordinate t before. The own block comes first."""
    count = len(needs)
    return tuple(
        tuple((r, (r - t) % count) if t == 0 or needs[r][(r - t) % count] else None for t in range(count))
        for r in range(count)
    )


def balanced(needs: Needs) -> Jobs:
    """LightSeq's schedule (2310.03294, algorithm 1): ⌊P/2⌋ + 1 steps of equal work under a causal mask.

    At step t coordinate r ≥ t attends its queries to the keys of r-t; r < t, who would idle, helps h = r-t+P, attending
    h's queries to its own keys. For even P the last step needs no helpers. Each pair is done once.
    """
    count = len(needs)

    def job(r: int, t: int) -> Job | None:
        if r >= t:
            pair = (r, r - t)
        elif 2 * t < count or count % 2:
            pair = (r - t + count, r)
        else:
            return None
        return pair if t == 0 or needs[pair[0]][pair[1]] else None

    return tuple(tuple(job(r, t) for t in range(count // 2 + 1)) for r in range(count))


def is_causal(needs: Needs) -> bool:
    """No query sees a key of a later coordinate: what `balanced` is made for."""
    return not any(seen for i, row in enumerate(needs) for seen in row[i + 1 :])


def work(schedule: Schedule, mask: str) -> list[list[int]]:
    """(query, key) pairs that are computed, by coordinate and step: the measure of balance."""

    def pairs(job: Job | None) -> int:
        if job is None:
            return 0
        queries, keys = (
            tuple(bound for interval in intervals for bound in interval)
            for intervals in (schedule.queries[job[0]], schedule.keys[job[1]])
        )
        return sum(block.pairs for block in blocks(mask, queries, keys))

    return [[pairs(job) for job in jobs] for jobs in schedule.jobs]
