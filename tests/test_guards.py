"""When a captured program may be used again: guards, and what is said of a call that differs."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from evocompile.capture import capture
from tests.captured_model import ids_of, mlp


def change_attribute(module):
    module.residual = False


def change_training(module):
    module.eval()


def freeze(module):
    module.up.weight.requires_grad_(False)


def replace_by_another_shape(module):
    module.down = nn.Linear(16, 8, bias=False).double()


def replace_by_another_type(module):
    module.dropout = nn.Identity()


def add_hook(module):
    module.up.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_attribute, "model.residual"),
        (change_training, "model.dropout.training"),
        (freeze, "'up.weight'"),
        (replace_by_another_shape, "the module 'down' was replaced"),
        (replace_by_another_type, "the module 'dropout' was replaced"),
        (add_hook, "`not model.up._forward_hooks` held at capture"),
    ],
)
def test_guards_see_changes_of_the_module(change, says):
    module, ids = mlp(), ids_of()
    captured = capture(module.forward, module, (ids,), {})
    assert captured.matches((ids,), {}) and captured.mismatch((ids,), {}) == ""
    change(module)
    assert not captured.matches((ids,), {})
    assert says in captured.mismatch((ids,), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((ids_of(),), {"scale": 3.0}, "scale"),
        ((ids_of(),), {"scale": 2.0, "labels": ids_of()}, "'labels' changed: no tensor"),
        ((ids_of()[:, :4],), {"scale": 2.0}, "'args[0]' changed: torch.int64 (2, 6)"),
        ((ids_of().int(),), {"scale": 2.0}, "torch.int32"),
        ((), {"ids": ids_of(), "scale": 2.0}, "'args[0]'"),
    ],
)
def test_row_15_guards_see_changes_of_the_call(args, kwargs, says):
    """Row 15 of PAINS: what is said of a recompilation names the input that changed, or the attribute (above)."""
    module = mlp()
    captured = capture(module.forward, module, (ids_of(),), {"scale": 2.0})
    assert captured.matches((ids_of(5),), {"scale": 2.0})
    assert not captured.matches(args, kwargs)
    assert says in captured.mismatch(args, kwargs)


def test_guards_see_grad_mode_and_autocast():
    module, ids = mlp(), ids_of()
    captured = capture(module.forward, module, (ids,), {})
    with torch.no_grad():
        assert not captured.matches((ids,), {})
        assert captured.mismatch((ids,), {}) == "the global state of torch changed: grad_mode"
    with torch.autocast("cpu", torch.bfloat16):
        assert not captured.matches((ids,), {})
        assert "autocast" in captured.mismatch((ids,), {})
    assert captured.matches((ids,), {})


def test_guards_allow_tensors_to_alias_that_did_not_and_new_values():
    module = mlp()
    captured = capture(module.forward, module, (ids_of(1),), {"labels": ids_of(2)})
    ids = ids_of(3)
    assert captured.matches((ids,), {"labels": ids})
    with torch.no_grad():
        module.up.weight.zero_()
    assert captured.matches((ids,), {"labels": ids})


def test_a_changed_loss_function_call_is_described_in_the_users_words():
    module, ids = mlp(), ids_of()

    def loss_fn(model, x, *, smoothing=0.0):
        return model(x, labels=x)["loss"] * (1 + smoothing)

    captured = capture(loss_fn, module, (module, ids), {})
    assert captured.matches((module, ids), {})
    says = captured.mismatch((module, ids), {"smoothing": 0.1})
    assert says == "argument 'smoothing' was not passed at capture, but is now"
    assert captured.guards.differ((module, ids), {"smoothing": 0.1}) == (False, True)
    module.residual = False
    assert "`model.residual" in captured.mismatch((module, ids), {})


def test_an_argument_that_is_left_out():
    module, ids = mlp(), ids_of()
    captured = capture(module.forward, module, (ids,), {"scale": 2.0})
    assert captured.mismatch((ids,), {}) == "argument 'scale' was passed at capture, and is not now"
