"""The virtual cluster: collectives by their definition, mismatches and deadlocks named, values freed, whole steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from evocompile.collectives import exchange_start, exchange_wait, unpack
from evocompile.errors import DeadlockError, VerificationError
from evocompile.mesh import Mesh
from evocompile.plan import Plan
from evocompile.program import Input, InputKind, Output, OutputKind, Program
from evocompile.virtual import run_virtual, virtual_step

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
CPU = torch.device("cpu")


class Writer:
    """Writes a graph with few words."""

    def __init__(self, *names: str) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in names]

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def wait(self, start: fx.Node) -> fx.Node:
        return self.call(exchange_wait if start.target is exchange_start else c10d.wait_tensor.default, start)

    def exchange(self, tensors: list[fx.Node], to: int, source: int, size: int, group: str) -> fx.Node:
        return self.call(exchange_start, tensors, to, source, [[size]], torch.float32, CPU, group)

    def done(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(list(outputs))
        return fx.GraphModule({}, self.graph)


def everyone(world: int) -> str:
    return f"all:{','.join(map(str, range(world)))}"


def one_collective(world: int, target: Callable[..., Any], *args: Any) -> list[fx.GraphModule]:
    """The same collective on every rank. A callable among `args` gives the argument for a rank."""
    graphs = []
    for rank in range(world):
        writer = Writer("x")
        given = [arg(rank) if callable(arg) else arg for arg in args]
        graphs.append(writer.done(writer.wait(writer.call(target, *writer.inputs, *given, everyone(world)))))
    return graphs


def values(world: int, *shape: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(world)
    return [[torch.randn(*shape, generator=generator, dtype=torch.float64)] for _ in range(world)]


# --- what the collectives give -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [3, 0])
@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_collectives_by_definition(world: int, width: int) -> None:
    inputs = values(world, 2 * world, width)
    tensors = [each for (each,) in inputs]
    total = torch.stack(tensors).sum(0)
    for (gathered,) in run_virtual(one_collective(world, c10d.all_gather_into_tensor.default, world), inputs):
        assert torch.equal(gathered, torch.cat(tensors))
    for (reduced,) in run_virtual(one_collective(world, c10d.all_reduce.default, "sum"), inputs):
        torch.testing.assert_close(reduced, total)
    scattered = run_virtual(one_collective(world, c10d.reduce_scatter_tensor.default, "sum", world), inputs)
    for rank, (part,) in enumerate(scattered):
        torch.testing.assert_close(part, total[2 * rank : 2 * rank + 2])
    splits = [2] * world
    exchanged = run_virtual(one_collective(world, c10d.all_to_all_single.default, splits, splits), inputs)
    for rank, (part,) in enumerate(exchanged):
        assert torch.equal(part, torch.cat([each[2 * rank : 2 * rank + 2] for each in tensors]))


def test_uneven_all_to_all() -> None:
    world, rows = 3, [[0, 2, 1], [3, 0, 0], [1, 1, 4]]  # rows[i][j]: from rank i to rank j
    graphs = one_collective(
        world, c10d.all_to_all_single.default, lambda rank: [each[rank] for each in rows], lambda rank: rows[rank]
    )
    inputs = [[torch.full((sum(rows[rank]), 2), float(rank))] for rank in range(world)]
    for rank, (part,) in enumerate(run_virtual(graphs, inputs)):
        expected = [float(source) for source in range(world) for _ in range(rows[source][rank])]
        assert part[:, 0].tolist() == expected


def test_results_are_no_aliases() -> None:
    inputs = [[torch.ones(2)], [torch.ones(2)]]
    results = run_virtual(one_collective(2, c10d.all_reduce.default, "sum"), inputs)
    results[0][0].zero_()
    assert results[1][0].tolist() == [2, 2]
    assert inputs[0][0].tolist() == [1, 1]


@pytest.mark.parametrize("world", [2, 3, 64])
def test_a_ring_of_uneven_blocks(world: int) -> None:
    sizes = [(rank * 7) % 5 for rank in range(world)]  # rank 0 and others hold nothing
    graphs = []
    for rank in range(world):
        writer = Writer("x")
        block, total = writer.inputs[0], writer.call(aten.sum.default, writer.inputs[0])
        for step in range(1, world):
            count = sizes[(rank - step) % world]
            buffer = writer.wait(
                writer.exchange([block], (rank + 1) % world, (rank - 1) % world, count, everyone(world))
            )
            block = writer.call(operator.getitem, writer.call(unpack, buffer, [[count]]), 0)
            total = writer.call(aten.add.Tensor, total, writer.call(aten.sum.default, block))
        graphs.append(writer.done(total))
    results = run_virtual(graphs, [[torch.full((size,), float(rank))] for rank, size in enumerate(sizes)])
    assert [each.item() for (each,) in results] == [sum(rank * size for rank, size in enumerate(sizes))] * world


def test_one_way_exchanges() -> None:
    sender, receiver = Writer("x"), Writer()
    sent = sender.wait(sender.exchange(sender.inputs, 1, -1, 0, "cp:0,1"))
    graphs = [sender.done(sent), receiver.done(receiver.wait(receiver.exchange([], -1, 0, 3, "cp:0,1")))]
    (nothing,), (received,) = run_virtual(graphs, [[torch.arange(3.0)], []])
    assert nothing.shape == (0,)
    assert received.tolist() == [0, 1, 2]


def test_starts_do_not_block_and_groups_are_independent() -> None:
    """Both ranks start on two groups and wait in opposite orders."""
    graphs = []
    for rank in range(2):
        writer = Writer("x")
        starts = [writer.call(c10d.all_reduce.default, *writer.inputs, "sum", f"{name}:0,1") for name in "ab"]
        waits = [writer.wait(start) for start in (starts if rank else reversed(starts))]
        graphs.append(writer.done(*waits))
    assert run_virtual(graphs, [[torch.tensor(1.0)], [torch.tensor(2.0)]]) == [[3.0, 3.0], [3.0, 3.0]]


def test_runs_repeat_bit_for_bit() -> None:
    graphs, inputs = one_collective(16, c10d.all_reduce.default, "sum"), values(16, 1000)
    first, second = run_virtual(graphs, inputs), run_virtual(graphs, inputs)
    assert all(torch.equal(first[0][0], each) for (each,) in first + second)


# --- what is wrong ---------------------------------------------------------------------------------------------------


def _reduce(name: str, group: str = "all:0,1", dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    writer = Writer("x")
    value = writer.call(aten.to.dtype, writer.inputs[0], dtype)
    start = writer.graph.create_node("call_function", c10d.all_reduce.default, (value, "sum", group), name=name)
    return writer.done(writer.wait(start))


def _gather(name: str) -> fx.GraphModule:
    writer = Writer("x")
    args = (writer.inputs[0], 2, "all:0,1")
    start = writer.graph.create_node("call_function", c10d.all_gather_into_tensor.default, args, name=name)
    return writer.done(writer.wait(start))


def test_mismatches_name_both_nodes() -> None:
    short, long = [[torch.ones(2)], [torch.ones(3)]], [[torch.ones(2)], [torch.ones(2)]]
    with pytest.raises(DeadlockError, match=r"'mine' of rank 0 .* 'other' of rank 1 .*: size 8 bytes against 12 bytes"):
        run_virtual([_reduce("mine"), _reduce("other")], short)
    with pytest.raises(DeadlockError, match=r"'mine' of rank 0 .* 'other' of rank 1 .*: dtype torch.float32 against"):
        run_virtual([_reduce("mine"), _reduce("other", dtype=torch.int32)], long)
    with pytest.raises(DeadlockError, match=r"all_reduce 'mine' of rank 0 .* all_gather 'other' of rank 1 .*: kind"):
        run_virtual([_reduce("mine"), _gather("other")], long)
    with pytest.raises(DeadlockError, match="no member of the group"):
        run_virtual([_reduce("mine", "all:1,2"), _reduce("other")], long)


def test_exchanges_of_different_sizes_are_named() -> None:
    graphs = []
    for rank in range(2):
        writer = Writer("x")
        graphs.append(writer.done(writer.wait(writer.exchange(writer.inputs, 1 - rank, 1 - rank, 3, "cp:0,1"))))
    with pytest.raises(
        DeadlockError, match=r"rank 0 .* sends 8 bytes of torch.float32, .* rank 1 .* receives 12 bytes"
    ):
        run_virtual(graphs, [[torch.ones(2)], [torch.ones(3)]])


def test_uneven_all_to_all_must_match_pairwise() -> None:
    graphs = one_collective(2, c10d.all_to_all_single.default, [1, 1], lambda rank: [1, 1] if rank else [0, 2])
    with pytest.raises(DeadlockError, match=r"rank 0 .* sends 0 bytes, .* rank 0 .* receives 4 bytes"):
        run_virtual(graphs, [[torch.ones(2)], [torch.ones(2)]])


def test_a_deadlock_names_every_rank_and_node() -> None:
    """The order of each group is the same on all ranks; only all groups together show the cycle."""
    graphs = []
    for rank in range(3):
        writer = Writer("x")
        pairs = [sorted((rank, (rank + 1) % 3)), sorted(((rank - 1) % 3, rank))]
        groups = [f"a:{low},{high}" for low, high in pairs]
        waits = [writer.wait(writer.call(c10d.all_reduce.default, *writer.inputs, "sum", group)) for group in groups]
        graphs.append(writer.done(*waits))
    with pytest.raises(DeadlockError) as caught:
        run_virtual(graphs, [[torch.ones(2)]] * 3, where="forward.")
    for rank in range(3):
        assert f"rank {rank} waits in 'forward.wait_tensor" in str(caught.value)


def test_a_rank_that_has_finished_is_named() -> None:
    writer = Writer("x")
    with pytest.raises(
        DeadlockError, match=r"(?s)rank 0 waits in 'wait_tensor.*started by rank 1.*rank 1 has finished"
    ):
        run_virtual([_reduce("mine"), writer.done(*writer.inputs)], [[torch.ones(2)], [torch.ones(2)]])


def test_communications_of_one_group_are_carried_out_in_order() -> None:
    """Rank 0 sends to 1, then to 2; both receive, but rank 2 wants its part before rank 1 starts: NCCL would hang."""
    first = Writer("x")
    starts = [first.exchange(first.inputs, to, -1, 0, "cp:0,1,2") for to in (1, 2)]
    graphs = [first.done(*map(first.wait, starts))]
    second = Writer()
    token = second.wait(second.exchange([], -1, 2, 1, "token:1,2"))
    graphs.append(second.done(token, second.wait(second.exchange([], -1, 0, 2, "cp:0,1,2"))))
    third = Writer()
    received = third.wait(third.exchange([], -1, 0, 2, "cp:0,1,2"))
    one = third.call(aten.narrow.default, received, 0, 0, 1)
    graphs.append(third.done(third.wait(third.exchange([one], 1, -1, 0, "token:1,2"))))
    with pytest.raises(DeadlockError, match="block one another"):
        run_virtual(graphs, [[torch.ones(2)], [], []])


def test_a_start_that_nobody_matches_is_found_without_a_wait() -> None:
    writer, idle = Writer("x"), Writer("x")
    writer.call(c10d.all_reduce.default, *writer.inputs, "sum", "all:0,1")
    with pytest.raises(DeadlockError, match=r"'all_reduce.*' of rank 0 .* is never matched: not started by rank 1"):
        run_virtual([writer.done(*writer.inputs), idle.done(*idle.inputs)], [[torch.ones(2)]] * 2)


def test_reading_before_the_wait_is_caught() -> None:
    writer = Writer("x")
    start = writer.call(c10d.all_reduce.default, *writer.inputs, "sum", "all:0")
    early = writer.call(aten.neg.default, start)
    with pytest.raises(VerificationError, match="rank 0: neg_default reads a communication before its wait"):
        run_virtual([writer.done(early, writer.wait(start))], [[torch.ones(2)]])


# --- memory ----------------------------------------------------------------------------------------------------------


def test_values_are_freed_after_their_last_use() -> None:
    made: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(result := x + 1))
        return result

    alive: list[int] = []
    writer = Writer("x")
    value = writer.inputs[0]
    for _ in range(5):
        writer.call(make, value)  # nobody uses it
        start = writer.call(c10d.all_reduce.default, writer.call(make, value), "sum", "all:0")
        value = writer.wait(start)
    run_virtual([writer.done(value)], [[torch.ones(2)]])
    assert alive == [0] * 10


# --- a whole step ----------------------------------------------------------------------------------------------------


def _linear_program(rank: int) -> Program:
    """loss = sum(x @ w) over 2 ranks: x's rows are split, w is sharded by rows; x is given whole."""
    group = "all:0,1"
    forward = Writer("w", "count", "x")
    w, count, x = forward.inputs
    part = forward.call(aten.narrow.default, x, 0, 2 * rank, 2)
    whole = forward.wait(forward.call(c10d.all_gather_into_tensor.default, w, 2, group))
    loss = forward.call(aten.sum.default, forward.call(aten.mm.default, part, whole))
    loss = forward.wait(forward.call(c10d.all_reduce.default, loss, "sum", group))
    backward = Writer("part", "d_loss")
    part_saved, d_loss = backward.inputs
    ones = backward.call(aten.expand.default, d_loss, [2, 3])
    d_w = backward.call(aten.mm.default, backward.call(aten.t.default, part_saved), ones)
    d_w = backward.wait(backward.call(c10d.reduce_scatter_tensor.default, d_w, "sum", 2, group))
    scalar, counted = ((), torch.float32), ((), torch.int64)
    return Program(
        joint=None,
        inputs=[
            Input(InputKind.PARAMETER, "w", (4, 3), torch.float32, True),
            Input(InputKind.BUFFER, "count", *counted),
            Input(InputKind.USER, "x", (4, 4), torch.float32),
            Input(InputKind.TANGENT, "0", *scalar),
        ],
        outputs=[
            Output(OutputKind.USER, "0", *scalar, differentiable=True),
            Output(OutputKind.BUFFER, "count", *counted),
            Output(OutputKind.GRADIENT, "w", (4, 3), torch.float32),
        ],
        plan=Plan(cp=2),
        mesh=Mesh.of(Plan(cp=2)),
        rank=rank,
        forward=forward.done(loss, forward.call(aten.add.Tensor, count, 1), part),
        backward=backward.done(d_w),
    )


def test_a_step_gives_outputs_buffers_and_gradients() -> None:
    w, x, count = torch.randn(4, 3, requires_grad=True), torch.randn(4, 4), torch.tensor(6)
    loss = (x @ w).sum()
    loss.backward()
    assert w.grad is not None
    programs = [_linear_program(rank) for rank in range(2)]
    inputs = [[part.detach(), count, x] for part in w.chunk(2)]
    step = virtual_step(programs, inputs)
    doubled = virtual_step(programs, inputs, [torch.tensor(2.0)])
    for rank in range(2):
        torch.testing.assert_close(step.outputs[rank], [loss.detach()])
        assert step.buffers[rank] == {"count": 7}
        torch.testing.assert_close(step.gradients[rank], {"w": w.grad.chunk(2)[rank]})
        torch.testing.assert_close(doubled.gradients[rank], {"w": 2 * w.grad.chunk(2)[rank]})
    for program in programs:
        program.backward = None
    assert virtual_step(programs, inputs).gradients == []
