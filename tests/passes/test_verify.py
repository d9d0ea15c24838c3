"""verify: every invariant, broken once, is found and named. agree: programs of all ranks fit together, or not."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from evocompile import torch_private
from evocompile.collectives import Event, describe, exchange_start, exchange_wait, is_start, program_events, unpack
from evocompile.errors import DeadlockError, VerificationError
from evocompile.layout import Axis, Factor, Layout, Sharding, Split
from evocompile.mesh import Mesh
from evocompile.passes.verify import agree, events, verify
from evocompile.plan import Plan
from evocompile.program import Input, InputKind, Output, OutputKind, Program, Snapshot, placeholders

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
CPU = torch.device("cpu")
SEQ = Layout(((Factor(8, Axis("seq", 8), split=True),), (Factor(4),)))


class Writer:
    """Writes a graph with fake values."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.graph, self.mode = fx.Graph(), torch_private.new_fake_mode()
        self.inputs = [self.graph.placeholder(name) for name in shapes]
        for node, shape in zip(self.inputs, shapes.values(), strict=True):
            with self.mode:
                node.meta["val"] = torch.empty(shape)

    def call(self, target: Callable[..., Any], *args: Any, name: str | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
        return node


def sample(rank: int = 0) -> Program:
    """Forward: gathers w, keeps this rank's rows of x, exchanges them with the other rank. Backward: reduces d_w."""
    forward = Writer(w=(2, 4), x=(8, 4))
    w, x = forward.inputs
    start = forward.call(c10d.all_gather_into_tensor.default, w, 2, "params:0,1", name="gather")
    whole = forward.call(c10d.wait_tensor.default, start, name="whole")
    rows = forward.call(aten.narrow.default, x, 0, 4 * rank, 4, name="rows")
    args = ([rows], 1 - rank, 1 - rank, [[4, 4]], torch.float32, CPU, "cp:0,1")
    exchange = forward.call(exchange_start, *args, name="exchange")
    buffer = forward.call(exchange_wait, exchange, name="arrived")
    other = forward.call(operator.getitem, forward.call(unpack, buffer, [[4, 4]]), 0, name="other")
    out = forward.call(aten.mm.default, forward.call(aten.add.Tensor, rows, other), whole, name="out")
    forward.graph.output([out, rows])
    backward = Writer(rows=(4, 4), d_out=(8, 4))
    rows_saved, d_out = backward.inputs
    d_local = backward.call(aten.narrow.default, d_out, 0, 4 * rank, 4)
    d_w = backward.call(aten.mm.default, backward.call(aten.t.default, rows_saved), d_local, name="mm")
    reduce = backward.call(c10d.reduce_scatter_tensor.default, d_w, "sum", 2, "grads:0,1", name="reduce")
    backward.graph.output([backward.call(c10d.wait_tensor.default, reduce, name="d_w")])
    plan = Plan(cp=2, attention="ring")
    program = Program(
        joint=None,
        inputs=[
            Input(InputKind.PARAMETER, "w", (4, 4), torch.float32, True),
            Input(InputKind.USER, "x", (8, 4), torch.float32),
            Input(InputKind.TANGENT, "0", (8, 4), torch.float32),
        ],
        outputs=[
            Output(OutputKind.USER, "0", (8, 4), torch.float32, differentiable=True, layout=SEQ),
            Output(OutputKind.GRADIENT, "w", (4, 4), torch.float32),
        ],
        plan=plan,
        mesh=Mesh.of(plan),
        rank=rank,
        forward=fx.GraphModule({}, forward.graph),
        backward=fx.GraphModule({}, backward.graph),
        sharding=Sharding({"seq": Split("cp", 2, "contiguous", 8)}, {"dp": 0, "cp": rank}),
        facts={"sharded states", "variants of a step"},
    )
    program.layouts[rows] = program.layouts[out] = SEQ
    for graph_module in program.graphs.values():
        for node in filter(is_start, graph_module.graph.nodes):
            program.collectives[node] = describe(node, rank, "a test")
    return program


def node(program: Program, name: str) -> fx.Node:
    return next(each for graph in program.graphs.values() for each in graph.graph.nodes if each.name == name)


def broken(change: Callable[[Program], object], message: str) -> None:
    program = sample()
    change(program)
    with pytest.raises(VerificationError, match=f"after some pass: {message}"):
        verify(program, "some pass")


# --- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sound_program_passes(rank: int) -> None:
    verify(sample(rank))


def test_the_last_pass_is_named() -> None:
    program = sample()
    program.collectives.clear()
    with pytest.raises(VerificationError, match=r"after capture: forward.gather has no entry"):
        verify(program)
    program.snapshots.append(Snapshot("localize", "", 0, 0.0))
    with pytest.raises(VerificationError, match=r"after localize: forward.gather has no entry"):
        verify(program)


def _erase_wait(name: str) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        wait = node(program, name)
        for user in list(wait.users):
            user.replace_input_with(wait, wait.all_input_nodes[0])
        wait.graph.erase_node(wait)

    return change


def test_waits() -> None:
    broken(_erase_wait("whole"), r"forward.gather is read by out before its wait")

    def unused_exchange(program: Program) -> None:
        for name in ("other", "unpack", "arrived"):
            each = node(program, name)
            each.replace_all_uses_with(node(program, "rows"))
            each.graph.erase_node(each)

    broken(unused_exchange, r"forward.exchange has 0 waits; every start needs exactly one, whether or not")

    def second_wait(program: Program) -> None:
        start = node(program, "gather")
        with start.graph.inserting_after(node(program, "whole")):
            again = start.graph.call_function(c10d.wait_tensor.default, (start,), name="again")
        again.meta["val"] = start.meta["val"]

    broken(second_wait, r"forward.gather has 2 waits")
    broken(lambda p: node(p, "whole").update_arg(0, node(p, "w")), r"forward.gather has 0 waits")
    broken(lambda p: node(p, "arrived").update_arg(0, node(p, "rows")), r"forward.exchange has 0 waits")

    def wait_of_nothing(program: Program) -> None:
        out = node(program, "out")
        with out.graph.inserting_before(out):
            extra = out.graph.call_function(c10d.wait_tensor.default, (node(program, "rows"),), name="extra")
        extra.meta["val"] = node(program, "rows").meta["val"]

    broken(wait_of_nothing, r"forward.extra waits for rows, which starts no communication")


def _entry(name: str, **changes: Any) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        start = node(program, name)
        program.collectives[start] = replace(program.collectives[start], **changes)

    return change


def test_the_table_of_collectives() -> None:
    broken(_entry("exchange", sent=63), r"forward.exchange sends 64 bytes; the table says 63")
    broken(
        _entry("reduce", kind="all_reduce"), r"backward.reduce is reduce_scatter on grads:0,1; the table says all_red"
    )
    broken(
        _entry("gather", group="p:0,1"), r"forward.gather is all_gather on params:0,1; the table says all_gather on p:"
    )
    broken(lambda p: p.collectives.pop(node(p, "reduce")), r"backward.reduce has no entry in the table")


def test_groups_and_peers() -> None:
    broken(lambda p: node(p, "gather").update_arg(2, "params:0,2"), "forward.gather communicates on group params:0,2")
    broken(lambda p: node(p, "gather").update_arg(2, "params:1"), r"forward.gather communicates on .* from rank 0 of 2")
    broken(lambda p: node(p, "gather").update_arg(1, 3), r"forward.gather takes group params:0,1 for one of 3 ranks")
    broken(lambda p: node(p, "reduce").update_arg(1, "avg"), r"backward.reduce reduces by 'avg'")
    broken(lambda p: node(p, "exchange").update_arg(1, 0), r"forward.exchange has destination 0, which is no other")
    broken(lambda p: node(p, "exchange").update_arg(2, 5), r"forward.exchange has source 5, which is no other")
    broken(
        lambda p: node(p, "exchange").update_arg(4, torch.float16),
        r"forward.exchange exchanges torch.float16, but is given torch.float32",
    )
    broken(
        lambda p: node(p, "exchange").update_arg(3, [[5, 4]]),
        r"forward.exchange has a value of 64 bytes, but receives 80",
    )


def test_shapes_and_metadata() -> None:
    broken(
        lambda p: p.layouts.update({node(p, "whole"): SEQ.unsplit()}),
        r"forward.whole has shape \(4, 4\); its layout .* \(8, 4\)",
    )
    broken(lambda p: node(p, "other").meta.clear(), r"forward.other has no fake value")
    broken(lambda p: p.forward and p.forward.graph._root.append(node(p, "out")), r"the forward graph is malformed")


def _returned(name: str, *values: str | None) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        (output,) = program.graphs[name].graph.find_nodes(op="output")
        output.args = ([each and node(program, each) for each in values],)

    return change


def test_inputs_and_outputs() -> None:
    broken(lambda p: p.inputs.pop(1), r"the forward graph has 2 placeholders for 1 inputs")
    broken(
        lambda p: p.inputs.__setitem__(1, replace(p.inputs[1], shape=(8, 5))),
        r"forward.x is torch.float32 \(8, 4\); input x is torch.float32 \(8, 5\)",
    )
    broken(lambda p: p.inputs.__setitem__(0, replace(p.inputs[0], dtype=torch.int8)), r"forward.w is torch.float32")
    broken(
        lambda p: p.outputs.__setitem__(0, replace(p.outputs[0], layout=None)),
        r"forward.out is \(4, 4\); output 0 is \(8, 4\)",
    )
    broken(_returned("forward", None, "rows"), r"the forward graph returns None for output 0")
    broken(_returned("forward", "out"), r"backward takes 2 values; 0 are saved and 1 are tangents")
    broken(_returned("forward", "out", "x"), r"backward.rows is .*; the saved forward.x is")
    broken(_returned("backward"), r"the backward graph returns 0 values for 1 outputs")
    broken(_returned("backward", "reduce"), r"backward.reduce is read by output before its wait")
    broken(_returned("backward", "mm"), r"backward.mm is \(4, 4\); the shard of w, .*, is \(2, 4\)")
    broken(lambda p: setattr(p, "backward", None), r"forward saves 1 values, but there is no backward graph")
    broken(lambda p: setattr(p, "forward", None), r"there is neither a joint nor a forward graph")
    program = sample()
    _returned("backward", None)(program)
    verify(program)  # a parameter that the loss does not depend on


def test_joint_graphs() -> None:
    writer = Writer(tangent=(), w=(4,))
    d_out, w = writer.inputs
    writer.graph.output([writer.call(aten.sum.default, w), writer.call(aten.expand.default, d_out, [4])])
    program = Program(
        joint=fx.GraphModule({}, writer.graph),
        inputs=[
            Input(InputKind.TANGENT, "w", (), torch.float32),  # a name that a parameter has too
            Input(InputKind.PARAMETER, "w", (4,), torch.float32, True),
        ],
        outputs=[
            Output(OutputKind.USER, "0", (), torch.float32, differentiable=True),
            Output(OutputKind.GRADIENT, "w", (4,), torch.float32),
        ],
        plan=Plan(),
        mesh=Mesh.of(Plan()),
        rank=0,
    )
    verify(program)
    program.outputs.reverse()
    with pytest.raises(VerificationError, match=r"joint.expand.* is \(4,\); output 0 is \(\)"):
        verify(program)


def test_cost_is_linear() -> None:
    """20,000 nodes in seconds; quadratic work would take minutes."""
    writer = Writer(w=(2, 4))
    program, value = sample(), writer.inputs[0]
    starts = []
    for _ in range(4_000):
        start = writer.graph.call_function(c10d.all_reduce.default, (value, "sum", "cp:0,1"))
        value = writer.graph.call_function(c10d.wait_tensor.default, (start,))
        for _ in range(3):
            value = writer.graph.call_function(aten.neg.default, (value,))
        starts.append(start)
    writer.graph.output([value])
    for each in writer.graph.nodes:
        each.meta["val"] = writer.inputs[0].meta["val"]
    program.forward, program.backward = fx.GraphModule({}, writer.graph), None
    program.inputs, program.outputs = program.inputs[:1], [Output(OutputKind.USER, "0", (2, 4), torch.float32)]
    program.collectives = {each: describe(each, 0, "") for each in starts}
    assert placeholders(writer.graph)
    begin = time.perf_counter()
    verify(program)
    agree([program_events(program)] * 2)
    assert time.perf_counter() - begin < 30


# --- all ranks -------------------------------------------------------------------------------------------------------


def test_events_of_a_program_agree() -> None:
    programs = [program_events(sample(rank)) for rank in range(2)]
    assert [(each.kind, each.node, each.start) for each in programs[0]] == [
        ("all_gather", "forward.gather", -1),
        ("wait", "forward.whole", 0),
        ("exchange", "forward.exchange", -1),
        ("wait", "forward.arrived", 2),
        ("reduce_scatter", "backward.reduce", -1),
        ("wait", "backward.d_w", 4),
    ]
    forward = sample().forward
    assert forward is not None
    assert [each.node for each in events(forward)] == ["gather", "whole", "exchange", "arrived"]
    agree(programs)


def _swap(program: list[Event], i: int, j: int) -> list[Event]:
    """Exchange the places of two start-wait pairs, each at positions (i, i + 1)."""
    pairs = [program[k : k + 2] for k in range(0, len(program), 2)]
    pairs[i], pairs[j] = pairs[j], pairs[i]
    flat = [event for pair in pairs for event in pair]
    return [event._replace(start=k - 1) if event.kind == "wait" else event for k, event in enumerate(flat)]


def test_two_groups_in_different_orders_block() -> None:
    """Each group alone has the same order on both ranks."""
    programs = [program_events(sample(rank)) for rank in range(2)]
    with pytest.raises(DeadlockError) as caught:
        agree([programs[0], _swap(programs[1], 0, 1)])
    assert "rank 0 waits in 'forward.whole' for all_gather 'forward.gather'" in str(caught.value)
    assert "rank 1 waits in 'forward.arrived' for exchange 'forward.exchange'" in str(caught.value)


def test_a_dropped_collective_blocks() -> None:
    programs = [program_events(sample(rank)) for rank in range(2)]
    with pytest.raises(DeadlockError, match=r"(?s)rank 0 waits in 'backward.d_w'.*rank 1 has finished"):
        agree([programs[0], programs[1][:4]])


def test_different_sizes_do_not_match() -> None:
    programs = [program_events(sample(rank)) for rank in range(2)]
    programs[1][0] = programs[1][0]._replace(size=16)
    with pytest.raises(
        DeadlockError, match=r"'forward.gather' of rank 0 .* of rank 1 .*size 32 bytes against 16 bytes"
    ):
        agree(programs)
    programs[1][0] = programs[0][0]
    programs[1][2] = programs[1][2]._replace(sent=((0, 32),))
    with pytest.raises(DeadlockError, match=r"rank 1 .* sends 32 bytes .* rank 0 .* receives 64 bytes"):
        agree(programs)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[Event]]:
    """Programs of a world in which all ranks follow one global order of communications, each rank waiting for its own
    starts in any order and as late as it likes: such programs never block."""
    world = draw(st.integers(2, 6))
    programs: list[list[Event]] = [[] for _ in range(world)]
    open_starts: list[list[int]] = [[] for _ in range(world)]

    def wait_for_some(rank: int, at_most: int) -> None:
        for _ in range(draw(st.integers(0, at_most))):
            if open_starts[rank]:
                index = draw(st.integers(0, len(open_starts[rank]) - 1))
                programs[rank].append(Event("wait", "wait", start=open_starts[rank].pop(index)))

    for number in range(draw(st.integers(1, 12))):
        members = sorted(draw(st.sets(st.integers(0, world - 1), min_size=2)))
        group = f"{draw(st.sampled_from('ab'))}:{','.join(map(str, members))}"
        kind = draw(st.sampled_from(["all_reduce", "exchange"]))
        for place, rank in enumerate(members):
            event = Event(kind, f"n{number}", group, "torch.float32", size=4 * number)
            if kind == "exchange":  # a ring within the group
                to, source = members[(place + 1) % len(members)], members[place - 1]
                event = event._replace(size=0, sent=((to, 4 + rank),), received=((source, 4 + source),))
            open_starts[rank].append(len(programs[rank]))
            programs[rank].append(event)
            wait_for_some(rank, 2)
    for rank in range(world):
        programs[rank] += [Event("wait", "wait", start=start) for start in open_starts[rank]]
    return programs


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_programs_that_follow_one_order_agree(programs: list[list[Event]]) -> None:
    agree(programs)


@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_a_lost_communication_is_always_found(programs: list[list[Event]], data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, each in enumerate(programs) if each]))
    starts = [index for index, event in enumerate(programs[rank]) if event.kind != "wait"]
    lost = data.draw(st.sampled_from(starts))
    kept = [i for i, event in enumerate(programs[rank]) if i != lost and event.start != lost]
    position = {old: new for new, old in enumerate(kept)}
    programs[rank] = [
        event._replace(start=position[event.start]) if event.kind == "wait" else event
        for event in (programs[rank][i] for i in kept)
    ]
    with pytest.raises(DeadlockError):
        agree(programs)
