"""How close a parallel run must be to one device. Used in every end-to-end test."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.models.reference import gradient_floors

LOSS = 1e-6  # relative


def assert_loss(loss: Tensor, reference: Tensor) -> None:
    error = abs(float(loss) - float(reference)) / abs(float(reference))
    assert error <= LOSS, f"loss {float(loss)!r} against {float(reference)!r}: relative error {error:.2e}"


def assert_gradients(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """A gradient's error is at most 1e-5 · max(its largest entry, 1e-3 · the largest gradient of the model)."""
    assert gradients.keys() == reference.keys()
    for name, floor in gradient_floors(reference).items():
        assert gradients[name].shape == reference[name].shape, name
        error = float((gradients[name] - reference[name]).abs().max())
        assert error <= floor, f"{name}: error {error:.2e}, allowed {floor:.2e}"


def assert_parameters(parameters: dict[str, Tensor], reference: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Parameters after the optimizer's steps, but for entries whose gradient is noise (AdamW makes steps of noise)."""
    for name, expected in reference["parameters"].items():
        error = (parameters[name] - expected).abs()
        if name in reference["noise"]:
            error = error.masked_fill(reference["noise"][name], 0.0)
        allowed = tolerance * float(expected.abs().max())
        assert float(error.max()) <= allowed, f"{name}: error {float(error.max()):.2e}, allowed {allowed:.2e}"
