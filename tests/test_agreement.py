"""The check before the first step: alike on all ranks, under a time-out of its own, on threads and on real ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from evocompile.agreement import agree_across_ranks, check_same_inputs, computation, decode, digest, encode
from evocompile.collectives import Event
from evocompile.errors import DeadlockError, EvocompileError, InputError, PlanError
from evocompile.mesh import group_ranks
from tests.distributed.launch import launch, run_ranks

Outcome = Any  # what a rank returned, or the error that it raised


def on_threads(world: int, call: Callable[[dist.Store, int], Any], absent: tuple[int, ...] = ()) -> list[Outcome]:
    """Call `call(store, rank)` on a thread for each rank but the absent ones; what each returned or raised."""
    store, outcomes = dist.HashStore(), [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = call(store, rank)
        except EvocompileError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def ring(rank: int, world: int, size: int = 8) -> list[Event]:
    """The events of a ring exchange, the same at every place of the ring, followed by a sum over pairs."""
    everyone, pair = f"cp:{','.join(map(str, range(world)))}", f"dp:{rank // 2 * 2},{rank // 2 * 2 + 1}"
    to, source = (rank + 1) % world, (rank - 1) % world
    return [
        Event("exchange", "send", everyone, "torch.float32", 0, ((to, size),), ((source, size),)),
        Event("all_reduce", "sum", pair, "torch.float32", 4),
        Event("wait", "wait_send", start=0),
        Event("wait", "wait_sum", start=1),
    ]


def agreement(
    events: Callable[[int], list[Event]], fingerprint: Callable[[int], dict[str, str]] = lambda rank: {}, **options: Any
) -> Callable[[dist.Store, int], Any]:
    def call(store: dist.Store, rank: int) -> Any:
        return agree_across_ranks(events(rank), fingerprint(rank), store=store, rank=rank, **options)

    return call


def same_error(outcomes: list[Outcome], kind: type[Exception]) -> str:
    """The text of the error that all of them are."""
    texts = {str(each) for each in outcomes}
    assert {type(each) for each in outcomes} == {kind}
    assert len(texts) == 1
    return texts.pop()


# --- programs --------------------------------------------------------------------------------------------------------


def test_all_ranks_learn_the_names_of_all_groups() -> None:
    outcomes = on_threads(4, agreement(lambda rank: ring(rank, 4), world=4))
    assert outcomes == [("cp:0,1,2,3", "dp:0,1", "dp:2,3")] * 4


def test_symmetric_programs_travel_once() -> None:
    bodies = {encode(ring(rank, 64), rank)[0] for rank in range(64)}
    assert len(bodies) == 1
    long = [event for _ in range(500) for event in ring(0, 64)[:2]]
    assert len(encode(long, 0)[0]) < 2000  # bytes, for 1000 events


def test_nothing_large_is_left_in_the_store() -> None:
    store = dist.HashStore()

    def call(_: dist.Store, rank: int) -> Any:
        return agree_across_ranks(ring(rank, 2), {}, store=store, rank=rank, world=2)

    on_threads(2, call)
    counts = store.num_keys()
    on_threads(2, call)  # a second round meets under keys of its own
    assert store.num_keys() < 2 * counts
    assert counts < 10


@pytest.mark.parametrize("failing", [{0, 1, 2}, {1}])
def test_a_rank_hears_of_others_failures_unless_all_fail(failing: set[int]) -> None:
    def call(store: dist.Store, rank: int) -> Any:
        failure = f"PlanError: {rank} is short of memory" if rank in failing else None
        return agree_across_ranks([], {}, failure=failure, store=store, rank=rank, world=3)

    outcomes = on_threads(3, call)
    if len(failing) == 3:
        assert outcomes == [()] * 3
    else:
        text = same_error(outcomes, PlanError)
        assert text.endswith("but is ranks 0, 2: a program; rank 1: PlanError: 1 is short of memory")


def test_a_mismatch_is_raised_alike_on_all_ranks() -> None:
    def events(rank: int) -> list[Event]:
        first, *others = ring(rank, 4)
        return [first._replace(sent=((3, 16),)) if rank == 2 else first, *others]

    text = same_error(on_threads(4, agreement(events, world=4)), DeadlockError)
    assert "'send' of rank 2 on group cp:0,1,2,3 sends 16 bytes" in text
    assert "'send' of rank 3 on group cp:0,1,2,3 receives 8 bytes" in text


def test_a_deadlock_is_raised_alike_on_all_ranks() -> None:
    def events(rank: int) -> list[Event]:
        return ring(rank, 4) if rank != 1 else []

    text = same_error(on_threads(4, agreement(events, world=4)), DeadlockError)
    assert "rank 0 waits in 'wait_send'" in text
    assert "rank 1 has finished" in text


def test_fingerprints_must_be_equal() -> None:
    def fingerprint(rank: int) -> dict[str, str]:
        return {"torch": "2.13.0", "plan": "cp=2" if rank == 1 else "cp=4"}

    text = same_error(on_threads(3, agreement(lambda rank: [], fingerprint, world=3)), PlanError)
    assert text == "plan must be equal on all ranks, but is ranks 0, 2: cp=4; rank 1: cp=2"


def test_row_10_ranks_that_do_not_come_are_named() -> None:
    """Row 10 of PAINS: the check has a time-out of its own, and ends on the ranks that did come."""
    begin = time.monotonic()
    call = agreement(lambda rank: ring(rank, 5), world=5, timeout=timedelta(seconds=1))
    outcomes = on_threads(5, call, absent=(1, 3))
    text = same_error([outcomes[rank] for rank in (0, 2, 4)], DeadlockError)
    assert "ranks 1, 3 did not come" in text
    assert time.monotonic() - begin < 5


def test_a_late_rank_learns_that_the_others_gave_up() -> None:
    def call(store: dist.Store, rank: int) -> Any:
        if rank == 1:
            time.sleep(1.5)
        return agree_across_ranks([], {}, store=store, rank=rank, world=3, timeout=timedelta(seconds=0.5))

    text = same_error(on_threads(3, call), DeadlockError)
    assert "rank 1 did not come" in text


@st.composite
def any_events(draw: st.DrawFn) -> tuple[list[Event], int]:
    rank, sizes = draw(st.integers(0, 9)), st.integers(0, 1 << 40)
    events: list[Event] = []
    for index in range(draw(st.integers(0, 8))):
        others = draw(st.sets(st.integers(0, 9), min_size=1))
        members = sorted({rank, *others})
        group = f"g{draw(st.integers(0, 1))}:{','.join(map(str, members))}"
        peers = st.dictionaries(st.sampled_from(members), sizes).map(lambda each: tuple(sorted(each.items())))
        events.append(Event("all_to_all", f"n{index}", group, "torch.int8", draw(sizes), draw(peers), draw(peers)))
        events.append(Event("wait", f"w{index}", start=draw(st.integers(0, len(events) - 1))))
    return events, rank


@given(any_events())
def test_encoding_loses_nothing(case: tuple[list[Event], int]) -> None:
    events, rank = case
    body, groups = encode(events, rank)
    decoded = decode(body, groups, rank)
    assert [
        each._replace(sent=tuple(sorted(each.sent)), received=tuple(sorted(each.received))) for each in decoded
    ] == events
    assert all(rank in group_ranks(group) for group in groups)


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_digest_sees_contents_shape_and_dtype() -> None:
    x = torch.arange(6, dtype=torch.int32)
    same = torch.arange(12, dtype=torch.int32)[::2] // 2
    assert digest(x) == digest(same)
    others = [x.view(2, 3), x.float(), x + 1, x.view(torch.float32), x[:0], x[0]]
    assert len({digest(each) for each in [x, *others]}) == 1 + len(others)
    for dtype in (torch.bfloat16, torch.bool, torch.float64, torch.complex64):
        assert digest(torch.ones(3, dtype=dtype)) != digest(torch.zeros(3, dtype=dtype))
    assert digest(torch.tensor(float("nan"))) == digest(torch.tensor(float("nan")))
    assert digest(torch.zeros((), requires_grad=True)) == digest(torch.zeros(()))


def inputs_check(ids: Callable[[int], torch.Tensor], ranks: list[int], **options: Any) -> Callable[..., Any]:
    def call(store: dist.Store, rank: int) -> None:
        tensors = [torch.zeros(2), ids(rank)]
        check_same_inputs(tensors, ["mask", "input_ids"], ranks, store=store, rank=rank, **options)

    return call


def test_equal_inputs_pass() -> None:
    assert (
        on_threads(3, inputs_check(lambda rank: torch.arange(4), [0, 1, 2], timeout=timedelta(seconds=20)))
        == [None] * 3
    )


def test_replicas_are_checked_each_for_itself() -> None:
    def call(store: dist.Store, rank: int) -> None:
        replica = [rank // 2 * 2, rank // 2 * 2 + 1]
        inputs_check(lambda rank: torch.full((2,), rank // 2), replica, timeout=timedelta(seconds=20))(store, rank)

    assert on_threads(4, call) == [None] * 4


def test_the_input_and_the_ranks_that_differ_are_named() -> None:
    check = inputs_check(lambda rank: torch.tensor([rank // 2]), [0, 1, 2, 3], timeout=timedelta(seconds=20))
    text = same_error(on_threads(4, check), InputError)
    assert "input 'input_ids' differs between ranks: ranks 2, 3 passed another value than rank 0" in text


def test_different_arguments_are_named() -> None:
    def call(store: dist.Store, rank: int) -> None:
        names = ["input_ids", "labels"][: rank + 1]
        tensors = [torch.zeros(1)] * len(names)
        check_same_inputs(tensors, names, [0, 1], store=store, rank=rank, timeout=timedelta(seconds=20))

    text = same_error(on_threads(2, call), InputError)
    assert "rank 1 passed the inputs ['input_ids', 'labels'], rank 0 passed ['input_ids']" in text


# --- on gloo ---------------------------------------------------------------------------------------------------------


def _swapped_order(swapped_rank: int) -> str:
    """Starts of different sizes in a different order on one rank, on the default group's own store."""
    rank, world = dist.get_rank(), dist.get_world_size()
    good = agree_across_ranks(ring(rank, world), {"plan": "same"})
    assert good == ("cp:0,1,2,3", "dp:0,1", "dp:2,3")
    group = "cp:0,1,2,3"
    starts = [Event("all_reduce", name, group, "torch.float32", size) for name, size in (("small", 4), ("large", 400))]
    if rank == swapped_rank:
        starts.reverse()
    with pytest.raises(DeadlockError) as caught:
        agree_across_ranks([*starts, Event("wait", "w0", start=0), Event("wait", "w1", start=1)], {"plan": "same"})
    return str(caught.value)


def test_gloo_ranks_raise_the_same_error() -> None:
    texts = run_ranks(_swapped_order, 4, 2)
    assert len(set(texts)) == 1
    assert "'small' of rank 0" in texts[0]
    assert "'large' of rank 2" in texts[0]


def _one_rank_stays_away() -> str:
    if dist.get_rank() == 1:
        raise RuntimeError("this rank fails before the check")
    with pytest.raises(DeadlockError) as caught:
        agree_across_ranks([], {})  # the default group's time-out is the smaller one
    return str(caught.value)


def test_a_gloo_rank_that_fails_before_the_check_is_named() -> None:
    outcomes = launch(_one_rank_stays_away, 3, group_timeout=15)
    assert "fails before the check" in str(outcomes[1].error)
    for rank in (0, 2):
        assert outcomes[rank].error is None
        assert "rank 1 did not come to the check before the first step within 15 s" in outcomes[rank].result


def test_a_computation_is_told_from_another_but_not_by_its_device() -> None:
    def told(factor: float, device: str) -> str:
        graph = fx.Graph()
        x = graph.placeholder("x")
        made = graph.call_function(torch.ops.aten.full.default, ([2], factor), {"device": torch.device(device)})
        graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, made)))
        return computation(graph)

    assert told(1.0, "cuda:0") == told(1.0, "cuda:1") != told(2.0, "cuda:0")
