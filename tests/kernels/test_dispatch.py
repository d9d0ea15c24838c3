"""Which backend computes what, how one is asked for, and the libraries' conventions against stand-ins of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evocompile
from evocompile import KernelError, Plan
from evocompile.attention_backends import attention_table, check_backends
from evocompile.capture import capture
from evocompile.doctor import doctor
from evocompile.kernels import cpu, dispatch, flash, reference, refusals
from evocompile.kernels.dispatch import CAUSAL, CHANGED, FULL, TENSOR, VARIABLE, Case
from evocompile.pipeline import run_passes
from tests.kernels.test_attention import SCALE, close, exact, make, ops

FLASH = {"flash-attn-2": flash.two, "flash-attn-3": flash.three, "flash-attn-4": flash.four}
H100, A100, B200 = (9, 0), (8, 0), (10, 0)


def case(
    mask: str = FULL,
    device: str = "cuda",
    capability: tuple[int, int] | None = H100,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (128, 128),
) -> Case:
    return Case(device, capability, dtype, *dims, mask)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that compute, by name, in order."""
    seen: list[str] = []

    def spy(kernel: ModuleType, name: str) -> None:
        for function in ("forward", "backward"):
            original = getattr(kernel, function)

            def record(*args: Any, original: Callable[..., Any] = original) -> Any:
                seen.append(name)
                return original(*args)

            monkeypatch.setattr(kernel, function, record)

    spy(cpu, "aten-cpu")
    spy(reference, "reference")
    return seen


def test_cpu_kernels_are_used_where_they_fit(calls: list[str]) -> None:
    for dims, expected in (((16, 16), "aten-cpu"), ((16, 8), "reference")):
        q, k, v, _ = make(dims=dims)
        ops.attention(q, k, v, [], CAUSAL, SCALE)
        assert calls == [expected]
        calls.clear()
    assert dispatch.choose(case(device="cpu", capability=None, dtype=torch.float64)).name == "aten-cpu"
    assert dispatch.choose(case(device="mps", capability=None)).name == "reference"


def test_a_backend_can_be_asked_for(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d_out = make()
    expected = exact(q, k, v, None, d_out)

    def run() -> None:
        out, lse = ops.attention_step(q, k, v, [], None, None, FULL, [0, 33], [0, 33], SCALE)
        step = ops.attention_backward_step(d_out, q, k, v, out, lse, [], FULL, [0, 33], [0, 33], SCALE)
        for one, other in zip((out, lse, *step), expected, strict=True):
            close(one, other, 1e-10)

    with dispatch.use("reference"):
        run()
    monkeypatch.setenv(VARIABLE, "reference")
    run()
    assert calls == ["reference"] * 4
    with dispatch.use("aten-cpu"):  # the argument counts before the variable
        run()
    with dispatch.use(None):
        assert dispatch.forced() == "reference"
    assert calls[4:] == ["aten-cpu"] * 2


def test_what_was_asked_for_and_does_not_serve_is_an_error() -> None:
    q, k, v, _ = make(dims=(16, 8))
    with dispatch.use("aten-cpu"), pytest.raises(KernelError, match=r"one head dim\. Leave out"):
        ops.attention(q, k, v, [], FULL, SCALE)
    with dispatch.use("flash-attn-2"), pytest.raises(KernelError, match="it runs on cuda, not on cpu"):
        ops.attention(q, k, v, [], FULL, SCALE)
    with pytest.raises(KernelError, match=r"'flash': there are .*aten-cpu, reference"), dispatch.use("flash"):
        pass
    with pytest.raises(KernelError, match="'flash': there are"):
        evocompile.parallelize(nn.Linear(2, 2), attention_backend="flash")


class Attend(nn.Module):
    def __init__(self, value_dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 2 * 8 + value_dim)
        self.value_dim = value_dim

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x)[:, None].split([8, 8, self.value_dim], -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


def test_a_program_is_checked_before_it_runs() -> None:
    """Also on ranks whose own blocks are served: all ranks hear of the one that fails."""
    model = Attend(4)
    program = run_passes(capture(model.forward, model, (torch.zeros(2, 12, 8),), {}).program, Plan(cp=2), 0)
    check_backends(program)
    with dispatch.use("reference"):
        check_backends(program)
    with dispatch.use("aten-cpu"), pytest.raises(KernelError, match="head dim 8 and 4"):
        check_backends(program)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (case(), ["triton", "flash-attn-4", "flash-attn-3", "flash-attn-2", "aten-cuda", "reference"]),
        (case(CAUSAL, capability=A100), ["triton", "flash-attn-2", "aten-cuda", "reference"]),
        (case(capability=B200), ["triton", "flash-attn-4", "flash-attn-2", "aten-cuda", "reference"]),
        (case(capability=(7, 5)), ["reference"]),
        (case(TENSOR), ["reference"]),
        (case(CHANGED), ["reference"]),
        (case("(k <= q) & (k > q - 9)"), ["triton", "reference"]),
        (case("(k <= q) | (k <= 9)"), ["reference"]),
        (case(dtype=torch.float32), ["triton", "reference"]),
        (case(dtype=torch.float64), ["reference"]),
        (case(dims=(192, 128)), ["triton", "reference"]),
        (case(dims=(512, 512)), ["reference"]),
        (case(dims=(256, 256)), ["triton", "flash-attn-3", "flash-attn-2", "aten-cuda", "reference"]),
        (case(dims=(100, 100)), ["triton", "reference"]),
    ],
)
def test_who_serves_on_cuda(given: Case, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all libraries installed; without, ATen's own."""
    monkeypatch.setattr(refusals, "importable", lambda module: True)
    assert [each.name for each in dispatch.BACKENDS if each.refuses(given) is None] == expected
    assert dispatch.explain(given)[0] == expected[0]
    monkeypatch.setattr(refusals, "importable", lambda module: False)
    assert dispatch.explain(given)[0] == ("aten-cuda" if "aten-cuda" in expected else "reference")


def test_the_doctor_says_who_serves_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = doctor()
    assert "bfloat16  64           aten-cpu" in text
    assert "not aten-cpu: q and v must have one head dim (first: bfloat16, head dims 192 and 128, mask True)" in text
    assert attention_table(torch.device("mps"))[1].split()[2:] == ["reference"] * 6
    monkeypatch.setenv(VARIABLE, "flash")
    text, healthy = doctor()
    assert not healthy and f"problem: {VARIABLE}=flash: there are" in text


# ---- flash-attn's conventions


def _bottom_right(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    rows, columns = q.shape[1], k.shape[1]
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows) if causal else None


def _standin_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = reference.forward(*_swapped(q, k, v), _bottom_right(q, k, causal), False, scale)
    return out.transpose(1, 2).to(q.dtype), lse.masked_fill(lse == -math.inf, math.inf)


def _standin_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> list[Tensor]:
    assert {x.dtype for x in (d_out, out)} == {q.dtype}
    mask = _bottom_right(q, k, causal)
    gradients = reference.backward(*_swapped(d_out, q, k, v, out), lse, mask, False, scale)
    return [gradient.transpose(1, 2).to(q.dtype) for gradient in gradients]


def _swapped(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def standins() -> dict[str, ModuleType]:
    """The functions that `flash` calls, with the libraries' parameters, computed by the reference."""

    def forward_2(  # type: ignore[no-untyped-def]
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        return (*_standin_forward(q, k, v, softmax_scale, causal), None, torch.zeros(2))

    def backward_2(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert deterministic
        for x, gradient in zip(
            (dq, dk, dv), _standin_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal), strict=True
        ):
            x.copy_(gradient)
        return torch.zeros(1)

    def forward_3(q, k, v, k_new=None, softmax_scale=None, causal=False, num_splits=1):  # type: ignore[no-untyped-def]
        return (*_standin_forward(q, k, v, softmax_scale, causal), torch.zeros(0), torch.zeros(0))

    def backward_3(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, dq=None, dk=None, dv=None, softmax_scale=None,
        is_causal=False, deterministic=False,
    ):  # fmt: skip
        return backward_2(dout, q, k, v, out, softmax_lse, dq, dk, dv, 0, softmax_scale, is_causal, -1, -1, 0, None,
                          deterministic)  # fmt: skip

    def forward_4(q, k, v, softmax_scale=None, causal=False, return_lse=False):  # type: ignore[no-untyped-def]
        out, lse = _standin_forward(q, k, v, softmax_scale, causal)
        return out, lse if return_lse else None

    def backward_4(q, k, v, out, dout, lse, softmax_scale=None, causal=False):  # type: ignore[no-untyped-def]
        return _standin_backward(dout, q, k, v, out, lse, softmax_scale, causal)

    named = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.flash_attn_interface": {"_flash_attn_forward": forward_2, "_flash_attn_backward": backward_2},
        "flash_attn_interface": {"_flash_attn_forward": forward_3, "_flash_attn_backward": backward_3},
        "flash_attn.cute.interface": {"_flash_attn_fwd": forward_4, "_flash_attn_bwd": backward_4},
    }
    modules = {}
    for name, functions in named.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(functions)
    return modules


@pytest.mark.parametrize("library", FLASH)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(20, 20), (24, 16), (16, 24)])
def test_flash_attention_conventions(
    library: str, is_causal: bool, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in standins().items():
        monkeypatch.setitem(sys.modules, name, module)
    q, k, v, d_out = make((4, 2), rows, columns)
    keep = reference.with_causal(None, is_causal, rows, columns, q.device)
    expected = exact(q, k, v, keep, d_out)
    kernel = FLASH[library]
    out, lse = kernel.forward(q, k, v, None, is_causal, SCALE)
    for one, other in zip((out, lse), expected[:2], strict=True):
        close(one, other, 1e-10)
    gradients = kernel.backward(d_out, q, k, v, out, lse, None, is_causal, SCALE)
    for one, other in zip(gradients, expected[2:], strict=True):
        close(one, other, 1e-10)
