"""`inputs="local"`: every replica passes its own rows, the numbers are those of one device with all of them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evocompile import (
    InputError,
    parallelize,
)
from evocompile.runtime import parallel_forward
from tests.distributed.facts import Facts, on_ranks, selected_facts
from tests.distributed.small import (
    Normed,
    dp2,
    gpt,
    parts,
    replica,
    same_step,
    small_batch,
    smoothed_loss,
    tokens,
)
from tests.distributed.test_parallelize import Messages, close, whole_state
from tests.models.zoo import PlainGPT


def local_inputs_give_the_numbers_of_the_whole_batch() -> None:
    plain, model = gpt(), parallelize(gpt(), **dp2())
    for number, rows in enumerate([(1, 2), (2, 1), (1, 2), (3, 0), (2, 2)]):
        batch = tokens(rows=sum(rows), seed=number)
        outputs = model(**parts(batch, *rows))
        expected = plain(**batch)
        torch.testing.assert_close(outputs[1].detach() + 0, expected[1].detach(), rtol=1e-5, atol=1e-6)
        same_step(model, plain, outputs[0], expected[0])
    assert len(parallel_forward(model)._variants) == 4


def a_loss_function_takes_local_inputs() -> None:
    plain, model = gpt(), gpt()
    step = parallelize(smoothed_loss, model=model, **dp2())
    batch = tokens(rows=5)
    same_step(model, plain, step(model, parts(batch, 2, 3)), smoothed_loss(plain, batch))


def statistics_are_those_of_the_whole_batch() -> None:
    plain, model = Normed(), parallelize(Normed(), **dp2())
    for number, rows in enumerate([(1, 2), (2, 1)]):
        batch = small_batch(seed=number)
        same_step(model, plain, model(**parts(batch, *rows)), plain(**batch))
    close(whole_state(model), whole_state(plain))


class Weighted(PlainGPT):
    """Inputs of all kinds: rows of numbers, a mask of padding, a vector without a batch axis."""

    def forward(self, input_ids: Tensor, labels: Tensor, weights: Tensor, mask: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(input_ids.shape[1])
        x = self.tokens(input_ids) * scale + self.positions(positions) + weights[..., None]
        x = torch.where(mask[..., None], x, 0.0)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss + (weights * mask).sum() / mask.sum()


def local_inputs_of_many_kinds() -> None:
    torch.manual_seed(0)
    plain = Weighted().double()
    model = parallelize(copy.deepcopy(plain), **dp2())
    batch = tokens(rows=3) | {
        "weights": torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        "mask": torch.arange(7)[None] < torch.tensor([[7], [3], [5]]),
        "scale": torch.linspace(0.5, 1, 24, dtype=torch.float64),
    }
    same_step(model, plain, model(**parts(batch, 2, 1)), plain(**batch))


def bad_parts_are_refused() -> None:
    model = parallelize(gpt(), **dp2())
    first = dist.get_rank() == 0
    batch = tokens(rows=2, length=7 if replica() == 0 else 6)
    with pytest.raises(InputError, match=r"'input_ids' is torch.int64 \(2, 6\) on rank . and .*pad_batch"):
        model(**batch)
    with pytest.raises(InputError, match="rank 0 passes"):
        model(**(tokens() if first else {"input_ids": tokens()["input_ids"]}))
    if dist.get_world_size() > 2:
        with pytest.raises(InputError, match="differs between ranks 0 and 1, which belong to one replica"):
            model(**tokens(seed=dist.get_rank()))
    torch.manual_seed(0)
    weighted = parallelize(Weighted(), **dp2())
    given = parts(tokens(), 2, 1) | {"weights": torch.zeros(2 - replica(), 7), "mask": torch.ones(2 - replica(), 7) > 0}
    with pytest.raises(InputError, match=r"'scale' has not the 2 and 1 rows .* rank . passes another one"):
        weighted(**given, scale=torch.full((24,), float(replica())))


def a_call_on_local_inputs_without_a_scalar_warns() -> None:
    plain, model = gpt(), parallelize(gpt(), **dp2())
    ids = tokens()["input_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            (logits,) = model(**parts({"input_ids": ids}, 2, 1))
    found = [each for each in caught if "not the loss of the batch" in str(each.message)]
    assert len(found) == (dist.get_rank() == 0), [str(each.message) for each in caught]
    assert not found or found[0].filename == __file__
    assert type(logits) is Tensor
    torch.testing.assert_close(logits, plain(ids)[0], rtol=1e-5, atol=1e-6)


def the_message_of_another_split_names_it() -> None:
    messages = Messages()
    model = parallelize(gpt(), **dp2())
    batch = tokens(rows=4)
    with torch.no_grad():
        model(**parts(batch, 2, 2))
        model(**{name: each[: 2 if replica() == 0 else 1] for name, each in batch.items()})
    if dist.get_rank() == 0:
        assert len(messages.texts) == 1, messages.texts
        assert "the batch changed: parts of 2, 2 rows at capture, parts of 2, 1 rows now" in messages.texts[0]


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Facts:
    return selected_facts(request)


@on_ranks(
    {
        2: (
            local_inputs_give_the_numbers_of_the_whole_batch,
            a_loss_function_takes_local_inputs,
            statistics_are_those_of_the_whole_batch,
            local_inputs_of_many_kinds,
            bad_parts_are_refused,
            a_call_on_local_inputs_without_a_scalar_warns,
            the_message_of_another_split_names_it,
        ),
        4: (
            local_inputs_give_the_numbers_of_the_whole_batch,
            local_inputs_of_many_kinds,
            bad_parts_are_refused,
        ),
    }
)
def test_on_ranks(world: int, fact: str, facts: Facts) -> None:
    facts.check(world, fact)
