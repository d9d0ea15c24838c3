"""FLOPs of the attention operators, for `torch.utils.flop_counter`: what is computed, dead parts left out.

Two products forward, five backward: the scores again, and the gradients of q, k, v and the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .blocks import Block, blocks
from .mask import Tile


def _forward_flops(q_shape: torch.Size, v_shape: torch.Size, pairs: int) -> int:
    return 2 * q_shape[0] * q_shape[1] * pairs * (q_shape[3] + v_shape[3])


def _backward_flops(q_shape: torch.Size, v_shape: torch.Size, pairs: int) -> int:
    return 2 * q_shape[0] * q_shape[1] * pairs * (3 * q_shape[3] + 2 * v_shape[3])


def _dense_pairs(q_shape: torch.Size, k_shape: torch.Size, is_causal: bool) -> int:
    return Block(Tile.CAUSAL if is_causal else Tile.FULL, (0, q_shape[2]), (0, k_shape[2])).pairs


def _step_pairs(mask: str, q_intervals: list[int], k_intervals: list[int]) -> int:
    return sum(block.pairs for block in blocks(mask, tuple(q_intervals), tuple(k_intervals)))


@register_flop_formula(torch.ops.evocompile.dense_attention)
def _(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, *_rest: Any, **_out: Any) -> int:
    return _forward_flops(q, v, _dense_pairs(q, k, is_causal))


@register_flop_formula(torch.ops.evocompile.dense_attention_backward)
def _(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, is_causal: bool, *_rest: Any, **_out: Any
) -> int:
    return _backward_flops(q, v, _dense_pairs(q, k, is_causal))


@register_flop_formula(torch.ops.evocompile.attention)
def _(q: Any, k: Any, v: Any, tables: Any, mask: str, *_rest: Any, **_out: Any) -> int:
    return _forward_flops(q, v, _step_pairs(mask, [0, q[2]], [0, k[2]]))


@register_flop_formula(torch.ops.evocompile.attention_backward)
def _(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, tables: Any, mask: str, *_rest: Any, **_out: Any) -> int:
    return _backward_flops(q, v, _step_pairs(mask, [0, q[2]], [0, k[2]]))


@register_flop_formula(torch.ops.evocompile.attention_step)
def _(q: Any, k: Any, v: Any, tables: Any, out: Any, lse: Any, *where: Any, **_out: Any) -> int:
    return _forward_flops(q, v, _step_pairs(*where[:3]))


@register_flop_formula(torch.ops.evocompile.attention_backward_step)
def _(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, tables: Any, *where: Any, **_out: Any) -> int:
    return _backward_flops(q, v, _step_pairs(*where[:3]))
