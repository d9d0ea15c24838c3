"""The schedule of real programs: what runs is what was planned, nothing but the order changes, and it hides more."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from evocompile.capture import capture
from evocompile.collectives import is_start, is_wait
from evocompile.compile import compile_graph
from evocompile.memory import step_memory
from evocompile.passes.ahead import layer_of, purpose
from evocompile.passes.split_attention import BACKWARD_STEP
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.printing import collectives_table
from evocompile.program import Program, placeholders
from evocompile.rates import Rates, has_flops
from evocompile.simulate import simulate_step
from tests.conftest import References
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case, PlainGPT
from tests.virtual_model import VirtualModel, virtual_model

GPT = Case("gpt")
PLAN = Plan(cp=2)


@pytest.fixture(scope="module")
def default() -> VirtualModel:
    return virtual_model(GPT, PLAN)


@pytest.fixture(scope="module")
def unplaced() -> VirtualModel:
    return virtual_model(GPT, dataclasses.replace(PLAN, overlap="none"))


# --- what runs -------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the operators with FLOPs that run; starts and waits are noted by what stands for them."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if counts(func):
            self.ran.append(str(func))
        return func(*args, **(kwargs or {}))

    def stand_in(self, node: fx.Node) -> Callable[..., Any]:
        """What the driver calls for a boundary: communication gives zeros of its shape, attention is itself."""
        if not (is_start(node) or is_wait(node)):
            return node.target  # type: ignore[return-value]

        def run(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(node.name)
            return zeros(node)

        return run


def counts(target: Any) -> bool:
    return has_flops(fx.Graph().create_node("call_function", target))


def zeros(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_order_that_runs_is_the_order_planned(name: str, default: VirtualModel) -> None:
    for program in default.programs:
        graph_module, recorder = program.graphs[name], Recorder()
        run = compile_graph(graph_module, backend="eager", resolve=recorder.stand_in)
        with torch.no_grad(), recorder:
            run([zeros(node) for node in placeholders(graph_module.graph)])
        planned = [
            node.name if is_start(node) or is_wait(node) else str(node.target)
            for node in graph_module.graph.nodes
            if is_start(node) or is_wait(node) or has_flops(node)
        ]
        assert len(set(planned)) > 20
        assert recorder.ran == planned


# --- what changes ----------------------------------------------------------------------------------------------------


def test_only_the_order_changes_and_no_weight_is_gathered_again(default: VirtualModel, unplaced: VirtualModel) -> None:
    """Row 12 of the design's PAINS."""
    for new, old in zip(default.programs, unplaced.programs, strict=True):
        for name in ("forward", "backward"):
            nodes = [[node.name for node in program.graphs[name].graph.nodes] for program in (new, old)]
            assert sorted(nodes[0]) == sorted(nodes[1])
            assert nodes[0] != nodes[1]
            gathers = Counter(
                new.collectives[node].why
                for node in new.graphs[name].graph.nodes
                if is_start(node) and purpose(node) == "params"
            )
            assert set(gathers.values()) == {1}


def test_a_layer_is_gathered_behind_the_attention_of_the_one_before() -> None:
    """In the forward: after the last exchange, before the product that the attention's output goes into."""
    (program, _) = virtual_model(Case("llama"), PLAN).programs
    assert program.forward is not None
    nodes = list(program.forward.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    starts = [node for node in nodes if is_start(node) and purpose(node) == "params"]
    second = [node for node in starts if layer_of(program.collectives[node].why) == "model.layers.1"]
    exchanges = [node for node in nodes if is_wait(node) and purpose(node.args[0]) == "cp"]
    (projection,) = (
        next(iter(node.users)) for node in starts if "layers.0.self_attn.o_proj" in program.collectives[node].why
    )
    assert len(second) == 9
    assert position[exchanges[0]] < position[second[0]] <= position[second[-1]] < position[projection]
    assert position[second[-1]] < position[exchanges[1]]
    assert {program.placed[node] for node in second} == {"ahead, behind the urgent communication of model.layers.0"}


def test_reductions_are_waited_for_at_the_end(default: VirtualModel) -> None:
    for program in default.programs:
        assert program.backward is not None
        nodes = [node for node in program.backward.graph.nodes if node.op == "call_function"]
        waits = [i for i, node in enumerate(nodes) if is_wait(node) and purpose(node.args[0]) == "grads"]
        products = [i for i, node in enumerate(nodes) if has_flops(node)]
        assert len(waits) > 10
        assert waits[0] > products[-1]


def test_a_rings_backward_ends_with_the_own_block_while_gradients_travel_and_the_next_keys_come(
    default: VirtualModel,
) -> None:
    for program in default.programs:
        assert program.backward is not None
        nodes = list(program.backward.graph.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        steps = [position[node] for node in nodes if node.target == BACKWARD_STEP]
        exchanges = [node for node in nodes if is_start(node) and purpose(node) == "cp.backward"]
        whys = [program.collectives[node].why for node in exchanges]
        keys = [node for node, why in zip(exchanges, whys, strict=True) if why.startswith("keys")]
        returns = [node for node, why in zip(exchanges, whys, strict=True) if why.startswith("gradients")]
        assert len(keys) == len(returns) == len(steps) // 2 == 2  # two layers, two ranks
        for layer, (start, back) in enumerate(zip(keys, returns, strict=True)):
            remote, own = steps[2 * layer : 2 * layer + 2]
            before = steps[2 * layer - 1] if layer else steps[0]
            assert position[start] < before, "keys come while the layer behind is at its own block"
            (wait,) = back.users
            assert remote < position[back] < own < position[wait]


# --- what it is worth ------------------------------------------------------------------------------------------------


def test_row_11_overlap_is_on_and_what_is_exposed_is_said(default: VirtualModel, unplaced: VirtualModel) -> None:
    assert Plan().overlap == "selective"
    rates = Rates.of("cpu")
    placed, as_needed = simulate_step(default.programs, rates), simulate_step(unplaced.programs, rates)
    assert placed.seconds < as_needed.seconds
    assert max(placed.exposed) < 0.9 * min(as_needed.exposed)
    for rank in range(2):
        assert placed.computing(rank) == pytest.approx(as_needed.computing(rank))
    header, *rows = collectives_table(default.programs[0]).splitlines()
    assert header.split() == ["graph", "kind", "group", "sent", "ms", "hidden", "exposed", "why"]
    assert len(rows) == len(default.programs[0].collectives)
    assert any("(ahead, " in row for row in rows) and any("(as soon as its data is there)" in row for row in rows)


def test_all_holds_more_than_two_layers_and_selective_does_not() -> None:
    """With six layers: everything starts at once under "all", and a step holds more."""
    torch.manual_seed(0)
    model = PlainGPT(layers=6)
    step = capture(model.forward, model, (), GPT.inputs())
    peaks, most = {}, {}
    for overlap in ("selective", "all"):
        program = run_passes(step.program, dataclasses.replace(PLAN, overlap=overlap), 0)
        peaks[overlap] = step_memory([program]).peak
        most[overlap], layer = most_whole(program)
    assert most["selective"] <= 2 * layer < most["all"]
    assert peaks["selective"] < peaks["all"]


def most_whole(program: Program) -> tuple[int, int]:
    """Bytes of the blocks' gathered weights between start and last use: at once, and those of one block."""
    assert program.forward is not None
    nodes = list(program.forward.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    change, layers = [0] * (len(nodes) + 1), Counter[str]()
    for node in nodes:
        if is_start(node) and program.collectives[node].why.startswith("parameter blocks."):
            value = node.meta["val"]
            size = value.numel() * value.element_size()
            layers[layer_of(program.collectives[node].why)] += size
            (wait,) = node.users
            change[position[node]] += size
            change[max(position[user] for user in wait.users)] -= size
    return max(accumulate(change)), max(layers.values())


# --- the numbers -----------------------------------------------------------------------------------------------------

PLANS = [
    PLAN,
    Plan(dp=2, cp=2, shard=Shard(4, 4, 4)),
    Plan(dp=2, cp=2, shard=Shard(2, 2, 4)),
    Plan(ulysses=2),
    Plan(cp=3, attention="balanced"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_everything_at_once_gives_one_devices_numbers(plan: Plan, references: References) -> None:
    """The default, "selective", is what all other tests run."""
    virtual = virtual_model(GPT, dataclasses.replace(plan, overlap="all"))
    losses, gradients, _ = virtual.step(GPT.inputs())
    for loss in losses:
        assert_loss(loss, references[GPT]["loss"])
    assert_gradients(gradients, references[GPT]["gradients"])
