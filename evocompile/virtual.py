"""The virtual cluster: the programs of all ranks in one process, in lock step, without any process group.

`Rendezvous` matches what the ranks start, group by group. It blocks where the strictest of the real libraries would:
starts never block, a wait blocks until every rank concerned has started its part, and one rank's communications on one
group are carried out one after the other. On events alone it proves that programs cannot block one another
(`passes.verify.agree`); with tensors it runs them (`run_virtual`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .collectives import Event, is_start, is_wait, pack, start_arguments, start_event
from .errors import DeadlockError, VerificationError
from .mesh import group_ranks
from .program import InputKind, OutputKind, Program

_SHOWN = 8  # ranks that a message lists

# --- matching ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Ticket:
    """One started communication of one rank. `lacks`: the ranks whose part is still missing, each once per part."""

    rank: int
    event: Event
    given: Any = None
    result: Any = None
    lacks: list[int] = field(default_factory=list)
    done: bool = False

    def __str__(self) -> str:
        return f"{self.event.kind} {self.event.node!r} of rank {self.rank} on group {self.event.group}"


Deliver = Callable[[list[Ticket]], None]
Blocked = tuple[Ticket, str]  # what a rank waits for, and the node in which it does


class Rendezvous:
    """Matches the starts of all ranks.

    deliver: called with each match: the tickets of all members in the group's order, or (sender, receiver).
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._queues: dict[tuple[str, int], deque[Ticket]] = defaultdict(deque)  # by group and rank; first is active
        self._joined: dict[str, list[Ticket]] = defaultdict(list)  # by group: the collective that gathers its members
        self._halves: dict[tuple[str, int, int], Ticket] = {}  # unmatched parts of exchanges, by (group, from, to)
        self._active: deque[Ticket] = deque()
        self.completed: list[Ticket] = []  # for the scheduler, which empties it

    def post(self, rank: int, event: Event, given: Any = None) -> Ticket:
        """Start `event` on `rank`. Raises DeadlockError where it does not fit what another rank started."""
        ticket = Ticket(rank, event, given)
        if rank not in group_ranks(event.group):
            raise DeadlockError(f"{ticket}: that rank is no member of the group")
        if rank in dict(event.sent + event.received) and event.kind == "exchange":
            raise DeadlockError(f"{ticket}: a rank cannot exchange with itself")
        queue = self._queues[event.group, rank]
        queue.append(ticket)
        if len(queue) == 1:
            self._active.append(ticket)
        while self._active:  # a completion activates the next in its queue, and so on
            self._activate(self._active.popleft())
        return ticket

    def head(self, ticket: Ticket) -> Ticket:
        """The communication that is being carried out for the ticket's rank and group."""
        return self._queues[ticket.event.group, ticket.rank][0]

    def unfinished(self) -> Iterator[Ticket]:
        return (ticket for queue in self._queues.values() for ticket in queue)

    def _activate(self, ticket: Ticket) -> None:
        event = ticket.event
        if event.kind != "exchange":
            self._join(ticket)
            return
        ticket.lacks = [rank for rank, _ in event.sent + event.received]
        for receiver, _ in event.sent:
            self._meet((event.group, ticket.rank, receiver), ticket)
        for sender, _ in event.received:
            self._meet((event.group, sender, ticket.rank), ticket)
        if not ticket.lacks:
            self._complete(ticket)

    def _join(self, ticket: Ticket) -> None:
        joined, ranks = self._joined[ticket.event.group], group_ranks(ticket.event.group)
        if joined:
            _check_same(joined[0], ticket)
        joined.append(ticket)
        present = {each.rank for each in joined}
        for each in joined:
            each.lacks = [rank for rank in ranks if rank not in present]
        if len(joined) == len(ranks):
            members = sorted(joined, key=lambda each: ranks.index(each.rank))
            joined.clear()
            if ticket.event.kind == "all_to_all":
                _check_all_to_all(members)
            self._deliver(members)
            for each in members:
                self._complete(each)

    def _meet(self, channel: tuple[str, int, int], ticket: Ticket) -> None:
        _, sender, receiver = channel
        peer = self._halves.pop(channel, None)
        if peer is None:
            self._halves[channel] = ticket
            return
        pair = [ticket, peer] if ticket.rank == sender else [peer, ticket]
        sizes = [dict(pair[0].event.sent)[receiver], dict(pair[1].event.received)[sender]]
        if sizes[0] != sizes[1] or ticket.event.dtype != peer.event.dtype:
            raise DeadlockError(
                f"{pair[0]} sends {sizes[0]} bytes of {pair[0].event.dtype}, "
                f"{pair[1]} receives {sizes[1]} bytes of {pair[1].event.dtype}"
            )
        self._deliver(pair)
        ticket.lacks.remove(peer.rank)
        peer.lacks.remove(ticket.rank)
        if not peer.lacks:
            self._complete(peer)

    def _complete(self, ticket: Ticket) -> None:
        ticket.done, ticket.given = True, None
        self.completed.append(ticket)
        queue = self._queues[ticket.event.group, ticket.rank]
        assert queue.popleft() is ticket
        if queue:
            self._active.append(queue[0])


def _check_same(first: Ticket, second: Ticket) -> None:
    """Members of a collective must agree on its kind, dtype and size, and on what it is for."""
    for what in ("kind", "dtype", "size", "what"):
        theirs, ours = getattr(first.event, what), getattr(second.event, what)
        if theirs != ours:
            unit = " bytes" if what == "size" else ""
            name = "" if what == "what" else f"{what} "
            raise DeadlockError(f"{first} meets {second}: {name}{theirs}{unit} against {ours}{unit}")


def _check_all_to_all(members: list[Ticket]) -> None:
    for sender in members:
        for receiver in members:
            sent, received = dict(sender.event.sent)[receiver.rank], dict(receiver.event.received)[sender.rank]
            if sent != received:
                raise DeadlockError(f"{sender} sends {sent} bytes, {receiver} receives {received} bytes")


# --- lock step -----------------------------------------------------------------------------------------------------

Result = TypeVar("Result")


def run_together(ranks: Sequence[Generator[Blocked, None, Result]], rendezvous: Rendezvous) -> list[Result]:
    """Advance one generator per rank until all have returned; a generator yields where it blocks.

    Raises DeadlockError, naming each rank's node, when no rank can go on, or when a start was never matched.
    """
    results: dict[int, Result] = {}
    blocked: dict[int, Blocked] = {}
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        try:
            blocked[rank] = next(ranks[rank])
        except StopIteration as stop:
            results[rank] = stop.value
        for ticket in rendezvous.completed:
            if ticket.rank in blocked and blocked[ticket.rank][0] is ticket:
                del blocked[ticket.rank]
                ready.append(ticket.rank)
        rendezvous.completed.clear()
    if blocked:
        raise DeadlockError(_explain(blocked, rendezvous))
    left = next(rendezvous.unfinished(), None)
    if left is not None:
        raise DeadlockError(f"{left} is never matched: not started by {_lacking(rendezvous.head(left))}")
    return [results[rank] for rank in range(len(ranks))]


def _explain(blocked: dict[int, Blocked], rendezvous: Rendezvous) -> str:
    """The chain of ranks that wait for one another, from the first blocked rank on, then the others."""
    chain, rank = [], min(blocked)
    while rank in blocked and rank not in chain:
        chain.append(rank)
        rank = rendezvous.head(blocked[rank][0]).lacks[0]
    shown = (chain + [each for each in sorted(blocked) if each not in chain])[:_SHOWN]
    lines = []
    for each in shown:
        ticket, node = blocked[each]
        head = rendezvous.head(ticket)
        behind = "" if head is ticket else f", queued behind {head.event.kind} {head.event.node!r}"
        lines.append(
            f"  rank {each} waits in {node!r} for {ticket.event.kind} {ticket.event.node!r} on group "
            f"{ticket.event.group}{behind}; not yet started by {_lacking(head)}"
        )
    if rank not in blocked:
        lines.append(f"  rank {rank} has finished")
    if len(blocked) > len(shown):
        lines.append(f"  and {len(blocked) - len(shown)} more ranks")
    return "\n".join(["the ranks' programs block one another:", *lines])


def _lacking(ticket: Ticket) -> str:
    ranks = sorted(set(ticket.lacks))
    listed = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


# --- running with tensors ------------------------------------------------------------------------------------------


_EXTREMES = {"max": torch.maximum, "min": torch.minimum}


def _move(tickets: list[Ticket]) -> None:
    """Carry out one match: fill the tickets' results. Sums run in the group's order, so results repeat exactly."""
    kind = tickets[0].event.kind
    if kind == "exchange":
        sender, receiver = tickets
        receiver.result = pack(sender.given["tensors"]).clone()
        return
    inputs = [ticket.given["input"] for ticket in tickets]
    if kind in ("reduce_scatter", "all_reduce"):
        reduction = tickets[0].given["reduce"]
        if any(ticket.given["reduce"] != reduction for ticket in tickets):
            raise VerificationError(f"{tickets[0]}: the ranks reduce by different operators")
        total = inputs[0].clone()
        for each in inputs[1:]:
            total = total + each if reduction == "sum" else _EXTREMES[reduction](total, each)
        if kind == "reduce_scatter":
            parts = total.reshape(len(tickets), total.shape[0] // len(tickets), *total.shape[1:]).unbind()
        else:
            parts = (total,) * len(tickets)
        for ticket, part in zip(tickets, parts, strict=True):
            ticket.result = part.clone()
    elif kind == "all_gather":
        for ticket in tickets:
            ticket.result = torch.cat(inputs)
    else:
        pieces = [ticket.given["input"].split(ticket.given["input_splits"]) for ticket in tickets]
        for index, ticket in enumerate(tickets):
            ticket.result = torch.cat([piece[index] for piece in pieces])


def _interpret(
    graph_module: fx.GraphModule, inputs: Sequence[Any], rank: int, rendezvous: Rendezvous, where: str
) -> Generator[Blocked, None, list[Any]]:
    """Run one rank's graph node by node; values are freed after their last use."""
    interpreter = fx.Interpreter(graph_module, garbage_collect_values=True)
    values: dict[fx.Node, Any] = {}
    supplied = iter(inputs)
    for node in graph_module.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(supplied)
        elif node.op == "output":
            return list(args[0])
        elif is_start(node):
            given = start_arguments(node, args, kwargs)
            values[node] = rendezvous.post(rank, start_event(node, given, where), given)
            del given
        elif is_wait(node):
            ticket = args[0]
            if not isinstance(ticket, Ticket):
                raise VerificationError(f"rank {rank}: {where}{node.name} waits for what was not started")
            if not ticket.done:
                yield ticket, where + node.name
            values[node] = _take(ticket, node)
            del ticket
        else:
            if any(is_start(each) for each in node.all_input_nodes):
                raise VerificationError(f"rank {rank}: {where}{node.name} reads a communication before its wait")
            values[node] = getattr(interpreter, node.op)(node.target, args, kwargs)
        del args, kwargs
        for used in interpreter.user_to_last_uses.get(node, ()):
            del values[used]
        if not node.users:
            del values[node]
    raise AssertionError("a graph without an output")


def _take(ticket: Ticket, wait: fx.Node) -> Tensor:
    """The outcome of a finished communication: an empty buffer where an exchange received nothing."""
    result, ticket.result = ticket.result, None
    if result is not None:
        return result
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    arguments = start_arguments(start, start.args, start.kwargs)
    return torch.empty(0, dtype=arguments["dtype"], device=arguments["device"])


def run_virtual(
    graphs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Any]], *, where: str = ""
) -> list[list[Any]]:
    """Run the graphs of ranks 0 … P-1 on their inputs in lock step; per rank, the flat list that its graph returns.

    where: prefix of node names in messages.
    Raises DeadlockError where the ranks block one another or their communications do not match.
    """
    rendezvous = Rendezvous(_move)
    ranks = [
        _interpret(graph, given, rank, rendezvous, where)
        for rank, (graph, given) in enumerate(zip(graphs, inputs, strict=True))
    ]
    with torch.no_grad():
        return run_together(ranks, rendezvous)


# --- a training step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VirtualStep:
    """What a step returns, by rank: user outputs in order, buffer updates and gradients by name (local shards)."""

    outputs: list[list[Tensor]]
    buffers: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor | None]]


def virtual_step(
    programs: Sequence[Program], inputs: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor] | None = None
) -> VirtualStep:
    """Run the forward, then the backward graphs of all ranks.

    inputs:   by rank, one tensor for each of `program.inputs` but the tangents, in order.
    tangents: global, one per differentiable user output, the same on every rank; ones when left out (what
              `loss.backward()` starts from).
    """
    forwards = [program.forward for program in programs if program.forward is not None]
    backwards = [program.backward for program in programs if program.backward is not None]
    assert len(forwards) == len(programs), "rematerialize has not run on every rank's program"
    users = programs[0].outputs_of(OutputKind.USER)
    names = [output.name for output in programs[0].outputs_of(OutputKind.BUFFER)]
    results = run_virtual(forwards, inputs, where="forward.")
    step = VirtualStep(
        outputs=[result[: len(users)] for result in results],
        buffers=[dict(zip(names, result[len(users) :], strict=False)) for result in results],
        gradients=[],
    )
    if not backwards:
        return step
    if tangents is None:
        device = next(each for each in inputs[0] if isinstance(each, Tensor)).device
        tangents = [
            torch.ones(each.shape, dtype=each.dtype, device=device) for each in programs[0].inputs_of(InputKind.TANGENT)
        ]
    saved = [result[len(users) + len(names) :] for result in results]
    del results
    returned = run_virtual(backwards, [[*own, *tangents] for own in saved], where="backward.")
    for program, values in zip(programs, returned, strict=True):
        gradients = program.outputs_of(OutputKind.GRADIENT)
        step.gradients.append({each.name: value for each, value in zip(gradients, values, strict=True)})
    return step
