"""`pad_batch`: exact where the docs say so, refused where it would have to guess."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evocompile import InputError, pad_batch
from tests.models.zoo import Case

VALUES = {"input_ids": 0, "labels": -100}


def batch(length: int = 13) -> dict[str, torch.Tensor]:
    return Case("gpt", length=length).inputs()


def test_the_length_becomes_the_next_multiple_or_the_next_of_a_list() -> None:
    for length, multiple, padded in ((13, 8, 16), (16, 8, 16), (1, 8, 8)):
        assert pad_batch(batch(length), VALUES, multiple_of=multiple)["labels"].shape == (2, padded)
    assert pad_batch(batch(13), VALUES, lengths=[32, 14, 8])["input_ids"].shape == (2, 14)
    with pytest.raises(InputError, match=r"13 positions, more than every one of lengths=\[8, 12\]"):
        pad_batch(batch(13), VALUES, lengths=[8, 12])
    with pytest.raises(InputError, match="either multiple_of=… or lengths=…"):
        pad_batch(batch(), VALUES)


def test_the_given_values_are_appended_and_all_else_stays() -> None:
    given = batch() | {"hidden": torch.ones(2, 13, 3), "scale": torch.ones(4), "use_cache": False}
    padded = pad_batch(given, VALUES | {"hidden": 0.5}, multiple_of=8)
    for name, value in {**VALUES, "hidden": 0.5}.items():
        assert torch.equal(padded[name][:, :13], given[name]) and padded[name].dtype == given[name].dtype
        assert (padded[name][:, 13:] == value).all()
    assert padded["scale"] is given["scale"] and padded["use_cache"] is False
    assert given["input_ids"].shape == (2, 13)


@pytest.mark.parametrize(
    ("extra", "values", "message"),
    [
        ({"mask": torch.ones(2, 13)}, VALUES, r"'mask' of shape \(2, 13\) has a dim of the sequence's length 13"),
        ({"mask": torch.ones(2, 1, 13, 13)}, VALUES, r"'mask' of shape \(2, 1, 13, 13\) .* build it after padding"),
        ({"mask": torch.ones(2, 12)}, VALUES | {"mask": 0}, "different lengths: .*'mask': 12"),
        ({}, VALUES | {"mask": 0}, r"names \['mask'\]"),
        ({}, {}, "names nothing"),
    ],
)
def test_nothing_is_guessed(extra: dict[str, torch.Tensor], values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pad_batch(batch() | extra, values, multiple_of=8)


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    loss = model(**inputs)[0]
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(
    ("model", "with_mask"), [("gpt", False), ("llama", False), ("llama", True), ("llama-tied", False)]
)
def test_a_causal_model_gives_the_numbers_of_the_unpadded_batch(model: str, with_mask: bool) -> None:
    case = Case(model, length=13, dtype="float64")
    inputs = case.inputs()
    values = dict(VALUES)
    if with_mask:
        inputs["attention_mask"], values["attention_mask"] = torch.ones_like(inputs["input_ids"]), 0
    built = case.build()
    expected = gradients(built, inputs)
    found = gradients(built, pad_batch(inputs, values, multiple_of=8))
    for own, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-7)  # the models compute norms in float32
