"""The attention operators: queries and keys may both be split over the sequence, `split_attention` exchanges blocks.

They do not fit the labels of `base.py` (queries and keys are two dims over one mesh axis, which nothing else may
have), so they come with a solution of their own. Letters: B batch, H query heads, K key/value heads, S queries,
T keys, D and E head dims of q/k and v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from evocompile.kernels.mask import H, parse_mask
from evocompile.layout import FINE, SEQUENCE, Axis, Dim, Factor, Layout, Split

from .base import operands_of, shape_of
from .solve import Solution, coarsened, mesh_axes, regroup

ATTENTION = torch.ops.evocompile.attention.default
ATTENTION_BACKWARD = torch.ops.evocompile.attention_backward.default

# dims of the leading operands, before the tables, and of the results, before the gradients of params
_OPERANDS = {ATTENTION: ("BHSD", "BKTD", "BKTE"), ATTENTION_BACKWARD: ("BHSE", "BHSD", "BKTD", "BKTE", "BHSE", "BHS")}
_RESULTS = {ATTENTION: ("BHSE", "BHS"), ATTENTION_BACKWARD: ("BHSD", "BKTD", "BKTE")}


class Form(NamedTuple):
    """The last arguments of an attention node (see `kernels.attention`), with their defaults where it has none."""

    params: Sequence[fx.Node] = ()
    seed: fx.Node | None = None
    score: str = "s"
    dropout: float = 0.0
    trained: int = 0

    def arguments(self, mask: str, batch: int, head: int) -> tuple[Any, ...]:
        """What to append to a step's arguments: nothing, where nothing is changed.

        batch, head: global numbers of the first batch row and query head.
        """
        place = (batch, head)
        if self.score == "s" and not self.dropout:
            return ([], None, "s", 0.0, *place) if head and H in parse_mask(mask).expression.free_symbols else ()
        return (list(self.params), self.seed, self.score, self.dropout, *place, *((self.trained,) * bool(self.trained)))


class Forward(NamedTuple):
    """The arguments of an `evocompile::attention` node."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    tables: Sequence[fx.Node]
    mask: str
    scale: float
    form: Form


class Backward(NamedTuple):
    """The arguments of an `evocompile::attention_backward` node."""

    d_out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    out: fx.Node
    lse: fx.Node
    tables: Sequence[fx.Node]
    mask: str
    scale: float
    form: Form


def call_of(node: fx.Node) -> Forward | Backward:
    """The arguments of an attention node by name."""
    kind = Forward if node.target == ATTENTION else Backward
    count = len(kind._fields) - 1
    return kind(*node.args[:count], Form(*node.args[count:]))  # type: ignore[arg-type]


def attention_solution(node: fx.Node, layouts: list[Layout], splits: Mapping[str, Split]) -> Solution:
    """Batch may be split; queries may be split; keys may be split if the queries are split over the same mesh axis.
    Heads may be split: those of keys with all the queries that read them, or among these, with the keys at every rank.

    With whole keys and split queries every rank has a partial gradient of the keys.
    """
    operands = operands_of(node)
    layouts = [coarsened(layout, splits) for layout in layouts]
    leading, results = _OPERANDS[node.target], _RESULTS[node.target]
    call = call_of(node)
    dims: dict[str, Dim] = {}
    merged = "HK" if call.form.dropout else "BHK"  # dropout draws by the number of the row: rows are an interval there
    for letters, operand, layout in zip(leading, operands, layouts, strict=False):
        for letter, size, dim in zip(letters, shape_of(operand), layout.dims, strict=True):
            seeded = _seeded(dim, splits) if letter in "BST" else None
            known = dims.get(letter) or ((Factor(size),) if any(factor.split for factor in dim) else dim)
            if letter in merged and any(factor.split for factor in dim) and not any(factor.split for factor in known):
                known = dim
            dims[letter] = seeded or known
    dims |= {letter: _unsplit(dims[letter]) for letter in "DE"}
    if any(factor.split for letter in "HK" for factor in dims[letter]):
        dims |= _heads(dims, call)
    taken = _mesh_axes(*(dims[letter] for letter in "BHK"), splits)  # by frames of a video, each of which attends alone
    for letter, positions in zip("ST", (shape_of(call.q)[2], shape_of(call.k)[2]), strict=True):
        if not any(factor.axis for factor in dims[letter]):
            dims[letter] = _positions(positions, splits) or dims[letter]
        if taken & _mesh_axes(dims[letter], splits):
            dims[letter] = (Factor(positions),)
    if not _same_mesh_axis(dims["S"], dims["T"], splits):
        dims["T"] = _unsplit(dims["T"])

    def layout_of(letters: str, partial: frozenset[str] = frozenset()) -> Layout:
        return Layout(tuple(dims[letter] for letter in letters), partial)

    keys_partial: frozenset[str] = frozenset()
    if not any(factor.split for factor in dims["T"]):
        keys_partial = _mesh_axes(dims["S"], splits)
    keys_partial |= _mesh_axes(dims["H"], splits) - _mesh_axes(dims["K"], splits)
    tables = [Layout((_rows(table, 0, dims["B"]), (Factor(shape_of(table)[1]),))) for table in call.tables]
    params = [_param_layout(each, dims) for each in call.form.params]
    seed = [] if call.form.seed is None else [Layout(())]
    everywhere = _mesh_axes(dims["B"], splits) | _mesh_axes(dims["S"], splits)
    d_params = [replace(each, partial=everywhere - _mesh_axes(*each.dims[1:2], splits)) for each in params]
    return Solution(
        (*(layout_of(letters) for letters in leading), *tables, *params, *seed),
        (
            *(layout_of(letters, keys_partial if "K" in letters else frozenset()) for letters in results),
            *d_params[: call.form.trained],
        ),
    )


def _heads(dims: Mapping[str, Dim], call: Forward | Backward) -> dict[str, Dim]:
    """Dims H and K: H is K times the query heads of each key/value head.

    Where these are split, the heads of a rank are no interval, so nothing may depend on their numbers.
    """
    queries, keys = shape_of(call.q)[1], shape_of(call.k)[1]
    parts = regroup(dims["H"], [keys, queries // keys])
    if parts is None:
        return {"H": (Factor(queries),), "K": (Factor(keys),)}
    outer, inner = parts
    if not any(factor.split for factor in outer):
        outer = dims["K"]
    if any(factor.split for factor in outer):  # one mesh axis splits one factor
        inner = (Factor(queries // keys),)
    if any(factor.split for factor in inner) and keys > 1 and call.form.arguments(call.mask, 0, 1):
        inner = (Factor(queries // keys),)
    return {"H": tuple(factor for factor in (*outer, *inner) if factor.size > 1 or factor.split), "K": outer}


def _rows(tensor: fx.Node, dim: int, batch: Dim) -> Dim:
    """The layout of a dim that is the batch, or 1."""
    return batch if shape_of(tensor)[dim] > 1 else (Factor(1),)


def _param_layout(param: fx.Node, dims: Mapping[str, Dim]) -> Layout:
    """(H,), (H, N) or (H, B or 1, N): whole but for heads and batch, which are split as the queries are."""
    shape = shape_of(param)
    batch = [_rows(param, 1, dims["B"])] if len(shape) == 3 else []
    return Layout((dims["H"], *batch, *((Factor(size),) for size in shape[1 + len(batch) :])))


def _unsplit(dim: Dim) -> Dim:
    return tuple(replace(factor, split=False) for factor in dim)


def _mesh_axes(*dims_and_splits: Any) -> frozenset[str]:
    """The mesh axes over which dims are split."""
    *dims, splits = dims_and_splits
    return frozenset(each for dim in dims for factor in dim for each in mesh_axes(factor, splits))


def _seeded(dim: Dim, splits: Mapping[str, Split]) -> Dim | None:
    """The dim split on its named axis, if it is one."""
    if len(dim) == 1 and dim[0].axis is not None and dim[0].axis.name in splits:
        return (replace(dim[0], split=True),)
    return None


def _positions(size: int, splits: Mapping[str, Split]) -> Dim | None:
    """Positions that no input has, such as the patches of an image, are split from their first attention on."""
    for name, split in splits.items():
        if name.startswith(SEQUENCE) and not name.endswith(FINE) and split.size == size:
            return (Factor(size, Axis(name, size), split=True),)
    return None


def _same_mesh_axis(queries: Dim, keys: Dim, splits: Mapping[str, Split]) -> bool:
    axes = [[each for factor in dim for each in mesh_axes(factor, splits)] for dim in (queries, keys)]
    return axes[0] == axes[1]
