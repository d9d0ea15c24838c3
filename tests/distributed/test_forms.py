"""The forms of `parallelize`, states, containers and `check=True`, on gloo ranks, against the plain model."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import evocompile
from evocompile import (
    EvocompileError,
    InputError,
    Plan,
    PlanError,
    StateError,
    VerificationError,
    materialize,
    parallelize,
)
from evocompile.lazy import LazyOutput
from evocompile.runtime import parallel_forward
from tests.distributed.facts import Facts, on_ranks, selected_facts
from tests.distributed.small import (
    VOCABULARY,
    Batch,
    Normed,
    dp2,
    gpt,
    parts,
    plans,
    same_step,
    small_batch,
    smoothed_loss,
    tokens,
)
from tests.distributed.test_parallelize import Messages, close, full_gradients, whole_state
from tests.models.zoo import PlainGPT

# --- loss functions ---------------------------------------------------------------------------------------------------


def a_loss_function_is_part_of_the_program() -> None:
    plain, model = gpt(), gpt()
    step = parallelize(smoothed_loss, model=model, **plans())
    assert step.__name__ == "smoothed_loss" and step.__wrapped__ is smoothed_loss
    assert all(isinstance(each, DTensor) for each in model.parameters())
    for number in range(2):
        batch = tokens(seed=number)
        same_step(model, plain, step(model, batch, smoothing=0.1), smoothed_loss(plain, batch, smoothing=0.1))
    assert len(step._variants) == 1
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    step(model, tokens()).backward()
    smoothed_loss(plain, tokens()).backward()
    for optimizer in optimizers:
        optimizer.step()
    close(whole_state(model), whole_state(plain))


def the_model_of_a_loss_function_may_be_called_by_itself() -> None:
    plain, model = gpt(), gpt()
    step = parallelize(smoothed_loss, model=model, **plans())
    for _ in range(2):
        same_step(model, plain, model(**tokens())[0], plain(**tokens())[0])
        same_step(model, plain, step(model, tokens()), smoothed_loss(plain, tokens()))
    assert len(step._variants) == len(parallel_forward(model)._variants) == 1

    def other_loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch)[0] * 2

    other = parallelize(other_loss, model=model, backend="eager")
    same_step(model, plain, other(model, tokens()), other_loss(plain, tokens()))
    with pytest.raises(StateError, match="parallelised already, with Plan"):
        parallelize(other_loss, model=model, plan=Plan(dp=dist.get_world_size()))


def a_loss_function_is_called_with_its_model() -> None:
    model = gpt()
    step = parallelize(smoothed_loss, model=model, **plans())
    with pytest.raises(InputError, match=r"smoothed_loss\(\) takes the model .* got PlainGPT"):
        step(gpt(), tokens())
    with pytest.raises(InputError, match="got nothing"):
        step(batch=tokens())


def changes_of_the_model_of_a_loss_function_are_seen() -> None:
    messages = Messages()
    model = gpt()
    step = parallelize(smoothed_loss, model=model, **plans())
    evocompile.compile(step, model, tokens())
    assert len(step._variants) == 1
    step(model, tokens())
    step(model, tokens(), smoothing=0.25)
    model.blocks[0].heads = 4
    step(model, tokens())
    if dist.get_rank() == 0:
        assert len(messages.texts) == 2, messages.texts
        assert "smoothing" in messages.texts[0] and "model.blocks.0.heads" in messages.texts[1], messages.texts


# --- classes ----------------------------------------------------------------------------------------------------------


class Base(PlainGPT):
    """Decorated below, as its subclasses are with it."""

    def __init__(self, seed: int = 0, *, width: int = 24) -> None:
        torch.manual_seed(seed)
        super().__init__(width=width)

    def __init_subclass__(cls, *, tag: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tag = tag


class Early(Base):
    """Exists before its base is decorated."""

    def __init__(self) -> None:
        super().__init__(1)
        self.extra = nn.Linear(24, 24)


def instances_of_a_class_are_parallel() -> None:
    assert parallelize(Base, **plans()) is Base

    class Late(Base, tag="late"):
        def __init__(self) -> None:
            super().__init__(2)
            assert parallel_forward(self) is None, "not yet"
            self.extra = nn.Linear(24, 24)

    class Mixin:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mixed = nn.Parameter(torch.zeros(3))

    class Mixed(Mixin, Base):
        pass

    class Plain(Base):
        pass

    for cls, seed in ((Base, 0), (Late, 2), (Plain, 0), (Mixed, 0), (Early, 1)):
        model = cls()
        assert type(model) is cls and isinstance(model, Base) and isinstance(model, PlainGPT)
        assert parallel_forward(model) is not None
        assert all(isinstance(each, DTensor) for each in model.parameters())
        plain = gpt(seed).float()
        loss, expected = model(**tokens())[0], plain(**tokens())[0]
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    assert Late.tag == "late" and Plain.tag == ""
    assert pickle.loads(pickle.dumps(Base)) is Base
    assert Base(3, width=12).tokens.weight.shape == (VOCABULARY, 12)
    with pytest.raises(StateError, match="Base is parallelised already"):
        parallelize(Base)
    assert parallelize(Plain, backend="eager", plan=Plan(dp=dist.get_world_size())) is Plain
    assert Plain().forward.plan.cp == 1 and Base().forward.plan.cp == 2  # type: ignore[attr-defined]


def a_class_may_be_decorated() -> None:
    @parallelize(**plans())
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gpt = PlainGPT()

        def forward(self, **batch: Tensor) -> Tensor:
            return self.gpt(**batch)[0]

    torch.testing.assert_close(Decorated()(**tokens()), gpt().float()(**tokens())[0], rtol=2e-6, atol=0)

    @parallelize
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decorated()

    with pytest.raises(StateError, match="its part 'inner' is parallelised already"):
        Outer()


def instances_may_be_built_on_meta() -> None:
    parallelize(Scaled, **plans())
    with torch.device("meta"):
        model = Scaled()
    assert {each.device.type for each in model.parameters()} == {"meta"}
    materialize(model, lambda module: nn.init.ones_(module.weight))
    assert model(torch.ones(2, 3)).item() == 6


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


class Failing(nn.Module):
    def __init__(self, fail: bool) -> None:
        if fail:
            raise ValueError("no")
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def a_failing_constructor_fails_as_ever() -> None:
    parallelize(Failing, **plans())
    with pytest.raises(ValueError, match="no"):
        Failing(True)
    assert parallel_forward(Failing(False)) is not None


# --- state and containers ---------------------------------------------------------------------------------------------


def batch_statistics_are_those_of_the_whole_batch() -> None:
    world = dist.get_world_size()
    for plan in (Plan(dp=world), Plan(cp=world), Plan(dp=world // 2, cp=2)):
        plain, model = Normed(), parallelize(Normed(), backend="eager", plan=plan)
        for number in range(2):
            batch = small_batch(seed=number)
            same_step(model, plain, model(**batch), plain(**batch))
        close(whole_state(model), whole_state(plain))
        plain.eval()
        model.eval()
        same_step(model, plain, model(**batch), plain(**batch))


def frozen_and_unused_parameters_get_no_gradient() -> None:
    plain, model = Normed(), parallelize(Normed(), **plans())
    for each in (plain, model):
        each(**small_batch()).backward()
    gradients = full_gradients(model)
    close(gradients, full_gradients(plain))
    without = {name for name, gradient in gradients.items() if gradient is None}
    assert without == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias", "detached"}
    assert all(isinstance(each, DTensor) for each in model.parameters())


def a_default_device_is_the_callers_own() -> None:
    """What the compiler makes is where the model is."""
    plain, model, batch = gpt(), parallelize(gpt(), **plans()), tokens()
    torch.set_default_device("meta")
    try:
        loss = model(**batch)[0]
        loss.backward()
    finally:
        torch.set_default_device(None)
    model.zero_grad()
    same_step(model, plain, model(**batch)[0], plain(**batch)[0])
    assert len(model.forward._variants) == 2, "a default device is part of what the model computes"


def a_parameter_may_be_frozen_later() -> None:
    messages = Messages()
    plain, model = Normed(), parallelize(Normed(), **plans())
    same_step(model, plain, model(**small_batch()), plain(**small_batch()))
    for each in (plain, model):
        each.embedding.requires_grad_(False)
    same_step(model, plain, model(**small_batch()), plain(**small_batch()))
    assert model.embedding.weight.grad is None
    if dist.get_rank() == 0:
        (text,) = messages.texts
        assert "'embedding.weight' changed" in text and "requires_grad=False now" in text, text


@dataclass
class Record:
    loss: Tensor
    logits: Tensor
    name: str


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor, kind: str = "record") -> Any:
        logits = self.head(self.embedding(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if kind == "record":
            return Record(loss, logits, "kept")
        return Pair(loss, logits) if kind == "pair" else {"loss": loss, "more": [logits, (ids, None)]}


def outputs_come_in_the_models_containers() -> None:
    plain, model = Containers(), parallelize(Containers(), **plans())
    batch = small_batch()
    record, expected = model(batch["ids"], batch["labels"]), plain(**batch)
    assert type(record) is Record and record.name == "kept" and isinstance(record.logits, LazyOutput)
    torch.testing.assert_close(record.logits.detach() + 0, expected.logits.detach())
    same_step(model, plain, record.loss, expected.loss)
    pair = model(batch["ids"], labels=batch["labels"], kind="pair")
    assert type(pair) is Pair
    same_step(model, plain, pair.loss, plain(**batch, kind="pair")[0])
    nested = model(batch["ids"], batch["labels"], "nested")
    assert list(nested) == ["loss", "more"] and torch.equal(nested["more"][1][0], batch["ids"])
    assert nested["more"][1][1] is None


def one_tensor_may_be_passed_twice() -> None:
    plain, model = Containers(), parallelize(Containers(), **plans())
    ids, labels = small_batch().values()
    assert (
        same_step(model, plain, model(ids, ids).loss, plain(ids, ids).loss)
        is same_step(model, plain, model(ids, labels).loss, plain(ids, labels).loss)
        is None
    )
    assert len(parallel_forward(model)._variants) == 1


def a_part_that_is_replaced_is_refused() -> None:
    model = parallelize(Containers(), **plans())
    model(**small_batch())
    model.head = nn.Linear(6, 12)
    with pytest.raises(StateError, match=r"parameter 'head.weight' is not sharded: .* before parallelize"):
        model(**small_batch())


def padded_lengths_share_programs() -> None:
    """Row 15 of PAINS: a program for each length of the list, not for each batch."""
    messages = Messages()
    plain, model = gpt(), parallelize(gpt(), **plans())
    for length in (3, 5, 9, 4, 7):
        batch = evocompile.pad_batch(tokens(length=length), {"input_ids": 0, "labels": -100}, lengths=[5, 9])
        same_step(model, plain, model(**batch)[0], plain(**tokens(length=length))[0])
    assert len(parallel_forward(model)._variants) == 2
    assert len(messages.texts) == (dist.get_rank() == 0), messages.texts
    assert not messages.texts or "input 'input_ids' changed: torch.int64 (3, 5)" in messages.texts[0]


def parameters_may_change_their_type() -> None:
    plain, model = Containers(), parallelize(Containers(), **plans())
    model(**small_batch()).loss.backward()
    model.zero_grad()
    for each in (plain, model):
        each.double()
    same_step(model, plain, model(**small_batch()).loss, plain(**small_batch()).loss)


# --- check ------------------------------------------------------------------------------------------------------------


def a_checked_step_changes_nothing() -> None:
    plain, model = Normed(), parallelize(Normed(), **plans(check=True))
    for number in range(2):
        same_step(model, plain, model(**small_batch(seed=number)), plain(**small_batch(seed=number)))
    close(whole_state(model), whole_state(plain))
    model = gpt()
    step = parallelize(smoothed_loss, model=model, **dp2(check=True))
    step(model, parts(tokens(), 1, 2)).backward()
    with torch.no_grad():
        model(parts(tokens(), 1, 2)["input_ids"])


def a_check_allows_for_the_precision() -> None:
    model = parallelize(gpt().bfloat16(), **plans(check=True))
    model(**tokens())[0].backward()
    model = parallelize(gpt().float(), **plans(check=True))
    with torch.autocast("cpu", torch.bfloat16):
        model(**tokens())[0].backward()


def a_check_finds_a_wrong_program() -> None:
    """The head's weights are changed on the way into the program, as a defect would."""
    model = parallelize(gpt(), **plans(check=True))
    forward = parallel_forward(model)
    build = forward._build

    def broken(*args: Any) -> Any:
        variant = build(*args)
        run = variant.run_backward

        def wrong(*given: Any) -> list[Any]:
            gradients = run(*given)
            gradients[3] = gradients[3] * 1.01
            return gradients

        variant.run_backward = wrong
        return variant

    forward._build = broken
    name = list(dict(model.named_parameters()))[3]
    with pytest.raises(VerificationError, match=rf"the gradient of '{name}' differs .* by [\d.e-]+ of .*; 1 of"):
        model(**tokens())
    assert not forward._variants


def a_check_says_when_it_cannot_compare() -> None:
    model = parallelize(nn.Sequential(nn.Embedding(11, 6), nn.Dropout(0.5), nn.Linear(6, 3)), **plans(check=True))
    with pytest.warns(UserWarning, match="draws random numbers"):
        model(small_batch()["ids"])


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Facts:
    return selected_facts(request)


@on_ranks(
    {
        2: (
            a_loss_function_is_part_of_the_program,
            the_model_of_a_loss_function_may_be_called_by_itself,
            a_loss_function_is_called_with_its_model,
            changes_of_the_model_of_a_loss_function_are_seen,
            instances_of_a_class_are_parallel,
            a_class_may_be_decorated,
            instances_may_be_built_on_meta,
            a_failing_constructor_fails_as_ever,
            batch_statistics_are_those_of_the_whole_batch,
            frozen_and_unused_parameters_get_no_gradient,
            a_parameter_may_be_frozen_later,
            a_default_device_is_the_callers_own,
            outputs_come_in_the_models_containers,
            one_tensor_may_be_passed_twice,
            a_part_that_is_replaced_is_refused,
            padded_lengths_share_programs,
            parameters_may_change_their_type,
            a_checked_step_changes_nothing,
            a_check_allows_for_the_precision,
            a_check_finds_a_wrong_program,
            a_check_says_when_it_cannot_compare,
        ),
        4: (batch_statistics_are_those_of_the_whole_batch,),
    }
)
def test_on_ranks(world: int, fact: str, facts: Facts) -> None:
    facts.check(world, fact)


# --- without ranks ----------------------------------------------------------------------------------------------------


def test_a_parallel_class_needs_a_process_group() -> None:
    @parallelize(plan=Plan(cp=2))
    class Alone(nn.Module):
        def __init__(self) -> None:
            raise AssertionError("the model is not built in vain")

    with pytest.raises(PlanError, match=r"Alone, a class that is parallelised, needs a process group: .*torchrun"):
        Alone()


def test_a_class_takes_no_model_and_no_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    for options in ({"model": nn.Linear(1, 1)}, {"optimizer": optimizer}):
        with pytest.raises(PlanError, match="they belong to an instance"):
            parallelize(Failing, **options)


def test_every_error_is_of_evocompile() -> None:
    assert issubclass(VerificationError, EvocompileError)
