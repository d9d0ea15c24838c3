"""What backward computes again, layer by layer: the numbers are the same to the last bit, attention runs once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from evocompile.capture import capture
from evocompile.collectives import is_start
from evocompile.errors import PlanError
from evocompile.passes.split_attention import STEP
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import Program, nbytes
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import VirtualModel, captured, virtual_model

MODES = ["attention", "full"]
PLANS = [Plan(cp=2), Plan(dp=2, cp=3, attention="ring", shard=Shard(2, 2, 2))]
FAMILIES = ["llama", "gpt-neox", "gemma3", "mixtral-auxiliary", "bert"]
COMPARED = [(family, mode, PLANS[(i + j) % 2]) for i, family in enumerate(FAMILIES) for j, mode in enumerate(MODES)] + [
    ("llama", mode, Plan(cp=2, ulysses=2)) for mode in MODES
]


def saved_bytes(program: Program) -> int:
    return sum(nbytes(node.meta["val"]) for node in program.saved)


def counts(program: Program) -> dict[str, Counter[Any]]:
    """How often each kind of communication starts, and attention steps, in forward and in backward."""
    found = {}
    for name, graph in program.graphs.items():
        kinds = [program.collectives[node].kind for node in graph.graph.nodes if is_start(node)]
        steps = [node.target for node in graph.graph.nodes if node.target == STEP]
        found[name] = Counter([*kinds, *steps])
    return found


@pytest.mark.parametrize(("family", "mode", "plan"), COMPARED, ids=str)
def test_numbers_are_the_same_to_the_last_bit(family: str, mode: str, plan: Plan, references: Any) -> None:
    case = Case(family, length=13, seed=3)
    kept = virtual_model(case, plan)
    again = virtual_model(case, Plan(**{**vars(plan), "recompute": mode}))
    assert not again.programs[0].notes
    losses, gradients, _ = again.step(case.inputs())
    expected_losses, expected, _ = kept.step(case.inputs())
    assert_loss(losses[0], references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])
    assert losses == expected_losses
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    assert saved_bytes(again.programs[0]) < 0.6 * saved_bytes(kept.programs[0])


@pytest.mark.parametrize("attention", ["zigzag", "ring", "balanced"])
def test_attention_and_its_exchanges_run_once(attention: str) -> None:
    """Under "full" they run twice: what each rank does in forward, it does again in backward."""
    _, whole = captured(Case("llama", length=24))
    for rank in range(4):
        kept, again, full = (
            counts(run_passes(whole.program, Plan(cp=4, attention=attention, recompute=mode), rank))
            for mode in ("none", "attention", "full")
        )
        assert again["forward"] == kept["forward"] == full["forward"]
        assert again["backward"] == kept["backward"]
        assert again["forward"][STEP] > 0 and again["backward"][STEP] == 0
        assert full["backward"][STEP] == kept["forward"][STEP]
        assert full["backward"]["exchange"] == kept["backward"]["exchange"] + kept["forward"]["exchange"]


@pytest.mark.parametrize("mode", ["none", "attention", "full"])
def test_row_12_a_weight_is_gathered_once_for_backward(mode: str) -> None:
    """PAINS row 12: what is computed again and its backward read one gather, also where only some layers do."""
    _, whole = captured(Case("llama", length=24))
    part = 1.0 if mode == "none" else 0.5
    program = run_passes(whole.program, Plan(cp=2, recompute=mode, recompute_layers=part), 0)
    for name, graph in program.graphs.items():
        whys = [program.collectives[node].why for node in graph.graph.nodes if is_start(node)]
        gathers = Counter(why.removesuffix(", again for backward") for why in whys if why.startswith("parameter "))
        assert gathers and set(gathers.values()) == {1}, (name, gathers)


def test_a_fraction_of_the_layers() -> None:
    case = Case("llama", length=24)
    _, whole = captured(case)
    sizes = [
        saved_bytes(run_passes(whole.program, Plan(cp=2, recompute="attention", recompute_layers=fraction), 0))
        for fraction in (0, 0.5, 1.0)
    ]
    assert sizes[0] == saved_bytes(run_passes(whole.program, Plan(cp=2), 0))
    assert sizes[0] - sizes[1] == pytest.approx(sizes[1] - sizes[2], rel=0.2)  # the last layer keeps the head's input
    assert sizes[2] < 0.5 * sizes[0]


def test_dropout_is_the_same_again() -> None:
    """Draws are kept: one loss and one set of gradients, whatever is computed again."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=67, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    case = Case("gpt2", length=13)
    program = capture(model.forward, model, (), case.inputs()).program
    parameters = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())
    results = []
    for mode in ("none", *MODES):
        programs = [run_passes(program, Plan(cp=2, recompute=mode), rank) for rank in range(2)]
        results.append(VirtualModel(programs, parameters, buffers, Shard(2, 2, 2)).step(case.inputs()))
    for losses, gradients, _ in results[1:]:
        assert losses == results[0][0]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, results[0][1][name]), name


def test_a_model_without_attention_says_so() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))

    def loss(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return module(ids).logsumexp(-1).sum()

    program = capture(loss, model, (model, torch.zeros(2, 6, dtype=torch.long)), {}).program
    (note,) = run_passes(program, Plan(cp=2, recompute="attention"), 0).notes
    assert "no attention" in note.why


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "half", True])
def test_a_fraction_is_from_0_to_1(fraction: Any) -> None:
    with pytest.raises(PlanError, match="recompute_layers must be a fraction from 0 to 1"):
        Plan(recompute="attention", recompute_layers=fraction)


def test_a_fraction_needs_a_choice() -> None:
    with pytest.raises(PlanError, match=r"recompute='none' says that none does: choose"):
        Plan(recompute_layers=0.5)
