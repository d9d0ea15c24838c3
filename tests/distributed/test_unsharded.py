"""`unsharded`: the plain model for a time; what it keeps and refuses; what a parallel model generates by itself."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evocompile import Plan, Shard, StateError, parallelize, unsharded
from tests.distributed.facts import Facts, on_ranks, selected_facts
from tests.distributed.small import VOCABULARY, gpt, plans, same_step, smoothed_loss, tokens
from tests.distributed.test_parallelize import whole_state


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, tie_word_embeddings=True)).double()


def prompt() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))


def the_plain_model_comes_and_goes() -> None:
    source = gpt()
    model = parallelize(gpt(), **plans())
    shards = list(model.parameters())
    before = [each.detach().to_local().clone() for each in shards]
    step = parallelize(smoothed_loss, model=model)
    with unsharded(model) as plain:
        assert plain is model and not any(isinstance(each, DTensor) for each in model.parameters())
        assert model.head.weight is model.tokens.weight
        for name, each in source.state_dict().items():
            assert torch.equal(each, model.state_dict()[name])
        assert torch.equal(model(**tokens())[0], source(**tokens())[0])  # the same code on one device: the same bits
        if dist.get_rank() == 0:  # nothing communicates
            assert torch.equal(copy.deepcopy(model)(**tokens())[0], source(**tokens())[0])
            torch.export.export(model, (tokens()["input_ids"],))
        with pytest.raises(StateError, match="cannot run inside of unsharded"):
            step(model, tokens())
        with pytest.raises(StateError, match="outside of another unsharded"), unsharded(model):
            pass
    assert all(one is other for one, other in zip(model.parameters(), shards, strict=True))
    assert all(torch.equal(each.to_local(), old) for each, old in zip(shards, before, strict=True))
    same_step(model, source, model(**tokens())[0], source(**tokens())[0])


def what_is_written_inside_stays() -> None:
    for degree in (2, 1):  # two copies of two shards: test_checkpoints.py
        plan = Plan(cp=dist.get_world_size(), shard=Shard(degree, degree, degree))
        source, model = gpt(seed=3), parallelize(gpt(), backend="eager", plan=plan)
        with unsharded(model):
            model.load_state_dict(source.state_dict())
        for name, value in whole_state(model).items():
            assert torch.equal(value, source.state_dict()[name])
    same_step(model, source, model(**tokens())[0], source(**tokens())[0])


def what_would_be_lost_is_refused() -> None:
    model = parallelize(gpt(), **plans())
    before = whole_state(model)
    with (
        pytest.raises(StateError, match=r"different values to 'norm.weight' .* nothing was kept"),
        unsharded(model),
        torch.no_grad(),
    ):
        model.norm.bias.fill_(2.0)
        model.norm.weight[dist.get_world_size() - 1] = float(dist.get_rank())
    with pytest.raises(StateError, match=r"'norm.weight' was replaced inside unsharded"), unsharded(model):
        if dist.get_rank() == 1:
            model.norm.weight = nn.Parameter(torch.ones(24))
    with pytest.raises(StateError, match=r"a gradient of '.*' was computed inside unsharded"), unsharded(model):
        model(**tokens())[0].backward()
    with pytest.raises(ZeroDivisionError), unsharded(model), torch.no_grad():
        model.norm.weight.fill_(3.0)
        raise ZeroDivisionError
    with pytest.raises(StateError, match="takes a model that parallelize"), unsharded(gpt()):
        pass
    after = whole_state(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(isinstance(each, DTensor) and each.grad is None for each in model.parameters())


def shared_folder() -> Path:
    """The same empty folder on all ranks."""
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    return Path(names[0])


def transformers_generates_and_saves_inside() -> None:
    source, model = llama().eval(), parallelize(llama().eval(), **plans())
    folder = shared_folder()
    with pytest.raises(StateError, match=r"would write this rank's rows alone.*with evocompile.unsharded\(model\)"):
        model.save_pretrained(folder)
    options = {"max_new_tokens": 3, "do_sample": False}
    expected = source.generate(prompt(), **options)
    with unsharded(model):
        assert torch.equal(model.generate(prompt(), **options), expected)
        model.save_pretrained(folder)  # transformers writes on rank 0 alone
    again = type(source).from_pretrained(folder)
    assert again.dtype == torch.float64
    for name, value in source.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
    folder = shared_folder()
    model.save_pretrained(folder, state_dict=whole)
    dist.barrier()
    again = parallelize(type(source).from_pretrained(folder), **plans())
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in whole_state(again).items())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.generate(prompt(), max_new_tokens=4, do_sample=False)  # with its cache: a program for each token
    assert torch.equal(found[:, : expected.shape[1]], expected)
    hints = [each for each in caught if "with evocompile.unsharded(model)" in str(each.message)]
    assert len(hints) == (dist.get_rank() == 0)


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Facts:
    return selected_facts(request)


@on_ranks(
    {
        2: (
            the_plain_model_comes_and_goes,
            what_is_written_inside_stays,
            what_would_be_lost_is_refused,
            transformers_generates_and_saves_inside,
        )
    }
)
def test_on_ranks(world: int, fact: str, facts: Facts) -> None:
    facts.check(world, fact)
