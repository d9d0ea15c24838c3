"""Exchanges and process groups: on fake tensors, and on real gloo ranks against the virtual cluster."""

from __future__ import annotations

import operator
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import fx

from evocompile import torch_private
from evocompile.collectives import (
    Communicators,
    Event,
    exchange_start,
    exchange_wait,
    graph_events,
    group_names,
    is_boundary,
    is_start,
    is_wait,
    pack,
    pending_works,
    sent_bytes,
    unpack,
)
from evocompile.errors import DeadlockError
from evocompile.virtual import run_virtual
from tests.distributed.launch import launch, run_ranks

c10d = torch.ops._c10d_functional
CPU = torch.device("cpu")


def ring_graph(rank: int, rows: list[int], group: str, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """Passes a pair of tensors of rank-dependent size once around the ring; returns what arrives at each step."""
    world = len(rows)
    graph = fx.Graph()
    block: list[fx.Node] = [graph.placeholder("k"), graph.placeholder("v")]
    arrived: list[fx.Node] = []
    for step in range(1, world):
        count = rows[(rank - step) % world]
        shapes = [[count, 3], [2, count]]
        args = (list(block), (rank + 1) % world, (rank - 1) % world, shapes, dtype, CPU, group)
        buffer = graph.call_function(exchange_wait, (graph.call_function(exchange_start, args),))
        parts = graph.call_function(unpack, (buffer, shapes))
        block = [graph.call_function(operator.getitem, (parts, i)) for i in range(2)]
        arrived += block
    graph.output(arrived)
    return fx.GraphModule({}, graph)


def ring_inputs(rank: int, rows: list[int]) -> list[torch.Tensor]:
    count = rows[rank]
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(count, 3, generator=generator), torch.randn(2, count, generator=generator)]


def all_kinds_graph(world: int, rank: int) -> fx.GraphModule:
    """One of each functional collective, all in flight together, waited for in another order. all_to_all is uneven:
    rank i sends (i + j) % 3 rows to rank j."""
    group = f"all:{','.join(map(str, range(world)))}"
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    splits = [(rank + other) % 3 for other in range(world)]
    starts = [
        graph.call_function(c10d.all_gather_into_tensor.default, (x, world, group)),
        graph.call_function(c10d.reduce_scatter_tensor.default, (x, "sum", world, group)),
        graph.call_function(c10d.all_reduce.default, (x, "sum", group)),
        graph.call_function(c10d.all_to_all_single.default, (y, splits, splits, group)),
    ]
    waits = [graph.call_function(c10d.wait_tensor.default, (start,)) for start in reversed(starts)]
    graph.output(waits)
    return fx.GraphModule({}, graph)


def all_kinds_inputs(world: int, rank: int, width: int) -> list[torch.Tensor]:
    rows = sum((rank + other) % 3 for other in range(world))
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(2 * world, width, generator=generator),
        torch.randn(rows, width, generator=generator),
    ]


# --- without a process group -------------------------------------------------------------------------------------


def test_exchange_on_fake_tensors_gives_shapes() -> None:
    with torch_private.new_fake_mode():
        block = [torch.empty(2, 3), torch.empty(4)]
        buffer = exchange_start(block, 1, 3, [[5, 2], [0], [7]], torch.float32, CPU, "cp:0,1,2,3")
        nothing_sent = exchange_start([], -1, 3, [[5]], torch.float32, CPU, "cp:0,1,2,3")
        nothing_received = exchange_start(block, 1, -1, [[5]], torch.float32, CPU, "cp:0,1,2,3")
        parts = unpack(exchange_wait(buffer), [[5, 2], [0], [7]])
    assert torch_private.is_fake(buffer)
    assert [tuple(each.shape) for each in (buffer, nothing_sent, nothing_received)] == [(17,), (5,), (0,)]
    assert [tuple(part.shape) for part in parts] == [(5, 2), (0,), (7,)]
    outside = exchange_start([buffer], 1, 3, [[6]], torch.float32, CPU, "cp:0,1,2,3")  # the mode is not active here
    assert torch_private.is_fake(outside)
    assert pending_works() == 0


def test_pack_and_unpack_are_inverse() -> None:
    tensors = [torch.randn(2, 3).t(), torch.randn(0, 4), torch.randn(()), torch.randn(5)]
    parts = unpack(pack(tensors), [list(tensor.shape) for tensor in tensors])
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))
    single = torch.randn(2, 3)
    assert pack([single]).data_ptr() == single.data_ptr()  # no copy
    assert pack([single.t()]).is_contiguous()


def test_an_exchange_that_moves_nothing_needs_no_group() -> None:
    buffer = exchange_start([torch.empty(0, 3)], 1, 1, [[0, 3]], torch.float32, CPU, "no such group")
    assert pending_works() == 1
    assert exchange_wait(buffer).shape == (0,)
    assert pending_works() == 0


def test_waiting_twice_is_caught() -> None:
    buffer = exchange_start([], -1, -1, [], torch.float32, CPU, "no such group")
    exchange_wait(buffer)
    with pytest.raises(AssertionError, match="no exchange is filling"):
        exchange_wait(buffer)


def test_boundaries() -> None:
    nodes = {node.name: node for node in ring_graph(0, [1, 2, 3], "cp:0,1,2").graph.nodes}
    found = {name: (is_start(node), is_wait(node), is_boundary(node)) for name, node in nodes.items()}
    assert found["exchange_start"] == (True, False, True)
    assert found["exchange_wait"] == (False, True, True)
    assert found["unpack"] == found["getitem"] == (False, False, True)
    assert found["k"] == found["output"] == (False, False, False)
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.ops.aten.max.dim, (x, 0))
    assert not is_boundary(pair)
    assert not is_boundary(graph.call_function(operator.getitem, (pair, 0)))
    assert is_boundary(graph.call_function(c10d.all_reduce.default, (x, "sum", "g:0,1")))


def test_dead_code_elimination_keeps_exchanges() -> None:
    graph_module = ring_graph(0, [1, 1], "cp:0,1")
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = ([],)
    graph_module.graph.eliminate_dead_code()
    names = [node.name for node in graph_module.graph.nodes]
    assert "exchange_wait" in names
    assert "unpack" not in names


def fake_values(graph_module: fx.GraphModule, inputs: list[torch.Tensor]) -> fx.GraphModule:
    """Fills in the fake value of every node."""
    mode = torch_private.new_fake_mode()
    supplied = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = mode.from_tensor(next(supplied))
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
    return graph_module


def test_events_and_bytes() -> None:
    rows = [4, 0, 2]
    ring = [fake_values(ring_graph(rank, rows, "cp:0,1,2"), ring_inputs(rank, rows)) for rank in range(3)]
    per_row = 5 * 4  # bytes of a row of k and a column of v
    assert graph_events(ring[0], "forward.") == [
        Event(
            "exchange",
            "forward.exchange_start",
            "cp:0,1,2",
            "torch.float32",
            0,
            ((1, 4 * per_row),),
            ((2, 2 * per_row),),
        ),
        Event("wait", "forward.exchange_wait", start=0),
        # next what rank 2 sent is passed on, and what comes is rank 1's: nothing, so there is no such half
        Event("exchange", "forward.exchange_start_1", "cp:0,1,2", "torch.float32", 0, ((1, 2 * per_row),), ()),
        Event("wait", "forward.exchange_wait_1", start=2),
    ]
    kinds = fake_values(all_kinds_graph(3, 1), all_kinds_inputs(3, 1, 5))
    gather, scatter, reduce, all_to_all, *waits = graph_events(kinds, first=10)
    assert [wait.start for wait in waits] == [13, 12, 11, 10]
    size = 6 * 5 * 4
    assert (gather.size, scatter.size, reduce.size) == (size, size, size)
    assert [sent_bytes(each, 1) for each in (gather, scatter, reduce)] == [2 * size, size * 2 // 3, 4 * size // 3]
    assert all_to_all.sent == all_to_all.received == ((0, 20), (1, 40), (2, 0))
    assert sent_bytes(all_to_all, 1) == 20
    assert group_names([gather, *waits]) == {"all:0,1,2"}


# --- on gloo -------------------------------------------------------------------------------------------------------


def _run_graphs(rows: list[int]) -> list[list[torch.Tensor]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = ",".join(map(str, range(world)))
    communicators = Communicators(CPU)
    communicators.create([f"cp:{ranks}", f"all:{ranks}"])
    results = []
    for graph, inputs in (
        (ring_graph(rank, rows, f"cp:{ranks}"), ring_inputs(rank, rows)),
        (all_kinds_graph(world, rank), all_kinds_inputs(world, rank, 3)),
        (all_kinds_graph(world, rank), all_kinds_inputs(world, rank, 0)),
    ):
        results.append(communicators.resolve(graph)(*inputs))
        assert pending_works() == 0
    communicators.destroy()
    return results


@pytest.mark.parametrize("rows", [[2, 3], [4, 0, 1, 7]])
def test_gloo_gives_what_the_virtual_cluster_gives(rows: list[int]) -> None:
    world = len(rows)
    real = run_ranks(_run_graphs, world, rows)
    ranks, group = range(world), f"cp:{','.join(map(str, range(world)))}"
    virtual = [
        run_virtual([ring_graph(rank, rows, group) for rank in ranks], [ring_inputs(rank, rows) for rank in ranks]),
        *(
            run_virtual(
                [all_kinds_graph(world, rank) for rank in ranks],
                [all_kinds_inputs(world, rank, width) for rank in ranks],
            )
            for width in (3, 0)
        ),
    ]
    for rank in ranks:
        for index in range(3):
            torch.testing.assert_close(real[rank][index], virtual[index][rank])
    own_ring = real[0][0]
    for step in range(1, world):  # and the ring gives what the owners had
        assert torch.equal(own_ring[2 * step - 2], ring_inputs(-step % world, rows)[0])


def _groups_of_two_models() -> list[int]:
    rank = dist.get_rank()
    first, second = Communicators(CPU), Communicators(CPU, timeout=timedelta(seconds=5))
    # rank 3 is in one group, rank 0 in three
    names = ["cp:0,1", "cp.backward:0,1", "all:0,1,2,3"]
    first.create(names[:2])
    first.create(names)  # only what is missing
    second.create(reversed(names))
    assert first.group("all:0,1,2,3").group_name != second.group("all:0,1,2,3").group_name
    timeouts = [torch_private.default_group_timeout().total_seconds()]
    timeouts += [
        each.group("all:0,1,2,3")._get_backend(CPU).options._timeout.total_seconds() for each in (first, second)
    ]
    first.destroy()
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=second.group("all:0,1,2,3"))
    assert value.item() == 6
    second.destroy()
    second.destroy()
    assert dist.distributed_c10d._world.pg_map.keys() == {dist.group.WORLD}
    return timeouts


def test_two_models_have_groups_of_their_own_and_leave_none() -> None:
    assert run_ranks(_groups_of_two_models, 4) == [[60.0, 60.0, 5.0]] * 4


def _peer_stays_away() -> float:
    communicators = Communicators(CPU, timeout=timedelta(seconds=2))
    communicators.create(["cp:0,1"])
    if dist.get_rank() == 1:
        time.sleep(4)
        return 0.0
    start = time.monotonic()
    run = communicators.resolve(ring_graph(0, [1, 1], "cp:0,1"))
    with pytest.raises(DeadlockError, match=r"rank 1.*did not answer in time"):
        run(*ring_inputs(0, [1, 1]))
    assert pending_works() == 0
    return time.monotonic() - start


def test_a_peer_that_stays_away_raises_within_the_time_out() -> None:
    waited, _ = run_ranks(_peer_stays_away, 2)
    assert 1.5 < waited < 3.5


def _peer_dies() -> float:
    communicators = Communicators(CPU, timeout=timedelta(seconds=20))
    communicators.create(["cp:0,1"])
    if dist.get_rank() == 1:
        raise RuntimeError("this rank dies")
    start = time.monotonic()
    with pytest.raises(DeadlockError, match="rank 1"):
        communicators.resolve(ring_graph(0, [1, 1], "cp:0,1"))(*ring_inputs(0, [1, 1]))
    return time.monotonic() - start


def test_a_peer_that_dies_raises_at_once() -> None:
    survivor, victim = launch(_peer_dies, 2)
    assert victim.error is not None
    assert "this rank dies" in victim.error
    assert survivor.error is None
    assert survivor.result < 10


SIZES = [1, 24, 333, 20000, 8, 4096, 64] * 3


def gathers_in_flight(group: str = "params:0,1", repeats: int = 800) -> int:
    """Starts gathers of many sizes before it waits for the first; how many gave something else than they have to."""
    graph = fx.Graph()
    shards = [graph.placeholder(f"x{i}") for i in range(len(SIZES))]
    starts = [graph.call_function(c10d.all_gather_into_tensor.default, (each, 2, group)) for each in shards]
    graph.output([graph.call_function(c10d.wait_tensor.default, (start,)) for start in starts])
    communicators = Communicators(CPU)
    communicators.create([group])
    step = communicators.resolve(fx.GraphModule({}, graph))
    wrong = 0
    for repeat in range(repeats):
        mine = [torch.full((size,), float(i + repeat + dist.get_rank())) for i, size in enumerate(SIZES)]
        for i, whole in enumerate(step(*mine)):
            parts = whole.view(2, -1)
            wrong += not (parts[0].eq(i + repeat).all() and parts[1].eq(i + repeat + 1).all())
    communicators.destroy()
    return wrong


def test_gathers_of_many_sizes_are_under_way_together() -> None:
    assert run_ranks(gathers_in_flight, 2) == [0, 0]
