"""Communication in a graph: how it is recognised, described and carried out.

A *start* begins a communication and returns at once; its value may be used only by its one *wait*. Collectives are
torch's functional operators (`torch.ops._c10d_functional`) under our group names; point-to-point exchanges, for which
torch has none, are the Python functions of this module, used directly as targets of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import has_side_effect, map_arg

from . import torch_private
from .chunks import RowLoop
from .errors import DeadlockError, PlanError
from .mesh import group_ranks
from .offload import TRANSFERS
from .program import Collective, Program, clone_graph, nbytes

_functional = torch.ops._c10d_functional

# --- exchanges -----------------------------------------------------------------------------------------------------


@dataclass
class _Exchange:
    """An exchange under way. All buffers are held here: the wire reads and writes them until the wait.

    landing: where the wire writes what `buffer` gets at the wait; `buffer` itself unless the wire needs host memory.
    """

    works: list[dist.Work]
    sent: torch.Tensor | None
    buffer: torch.Tensor
    landing: torch.Tensor
    what: str


_exchanges: dict[int, _Exchange] = {}  # by id of the receive buffer, which the entry keeps alive


def exchange_start(
    tensors: list[torch.Tensor],
    destination: int,
    source: int,
    shapes: list[list[int]],
    dtype: torch.dtype,
    device: torch.device,
    group: str,
) -> torch.Tensor:
    """Start to send `tensors`, packed in one buffer, to global rank `destination`, and to receive from `source`.

    tensors: all of `dtype`; nothing is sent when `destination` is -1.
    shapes:  of the tensors that `source` packs; nothing is received when `source` is -1.
    group:   torch's own name of the process group (`Communicators.resolve` puts it in the graph's place).
    Returns the 1-D receive buffer, not to be read before `exchange_wait`. Halves of zero bytes never meet the wire.
    """
    assert all(tensor.dtype == dtype for tensor in tensors), f"an exchange of {dtype} got other dtypes"
    sent = pack(tensors) if destination >= 0 and tensors else None
    size = sum(map(math.prod, shapes)) if source >= 0 else 0
    buffer = torch.empty(size, dtype=dtype, device=device) if sent is None else sent.new_empty(size)
    if torch_private.is_fake(buffer):
        return buffer
    works: list[dist.Work] = []
    landing = buffer
    if size or (sent is not None and sent.numel()):
        process_group = torch_private.resolve_group(group)
        if buffer.device.type != "cpu" and dist.get_backend(process_group) == "gloo":
            # gloo copies to the host by itself in collectives, but not when it sends and receives
            landing, sent = torch.empty_like(buffer, device="cpu"), None if sent is None else sent.cpu()
        halves = [dist.P2POp(dist.irecv, landing, source, process_group)] if size else []
        if sent is not None and sent.numel():
            halves.append(dist.P2POp(dist.isend, sent, destination, process_group))
        works = dist.batch_isend_irecv(halves)
    what = f"exchange (to rank {destination}, from rank {source}) on process group {group}"
    _exchanges[id(buffer)] = _Exchange(works, sent, buffer, landing, what)
    return buffer


def exchange_wait(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for the send and the receive that `exchange_start` began; the buffer, now valid.

    Raises DeadlockError when a peer fails or does not come within the group's time-out.
    """
    if torch_private.is_fake(buffer):
        return buffer
    exchange = _arrived(buffer)
    return buffer if exchange.landing is buffer else buffer.copy_(exchange.landing)


def _arrived(buffer: torch.Tensor) -> _Exchange:
    exchange = _exchanges.pop(id(buffer), None)
    assert exchange is not None, "a wait for a buffer that no exchange is filling"
    try:
        for work in exchange.works:
            work.wait()
    except RuntimeError as error:
        raise DeadlockError(f"{exchange.what} failed, a peer died or did not answer in time: {error}") from error
    return exchange


def reduce_scatter_on_gloo(input: torch.Tensor, reduce: str, group_size: int, group: str) -> torch.Tensor:
    """Start to sum over the ranks of a group: each gets its part of dim 0, straight from all others.

    gloo's own reduce-scatter is an all-reduce, of which most is thrown away: twice the bytes. Returns what the others
    send, in the order of their ranks, not to be read before `reduce_scatter_wait`.
    """
    assert reduce == "sum", f"a reduce-scatter by {reduce}"
    process_group = torch_private.resolve_group(group)
    ranks, own = dist.get_process_group_ranks(process_group), dist.get_rank(process_group)
    parts = input.chunk(group_size)
    received = input.new_empty(group_size - 1, *parts[own].shape)
    halves = []
    for place, peer in enumerate(each for each in range(group_size) if each != own):
        halves.append(dist.P2POp(dist.irecv, received[place], ranks[peer], process_group))
        halves.append(dist.P2POp(dist.isend, parts[peer], ranks[peer], process_group))
    works = dist.batch_isend_irecv(halves) if input.numel() and halves else []
    what = f"reduce_scatter on process group {group}"
    _exchanges[id(received)] = _Exchange(works, parts[own], received, received, what)
    return received


def reduce_scatter_wait(received: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum that `reduce_scatter_on_gloo` started. Two ranks take no memory for it."""
    own = _arrived(received).sent
    assert own is not None
    if received.shape[0] == 1:
        return received[0].add_(own)
    total = own.clone()
    for each in received:
        total.add_(each)
    return total


def all_gather_on_gloo(input: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    """torch's functional all-gather, by gloo's own gather of one tensor.

    The functional operator takes gloo's gather of several tensors, which the two workers of a group must not run at the
    same time (`torch_private.use_one_worker`).
    """
    out = input.new_empty(group_size * input.shape[0], *input.shape[1:])
    return _functional.all_gather_into_tensor_out(input, group_size, group, out=out)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' elements in one contiguous 1-D buffer; no copy for a single contiguous tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack(buffer: torch.Tensor, shapes: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """The tensors of these shapes in a packed buffer, as views."""
    parts = buffer.split([math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def pending_works() -> int:
    """Number of communications of this process that are started and not waited for: 0 after every step."""
    return len(_exchanges) + torch_private.functional_works_pending()


has_side_effect(exchange_start)  # dead-code elimination on one rank would leave its peer waiting
has_side_effect(exchange_wait)
has_side_effect(all_gather_on_gloo)
has_side_effect(reduce_scatter_on_gloo)
has_side_effect(reduce_scatter_wait)

# --- recognising ---------------------------------------------------------------------------------------------------

STARTS: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {  # target: (kind, names of its parameters)
    _functional.all_gather_into_tensor.default: ("all_gather", ("input", "group_size", "group")),
    all_gather_on_gloo: ("all_gather", ("input", "group_size", "group")),
    _functional.reduce_scatter_tensor.default: ("reduce_scatter", ("input", "reduce", "group_size", "group")),
    reduce_scatter_on_gloo: ("reduce_scatter", ("input", "reduce", "group_size", "group")),
    _functional.all_reduce.default: ("all_reduce", ("input", "reduce", "group")),
    _functional.all_to_all_single.default: ("all_to_all", ("input", "output_splits", "input_splits", "group")),
    exchange_start: ("exchange", ("tensors", "destination", "source", "shapes", "dtype", "device", "group")),
}
WAITS = (_functional.wait_tensor.default, exchange_wait, reduce_scatter_wait)


def is_start(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in STARTS


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in WAITS


def is_boundary(node: fx.Node) -> bool:
    """Must not be swallowed by a compute segment: communication, transfers to and from the host, our own operators, and
    the unpacking of these."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_boundary(node.args[0])
    ours = getattr(node.target, "namespace", None) == "evocompile"
    moves = is_start(node) or is_wait(node) or node.target in TRANSFERS
    return ours or moves or node.target is unpack or isinstance(node.target, RowLoop)


# --- describing ----------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One start or wait of a rank's program, as the other ranks need to know it.

    kind:     a `Collective.kind`, or "wait".
    node:     name of the node, for messages.
    size:     bytes of this rank's input to an all_gather, reduce_scatter or all_reduce: equal on all members.
    sent:     (rank, bytes) for each receiver of an exchange or all_to_all; `received`: for each sender. Exchanges
              leave out halves of zero bytes.
    start:    for a wait: position in the list of the start that it waits for.
    what:     what a collective is for, in the words of `Collective.why`: equal on all members, so that two of equal
              size which one rank starts in another order do not pass for one another.
    """

    kind: str
    node: str
    group: str = ""
    dtype: str = ""
    size: int = 0
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[tuple[int, int], ...] = ()
    start: int = -1
    what: str = ""


def start_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a start by the parameter names of `STARTS`; `args`, `kwargs`: the node's, perhaps as values."""
    assert not kwargs or node.target is exchange_start, f"{node}: pass the arguments of a collective by position"
    _, names = STARTS[node.target]  # type: ignore[index]
    return dict(zip(names, args, strict=not kwargs)) | dict(kwargs)


def start_event(node: fx.Node, given: Mapping[str, Any], where: str = "") -> Event:
    """Describe a start from its arguments (`start_arguments`), whose tensors may be fake."""
    kind, _ = STARTS[node.target]  # type: ignore[index]
    group = given["group"]
    event = Event(kind, where + node.name, group)
    if kind == "exchange":
        received = sum(map(math.prod, given["shapes"])) * given["dtype"].itemsize if given["source"] >= 0 else 0
        sent = sum(map(nbytes, given["tensors"])) if given["destination"] >= 0 else 0
        return event._replace(
            dtype=str(given["dtype"]),
            sent=((given["destination"], sent),) if sent else (),
            received=((given["source"], received),) if received else (),
        )
    tensor = given["input"]
    event = event._replace(dtype=str(tensor.dtype))
    if kind != "all_to_all":
        return event._replace(size=nbytes(tensor))
    row, ranks = math.prod(tensor.shape[1:]) * tensor.element_size(), group_ranks(group)
    return event._replace(
        sent=tuple((rank, rows * row) for rank, rows in zip(ranks, given["input_splits"], strict=True)),
        received=tuple((rank, rows * row) for rank, rows in zip(ranks, given["output_splits"], strict=True)),
    )


def graph_events(
    graph_module: fx.GraphModule,
    where: str = "",
    first: int = 0,
    collectives: Mapping[fx.Node, Collective] | None = None,
) -> list[Event]:
    """The starts and waits of a graph in order.

    where:       prefix of node names.
    first:       position of the first event.
    collectives: the program's table, which says what each collective is for.
    """
    found: list[Event] = []
    position: dict[fx.Node, int] = {}
    for node in graph_module.graph.nodes:
        if is_start(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            position[node] = first + len(found)
            event = start_event(node, start_arguments(node, args, kwargs), where)
            if (
                collectives and node in collectives and event.kind != "exchange"
            ):  # whose two ends have steps of their own
                event = event._replace(what=collectives[node].why)
            found.append(event)
        elif is_wait(node):
            found.append(Event("wait", where + node.name, start=position[node.args[0]]))
    return found


def program_events(program: Program) -> list[Event]:
    """The starts and waits of a step: the forward graph, then the backward graph (or the joint graph)."""
    found: list[Event] = []
    for name, graph_module in program.graphs.items():
        found += graph_events(graph_module, f"{name}.", len(found), program.collectives)
    return found


def step_events(programs: Sequence[Program]) -> list[Event]:
    """The starts and waits of a step of several micro-batches, and the sum of their losses at the end."""
    found: list[Event] = []
    for program in programs:
        own, first = program_events(program), len(found)
        found += [event._replace(start=event.start + first) if event.kind == "wait" else event for event in own]
    micro = programs[0].micro
    if micro is not None and len(group_ranks(micro.loss_group)) > 1:
        found.append(Event("all_reduce", "loss", micro.loss_group, what="the loss of all micro-batches"))
        found.append(Event("wait", "loss", start=len(found) - 1))
    return found


def sent_bytes(event: Event, rank: int) -> int:
    """Bytes that `rank` puts on the wire, by the ring algorithms' volume (see `Collective.sent`)."""
    others = len(group_ranks(event.group)) - 1
    match event.kind:
        case "all_gather":
            return event.size * others
        case "reduce_scatter":
            return event.size * others // (others + 1)
        case "all_reduce":
            return 2 * event.size * others // (others + 1)
    return sum(size for receiver, size in event.sent if receiver != rank)


def describe(node: fx.Node, rank: int, why: str) -> Collective:
    """The entry of `Program.collectives` for a start whose arguments carry fake values."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    event = start_event(node, start_arguments(node, args, kwargs))
    return Collective(event.kind, event.group, sent_bytes(event, rank), why)


# --- process groups ------------------------------------------------------------------------------------------------

_communicators = itertools.count()


class Communicators:
    """The process groups of one compiled model, by our group names. They belong to it alone; `destroy` frees them.

    timeout: of every communication; the default group's when left out.
    """

    def __init__(self, device: torch.device, *, timeout: timedelta | None = None) -> None:
        self._device = device
        self._timeout = timeout or torch_private.default_group_timeout()
        self._known: set[str] = set()
        self._groups: dict[str, dist.ProcessGroup] = {}  # those that this rank is a member of
        self._key = f"evocompile failed {next(_communicators)}"  # ranks make them in the same order
        self.are_left = False  # after an error

    def create(self, names: Iterable[str]) -> None:
        """Create the groups that do not exist yet. Every rank calls this with the same names, its own or not.

        Not with `use_local_synchronization`: torch then derives the name under which members meet from how many
        groups each has, and ranks that are in different numbers of groups would never meet.
        """
        missing = sorted(set(names) - self._known)
        for name in missing:
            ranks = group_ranks(name)
            if ranks[-1] >= dist.get_world_size():
                raise PlanError(f"group {name} needs rank {ranks[-1]} in a world of {dist.get_world_size()}")
            backend = torch_private.backend_for(self._device)
            group = dist.new_group(list(ranks), timeout=self._timeout, backend=backend, group_desc=name)
            if dist.get_rank() in ranks:
                self._groups[name] = group
        self._known.update(missing)
        for name in missing:  # NCCL: the first call on a group must be one in which all members take part
            if name in self._groups:
                dist.all_reduce(torch.zeros(1, device=self._device), group=self._groups[name])

    def group(self, name: str) -> dist.ProcessGroup:
        return self._groups[name]

    def resolve(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """A copy of a graph in which every start names torch's process group instead of ours: ready to be run."""
        resolved = torch_private.graph_module(graph_module, clone_graph(graph_module.graph))
        for node in resolved.graph.nodes:
            if not is_start(node):
                continue
            if "group" in node.kwargs:
                node.update_kwarg("group", self._groups[node.kwargs["group"]].group_name)
            else:
                index = STARTS[node.target][1].index("group")
                group = self._groups[node.args[index]]
                node.update_arg(index, group.group_name)
                if dist.get_backend(group) == "gloo":
                    _take_gloo_form(node, self._device)
        resolved.recompile()
        return resolved

    def give_up(self, reason: str) -> str:
        """After an error in a program: tells the other ranks, and on gloo ends their waits. What was told first."""
        self.are_left = True
        with contextlib.suppress(dist.DistError):  # the store's host has ended
            reason = torch_private.default_store().compare_set(self._key, "", reason).decode()
        left = [[group] for group in self._groups.values()]
        self._groups.clear()
        for each in left:
            if dist.get_backend(each[0]) == "gloo":  # NCCL's watchdog sees to it
                dist.destroy_process_group(each[0])
            # Connections close with the last reference, which waits for what is under way: not in this thread.
            threading.Thread(target=each.clear, daemon=True).start()
        return reason

    def destroy(self) -> None:
        """Free the process groups. Every rank calls it; after torch's own tear-down there is nothing left to free."""
        if dist.is_initialized():
            for name in sorted(self._groups):
                dist.destroy_process_group(self._groups[name])
        self._groups.clear()
        self._known.clear()


def _take_gloo_form(start: fx.Node, device: torch.device) -> None:
    """Where gloo has a better way than torch's functional operator, take it."""
    if start.target is _functional.all_gather_into_tensor.default:
        start.target = all_gather_on_gloo
    if start.target is _functional.reduce_scatter_tensor.default and device.type == "cpu":
        start.target = reduce_scatter_on_gloo
        for wait in start.users:
            wait.target = reduce_scatter_wait


def sends_parts(start: fx.Node) -> bool:
    """Whether a reduce-scatter goes straight from rank to rank, as on CPU, where gloo carries it."""
    kind, _ = STARTS[start.target]  # type: ignore[index]
    return kind == "reduce_scatter" and start.args[0].meta["val"].device.type == "cpu"  # type: ignore[union-attr]


def group_names(events: Iterable[Event]) -> set[str]:
    """The groups on which these events communicate."""
    return {event.group for event in events if event.group}
