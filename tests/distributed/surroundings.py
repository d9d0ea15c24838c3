"""What a training loop does besides forward, backward and step, on two ranks; each function is one fact about it.

Each returns (found, expected), which the test compares: both are computed here, as the plain model is quick.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import evocompile
from evocompile.errors import InputError, StateError
from evocompile.plan import Plan, Shard
from tests.distributed.training import gradients, whole
from tests.redundant_model import Model, batch

PLAN = Plan(cp=2, shard=Shard(1, 1, 2))


def parallel(model: nn.Module | None = None, plan: Plan = PLAN, **options: Any) -> nn.Module:
    return evocompile.parallelize(model or Model().double(), plan=plan, backend="eager", **options)


def step(model: nn.Module, number: int) -> Tensor:
    loss = model(**batch(number))
    loss.backward()
    return loss.detach()


def plain_repeated_backward() -> Any:
    """Backward twice without no_sync, and a third time into gradients that were scaled."""
    results = []
    for model in (parallel(), Model().double()):
        step(model, 0), step(model, 1)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        step(model, 2)
        results.append(gradients(model))
    return results


def accumulated_then_thrown_away() -> Any:
    """zero_grad after backward under no_sync: what was accumulated is gone, as on one device."""
    results = []
    for model in (parallel(), Model().double()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync() if model.__dict__.get("no_sync") else nullcontext():
            step(model, 0)
        optimizer.zero_grad()
        step(model, 1)
        results.append(gradients(model))
    return results


def accumulated_onto_gradients() -> Any:
    """A synchronised backward, then one under no_sync, then a synchronised one."""
    results = []
    for model in (parallel(), Model().double()):
        step(model, 0)
        with model.no_sync() if model.__dict__.get("no_sync") else nullcontext():
            step(model, 1)
        step(model, 2)
        results.append(gradients(model))
    return results


class TwoHeads(nn.Module):
    """Each call uses one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x))).square().sum()


def accumulated_of_a_parameter_that_the_last_micro_batch_does_not_use() -> Any:
    results = []
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for model in (parallel(TwoHeads().double()), TwoHeads().double()):
        with model.no_sync() if model.__dict__.get("no_sync") else nullcontext():
            model(x, 0).backward()
        model(x, 1).backward()
        results.append(gradients(model))
    assert any("heads.0" in name for name in results[1])
    return results


def writes_that_torch_does_not_count() -> Any:
    """A write through .data is seen after a backward, and otherwise with refresh()."""
    results = []
    for model in (parallel(), Model().double()):
        losses = [step(model, 0)]
        model.scale.data.mul_(2)
        losses.append(step(model, 0))
        with torch.no_grad():
            losses.append(model(**batch(0)))
            model.scale.data.mul_(2)
            if model.__dict__.get("refresh"):
                model.refresh()
            losses.append(model(**batch(0)))
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            losses.append(model(**batch(0)))
        results.append(losses)
    return results


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapters_groups_schedule_and_clipping() -> Any:
    """Frozen weights with adapters, two parameter groups, a schedule, clipping, zero_grad(set_to_none=False)."""
    results = []
    for is_parallel in (True, False):
        model = Model().double()
        model.requires_grad_(False)
        torch.manual_seed(1)
        model.up, model.down = Adapted(model.up).double(), Adapted(model.down).double()
        if is_parallel:
            parallel(model, Plan(cp=2, shard=Shard(1, 2, 2)))
        trained = [[p for p in part.parameters() if p.requires_grad] for part in (model.up, model.down)]
        optimizer = torch.optim.AdamW([{"params": trained[0]}, {"params": trained[1], "lr": 0.05}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        norms = []
        for number in range(4):
            step(model, number)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        results.append([norms, whole(model.named_parameters())])
    return results


def fp16_with_a_scaler() -> Any:
    """The scale grows, an overflow skips the step on both ranks and halves the scale; parameters follow one device."""
    results = []
    for is_parallel in (True, False):
        model = Model()
        if is_parallel:
            parallel(model, precision="fp16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for number in range(5):
            if number == 3:
                scaler.update(2.0**40)
            if is_parallel:
                loss = model(**batch(number))
            else:
                computed = {name: p.half() for name, p in model.named_parameters()}
                loss = torch.func.functional_call(model, computed, (), batch(number))
            scaler.scale(loss.float()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(torch.tensor(scaler.get_scale()))
        results.append([scales, whole(model.named_parameters())])
    return results


def autocast_around_the_call() -> Any:
    results = []
    for model in (parallel(Model()), Model()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(0))
        loss.backward()
        results.append([loss.detach(), gradients(model)])
    return results


def micro_batches_inside_one_call() -> Any:
    """Plan(microbatches=k): losses, scaled gradients, parameters, beside no_sync, evaluation and a loss function."""
    results = []
    plans = [Plan(cp=2, microbatches=3, shard=Shard(1, 1, 2)), Plan(dp=2, microbatches=2, shard=Shard(1, 2, 2))]
    for plan in (*plans, None):
        model = Model().double()
        loss_fn = lambda model, **inputs: 2 * model(**inputs)  # noqa: E731
        if plan is not None:
            loss_fn = evocompile.parallelize(loss_fn, model=model, plan=plan, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, found = [], []
        for number in range(3):
            with model.no_sync() if plan is not None else nullcontext():
                (loss_fn(model, **batch(2 * number)) / 3).backward()
            loss = loss_fn(model, **batch(2 * number + 1))
            loss.backward()
            losses.append(loss.detach())
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_fn(model, **batch(9)))
        results.append([losses, found, whole(model.named_parameters())])
    return results[:2], [results[2], results[2]]


class Small(nn.Module):
    """Few segments, as Inductor compiles each: uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels = torch.where(labels >= 0, labels % 3, labels)
        return nn.functional.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), labels.flatten())


def graph_variants_by_inductor(precision: str | None, microbatches: int) -> Any:
    """First, inner and last micro-batch, under no_sync, and first again after a step."""
    results = []
    for is_parallel in (True, False):
        model = Small()
        if is_parallel:
            plan = Plan(cp=2, microbatches=microbatches, shard=Shard(1, 1, 2))
            evocompile.parallelize(model, plan=plan, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(6):
            with model.no_sync() if is_parallel and number % 3 < 2 else nullcontext():
                losses.append(step(model, number).float())
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        results.append([losses, whole(model.named_parameters())])
    return results


def inductor_with_micro_batches() -> Any:
    return graph_variants_by_inductor(None, 2)


def inductor_in_bf16() -> Any:
    return graph_variants_by_inductor("bf16", 1)


def refusals() -> Any:
    """Each with its sentence."""
    sentences = []
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with model.no_sync():
        step(model, 0)
    optimizer.step()
    for call, kind in (
        (lambda: step(model, 1), StateError),
        (lambda: on_one_rank_only(parallel()), InputError),
        (lambda: copy.deepcopy(model), StateError),
    ):
        try:
            call()
        except kind as error:
            sentences.append(str(error))
    return [["no_sync(), where no gradient" in sentences[0], "on rank 1, but" in sentences[1], len(sentences)]], [
        [True, True, 3]
    ]


def on_one_rank_only(model: nn.Module) -> None:
    with model.no_sync() if dist.get_rank() == 1 else nullcontext():
        step(model, 0)


FACTS = (
    plain_repeated_backward,
    accumulated_then_thrown_away,
    accumulated_onto_gradients,
    accumulated_of_a_parameter_that_the_last_micro_batch_does_not_use,
    writes_that_torch_does_not_count,
    adapters_groups_schedule_and_clipping,
    fp16_with_a_scaler,
    autocast_around_the_call,
    micro_batches_inside_one_call,
    inductor_with_micro_batches,
    inductor_in_bf16,
    refusals,
)
LOOSE = {
    "inductor_with_micro_batches": 1e-4,
    "inductor_in_bf16": 1e-2,
    "fp16_with_a_scaler": 2e-3,
    "autocast_around_the_call": 3e-2,
}


def check_facts() -> dict[str, str]:
    """The facts that do not hold, with why."""
    import traceback

    failures = {}
    for fact in FACTS:
        tolerance = LOOSE.get(fact.__name__, 1e-9)
        try:
            found, expected = fact()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        except Exception:
            failures[fact.__name__] = traceback.format_exc()
    return failures
