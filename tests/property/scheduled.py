"""Random graphs of several ranks for the scheduler: gathers, rings of which ranks skip steps, all-to-alls, reductions.

No tensor is computed with. Sizes are bytes, and the test operator's FLOPs say how long it computes.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from evocompile import torch_private
from evocompile.collectives import exchange_start, exchange_wait, unpack
from evocompile.rates import Link, Rates

c10d = torch.ops._c10d_functional
_library = torch.library.Library("evocompile_test", "DEF")
_library.define("compute(Tensor[] read, int units) -> Tensor")
COMPUTE = torch.ops.evocompile_test.compute.default
MODE = torch_private.new_fake_mode()


@register_flop_formula(torch.ops.evocompile_test.compute)
def _units(read: Any, units: int, *_rest: Any, **_out: Any) -> int:
    return units


UNITS = Rates(  # a FLOP and a byte take a second
    flops={torch.float32: 1.0, torch.uint8: 1.0},
    memory=float("inf"),
    launch=0.0,
    inside=Link(1.0, 0.0),
    between=Link(1.0, 0.0),
)


@cache
def value(size: int) -> Tensor:
    with MODE:
        return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True)
class RankGraph:
    graph: fx.Graph
    whys: dict[fx.Node, str]


class _Writer:
    def __init__(self, chooser: random.Random, rank: int, world: int) -> None:
        self.choose, self.rank, self.world = chooser, rank, world
        self.everyone = ",".join(map(str, range(world)))
        self.graph = fx.Graph()
        self.whys: dict[fx.Node, str] = {}
        self.gradients: list[fx.Node] = []
        self.shards: dict[str, tuple[fx.Node, int]] = {}
        self.x = self._placeholder("x", 4)

    def _placeholder(self, name: str, size: int) -> fx.Node:
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):  # type: ignore[arg-type]
            node = self.graph.placeholder(name)
        node.meta["val"] = value(size)
        return node

    def call(self, target: Callable[..., Any], size: int, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value(size)
        return node

    def wait(self, start: fx.Node) -> fx.Node:
        target = exchange_wait if start.target is exchange_start else c10d.wait_tensor.default
        return self.call(target, start.meta["val"].numel(), start)

    def compute(self, read: list[fx.Node], units: int) -> fx.Node:
        return self.call(COMPUTE, 4, read, units)

    def weight(self, name: str, size: int) -> fx.Node:
        if name not in self.shards:
            self.shards[name] = self._placeholder(f"weight_{len(self.shards)}", size), size
        shard, size = self.shards[name]
        start = self.call(
            c10d.all_gather_into_tensor.default, size * self.world, shard, self.world, f"params:{self.everyone}"
        )
        self.whys[start] = f"parameter {name}"
        return self.wait(start)

    # --- what a layer is made of; every rank draws the same numbers

    def product(self, layer: int, number: int) -> None:
        size, units = self.choose.randrange(1, 9), self.choose.randrange(1, 30)
        gathered = self.weight(f"layers.{layer}.{number}.weight", size)
        before, self.x = self.x, self.compute([self.x, gathered], units + self.rank % 2)
        if self.choose.random() < 0.5:
            gradient = self.compute([before, self.x], units)
            start = self.call(
                c10d.reduce_scatter_tensor.default, 4, gradient, "sum", self.world, f"grads:{self.everyone}"
            )
            self.whys[start] = f"gradient of layers.{layer}.{number}.weight"
            self.gradients.append(start)

    def ring(self, number: int) -> None:
        """Blocks of ranks before this one, of which the later ones need fewer, as under a causal mask."""
        state, size = self.x, self.choose.randrange(1, 5)
        units, causal = self.choose.randrange(1, 12), self.choose.random() < 0.5
        keys = self.call(COMPUTE, size, [self.x], 1)
        for step in range(1, self.world):
            to, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            sends, receives = not causal or to > self.rank, not causal or source < self.rank
            start = None
            if sends or receives:
                start = self.call(
                    exchange_start,
                    size if receives else 0,
                    [keys] * sends,
                    to if sends else -1,
                    source if receives else -1,
                    [[size]] if receives else [],
                    torch.uint8,
                    torch.device("cpu"),
                    f"cp.{number}:{self.everyone}",
                )
                self.whys[start] = f"keys, step {step}"
            state = self.compute([state], units)
            if start is not None:
                buffer = self.wait(start)
                if receives:
                    part = self.call(operator.getitem, size, self.call(unpack, size, buffer, [[size]]), 0)
                    state = self.compute([state, part], units)
        self.x = state

    def urgent(self, kind: str) -> None:
        if kind == "all_to_all":
            splits = [4 // self.world] * self.world if 4 % self.world == 0 else None
            if splits is not None:
                start = self.call(c10d.all_to_all_single.default, 4, self.x, splits, splits, f"ulysses:{self.everyone}")
            else:
                kind = "all_reduce"
        if kind == "all_reduce":
            start = self.call(c10d.all_reduce.default, 4, self.x, "sum", f"reduce:{self.everyone}")
        self.whys[start] = kind
        if self.choose.random() < 0.5:
            aside = self.compute([self.x], self.choose.randrange(1, 9))
            self.x = self.compute([self.wait(start), aside], 1)
        else:
            self.x = self.compute([self.wait(start)], 1)

    def done(self) -> RankGraph:
        self.graph.output([self.x, *map(self.wait, self.gradients)])
        return RankGraph(self.graph, self.whys)


def random_graphs(seed: int, world: int) -> list[RankGraph]:
    """One graph for each rank. They share all communication but the steps of a ring that a rank does not need."""
    graphs = []
    for rank in range(world):
        writer = _Writer(random.Random(seed), rank, world)
        choose = writer.choose
        for layer in range(choose.randrange(1, 5)):
            for number in range(choose.randrange(1, 5)):
                kind = choose.choice(["product", "product", "product", "ring", "all_to_all", "all_reduce"])
                if kind == "product":
                    writer.product(layer, number)
                elif kind == "ring":
                    writer.ring(layer)
                else:
                    writer.urgent(kind)
        graphs.append(writer.done())
    return graphs
