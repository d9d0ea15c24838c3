"""Every backend that serves a card against float64 on it. Runs where there is one."""

from __future__ import annotations

import pytest
import torch

from evocompile.errors import KernelError
from evocompile.kernels import dispatch
from tests.kernels.test_attention import (
    BIDIRECTIONAL,
    CAUSAL,
    DOCUMENTS,
    FULL,
    PADDED,
    SCALE,
    WINDOW,
    close,
    documents,
    exact,
    keep_of,
    make,
    ops,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels on a card: there is no CUDA device"),
]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("backend", dispatch.NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (80, 80), (32, 32), (256, 256)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, DOCUMENTS, PADDED, BIDIRECTIONAL])
def test_a_backend(backend: str, dtype: torch.dtype, dims: tuple[int, int], mask: str) -> None:
    """Whole sequences, and a chain of zigzag steps: out, lse and gradients, dead rows too."""
    q, k, v, d_out = make((4, 2), 300, 300, dims, dtype)
    tables = documents(300)
    expected = exact(q, k, v, keep_of(mask, tables, q, k), d_out)
    q, k, v, d_out = (x.cuda() for x in (q, k, v, d_out))
    tables = [each.cuda() for each in tables]
    scale = SCALE
    with dispatch.use(backend):
        try:
            out, lse = ops.attention(q, k, v, tables, mask, scale)
        except KernelError as refused:
            if backend in ("triton", "reference"):  # which serve all of these
                raise
            pytest.skip(f"not installed here, or not made for this case: {refused}")
        gradients = ops.attention_backward(d_out, q, k, v, out, lse, tables, mask, scale)
        again = ops.attention_backward(d_out, q, k, v, out, lse, tables, mask, scale)
        state: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        for lo, hi in ((0, 100), (100, 130), (130, 300)):
            state = ops.attention_step(
                q, k[:, :, lo:hi], v[:, :, lo:hi], tables, *state, mask, [0, 300], [lo, hi], scale
            )
    for one, other in zip((out, lse, *gradients), expected, strict=True):
        close(one.cpu(), other, TOLERANCE[dtype])
    for one, other in zip(state, expected[:2], strict=True):
        assert one is not None
        close(one.cpu(), other, TOLERANCE[dtype])
    if backend == "triton":  # deterministic
        assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


def test_the_warp_specialised_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("evocompile.kernels.triton.launch")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernel loads by tensor descriptors, which cards have from compute capability 9.0 on")
    monkeypatch.setenv(launch.SPECIALIZE, "1")
    q, k, v, d_out = make((4, 2), 512, 512, (64, 64), torch.bfloat16)
    expected = exact(q, k, v, None, d_out)
    with dispatch.use("triton"):
        out, lse = ops.attention(q.cuda(), k.cuda(), v.cuda(), [], FULL, SCALE)
    for one, other in zip((out, lse), expected[:2], strict=True):
        close(one.cpu(), other, 4e-2)
