"""Models with sequences of several lengths: each is split along its own axis, and attention between two of them too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import Program
from tests.equality import assert_attends_as_one_device

BATCH, WIDTH, HEADS = 2, 8, 4
SOURCE, TARGET = 13, 7


def dense(out: int) -> nn.Linear:
    return nn.Linear(WIDTH, out, bias=False, dtype=torch.float64)


class Attention(nn.Module):
    """Of one sequence to another; 2 key/value heads for 4 query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.back = dense(WIDTH), dense(WIDTH), dense(WIDTH)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        k, v = (each.unflatten(-1, (HEADS // 2, -1)).transpose(-2, -3) for each in self.kv(other).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return x + self.back(out.transpose(-2, -3).flatten(-2)).tanh()


class EncoderDecoder(nn.Module):
    """As T5, BART and Whisper: an encoder, a causal decoder, and attention of the one to the other, padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, WIDTH, dtype=torch.float64)
        self.encoder, self.decoder, self.cross = Attention(), Attention(), Attention()

    def forward(self, source: Tensor, target: Tensor, real: Tensor) -> Tensor:
        x, y = self.words(source), self.words(target)
        mask = real[:, None, None, :]
        x = self.encoder(x, x, mask)
        return self.cross(self.decoder(y, y, causal=True), x, mask).sin()


def sizes(program: Program) -> list[int]:
    assert program.sharding is not None
    return [split.size for name, split in program.sharding.splits.items() if name.startswith("seq")]


@cache
def translation(lengths: tuple[int, int]) -> tuple[nn.Module, dict[str, Tensor], Program]:
    """A model, its batch, of which one row is padded, and its program."""
    torch.manual_seed(1)
    source, target = (torch.randint(0, 11, (BATCH, length)) for length in lengths)
    real = torch.ones(BATCH, lengths[0], dtype=torch.bool)
    real[0, -3:] = False
    model, batch = EncoderDecoder(), {"source": source, "target": target, "real": real}
    return model, batch, capture(model.forward, model, (), batch).program


LONGER_SOURCE = [
    Plan(cp=3, attention="ring"),
    Plan(cp=4, inner_ring=2),
    Plan(cp=8),  # one position of the target for each rank but one
    Plan(cp=2, ulysses=2, placement="context-first"),
]
LONGER_TARGET = [Plan(cp=3, attention="balanced"), Plan(ulysses=3), Plan(dp=2, cp=2, attention="auto")]


@pytest.mark.parametrize(
    ("lengths", "plan"),
    [*(((SOURCE, TARGET), each) for each in LONGER_SOURCE), *(((TARGET, SOURCE), each) for each in LONGER_TARGET)],
    ids=str,
)
def test_encoder_and_decoder_are_both_split(lengths: tuple[int, int], plan: Plan) -> None:
    """The output alone is gathered: no rank has all keys of the encoder."""
    model, batch, captured = translation(lengths)
    model.zero_grad()
    for program in assert_attends_as_one_device(model, batch, plan, captured).programs:
        assert sizes(program) == [*lengths]
        assert len(program.attentions) == 3
        whole = [each.why for each in program.collectives.values() if each.group.startswith("gather")]
        assert all("seq2 " in each or "batch" in each for each in whole) and len(whole) <= 2, whole
        assert not [note for note in program.notes if "gathered" in note.what]


def test_blocks_of_the_encoder_travel_whatever_the_decoder_has() -> None:
    """A rank sends its part of the encoder's keys and values to each other rank, for cross-attention too."""
    source, target = torch.zeros(1, 12, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)
    model, real = EncoderDecoder(), torch.ones(1, 12, dtype=torch.bool)
    batch = {"source": source, "target": target, "real": real}
    program = run_passes(capture(model.forward, model, (), batch).program, Plan(cp=4, attention="ring"), 1)
    block = 2 * 2 * (WIDTH // HEADS) * 8  # k and v of two heads at one position, float64
    assert sum(each.sent for each in program.collectives.values() if each.group.startswith("cp:")) == block * (
        3 * 3 * 2 + 2  # 3 positions to 3 ranks, for two attentions; the decoder's one to 2 later ranks
    )


class Latents(nn.Module):
    """As Perceiver: learned queries attend to the input, then to themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.latents = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64))
        self.read, self.think = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        latents = self.read(self.latents.expand(len(x), -1, -1), x)
        return self.think(latents, latents)


def test_learned_queries_of_a_long_input() -> None:
    torch.manual_seed(1)
    batch = {"x": torch.randn(BATCH, 17, WIDTH, dtype=torch.float64)}
    for plan in (Plan(cp=3), Plan(ulysses=2)):
        program = assert_attends_as_one_device(Latents(), batch, plan).programs[0]
        assert sizes(program) == [5, 17]
        assert not program.notes


class Axial(nn.Module):
    """As video models: each frame attends within itself, then each place over time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.space, self.time = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, N, D)."""
        batch, frames, places, width = x.shape
        x = x.reshape(batch * frames, places, width)
        x = self.space(x, x).view(batch, frames, places, width).transpose(1, 2)
        x = x.reshape(batch * places, frames, width)
        return self.time(x, x, causal=True)


@pytest.mark.parametrize("places", [4, 6])
def test_attention_within_and_over_the_positions_of_a_sequence(places: int) -> None:
    """Where the batch of an attention is the split sequence, its positions are not split besides, whatever they are."""
    torch.manual_seed(1)
    batch = {"x": torch.randn(BATCH, 6, places, WIDTH, dtype=torch.float64)}
    model = Axial()
    captured = capture(model.forward, model, (), batch).program
    for plan in (Plan(cp=2), Plan(cp=2, ulysses=2)):
        model.zero_grad()
        program = assert_attends_as_one_device(model, batch, plan, captured).programs[0]
        assert not [note for note in program.notes if "gathered" in note.what]


class Prefixed(nn.Module):
    """Keys and values after a learned prefix: as many as no sequence has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.float64))
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, torch.cat((self.prefix.expand(len(x), -1, -1), x), 1))


def test_keys_that_are_no_sequence_stay_whole() -> None:
    torch.manual_seed(1)
    batch = {"x": torch.randn(BATCH, 11, WIDTH, dtype=torch.float64)}
    program = assert_attends_as_one_device(Prefixed(), batch, Plan(cp=3)).programs[0]
    assert sizes(program) == [11]
