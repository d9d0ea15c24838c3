"""What a node of a graph costs: rooflines for computation, bytes over a link for communication.

Plain numbers in, seconds out. Computation takes max(FLOPs / peak, bytes / memory bandwidth) and a launch; FLOPs are
those of torch's counter (`torch.utils.flop_counter`, and `kernels/flops.py` for attention), bytes what the operator
reads and writes. Communication takes its volume on the wire over the link's bandwidth, and its messages' latencies.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from .chunks import RowLoop
from .collectives import Event, is_start, is_wait, sent_bytes, start_arguments, start_event, unpack
from .mesh import group_ranks
from .offload import TRANSFERS
from .program import nbytes


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes per second that one rank sends, and receives at the same time. latency: seconds a message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Rates:
    """How fast a rank computes and communicates.

    flops:  FLOP/s by dtype; `torch.float32` stands in for those that are not there.
    memory: bytes per second. launch: seconds that any operator takes at least.
    inside, between: links of ranks within a node and across nodes of `node` consecutive ranks.
    links:           of kinds of communication whose own link was measured.
    """

    flops: Mapping[torch.dtype, float]
    memory: float
    launch: float
    inside: Link
    between: Link
    node: int = 8
    links: Mapping[str, Link] = field(default_factory=dict)
    _seconds: dict[Any, float] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(device: torch.device | str) -> Rates:
        """Round numbers for a kind of device, until its own are known."""
        return _GPU if torch.device(device).type == "cuda" else _CPU

    def link(self, group: str) -> Link:
        ranks = group_ranks(group)
        return self.inside if ranks[0] // self.node == ranks[-1] // self.node else self.between

    def compute(self, node: fx.Node) -> float:
        """Seconds of a node that is no communication; 0 for what only looks at memory in another way."""
        if node.op != "call_function" or node.target in (operator.getitem, unpack) or is_start(node) or is_wait(node):
            return 0.0
        if getattr(node.target, "is_view", False):
            return 0.0
        if node.target in TRANSFERS:  # beside the computation, on a link of their own
            return self.launch
        if isinstance(node.target, RowLoop):
            bodies = [sum(map(self.compute, body.graph.nodes)) for body in node.target.bodies]
            return sum(bodies[number] for number in node.target.numbers)
        key = (node.target, _key(node.args), _key(node.kwargs))
        if key not in self._seconds:
            self._seconds[key] = self._roofline(node)
        return self._seconds[key]

    def _roofline(self, node: fx.Node) -> float:
        tensors = [each.meta.get("val") for each in node.all_input_nodes] + _leaves(node.meta.get("val"))
        moved = sum(nbytes(each) for each in tensors if isinstance(each, torch.Tensor))
        seconds = moved / self.memory
        if has_flops(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            value = node.meta["val"]
            dtype = next((each.dtype for each in tensors if isinstance(each, torch.Tensor)), torch.float32)
            peak = self.flops.get(dtype, self.flops[torch.float32])
            seconds = max(seconds, flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=value) / peak)  # type: ignore[union-attr]
        return seconds + self.launch

    def transfer(self, event: Event, rank: int) -> float:
        """Seconds of a communication on an idle link, once all its members have started it. event: of `rank`."""
        others = len(group_ranks(event.group)) - 1
        if not others:
            return 0.0
        link = self.links.get(event.kind) or self.link(event.group)
        sent = float(sent_bytes(event, rank))
        messages = others
        match event.kind:
            case "exchange":
                sent = max(sent, float(sum(size for _, size in event.received)))
                messages = 1
            case "all_to_all":
                sent = max(sent, float(sum(size for peer, size in event.received if peer != rank)))
            case "all_reduce":
                messages = 2 * others
        return sent / link.bandwidth + messages * link.latency


_CPU = Rates(
    flops={torch.float32: 5e10, torch.float64: 2.5e10},
    memory=1e10,
    launch=1e-5,
    inside=Link(1.25e8, 1e-4),  # 1 Gbit/s
    between=Link(1.25e8, 1e-4),
)
_GPU = Rates(  # about an H100: peaks of dense matrix products times what is usually reached, NVLink and InfiniBand
    flops={torch.bfloat16: 6e14, torch.float16: 6e14, torch.float32: 5e13, torch.float64: 5e13},
    memory=2.5e12,
    launch=5e-6,
    inside=Link(3e11, 1e-5),
    between=Link(4e10, 2e-5),
)


def transfer_event(start: fx.Node) -> Event:
    """A start of a graph as `Rates.transfer` takes it."""
    args, kwargs = map_arg((start.args, start.kwargs), lambda each: each.meta["val"])
    return start_event(start, start_arguments(start, args, kwargs))


def device_of(graph: fx.Graph) -> torch.device:
    """Where a graph computes."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next((each.device for each in values if isinstance(each, torch.Tensor)), torch.device("cpu"))


def has_flops(node: fx.Node) -> bool:
    """A matrix product, a convolution, an attention, a loop over rows of those: what takes time by its FLOPs."""
    return isinstance(node.target, RowLoop) or getattr(node.target, "overloadpacket", None) in flop_registry


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _key(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _key(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return repr(value)
