"""Capture against eager: same numbers, whatever the model is made of."""

from __future__ import annotations

import logging
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from evocompile.capture import capture
from evocompile.errors import CaptureError, InputError
from evocompile.local_inputs import Parts
from evocompile.program import InputKind, OutputKind, output_values, source_line
from tests import captured_model
from tests.captured_model import assert_same_state, compiled_by, ids_of, llama, mlp, run

HERE = captured_model.__file__
LOGGER = logging.getLogger(__name__)


# --- Numbers -----------------------------------------------------------------------------------------------------


def test_training_equals_eager_with_tied_weights_and_buffer_update():
    module, ids, labels = mlp(), ids_of(1), ids_of(2)
    captured = capture(module.forward, module, (ids,), {"labels": labels, "scale": 0.5})
    got = run(captured, module, {"args[0]": ids, "labels": labels})
    assert int(module.calls) == 0, "neither capture nor the functional graph writes to the module"

    expected = module(ids, labels=labels, scale=0.5)
    expected["loss"].backward()
    program = captured.program
    (loss_output,) = [output for output in program.outputs if output.differentiable]
    torch.testing.assert_close(got[OutputKind.USER][loss_output.name], expected["loss"].detach())
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert list(got[OutputKind.GRADIENT]) == [each.name for each in program.inputs if each.requires_grad]
    assert sorted(got[OutputKind.GRADIENT]) == sorted(gradients) == sorted(captured.parameter_names)
    for name, gradient in got[OutputKind.GRADIENT].items():
        torch.testing.assert_close(gradient, gradients[name])
    assert {name: int(value) for name, value in got[OutputKind.BUFFER].items()} == {"calls": 1}
    kinds = [output.kind for output in program.outputs]
    assert kinds == sorted(kinds, key=[OutputKind.USER, OutputKind.BUFFER, OutputKind.GRADIENT].index)


def test_inputs_are_named_and_the_plain_tensor_attribute_is_like_a_buffer():
    module = mlp()
    captured = capture(module.forward, module, (ids_of(),), {"labels": ids_of()})
    names = {each.name: each.kind for each in captured.program.inputs}
    assert names["args[0]"] is names["labels"] is InputKind.USER
    assert names["calls"] is names["table"] is InputKind.BUFFER
    assert names["embed.weight"] is InputKind.PARAMETER and "head.weight" not in names


def test_callable_gives_the_models_own_containers_and_the_tensors_installed_now():
    module, ids, labels = mlp(), ids_of(1), ids_of(2)
    captured = capture(module.forward, module, (ids,), {"labels": labels})
    results: list = []
    call = captured.callable(compiled_by(captured.program, results))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    other = ids_of(3).t().contiguous().t()  # same shape, other strides
    output = call((other,), {"labels": labels})
    expected = module(other, labels=labels)
    assert list(output) == ["loss", "logits", "hidden", "name"] and output["name"] == "mlp"
    torch.testing.assert_close(output["loss"], expected["loss"].detach())
    torch.testing.assert_close(output["logits"], expected["logits"].detach())
    torch.testing.assert_close(output["hidden"][1], expected["hidden"][1].detach())


def test_without_a_scalar_all_outputs_are_differentiable():
    module, ids = mlp(), ids_of()
    captured = capture(module.forward, module, (ids,), {})
    got = run(captured, module, {"args[0]": ids})
    module(ids)["logits"].sum().backward()
    (tangent,) = captured.program.inputs_of(InputKind.TANGENT)
    assert tangent.shape == (2, 6, 11)
    torch.testing.assert_close(got[OutputKind.GRADIENT]["up.weight"], module.up.weight.grad)


def test_outputs_beside_a_differentiable_scalar_bring_no_tangent_and_no_copy():
    module = mlp()
    captured = capture(module.forward, module, (ids_of(),), {"labels": ids_of()})
    assert [each.shape for each in captured.program.inputs_of(InputKind.TANGENT)] == [()]
    targets = [node.target for node in captured.program.joint.graph.nodes]
    assert not {torch.ops.aten.detach.default, torch.ops.aten.alias.default} & set(targets)
    values = output_values(captured.program.joint.graph)
    assert all(value is None or value.target is not torch.ops.aten.clone.default for value in values)


@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_forward_only(how):
    module, ids = mlp(), ids_of()
    if how == "frozen":
        module.requires_grad_(False)
    with torch.set_grad_enabled(how == "frozen"):
        captured = capture(module.forward, module, (ids,), {"labels": ids})
        expected = module(ids, labels=ids)
        assert captured.matches((ids,), {"labels": ids})
    program = captured.program
    assert not program.inputs_of(InputKind.TANGENT) and not program.outputs_of(OutputKind.GRADIENT)
    got = run(captured, module, {"args[0]": ids, "labels": ids})
    torch.testing.assert_close(got[OutputKind.USER]["0"], expected["loss"])
    assert int(got[OutputKind.BUFFER]["calls"]) == 2


def test_frozen_and_unused_parameters():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.unused, self.cut = (nn.Parameter(torch.ones(3)) for _ in range(4))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return (self.used * self.frozen * x * self.cut.detach()).sum(), self.cut * 2

    module = Partly()
    captured = capture(module.forward, module, (torch.ones(3),), {})
    assert captured.parameter_names == ("used", "frozen", "cut")
    outputs = captured.program.outputs_of(OutputKind.GRADIENT)
    assert [output.name for output in outputs] == ["used", "cut"]
    got = run(captured, module, {"args[0]": torch.ones(3)})
    assert got[OutputKind.GRADIENT]["cut"] is None and got[OutputKind.GRADIENT]["used"] is not None


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()


class Checkpointed(Small):
    def forward(self, x):
        def inner(t):
            return self.second(torch.relu(self.first(t)))

        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sum()


class DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(b)
        return a * b

    @staticmethod
    def backward(ctx, gradient):
        (b,) = ctx.saved_tensors
        return 2 * gradient * b, None


class CustomFunction(Small):
    def forward(self, x):
        return DoubledGradient.apply(self.first(x), self.second.weight[:2]).sum()


class Views(Small):
    def forward(self, x):
        y = self.first(x)
        return y, y.view(-1), self.first.weight.t(), x.view(-1)


class BatchNorm(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return self.norm(self.first(x)).pow(3).sum(), self.second(x).sum()


class LocalWrites(Small):
    def forward(self, x):
        y = self.first(x)
        y[:, 0] = 0
        return y.mul_(2).sum()


@pytest.mark.parametrize("kind", [Checkpointed, CustomFunction, Views, BatchNorm, LocalWrites])
def test_constructs_that_need_care_equal_eager(kind):
    module, x = kind(), torch.randn(2, 4, dtype=torch.float64)
    captured = capture(module.forward, module, (x,), {})
    results: list = []
    output = captured.callable(compiled_by(captured.program, results))((x,), {})
    expected = module(x)
    if isinstance(expected, torch.Tensor):
        output, expected = (output,), (expected,)
    for ours, theirs in zip(output, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), check_stride=False)
    scalars = [each for each in expected if each.dim() == 0]
    wanted = scalars or [each for each in expected if each.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(each) for each in wanted])
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for each, result in zip(captured.program.outputs, results, strict=True):
        if each.kind is OutputKind.GRADIENT and gradients[each.name] is None:
            assert result is None
        elif each.kind is OutputKind.GRADIENT:
            torch.testing.assert_close(result, gradients[each.name])
        elif each.kind is OutputKind.BUFFER:
            torch.testing.assert_close(result, dict(module.named_buffers())[each.name])


def test_autocast_is_captured():
    module, x = Small().float(), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(module.first.forward, module.first, (x,), {})
        expected = module.first(x)
    expected.sum().backward()
    (output,) = captured.program.outputs_of(OutputKind.USER)
    assert output.dtype is expected.dtype is torch.bfloat16
    got = run(captured, module.first, {"args[0]": x})
    torch.testing.assert_close(got[OutputKind.USER]["0"], expected.detach())
    torch.testing.assert_close(got[OutputKind.GRADIENT]["weight"], module.first.weight.grad)


def test_tensors_in_a_container_that_pytree_does_not_know():
    class Reader(Small):
        def forward(self, batch):
            return self.first(batch["x"]).sum() + batch["y"].sum()

    module, x = Reader(), torch.ones(2, 4, dtype=torch.float64)
    captured = capture(module.forward, module, (UserDict(x=x, y=x + 1),), {})
    names = [each.name for each in captured.program.inputs_of(InputKind.USER)]
    assert names == ["args[0].data['x']", "args[0].data['y']"]
    assert captured.matches((UserDict(x=x, y=x + 2),), {})
    assert not captured.matches((UserDict(x=x[:1], y=x),), {})
    assert not captured.matches((UserDict(x=x, y=x),), {})


def test_the_same_tensor_passed_twice_stays_two_inputs():
    module, ids, labels = mlp(), ids_of(1), ids_of(2)
    captured = capture(module.forward, module, (ids,), {"labels": ids})
    assert [each.name for each in captured.program.inputs_of(InputKind.USER)] == ["args[0]", "labels"]
    assert captured.matches((ids,), {"labels": labels})
    got = run(captured, module, {"args[0]": ids, "labels": labels})
    torch.testing.assert_close(got[OutputKind.USER]["0"], module(ids, labels=labels)["loss"].detach())


def test_small_constants_stay_in_the_graph():
    class Constant(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 2.0, 3.0])

    module, x = Constant(), torch.ones(2, 3)
    captured = capture(module.forward, module, (x,), {})
    bound = captured.program.bind(captured.program.plan, 0)
    torch.testing.assert_close(bound.joint(x)[0], module(x))


def test_a_loss_function_that_reads_the_module():
    module, ids = mlp(), ids_of()

    def loss_fn(model, batch):
        return model(batch["x"], labels=batch["y"])["loss"] * 2

    captured = capture(loss_fn, module, (module, {"x": ids, "y": ids}), {})
    users = [each.name for each in captured.program.inputs_of(InputKind.USER)]
    assert users == ["args[1]['x']", "args[1]['y']"]
    assert "up.weight" in captured.parameter_names
    got = run(captured, module, {users[0]: ids, users[1]: ids})
    torch.testing.assert_close(got[OutputKind.USER]["0"], 2 * module(ids, labels=ids)["loss"].detach())


def test_stack_traces_lead_to_the_model():
    module = mlp()
    captured = capture(module.forward, module, (ids_of(),), {"labels": ids_of()})
    lines = [source_line(node) for node in captured.program.joint.graph.nodes if node.op == "call_function"]
    named = [line for line in lines if line.startswith(HERE)]
    assert len(named) > 0.8 * len(lines)
    matmuls = [node for node in captured.program.joint.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(matmuls) >= 6 and all(source_line(node).startswith(HERE) for node in matmuls)


# --- What capture needs and leaves behind --------------------------------------------------------------------------


def test_parameters_on_meta_and_a_device_to_run_on():
    module = mlp()
    real = capture(module.forward, module, (ids_of(),), {"labels": ids_of()})
    with torch.device("meta"):
        on_meta = mlp()
    placed = capture(on_meta.forward, on_meta, (ids_of().to("meta"),), {"labels": ids_of()}, device=torch.device("cpu"))
    assert [str(node) for node in placed.program.joint.graph.nodes] == [str(n) for n in real.program.joint.graph.nodes]
    assert all(parameter.device.type == "meta" for parameter in on_meta.parameters())
    assert all(
        node.meta["val"].device.type == "cpu" for node in placed.program.joint.graph.find_nodes(op="placeholder")
    )

    ids = ids_of().to("meta")
    whole = capture(on_meta.forward, on_meta, (ids,), {"labels": ids})
    gradients = [
        node
        for output, node in zip(whole.program.outputs, output_values(whole.program.joint.graph), strict=True)
        if output.kind is OutputKind.GRADIENT
    ]
    assert len(gradients) == 5 and None not in gradients


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there():
    module = Small()
    with pytest.raises(InputError, match="device cuda"):
        capture(module.first.forward, module.first, (torch.ones(2, 4),), {}, device=torch.device("cuda"))


def test_names_that_collide_or_are_no_identifiers():
    class Colliding(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Module()
            self.a.b_c = nn.Parameter(torch.full((3,), 2.0))
            self.a_b = nn.Module()
            self.a_b.c = nn.Parameter(torch.full((3,), 3.0))
            self.layers = nn.Sequential(nn.Linear(3, 3))

        def forward(self, a_b_c):
            return (self.layers(a_b_c) * self.a.b_c - self.a_b.c).sum()

    module, x = Colliding(), torch.ones(2, 3)
    captured = capture(module.forward, module, (), {"a_b_c": x})
    got = run(captured, module, {"a_b_c": x})
    torch.testing.assert_close(got[OutputKind.USER]["0"], module(x).detach())
    sequential = nn.Sequential(nn.Linear(3, 3))
    captured = capture(sequential.forward, sequential, (x,), {})
    torch.testing.assert_close(run(captured, sequential, {"args[0]": x})[OutputKind.USER]["0"], sequential(x).detach())


def test_capture_restores_the_module_and_leaves_no_state_also_after_an_error():
    module, ids = mlp(), ids_of()
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    config = torch._dynamo.config.get_config_copy()
    capture(module.forward, module, (ids,), {})
    with torch.no_grad():
        capture(module.forward, module, (ids,), {"labels": ids})
    with pytest.raises(CaptureError):
        capture(module.forward, module, (ids,), {"labels": 3})
    assert_same_state(before, module)
    assert module.head.weight is module.embed.weight
    assert torch._dynamo.config.get_config_copy() == config
    assert torch._guards.detect_fake_mode() is None and torch._guards.TracingContext.try_get() is None
    assert type(torch.ones(2)) is torch.Tensor and torch.is_grad_enabled()


def test_other_shapes_are_captured_statically():
    module = mlp()
    for size in (4, 5, 6):
        captured = capture(module.forward, module, (ids_of()[:, :size],), {})
        (ids,) = captured.program.inputs_of(InputKind.USER)
        assert ids.shape == (2, size)


@pytest.fixture
def fake_world():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def shard(module: nn.Module, mesh) -> None:
    """Parameters become DTensor shards of dimension 0 over two ranks; tied ones stay tied."""
    done: dict[nn.Parameter, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            if parameter not in done:
                local = parameter.detach().chunk(2)[0].clone()
                args = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
                done[parameter] = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], **args))
            setattr(submodule, name, done[parameter])


def test_sharded_parameters_at_capture_and_at_the_call(fake_world):
    module, ids = mlp(), ids_of()
    whole = capture(module.forward, module, (ids,), {"labels": ids})
    shard(module, fake_world)
    assert whole.matches((ids,), {"labels": ids}), whole.mismatch((ids,), {"labels": ids})
    sharded = capture(module.forward, module, (ids,), {"labels": ids})
    assert sharded.program.inputs == whole.program.inputs
    seen: list = []
    whole.callable(lambda *flat: seen.extend(flat) or [torch.zeros(())] * 4)((ids,), {"labels": ids})
    parameters = [each for each, t in zip(whole.program.inputs, seen, strict=False) if isinstance(t, DTensor)]
    assert [each.name for each in parameters] == list(whole.parameter_names)


# --- transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_llama_trains_as_eager(tied):
    module = llama(tied)
    ids = torch.randint(0, 64, (2, 16))
    kwargs = {"input_ids": ids, "labels": ids}
    captured = capture(module.forward, module, (), kwargs)
    assert captured.matches((), kwargs), captured.mismatch((), kwargs)
    assert ("lm_head.weight" in captured.parameter_names) is not tied
    targets = [node.target for node in captured.program.joint.graph.nodes]
    assert targets.count(torch.ops.evocompile.dense_attention.default) == 2

    results: list = []
    output = captured.callable(compiled_by(captured.program, results))((), kwargs)
    expected = module(**kwargs)
    expected.loss.backward()
    assert type(output) is type(expected) and type(output.past_key_values) is type(expected.past_key_values)
    torch.testing.assert_close(output.loss, expected.loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(output.logits, expected.logits.detach(), rtol=1e-6, atol=1e-6)
    keys = [layer.keys for layer in output.past_key_values.layers]
    for ours, theirs in zip(keys, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours, theirs.keys.detach(), rtol=1e-6, atol=1e-6)
    gradients = dict(module.named_parameters())
    found = [(o, r) for o, r in zip(captured.program.outputs, results, strict=True) if o.kind is OutputKind.GRADIENT]
    assert len(found) == len(gradients)
    for each, gradient in found:  # the model itself computes norms and the loss in float32
        torch.testing.assert_close(gradient, gradients[each.name].grad, rtol=1e-5, atol=1e-7)


def test_llama_evaluates_as_eager_with_a_logger_in_forward():
    module = llama(False).eval()
    ids = torch.randint(0, 64, (2, 16))

    def forward(**kwargs):
        LOGGER.warning_once("once")
        return module(**kwargs)

    with torch.no_grad():
        captured = capture(forward, module, (), {"input_ids": ids})
        output = captured.callable(compiled_by(captured.program, []))((), {"input_ids": ids})
        torch.testing.assert_close(output.logits, module(input_ids=ids).logits, rtol=1e-6, atol=1e-6)


# --- batches that arrive in parts -------------------------------------------------------------------------------------


def test_a_batch_in_parts_is_captured_whole():
    module = mlp()
    own = {"ids": ids_of()[:1], "labels": ids_of()[:1]}
    captured = capture(module.forward, module, (), own, parts=Parts((1, 3), frozenset(own)))
    program = captured.program
    assert program.batch_parts == (1, 3)
    users = program.inputs_of(InputKind.USER)
    assert [(each.name, each.shape, each.is_part) for each in users] == [(n, (4, 6), True) for n in ("ids", "labels")]
    assert captured.matches((), own), "the guards are about what this rank passes"
    whole = capture(module.forward, module, (), {name: each.repeat(4, 1) for name, each in own.items()})
    assert [str(node) for node in program.joint.graph.nodes] == [str(n) for n in whole.program.joint.graph.nodes]


def test_parts_in_a_container_that_pytree_does_not_know():
    class Reader(Small):
        def forward(self, batch):
            return self.first(batch["x"]).sum()

    module, x = Reader(), torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(InputError, match=r"args\[0\].data\['x'\]. is in a container that torch.utils._pytree"):
        capture(module.forward, module, (UserDict(x=x),), {}, parts=Parts((2, 2), frozenset()))
