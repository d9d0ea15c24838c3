"""What an attention's schedule computes and moves, for the choice between schedules and for `inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from evocompile.program import Attention

from .schedules import Job, Schedule, length, work


class Sizes(NamedTuple):
    """batch, heads, kv_heads: of one rank. dim: of q and k; v_dim: of v. Bytes of an element, and of one of a state."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    itemsize: int
    state_itemsize: int


def flops(schedule: Schedule, sizes: Sizes) -> list[list[int]]:
    """Of the forward, by coordinate and step: two products. The backward has five, over the same pairs."""
    each = 2 * sizes.batch * sizes.heads * (sizes.dim + sizes.v_dim)
    return [[pairs * each for pairs in steps] for steps in work(schedule)]


@lru_cache(maxsize=256)
def bytes_received(schedule: Schedule, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """In the forward, by coordinate and step. A helper's state counts at the step in which it is made."""
    batch, heads, kv_heads, dim, v_dim, itemsize, state_itemsize = sizes
    of_keys = batch * kv_heads * (dim + v_dim) * itemsize
    of_queries, of_state = batch * heads * dim * itemsize, batch * heads * (v_dim + 1) * state_itemsize

    def received(coordinate: int, step: int) -> int:
        job, total = schedule.jobs[coordinate][step], 0
        if job is not None and job.via != coordinate:
            total += _moved(schedule, coordinate, job, of_queries, of_keys)
        outer, inner = divmod(step, schedule.window)
        if schedule.window > 1 and inner == 0 and outer > 0:
            total += length(schedule.visiting(coordinate, outer)) * of_keys
        helpers = [each for each, jobs in enumerate(schedule.jobs) if _helped(jobs[step], each) == coordinate]
        return total + len(helpers) * length(schedule.queries[coordinate]) * of_state

    return tuple(tuple(received(c, step) for step in schedule.steps) for c in range(len(schedule.jobs)))


def _moved(schedule: Schedule, coordinate: int, job: Job, of_queries: int, of_keys: int) -> int:
    """Bytes that a job needs of another rank."""
    if job.queries != coordinate:
        return length(schedule.queries[job.queries]) * of_queries
    return length(schedule.columns(coordinate, job)) * of_keys


def _helped(job: Job | None, coordinate: int) -> int | None:
    """Whom a job of `coordinate` helps."""
    return None if job is None or job.queries == coordinate else job.queries


def report(name: str, why: str, schedule: Schedule, sizes: Sizes, shares: Sequence[int], source: str) -> Attention:
    """What `inspect` says of one attention. shares: the query heads of each rank that exchanges sequence for heads."""
    by_rank = [sum(steps) * share // max(shares) for steps in flops(schedule, sizes) for share in shares]
    busy = max(sum(job is not None for job in jobs) for jobs in schedule.jobs)
    received = max(sum(steps) for steps in bytes_received(schedule, sizes))
    work_ = max(by_rank), sum(by_rank)
    return Attention(name, why, schedule.mask, len(by_rank), busy, len(schedule.steps), *work_, received, source)
