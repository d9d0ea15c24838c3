"""Weights on `meta`: made module by module, or loaded, and what is refused on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from evocompile import (
    Plan,
    PlanError,
    Shard,
    StateError,
    materialize,
    parallelize,
)
from tests.distributed.facts import Facts, on_ranks, selected_facts
from tests.distributed.small import VOCABULARY, gpt, plans, same_step, small_batch, tokens
from tests.distributed.test_parallelize import whole_state
from tests.models.zoo import PlainGPT


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def drawn_on_one_device(build: Callable[[], nn.Module], init: Callable[[nn.Module], Any] = reset) -> nn.Module:
    model = on_meta(build).to_empty(device="cpu")
    torch.manual_seed(5)
    return model.apply(init)


def weights_on_meta_are_made_module_by_module() -> None:
    plain = drawn_on_one_device(PlainGPT)
    plain.head.weight = plain.tokens.weight  # to_empty separates them
    for degree in (dist.get_world_size(), 1):
        model = on_meta(PlainGPT)
        parallelize(model, backend="eager", plan=Plan(cp=dist.get_world_size(), shard=Shard(degree, degree, degree)))
        assert {each.device.type for each in model.parameters()} == {"meta"}
        model.norm.weight.tag = "kept"
        torch.manual_seed(5)
        assert materialize(model, reset) is model
        assert model.norm.weight.tag == "kept" and model.head.weight is model.tokens.weight
        state = whole_state(model)
        assert list(state) == list(plain.state_dict())
        for name in state:
            if name not in ("tokens.weight", "head.weight"):
                assert torch.equal(state[name], plain.state_dict()[name]), name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**tokens())[0].backward()
        optimizer.step()


def a_llama_on_meta_starts_as_on_one_device() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )

    def build() -> nn.Module:
        return LlamaForCausalLM(config)

    plain = on_meta(build).to_empty(device="cpu")
    torch.manual_seed(5)
    plain.apply(plain._init_weights)
    model = parallelize(on_meta(build), **plans())
    torch.manual_seed(5)
    materialize(model, model._init_weights)
    same_step(model, plain, model(**tokens()).loss, plain(**tokens()).loss)


def weights_on_meta_are_loaded() -> None:
    source = gpt()
    model = parallelize(on_meta(PlainGPT).double(), **plans())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {}, options=options)
    same_step(model, source, model(**tokens())[0], source(**tokens())[0])


def a_call_while_weights_are_on_meta_is_refused() -> None:
    model = parallelize(on_meta(PlainGPT), **plans())
    with pytest.raises(StateError, match=r"'tokens.weight' is still on the meta device. .*materialize.*to_empty"):
        model(**tokens())
    model.to_empty(device="cpu")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(StateError, match=r"'tokens.weight' and 'head.weight' were one parameter"):
        model(**tokens())
    with pytest.raises(PlanError, match="where an optimizer has nothing to train"):
        other = on_meta(PlainGPT)
        parallelize(other, optimizer=torch.optim.SGD(other.parameters()), **plans())
    with pytest.raises(StateError, match=r"'tokens.weight' is not sharded: "):
        other = parallelize(on_meta(PlainGPT), **plans())
        other.load_state_dict(gpt().state_dict(), assign=True)
        other(**tokens())


def ranks_with_other_values_are_refused() -> None:
    model = parallelize(on_meta(PlainGPT), backend="eager", plan=Plan(cp=dist.get_world_size(), shard=Shard()))
    torch.manual_seed(dist.get_rank())
    materialize(model, reset)
    with pytest.raises(StateError, match=r"has other values on rank 1 than on rank 0"):
        model(**tokens())


def equal_random_shards_are_found() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 12)))
    parallelize(model, backend="eager", plan=Plan(cp=dist.get_world_size()))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.apply(reset)
        model(small_batch()["ids"])
    found = [each for each in caught if "the rows of '0.weight'" in str(each.message)]
    assert len(found) == (dist.get_rank() == 0), [str(each.message) for each in caught]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.arange(6) / 6, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.frequencies).square().mean()


def loaded_rotary(left_in_memory: float) -> nn.Module:
    """After to_empty() and loading; the buffer is not in the state dict."""
    model = parallelize(on_meta(Rotary), **plans())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, nn.ModuleDict({"linear": nn.Linear(6, 6)}).state_dict(), options=options)
    model.frequencies.data.fill_(left_in_memory)  # unseen by the version counter
    return model


def buffers_that_to_empty_has_emptied_are_found() -> None:
    unwritten = "Nothing has been written to the buffers 'frequencies'"
    with pytest.raises(StateError, match=f"'frequencies' has other values on rank 1 .* {unwritten}"):
        loaded_rotary(dist.get_rank())(torch.ones(2, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded_rotary(1.0)(torch.ones(2, 6))
    assert sum(unwritten in str(each.message) for each in caught) == (dist.get_rank() == 0)
    model = loaded_rotary(1.0)
    model.frequencies.copy_(torch.arange(6) / 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 6))


def an_incomplete_init_is_refused() -> None:
    with pytest.raises(StateError, match=r"init has given no values to 'linear.bias', 'frequencies'"):
        materialize(
            parallelize(on_meta(Rotary), **plans()),
            lambda module: nn.init.ones_(module.weight) if hasattr(module, "weight") else None,
        )
    with pytest.raises(StateError, match="init has written to a parameter of a submodule of Rotary"):
        materialize(
            parallelize(on_meta(Rotary), **plans()),
            lambda module: [nn.init.ones_(each) for each in module.parameters()],
        )
    with pytest.raises(StateError, match="takes a model that parallelize"):
        materialize(gpt(), reset)


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Facts:
    return selected_facts(request)


@on_ranks(
    {
        2: (
            weights_on_meta_are_made_module_by_module,
            a_llama_on_meta_starts_as_on_one_device,
            weights_on_meta_are_loaded,
            a_call_while_weights_are_on_meta_is_refused,
            ranks_with_other_values_are_refused,
            equal_random_shards_are_found,
            buffers_that_to_empty_has_emptied_are_found,
            an_incomplete_init_is_refused,
        ),
        4: (weights_on_meta_are_loaded,),
    }
)
def test_on_ranks(world: int, fact: str, facts: Facts) -> None:
    facts.check(world, fact)
