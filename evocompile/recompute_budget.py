"""Which layers compute what again, so that no rank saves more than a number of bytes for backward, in the least time.

A choice for each layer of what it saves: "none", "attention" or "full" (passes/recompute.py). Each has a gain in bytes
and a time, so this is a multiple-choice knapsack, solved exactly by the frontier of (gain, time): layers of few kinds
have few different sums.

Times are FLOPs of products and attentions, and BYTES_TO_FLOPS for each byte that other operators write. Gains are
counted on the graph at global shapes, and scaled so that those of all layers together are what the passes themselves
find on the rank that saves most. The passes are then run with the choice; while it saves too much after all, more is
asked for. All of this is the same on every rank.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from .errors import PlanError
from .offload import to_host
from .passes.canonicalize import canonicalize
from .passes.recompute import Forward, Layer
from .passes.seed_random import seed_random
from .pipeline import run_passes
from .plan import Plan
from .program import MicroBatch, OutputKind, Program, nbytes

BYTES_TO_FLOPS = 100  # what a device computes while it writes a byte: an H100 about 300, a CPU about 30
MODES = ("none", "attention", "full")
_TRIES = 8


@dataclass(frozen=True)
class Choice:
    """What one layer may do: bytes that are then not saved, and FLOPs that are computed again."""

    gain: int
    time: int


@dataclass(frozen=True)
class Account:
    """What a plan's layers may do. rank: that which saves most; totals: its bytes where all layers do the same."""

    rank: int
    totals: dict[str, int]
    choices: list[list[Choice]]


_Key = tuple[Plan, int]
_accounts: weakref.WeakKeyDictionary[fx.GraphModule, dict[_Key, Account]] = weakref.WeakKeyDictionary()
_decisions: weakref.WeakKeyDictionary[fx.GraphModule, dict[_Key, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def layers_within(captured: Program, plan: Plan, number: int = 0) -> tuple[str, ...]:
    """For each layer what it computes again, under `plan.recompute` bytes. number: of the micro-batch.

    Found once for a captured program. Raises PlanError where all layers together do not get below them.
    """
    assert captured.joint is not None
    decisions = _decisions.setdefault(captured.joint, {})
    if (plan, number) not in decisions:
        gradients = captured.outputs_of(OutputKind.GRADIENT)
        decisions[plan, number] = _layers_within(captured, plan, number) if gradients else ()
    return decisions[plan, number]


def _layers_within(captured: Program, plan: Plan, number: int) -> tuple[str, ...]:
    assert isinstance(plan.recompute, int)
    budget, account = plan.recompute, account_of(captured, plan, number)
    count, most, least = len(account.choices), account.totals[MODES[0]], min(account.totals.values())
    if least > budget:
        raise PlanError(
            f"Plan.recompute={budget:,}: a step saves {most:,} bytes for backward on rank {account.rank}, and "
            f"{least:,} when all {count} layers compute everything again, so that is the least number that works: "
            "allow it, or plan more ranks, or a shorter batch"
        )
    if most <= budget:
        return (MODES[0],) * count

    def excess(chosen: tuple[str, ...]) -> int:
        return saved_bytes(run_passes(captured, plan, account.rank, number=number, again=chosen)) - budget

    return cheapest(account.choices, most - budget, excess) or (min(MODES, key=account.totals.__getitem__),) * count


def cheapest(
    choices: list[list[Choice]], needed: int, excess: Callable[[tuple[str, ...]], int]
) -> tuple[str, ...] | None:
    """The choice of least time that gains `needed` bytes, or so much more that nothing is in excess, if it is found."""
    for _ in range(_TRIES):
        chosen = _in_order(solve(choices, needed), choices)
        over = excess(chosen)
        if over <= 0:
            return chosen
        needed += over
    return None


def account_of(captured: Program, plan: Plan, number: int = 0) -> Account:
    """What the layers may do under a plan, whatever it says itself; found once."""
    assert captured.joint is not None
    accounts, kept = _accounts.setdefault(captured.joint, {}), replace(plan, recompute=MODES[0])
    if (kept, number) not in accounts:
        accounts[kept, number] = _account(captured, kept, number)
    return accounts[kept, number]


def check_saved(program: Program) -> None:
    """Raises PlanError where a rank saves more than the plan allows, for all that was done."""
    budget = program.plan.recompute
    assert isinstance(budget, int)
    if saved_bytes(program) > budget:
        raise PlanError(
            f"Plan.recompute={budget:,}: rank {program.rank} saves {saved_bytes(program):,} bytes for backward, more "
            "than the ranks with the largest parts of batch and sequence, by which the layers were chosen: allow at "
            f"least {saved_bytes(program):,}"
        )


def saved_bytes(program: Program) -> int:
    """What a rank saves for backward on its device, inputs and shards of parameters left out."""
    return sum(nbytes(node.meta["val"]) for node in program.saved if node.target is not to_host)


def solve(choices: Sequence[Sequence[Choice]], needed: int) -> list[int]:
    """For each layer the number of its choice: gains together at least `needed`, if that is possible, in least time."""
    frontier: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # gain, time, choices: none beats another
    for layer in choices:
        sums = [
            (min(gain + each.gain, needed), time + each.time, (*chosen, i))
            for gain, time, chosen in frontier
            for i, each in enumerate(layer)
        ]
        sums.sort(key=lambda each: (-each[0], each[1]))
        frontier = []
        for each in sums:
            if not frontier or each[1] < frontier[-1][1]:
                frontier.append(each)
    return list(frontier[0][2])


def _in_order(numbers: Sequence[int], choices: Sequence[Sequence[Choice]]) -> tuple[str, ...]:
    """Of layers that are alike, the first ones compute the most again, as what they save is kept the longest."""
    alike: dict[tuple[Choice, ...], list[int]] = {}
    for i, layer in enumerate(choices):
        alike.setdefault(tuple(layer), []).append(i)
    modes = [""] * len(choices)
    for places in alike.values():
        for i, number in zip(places, sorted((numbers[i] for i in places), reverse=True), strict=True):
            modes[i] = MODES[number]
    return tuple(modes)


# --- gains and times -------------------------------------------------------------------------------------------------


def _account(captured: Program, plan: Plan, number: int) -> Account:
    def saved(rank: int, mode: str) -> int:
        return saved_bytes(run_passes(captured, replace(plan, recompute=mode), rank, number=number))

    kept = {rank: saved(rank, MODES[0]) for rank in largest_ranks(captured, plan, number)}
    rank = max(kept, key=kept.__getitem__)
    totals = {mode: kept[rank] if mode == MODES[0] else saved(rank, mode) for mode in MODES}
    return Account(rank, totals, _choices(captured, plan, totals))


def _choices(captured: Program, plan: Plan, totals: dict[str, int]) -> list[list[Choice]]:
    """For each layer its choices, in the order of MODES."""
    program = seed_random(canonicalize(captured.bind(plan, 0)))
    forward = Forward(program)
    layers = forward.layers()
    found = {mode: [_choice(layer, forward, mode) for layer in layers] for mode in MODES[1:]}
    for mode, each in found.items():
        counted = sum(choice.gain for choice in each)
        real = totals["none"] - totals[mode]
        found[mode] = [Choice(choice.gain * real // counted if counted > 0 else 0, choice.time) for choice in each]
    return [[Choice(0, 0), *(found[mode][i] for mode in MODES[1:])] for i in range(len(layers))]


def _choice(layer: Layer, forward: Forward, mode: str) -> Choice:
    again = forward.again(layer, mode)
    inside = set(forward.nodes)

    def is_read(node: fx.Node) -> bool:
        return any(user not in inside and user.op != "output" for user in node.users)

    copied, sources = set[fx.Node](), set[fx.Node]()
    stack = [node for node in again if is_read(node)]
    while stack:
        node = stack.pop()
        if node not in copied:
            copied.add(node)
            stack += [each for each in node.all_input_nodes if each in again]
            sources.update(each for each in node.all_input_nodes if each not in again)
    own = set(layer.nodes)
    kept = {forward.root(node) for node in own - again if is_read(node)}
    kept |= {forward.root(node) for node in sources & own}
    freed = {forward.root(node) for node in copied if is_read(node)} - kept
    added = kept - {forward.root(node) for node in own if is_read(node)}
    return Choice(_bytes(freed) - _bytes(added), sum(map(_time, copied)))


def _bytes(nodes: Iterable[fx.Node]) -> int:
    values = (node.meta.get("val") for node in nodes)
    return sum(nbytes(value) for value in values if isinstance(value, torch.Tensor))


def _time(node: fx.Node) -> int:
    """In FLOPs."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return BYTES_TO_FLOPS * _bytes([node])


# --- ranks -----------------------------------------------------------------------------------------------------------


def largest_ranks(captured: Program, plan: Plan, number: int) -> list[int]:
    """One of each kind of rank that holds no less than others of every split axis: one, where all parts are even."""
    from .passes.annotate import annotate

    program = annotate(seed_random(canonicalize(captured.bind(plan, 0, number))))
    sharding = program.sharding
    assert sharding is not None
    first: dict[tuple[int, ...], int] = {}
    for rank in range(plan.world):
        own = MicroBatch(plan, rank, number).virtual()[1] if program.micro is not None else rank
        held = (split.held(program.mesh.coordinate(own)) for split in sharding.splits.values())
        first.setdefault(tuple(sum(hi - lo for lo, hi in each) for each in held), rank)
    most = max(map(math.prod, first), default=1)
    return [rank for sizes, rank in first.items() if math.prod(sizes) == most]
