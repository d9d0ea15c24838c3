"""in_time: a plan of several micro-batches is a plan of more replicas, of which a rank runs its own one after another.

`Plan(microbatches=k)` splits the batch over dp·k replicas; up to here the program is that of one of them, of a world
that is k times as large. This pass puts it back into the real one: groups within a replica keep their ranks, and the
sum of the loss over the replicas, the only communication among them that may come before the gradients, is left to the
runtime, which adds up what the micro-batches return. So every count and mean is that of the whole batch: nothing is
normalised by a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from evocompile.collectives import STARTS, exchange_start, is_start
from evocompile.errors import PlanError
from evocompile.mesh import Mesh, group_name, group_ranks
from evocompile.program import OutputKind, Program, output_values, source_line


def in_time(program: Program) -> Program:
    """The same program, of micro-batch `program.micro`, for the real plan and rank."""
    micro = program.micro
    if micro is None:
        return program
    assert program.joint is not None
    _check_outputs(program)
    graph = program.joint.graph
    inside = program.plan.world // program.plan.dp  # ranks of a replica; dp is the outermost axis
    (output,) = graph.find_nodes(op="output")
    returned = output_values(graph)
    sums: set[str] = set()
    for node in list(graph.nodes):
        if not is_start(node):
            continue
        name = str(node.kwargs.get("group", node.args[-1]))
        ranks = group_ranks(name)
        if len({rank // inside for rank in ranks}) == 1:
            _move(program, node, group_name(name.split(":")[0], tuple(micro.real(rank, inside) for rank in ranks)))
            continue
        (wait,) = node.users
        if set(wait.users) != {output} or program.collectives[node].kind != "all_reduce":
            raise PlanError(
                f"Plan(microbatches={micro.plan.microbatches}): {program.collectives[node].why}, before the loss, for "
                f"which all micro-batches would have to be there at once: {source_line(node)}. Split the batch in the "
                "loop instead, if its parts may be computed apart"
            )
        returned = [node.args[0] if each is wait else each for each in returned]
        output.args = (returned,)
        graph.erase_node(wait)
        graph.erase_node(node)
        del program.collectives[node]
        sums.add(group_name("reduce", tuple(sorted({micro.real(rank, inside) for rank in ranks}))))
    if len(sums) != 1:
        raise PlanError(
            f"Plan(microbatches={micro.plan.microbatches}): the call's result is no sum over the rows of the batch, so "
            "it cannot be added up from micro-batches"
        )
    micro = replace(micro, loss_group=sums.pop())
    return replace(program, plan=micro.plan, mesh=Mesh.of(micro.plan), rank=micro.rank, micro=micro)


def _check_outputs(program: Program) -> None:
    users, updates = program.outputs_of(OutputKind.USER), program.outputs_of(OutputKind.BUFFER)
    if len(users) != 1 or users[0].shape or updates:
        what = f"updates the buffer {updates[0].name!r}" if updates else f"returns {len(users)} tensors"
        raise PlanError(
            f"Plan(microbatches=…) is for calls that return the loss alone, and this one {what}: parallelize a loss "
            "function, parallelize(lambda model, batch: model(**batch).loss, model=model), or split the batch in the "
            "loop, with model.no_sync()"
        )


def _move(program: Program, node: fx.Node, group: str) -> None:
    """The communication within a replica, among the real ranks of it."""
    micro = program.micro
    assert micro is not None
    _, names = STARTS[node.target]  # type: ignore[index]
    changed: dict[str, object] = {"group": group}
    if node.target is exchange_start:
        inside = program.plan.world // program.plan.dp
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        for end in ("destination", "source"):
            rank = given[end]
            assert isinstance(rank, int)
            changed[end] = micro.real(rank, inside) if rank >= 0 else rank
    for name, value in changed.items():
        if name in node.kwargs:
            node.update_kwarg(name, value)
        else:
            node.update_arg(names.index(name), value)
    program.collectives[node] = replace(program.collectives[node], group=group)
