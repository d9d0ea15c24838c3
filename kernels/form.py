"""What an attention does besides softmax(scale · QKᵀ)V: a score function, params, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import score as scores
from .random import kept
from .score import Positions, parse_score


class Form(NamedTuple):
    """The arguments of the attention operators by this name, see `kernels.attention`. The default changes nothing."""

    params: Sequence[Tensor] = ()
    seed: Tensor | None = None
    score: str = "s"
    dropout: float = 0.0
    batch: int = 0
    head: int = 0
    trained: int = 0

    @property
    def is_plain(self) -> bool:
        return self.score == "s" and self.dropout == 0.0

    def at(
        self, rows: Tensor, columns: Tensor, tables: Sequence[Tensor], grids: Sequence[Tensor] = ()
    ) -> Changes | None:
        """What happens to the scores of these positions; None if nothing does."""
        if self.is_plain:
            return None
        return Changes(self, Positions(rows, columns, tables, self.params, self.batch, self.head, grids))


class Changes(NamedTuple):
    """What happens to one block of scores (B, H, rows, columns) and to its weights."""

    form: Form
    at: Positions

    def scores(self, scaled: Tensor) -> Tensor:
        """What enters the softmax."""
        if self.form.score == "s":
            return scaled
        return scores.apply(parse_score(self.form.score).expression, scaled, self.at).expand_as(scaled)

    def weights(self, weights: Tensor) -> Tensor:
        """The weights (or gradients of them) of the values that are kept, the others 0."""
        if not self.form.dropout:
            return weights
        assert self.form.seed is not None, "dropout without a seed"
        batch, heads = weights.shape[:2]
        rows = torch.arange(self.at.batch, self.at.batch + batch, device=weights.device).view(-1, 1, 1, 1)
        of_heads = torch.arange(self.at.head, self.at.head + heads, device=weights.device).view(1, -1, 1, 1)
        keep = kept(int(self.form.seed), rows, of_heads, self.at.rows, self.at.columns, self.form.dropout)
        return torch.where(keep, weights / (1 - self.form.dropout), 0.0)

    def d_scaled(self, d_scores: Tensor, scaled: Tensor) -> Tensor:
        """The gradient of the scaled scores."""
        if self.form.score == "s":
            return d_scores
        return d_scores * scores.apply(parse_score(self.form.score).by_score, scaled, self.at)

    def d_params(self, d_scores: Tensor, scaled: Tensor) -> list[Tensor]:
        """The gradients of the trained params, in the accumulation dtype."""
        gradients = [torch.zeros_like(each, dtype=scaled.dtype) for each in self.form.params[: self.form.trained]]
        for each in parse_score(self.form.score).by_param:
            if each.index < self.form.trained:
                scores.add_param_gradient(gradients[each.index], each, d_scores, scaled, self.at)
        return gradients
