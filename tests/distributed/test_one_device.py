"""The promise, over real processes: what one device computes. Plain eager in another process is the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evocompile.plan import Plan, Shard
from tests.conftest import References
from tests.distributed import training
from tests.distributed.jobs import Job, Jobs, selected_jobs
from tests.models.compare import assert_gradients, assert_loss, assert_parameters
from tests.models.reference import OPTIMIZERS, STEPS, gradient_floors
from tests.models.zoo import Case


def plan(dp: int = 1, cp: int = 1, *, shard: int, attention: str = "zigzag") -> Plan:
    return Plan(dp=dp, cp=cp, shard=Shard(shard, shard, shard), attention=attention)


# Seeds for which three steps of AdamW in float32 end near those in float64: entries whose gradient is noise move by
# the learning rate all the same, and with some seeds much hangs on them.
LLAMA, LLAMA_13 = Case("llama", seed=1), Case("llama", length=13)
TIED, TIED_13 = Case("llama-tied"), Case("llama-tied", length=13, batch=3)
GPT, GPT_13 = Case("gpt", seed=1), Case("gpt", length=13, batch=3, seed=1)

# Every plan with every degree, and every model with either number of ranks; the models share the product.
TRAINED = [
    Job(training.train, case, plan(dp, cp, shard=shard))
    for case, dp, cp, shard in [
        (LLAMA, 1, 2, 2),
        (LLAMA_13, 1, 2, 1),
        (TIED_13, 1, 2, 2),
        (TIED, 1, 2, 1),
        (GPT, 1, 2, 1),
        (GPT_13, 1, 2, 2),
        (LLAMA_13, 1, 4, 4),
        (GPT, 1, 4, 2),
        (TIED_13, 1, 4, 1),
        (TIED, 2, 2, 4),
        (GPT_13, 2, 2, 2),
        (LLAMA_13, 2, 2, 1),
    ]
] + [
    Job(training.train, GPT_13, Plan(tp=2)),
    Job(training.train, LLAMA_13, Plan(cp=2, tp=2, shard=Shard(1, 2, 4))),
    Job(training.train, LLAMA, plan(cp=2, shard=2), "inductor"),
    Job(training.train, TIED, plan(2, 2, shard=2), "inductor"),
]


def parameters(jobs: list[Job]) -> list[Any]:
    """Of pytest: Inductor takes most of a minute for each, as long as its cache is cold."""
    return [pytest.param(job, id=str(job), marks=pytest.mark.slow if job.backend == "inductor" else ()) for job in jobs]


trained = pytest.mark.parametrize("job", parameters(TRAINED))


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, references: References) -> Jobs:
    selected = selected_jobs(request)
    references.compute([job.case for job in selected])
    return Jobs(selected, timeout=1800)


def one_device(case: Case) -> nn.Module:
    """The plain model, for what the references do not have."""
    return case.build()


# --- training --------------------------------------------------------------------------------------------------------


@trained
def test_first_step(job: Job, jobs: Jobs, references: References) -> None:
    for result in jobs.results(job):
        assert_loss(result["loss"], references[job.case]["loss"])
        assert_gradients(result["gradients"], references[job.case]["gradients"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@trained
def test_three_optimizer_steps(job: Job, optimizer: str, jobs: Jobs, references: References) -> None:
    for result in jobs.results(job):
        same_training(result[optimizer], references[job.case], optimizer)


# Families whose graphs differ in kind: windows, two norms with windows and without, routed experts, full attention.
COMPILED = [
    Job(training.first_step, Case(model, length=13, seed=3), plan(cp=2, shard=2), "inductor")
    for model in ("mistral", "gemma3", "mixtral", "bert")
]


@pytest.mark.parametrize("job", parameters(COMPILED))
def test_families_compiled(job: Job, jobs: Jobs, references: References) -> None:
    for result in jobs.results(job):
        assert_loss(result["losses"][0], references[job.case]["loss"])
        assert_gradients(result["gradients"], references[job.case]["gradients"])


def same_training(result: dict[str, Any], reference: dict[str, Any], optimizer: str) -> None:
    assert len(result["losses"]) == STEPS
    for loss, expected in zip(result["losses"], reference[optimizer]["losses"], strict=True):
        assert_loss(loss, expected)
    if optimizer == "adamw":
        assert_adamw_parameters(result["parameters"], reference)
    else:
        assert_parameters(result["parameters"], reference[optimizer])


def assert_adamw_parameters(parameters: dict[str, Tensor], reference: dict[str, Any]) -> None:
    """As `assert_parameters`, and what the error that a gradient may have does to AdamW.

    A step is lr · m / √v, and √v stays near the first gradient g or above: an error of the gradient moves a parameter
    by up to lr · error / g a step. Ten times that, as later gradients also feel what the noise has moved: on one device
    the same batch with its rows in another order, or in float64, does as much.
    """
    rate = OPTIMIZERS["adamw"]([torch.zeros(1)]).defaults["lr"]
    floors = gradient_floors(reference["gradients"])
    for name, expected in reference["adamw"]["parameters"].items():
        allowed = 1e-5 * expected.abs().max() + 10 * STEPS * rate * floors[name] / reference["gradients"][name].abs()
        error = (parameters[name] - expected).abs().masked_fill(reference["adamw"]["noise"][name], 0.0)
        excess = float((error / allowed).max())
        assert excess <= 1, f"{name}: {excess:.2f} times the error that is allowed"


@trained
def test_clipping(job: Job, jobs: Jobs, references: References) -> None:
    gradients = references[job.case]["gradients"]
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
    assert norm > 2 * training.MAX_NORM
    for result in jobs.results(job):
        assert float(result["norm"]) == pytest.approx(norm, rel=1e-5)
        scale = training.MAX_NORM / norm
        assert_gradients(result["clipped"], {name: scale * each for name, each in gradients.items()})


@trained
def test_state_dict(job: Job, jobs: Jobs) -> None:
    expected = one_device(job.case).state_dict()
    for result in jobs.results(job):
        assert list(result["state"]) == list(expected)
        for name, value in expected.items():
            assert torch.equal(result["state"][name], value), name


PASSED = Job(training.train_with_a_passed_optimizer, LLAMA, plan(cp=2, shard=2))


@pytest.mark.parametrize("job", parameters([PASSED]))
def test_an_optimizer_that_is_passed(job: Job, jobs: Jobs, references: References) -> None:
    for result in jobs.results(job):
        same_training(result, references[job.case], "adamw")


# --- other ways to call ----------------------------------------------------------------------------------------------


def same_step(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for loss, reference in zip(result["losses"], expected["losses"], strict=True):
        assert_loss(loss, reference)
    assert_gradients(result["gradients"], expected["gradients"])


LENGTHS = [Job(training.train_on_two_lengths, LLAMA, plan(cp=2, shard=2))]


@pytest.mark.parametrize("job", parameters(LENGTHS))
def test_another_length_compiles_again(job: Job, jobs: Jobs) -> None:
    model = one_device(job.case)
    expected = [training.step(model, batch) for batch in training.batches_of_two_lengths(job.case)]
    for result in jobs.results(job):
        for own, reference in zip(result, expected, strict=True):
            same_step(own, reference)


ACCUMULATED = [
    Job(training.accumulate, LLAMA_13, plan(cp=2, shard=2)),
    Job(training.accumulate, GPT, plan(2, 2, shard=2)),
    Job(training.accumulate, LLAMA_13, Plan(ulysses=2)),
    Job(training.accumulate, GPT_13, Plan(cp=2, ulysses=2)),
]


@pytest.mark.parametrize("job", parameters(ACCUMULATED))
def test_gradients_accumulate(job: Job, jobs: Jobs) -> None:
    expected = training.accumulate_on(one_device(job.case), job.case)
    for result in jobs.results(job):
        same_step(result, expected)


EVALUATED = [
    Job(training.evaluate, LLAMA, plan(cp=2, shard=2)),
    Job(training.evaluate, GPT_13, plan(2, 2, shard=4)),
    Job(training.evaluate, GPT_13, Plan(cp=2, ulysses=2, placement="context-first")),
]


@pytest.mark.parametrize("job", parameters(EVALUATED))
def test_logits_in_evaluation(job: Job, jobs: Jobs) -> None:
    expected = training.logits(one_device(job.case), job.case)
    for result in jobs.results(job):
        for own, reference in zip(result, expected, strict=True):
            assert type(own) is Tensor and not own.requires_grad
            # logits near zero are sums of terms that are not
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-5 * float(reference.abs().max()))


# --- row 19 of PAINS: models side by side ----------------------------------------------------------------------------

BESIDE = [Job(training.train_beside_others, LLAMA_13, plan(cp=2, shard=2))]


@pytest.mark.parametrize("job", parameters(BESIDE))
def test_models_side_by_side(job: Job, jobs: Jobs) -> None:
    """A plain model between two parallel ones, forwards and backwards interleaved."""
    cases = {"plain": job.case, "parallel": job.case, "other": training.other_case(job.case)}
    for result in jobs.results(job):
        before, *after = result["plain"]
        for name, case in cases.items():
            model = one_device(case)
            for number, own in enumerate(after if name == "plain" else result[name]):
                same_step(own, training.step(model, job.case.inputs(number)))
        assert torch.equal(before["losses"][0], after[0]["losses"][0])
        for name, gradient in before["gradients"].items():
            assert torch.equal(gradient, after[0]["gradients"][name]), f"{name} of the plain model"
