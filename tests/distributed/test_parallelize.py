"""What the user touches: `parallelize` and the parallel forward, on gloo ranks, against the plain model."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from evocompile import EvocompileError, InputError, Plan, PlanError, Shard, StateError, compile, parallelize
from evocompile.collectives import pending_works
from evocompile.lazy import LazyOutput, _Value
from evocompile.meeting import check_backend
from evocompile.progress import Progress
from evocompile.runtime import parallel_forward
from tests.distributed.launch import launch, run_ranks


class Tiny(nn.Module):
    """No attention, but what the runtime has to carry: a frozen parameter, a written buffer, logits beside the loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, *, double: bool = False) -> Any:
        self.calls.add_(1)
        logits = self.head(torch.tanh(self.hidden(self.embedding(ids))) * self.frozen) * self.scale
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": 2 * loss if double else loss, "logits": logits, "ids": ids}


def batch(seed: int = 0, length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(11, (2, length), generator=generator) for name in ("ids", "labels")}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
    }


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def close(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert list(left) == list(right)
    for name in left:
        if left[name] is None or right[name] is None:
            assert left[name] is right[name], name
        else:
            torch.testing.assert_close(
                left[name], right[name], rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
            )


def parallel(**options: Any) -> Tiny:
    return parallelize(Tiny(), backend="eager", plan=Plan(cp=dist.get_world_size()), **options)


# --- one launch, many facts: each function is run on both ranks -------------------------------------------------------


def the_same_object_comes_back() -> None:
    plain = Tiny()
    before = [name for name, _ in plain.named_parameters()]
    order: list[str] = []
    plain.register_forward_pre_hook(lambda *_: order.append("before"))
    plain.register_forward_hook(lambda *_: order.append("after"))
    model = parallelize(plain, backend="eager")
    assert model is plain and type(model) is Tiny and model.scale == 1.0
    assert [name for name, _ in model.named_parameters()] == before
    assert inspect.signature(model.forward) == inspect.signature(Tiny().forward)
    model(**batch())
    assert order == ["before", "after"]


def losses_gradients_and_steps_are_those_of_one_device() -> None:
    for shard in (Shard(1, 1, 1), Shard(2, 2, 2)):
        plain, model = Tiny(), parallelize(Tiny(), backend="eager", plan=Plan(cp=2, shard=shard))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (plain, model)]
        for step in range(3):
            expected, loss = (each(**batch(step))["loss"] for each in (plain, model))
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            assert type(loss) is torch.Tensor and loss.grad_fn is not None
            expected.backward()
            loss.backward()
            close(full_gradients(model), full_gradients(plain))
            for each in model.parameters():
                assert each.grad is None or each.grad.placements == each.placements
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        close(whole_state(model), whole_state(plain))  # the buffer `calls` too
        assert pending_works() == 0


def gradients_accumulate_and_graphs_are_retained() -> None:
    plain, model = Tiny(), parallel()
    seen: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    for each in (plain, model):
        each(**batch(0))["loss"].backward()
        loss = each(**batch(1))["loss"]
        (3 * loss).backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    close(full_gradients(model), full_gradients(plain))
    assert seen == [1, 1, 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(**batch(0))["loss"]
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def logits_beside_a_loss_are_lazy() -> None:
    plain, model = Tiny(), parallel()
    expected, outputs = plain(**batch()), model(**batch())
    assert list(outputs) == ["loss", "logits", "ids"]
    logits = outputs["logits"]
    assert isinstance(logits, LazyOutput) and not logits.is_gathered
    assert logits.shape == expected["logits"].shape and logits.requires_grad
    torch.testing.assert_close(logits.detach() + 0, expected["logits"].detach())
    assert torch.equal(outputs["ids"], batch()["ids"])
    loss = outputs["loss"] + outputs["logits"].square().mean()
    with pytest.raises(EvocompileError, match="a gradient reached output 1"):
        loss.backward()


def a_lazy_output_may_be_an_input() -> None:
    model, labels = parallel(), batch()["labels"]
    lazy = LazyOutput(
        _Value(labels[:1], lambda part: labels), "output 0", labels.shape, labels.dtype, labels.device, False
    )
    expected = Tiny()(**batch())["loss"]
    torch.testing.assert_close(model(batch()["ids"], labels=lazy)["loss"], expected)


def without_a_scalar_outputs_are_whole_and_differentiable() -> None:
    plain, model = Tiny(), parallel()
    for each in (plain, model):
        logits = each(batch()["ids"])
        assert type(logits) is torch.Tensor
        logits.square().sum().backward()
    close(full_gradients(model), full_gradients(plain))


def evaluation_is_a_variant_of_its_own() -> None:
    plain, model = Tiny().eval(), parallel().eval()
    with torch.no_grad():
        expected, outputs = plain(**batch()), model(**batch())
    torch.testing.assert_close(outputs["loss"], expected["loss"])
    torch.testing.assert_close(outputs["logits"] + 0, expected["logits"])
    assert not outputs["loss"].requires_grad and not outputs["logits"].requires_grad
    model(**batch())["loss"].backward()


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("evocompile").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def each_signature_is_compiled_once() -> None:
    messages = Messages()
    plain, model = Tiny(), parallel()
    forward = parallel_forward(model)
    assert forward is not None
    compile(model, **batch(), double=False)
    assert model.calls == 0, "compile() runs nothing"
    model(**batch(), double=False)
    assert len(forward._variants) == 1 and not messages.texts
    model(**batch(length=6), double=False)
    model(**batch(), double=True)
    model.scale = plain.scale = 0.5  # the guards notice an attribute that the forward has read
    torch.testing.assert_close(model(**batch(), double=True)["loss"], plain(**batch(), double=True)["loss"])
    model(**batch(3, length=6), double=False)  # scale is 1 in that variant
    texts = messages.texts
    if dist.get_rank() == 0:
        assert len(texts) == 4 and all("compiles again" in text for text in texts), texts
        assert "input 'ids' changed" in texts[0] and "(2, 6)" in texts[0]
        assert "double" in texts[1], texts
        assert "model.scale == 1.0" in texts[2] and "model.scale == 1.0" in texts[3]
    else:
        assert not texts
    assert len(forward._variants) == 5


def copies_are_refused() -> None:
    model = parallel()
    with pytest.raises(StateError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(StateError, match=r"cannot be pickled: save model.state_dict"):
        pickle.dumps(model)


def models_live_side_by_side() -> None:
    plain, one, two = Tiny(), parallel(), parallelize(Tiny(1), backend="eager", plan=Plan(dp=2))
    other = Tiny(1)
    for _ in range(2):
        for left, right in ((one, plain), (two, other)):
            torch.testing.assert_close(left(**batch())["loss"], right(**batch())["loss"])
    assert "forward" not in vars(plain) and type(plain.head.weight) is nn.Parameter


def a_stale_optimizer_is_found() -> None:
    plain = Tiny()
    optimizer = torch.optim.AdamW(plain.parameters())
    model = parallelize(plain, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model(**batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [each for each in caught if "still holds the parameters from before" in str(each.message)]
    assert len(found) == (dist.get_rank() == 0), [str(each.message) for each in caught]
    assert not found or found[0].filename == __file__


def an_optimizer_that_is_passed_goes_on() -> None:
    plain, model = Tiny(), Tiny()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    parallelize(model, backend="eager", optimizer=optimizers[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                each(**batch(step))["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
    close(whole_state(model), whole_state(plain))


def bad_calls_are_refused() -> None:
    model = parallel()
    rank = dist.get_rank()
    with pytest.raises(
        InputError, match=r"input 'ids' is on meta, the model's parameters are on cpu: .* ids.to\('cpu'\)"
    ):
        model(ids=batch()["ids"].to("meta"))
    with pytest.raises(InputError, match=r"input 'labels' differs between ranks: rank 1"):
        model(ids=batch()["ids"], labels=batch(rank)["labels"])
    with pytest.raises(StateError, match="parallelised already"):
        parallelize(model)
    with pytest.raises(StateError, match="its part 'inner' is parallelised already"):
        parallelize(nn.ModuleDict({"inner": model}))
    with pytest.raises(StateError, match="a loss function that parallelize"):
        compile(Tiny())
    assert model(**batch())["loss"].isfinite()


def bad_models_and_plans_are_refused() -> None:
    rank = dist.get_rank()
    with pytest.raises(PlanError, match=r"is for 4 ranks .* but 2 run: change the plan, or start .torchrun"):
        parallelize(Tiny(), plan=Plan(dp=2, cp=2))
    with pytest.raises(PlanError, match="pass 'auto' or an"):
        parallelize(Tiny(), plan="fast")
    with pytest.raises(StateError, match=r"'frozen' has other values on rank 1 .* torch.manual_seed"):
        parallelize(Tiny(seed=rank))
    with pytest.raises(PlanError, match="no parameters"):
        parallelize(nn.ReLU())
    mixed = Tiny()
    if rank == 1:
        mixed.head.to("meta")
    what = "the model is on several devices" if rank == 1 else "rank 1 cannot parallelize the model: the model is on"
    with pytest.raises(PlanError, match=what):
        parallelize(mixed)
    assert type(mixed.frozen) is nn.Parameter, "nothing was changed"


def a_rank_that_cannot_compile_tells_the_others() -> None:
    model = parallel()
    if dist.get_rank() == 1:
        model.scale = object()
    with pytest.raises(
        PlanError, match=r"what compiling the call gives must be equal on all ranks.*rank 1: CaptureError"
    ):
        model(**batch())


FACTS: tuple[Callable[[], None], ...] = (
    the_same_object_comes_back,
    losses_gradients_and_steps_are_those_of_one_device,
    gradients_accumulate_and_graphs_are_retained,
    logits_beside_a_loss_are_lazy,
    a_lazy_output_may_be_an_input,
    without_a_scalar_outputs_are_whole_and_differentiable,
    evaluation_is_a_variant_of_its_own,
    each_signature_is_compiled_once,
    copies_are_refused,
    models_live_side_by_side,
    a_stale_optimizer_is_found,
    an_optimizer_that_is_passed_goes_on,
    bad_calls_are_refused,
    bad_models_and_plans_are_refused,
    a_rank_that_cannot_compile_tells_the_others,
)


def check_facts() -> dict[str, str]:
    """The tracebacks of the facts that do not hold, by name. Both ranks run all of them, whatever fails."""
    import traceback

    failures = {}
    for fact in FACTS:
        try:
            fact()
        except BaseException:
            failures[fact.__name__] = traceback.format_exc()
        dist.barrier()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(check_facts, 2, timeout=400)


@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS])
def test_on_two_ranks(fact: str, failures: list[dict[str, str]]) -> None:
    for rank, found in enumerate(failures):
        assert fact not in found, f"rank {rank}:\n{found[fact]}"


def die_in_step_two() -> None:
    model = parallel()
    model(**batch())["loss"].backward()
    if dist.get_rank() == 1:
        import os

        os._exit(7)
    model(**batch())["loss"].backward()


def test_a_rank_that_dies_makes_the_others_raise() -> None:
    outcomes = launch(die_in_step_two, 2, timeout=100, group_timeout=20)
    assert outcomes[1].error == "died with exit code 7"
    assert "still running" not in str(outcomes[0].error) and "Error" in str(outcomes[0].error)


# --- without ranks ---------------------------------------------------------------------------------------------------


def test_no_process_group() -> None:
    with pytest.raises(PlanError, match=r"needs a process group: .*torchrun.*init_process_group"):
        parallelize(Tiny())


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((nn.Linear(1, 1),), {"precision": "int8"}, r"'int8' is no floating-point type"),
        ((nn.Linear(1, 1),), {"cluster": "dgx"}, r"cluster='dgx': pass an evocompile.Cluster"),
        ((nn.Linear(1, 1),), {"backend": "aot"}, "choose 'inductor' or 'eager'"),
        ((nn.Linear(1, 1),), {"inputs": "split"}, "choose 'global'"),
        ((nn.Linear(1, 1),), {"model": nn.Linear(1, 1)}, "goes with a loss function"),
        ((3,), {}, "got a int: pass a model"),
        ((dict,), {}, "class dict, which is no"),
        ((copy.copy,), {}, "got the function copy: pass .* and its model"),
    ],
)
def test_what_is_not_built_is_refused(args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parallelize(*args, **options)


def test_the_process_group_has_to_serve_the_models_device() -> None:
    check_backend("cpu", "cpu:gloo,cuda:nccl")
    check_backend("cuda", "cpu:gloo,cuda:nccl")
    with pytest.raises(PlanError, match="on cpu, but the process group serves cuda"):
        check_backend("cpu", "cuda:nccl")
    with pytest.raises(PlanError, match="gloo's, which is for the CPU"):
        check_backend("cuda", "cpu:gloo,cuda:gloo")


def test_progress_speaks_only_when_a_stage_is_slow(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    import time

    monkeypatch.setattr(Progress, "PATIENCE", 0.05)
    with Progress(shown=True) as progress:
        progress("quick")
        progress("slow")
        time.sleep(0.2)
    with Progress(shown=False) as progress:
        progress("silent")
        time.sleep(0.1)
    assert capsys.readouterr().err == "evocompile: slow …\n"
