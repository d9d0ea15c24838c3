"""Routing: rows that are sorted by a key, worked on in that order, and put back (mixture of experts).

Sorting needs all keys at once, but what is then done to rows in sorted order often does not care about the order. So
each rank sorts its own rows. Their order is private to the rank: together the ranks have the rows of one device, in an
order that no rank knows. A dim in such an order is a *bag*: it is split over axes with names of their own
("seq@sort_1"), so that it never meets rows in the model's order, or in the order of another sort.

Beside layouts, this is known of values: *row numbers* (the permutation that a sort returns, its inverse, `perm // k`)
count each rank's own rows. They may be moved about, and used to look rows up or to put them somewhere, nothing else.

All of this is proven from the operators. A bag that is gathered, cut, viewed apart, returned, or combined with
anything in another order, and row numbers that are used otherwise, break the proof: that sort is given up (`broken`),
and its keys are gathered.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from evocompile.layout import Axis, Dim, Factor, Layout, Split

from .base import Dims, argument, label_sizes, normal_dim, operands_of
from .pointwise import CONSTANTS, NEW, RANDOM, is_zero
from .solve import Solution, canonical, is_fine, mesh_axes, pull, regroup
from .views import SQUEEZES, VIEWS
from .windows import WINDOWS

aten, prims = torch.ops.aten, torch.ops.prims


DimsOf = Callable[[fx.Node], "Dims | None"]


class Splits(dict[str, Split]):
    """The plan's splits by axis name. The axes of a bag are split as those that they come from."""

    def __missing__(self, name: str) -> Split:
        axis, marked, _ = name.partition("@")
        if not marked:
            raise KeyError(name)
        return self[axis]


@dataclass(frozen=True)
class Rows:
    """Values that are numbers of rows, counted on the rank's own part.

    sort: the name of the sort from which they come.
    of:   the dim whose rows they number.
    once: every row occurs exactly once.
    """

    sort: str
    of: Dim
    once: bool = False


def bags_of(layout: Layout) -> set[str]:
    """The sorts in whose order dims of a layout are."""
    return {axis.name.partition("@")[2] for axis in layout.split_axes() if "@" in axis.name}


# What moves row numbers about and leaves them what they are.
_MOVES = {
    *VIEWS,
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.expand.default),
    *SQUEEZES,
    *(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default),
    *(prims.convert_element_type.default, aten._to_copy.default),
}
# The same at all positions, or drawn at random.
_UNIFORM = (*CONSTANTS, *NEW, RANDOM)
_DIVISIONS = {aten.div.Tensor_mode: "rounding_mode", aten.floor_divide.default: None}


class Routes:
    """What is known of the bags and row numbers of one graph, node after node.

    broken: the sorts whose proof failed; give them up and start again.
    """

    def __init__(self, splits: Mapping[str, Split], dims_of: DimsOf) -> None:
        self.splits = splits
        self._dims_of = dims_of
        self.broken: set[str] = set()
        self._given_up: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._sorts: dict[str, fx.Node] = {}
        self._rows: dict[fx.Node, tuple[Rows | None, ...]] = {}
        self._numbered: set[tuple[fx.Node, fx.Node]] = set()
        self._uniform: dict[tuple[fx.Node, Layout], bool] = {}

    def give_up(self) -> None:
        """Forgets everything but the sorts that cannot be done rank by rank."""
        self._given_up |= self.broken
        for known in (self.broken, self._sizes, self._sorts, self._rows, self._numbered):
            known.clear()

    def sort(self, bag: str) -> fx.Node:
        return self._sorts[bag]

    def rows(self, node: fx.Node) -> Rows | None:
        """What a node's only (or first) result says of rows, if its values are row numbers."""
        return self._rows.get(node, (None,))[0]

    # ---- going forward

    def solve(self, node: fx.Node, layouts: list[Layout]) -> Solution | None:
        """How to compute an operator that sorts, or that reads row numbers or a bag; None leaves it to its own rule."""
        rule = _RULES.get(node.target) or _RULES.get(str(node.target))
        return rule(self, node, operands_of(node), layouts) if rule else None

    def pass_on(self, node: fx.Node) -> None:
        """A result of an operator with several."""
        parent = node.args[0]
        known = self._rows.get(parent)  # type: ignore[arg-type]
        if known is not None:
            self._rows[node] = (known[node.args[1]],)  # type: ignore[index]

    def check(self, node: fx.Node, layouts: list[Layout], solution: Solution, routed: bool) -> None:
        """Notes what of the proof a node breaks, and what its result says of rows. `routed`: it came from `solve`."""
        for operand, have, need in zip(operands_of(node), layouts, solution.operands, strict=True):
            rows = self.rows(operand)
            if canonical(have) != canonical(need):
                self.broken |= bags_of(have) | ({rows.sort} if rows else set())
            new = bags_of(need) - bags_of(have)
            if new and (node, operand) not in self._numbered and not self._same_in_any_order(operand, need):
                self.broken |= new
            if rows and not routed:
                moved = self._moved(node, rows)
                self.broken |= set() if moved else {rows.sort}
                self._rows[node] = (moved if isinstance(moved, Rows) else None,)
        for result in solution.results:
            self.broken |= {bag for bag in bags_of(result) if not _keeps(result, bag, self._sizes[bag])}

    def _same_in_any_order(self, node: fx.Node, layout: Layout) -> bool:
        """Whether a value that is laid out so is the same whatever the order of bags: constant, or broadcast, there.

        A random draw is as good in another order.
        """
        if not bags_of(layout) or node.target in _UNIFORM:
            return True
        if (node, layout) not in self._uniform:
            self._uniform[node, layout] = False
            dims = self._dims_of(node) if node.op == "call_function" else None
            if dims is None or node.target == prims.iota.default or node.target in WINDOWS or len(dims.results) != 1:
                return False
            solution = pull(dims, label_sizes(dims, node), layout)
            self._uniform[node, layout] = solution is not None and all(
                self._same_in_any_order(operand, each)
                for operand, each in zip(operands_of(node), solution.operands, strict=True)
            )
        return self._uniform[node, layout]

    def _moved(self, node: fx.Node, rows: Rows) -> Rows | bool:
        """The row numbers that an elementwise operator or a view makes of row numbers; True where it makes others."""
        value = node.meta["val"]
        if node.target in _MOVES and value.dtype in (torch.int64, torch.int32):
            return rows
        if node.target in _DIVISIONS or node.target == aten.remainder.Scalar:
            divisor = node.args[1]
            mode = _DIVISIONS.get(node.target)
            rounds_down = mode is None or node.kwargs.get(mode) in ("floor", "trunc")
            if not isinstance(divisor, int) or divisor < 1 or not rounds_down:
                return False
            size = math.prod(factor.size for factor in rows.of)
            parts = regroup(rows.of, [size // divisor, divisor]) if size % divisor == 0 else None
            if parts is None or any(factor.split for factor in parts[1]):
                return False
            return Rows(rows.sort, parts[0]) if node.target in _DIVISIONS else True
        return False

    # ---- going backward

    def check_version(self, node: fx.Node, own: tuple[Layout, ...], wanted: tuple[Layout, ...], pulled: bool) -> None:
        """A bag, or row numbers, exist in one version only; what is pulled into a bag's order has been checked."""
        if wanted == own:
            return
        for layout in own:
            self.broken |= bags_of(layout)
        self.broken |= {rows.sort for rows in self._rows.get(node, ()) if rows}
        if not pulled:
            self.broken |= {bag for layout in wanted for bag in bags_of(layout)}

    def check_output(self, node: fx.Node, layout: Layout) -> None:
        rows = self.rows(node)
        self.broken |= bags_of(layout) | ({rows.sort} if rows else set())

    def numbers_a_bag(self, node: fx.Node, layout: Layout) -> bool:
        """Whether an iota is wanted as the numbers of the rank's own rows of a bag."""
        return bool(bags_of(layout)) and any(numbers is node for _, numbers in self._numbered)


def _keeps(layout: Layout, bag: str, size: int) -> bool:
    """Whether one dim holds the whole bag."""
    places = []
    for dim in layout.dims:
        names = [factor.axis.name if factor.split and factor.axis else "" for factor in dim]
        first = next((i for i, name in enumerate(names) if name.endswith(f"@{bag}")), None)
        if first is not None:
            places.append(math.prod(factor.size for factor in dim[first:]))
    return len(places) == 1 and places[0] % max(size, 1) == 0


# ---- rules

RouteRule = Callable[[Routes, fx.Node, list[fx.Node], list[Layout]], "Solution | None"]


def _sort(routes: Routes, node: fx.Node, operands: list[fx.Node], layouts: list[Layout]) -> Solution | None:
    """keys (N,) -> (keys in order, permutation). Of a permutation: its inverse."""
    (layout,), rows = layouts, routes.rows(operands[0])
    if len(layout.dims) != 1 or layout.partial or node.name in routes._given_up:
        return None
    if rows is not None:
        if not rows.once or argument(node, 2, "descending", False):
            return None
        routes._rows[node] = (rows, Rows(rows.sort, layout.dims[0], once=True))
        return Solution((layout,), (Layout((rows.of,)),) * 2)
    if not layout.is_split or bags_of(layout):
        return None
    split = [factor for factor in layout.dims[0] if factor.split]
    bag = tuple(replace(f, axis=Axis(f"{f.axis.name}@{node.name}", f.axis.size, f.axis.start)) for f in split if f.axis)
    whole = layout.shape[0] // math.prod(factor.size for factor in split)
    routes._sizes[node.name], routes._sorts[node.name] = layout.shape[0], node
    routes._rows[node] = (None, Rows(node.name, layout.dims[0], once=True))
    return Solution((layout,), (Layout(((*bag, Factor(whole)),)),) * 2)


def _look_up(routes: Routes, node: fx.Node, operands: list[fx.Node], layouts: list[Layout]) -> Solution | None:
    """x[rows], x.index_select(dim, rows): rows of x, in the order of the row numbers."""
    if node.target == aten.index.Tensor:
        indices = argument(node, 1, "indices")
        used = [dim for dim, each in enumerate(indices) if each is not None]
        if len(used) != 1:
            return None
        dim = used[0]
    else:
        dim = normal_dim(argument(node, 1, "dim"), len(layouts[0].dims))
    x, index, rows = layouts[0], layouts[1], routes.rows(operands[1])
    if rows is None or not _rows_are_of(rows, x, dim):
        return None
    routes._rows[node] = (_looked_up(routes.rows(operands[0])),)
    pending = x.partial & {"tp"}  # rows are not split over it: what is pending is moved about as it is
    return Solution(
        (replace(_with(x, dim, (rows.of,)), partial=pending), index),
        (replace(_with(x, dim, index.dims), partial=pending),),
    )


def _put(routes: Routes, node: fx.Node, operands: list[fx.Node], layouts: list[Layout]) -> Solution | None:
    """x.index_put([rows], values, accumulate): values into rows of x. Of (permutation, 0, 1, …): the inverse."""
    accumulate = argument(node, 3, "accumulate", False)
    if len(argument(node, 1, "indices")) != 1 or len(operands) != 3 or (rows := routes.rows(operands[1])) is None:
        return None
    x, index, values = layouts
    fits = values.shape == index.shape + x.shape[1:]
    if not _rows_are_of(rows, x, 0) or not fits or not (accumulate or rows.once) or routes.rows(operands[0]):
        return None
    pending = values.partial & {"tp"} if accumulate and is_zero(operands[0]) else frozenset()
    wanted = Layout((*index.dims, *_unsplit(x, 0)), pending)
    placed = routes.rows(operands[2])
    if placed is not None and accumulate:
        return None
    if not accumulate and len(index.dims) == 1 and _counts_up(operands[2]):
        routes._numbered.add((node, operands[2]))
        placed = Rows(rows.sort, index.dims[0])
    routes._rows[node] = (replace(placed, once=rows.once) if placed else None,)
    placed_in = _with(x, 0, (rows.of,))
    return Solution((placed_in, index, wanted), (replace(placed_in, partial=pending),))


def _along(routes: Routes, node: fx.Node, operands: list[fx.Node], layouts: list[Layout]) -> Solution | None:
    """x.gather(0, rows) and x.scatter_add(0, rows, values), with row numbers that are the same in all columns."""
    x, index = layouts[0], layouts[1]
    rank = len(x.dims)
    if normal_dim(argument(node, 1, "dim"), rank) != 0 or x.shape[1:] != index.shape[1:]:
        return None
    rows = routes.rows(operands[1])
    if rows is None or not _rows_are_of(rows, x, 0) or any(f.split for dim in index.dims[1:] for f in dim):
        return None
    of = _with(x, 0, (rows.of,))
    found = Layout((index.dims[0], *_unsplit(x, 0)))
    if node.target == aten.gather.default:
        routes._rows[node] = (_looked_up(routes.rows(operands[0])),)
        return Solution((of, index), (found,))
    if layouts[2].shape != index.shape or routes.rows(operands[0]) or routes.rows(operands[2]):
        return None
    return Solution((of, index, found), (of,))


def _rows_are_of(rows: Rows, x: Layout, dim: int) -> bool:
    others = [factor for i, each in enumerate(x.dims) if i != dim for factor in each]
    return math.prod(f.size for f in rows.of) == x.shape[dim] and not any(factor.split for factor in others)


def _looked_up(rows: Rows | None) -> Rows | None:
    return replace(rows, once=False) if rows else None


def _unsplit(layout: Layout, dim: int) -> tuple[Dim, ...]:
    """The dims after `dim`, held whole."""
    return layout.unsplit().dims[dim + 1 :]


def _with(layout: Layout, dim: int, dims: tuple[Dim, ...]) -> Layout:
    """The layout with other dims in the place of `dim`, and without its pending sum."""
    whole = layout.unsplit().dims
    return Layout((*whole[:dim], *dims, *whole[dim + 1 :]))


def _counts_up(node: fx.Node) -> bool:
    return node.target == prims.iota.default and (node.kwargs["start"], node.kwargs["step"]) == (0, 1)


# Grouped products: labels of operands and results, "r" the rows in sorted order, "g" the groups.
_GROUPED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "transformers.grouped_mm_fallback.default": (("rk", "gkn", "g"), ("rn",)),
    "transformers.grouped_mm_fallback_backward.default": (("rk", "gkn", "g", "rn"), ("rk", "gkn")),
}
_GROUPED_MM = {("rk", "gkn", "g"): ("rn",), ("kr", "rn", "g"): ("gkn",)}  # aten._grouped_mm, by its operands' ranks


def _grouped(routes: Routes, node: fx.Node, operands: list[fx.Node], layouts: list[Layout]) -> Solution | None:
    """Rows times the weight of their group, where the groups are consecutive rows and `offsets` says where they end.

    On the rank's own rows with the rank's own offsets each row meets the weight that it meets on one device, if the
    offsets count the keys by which the rows are sorted. The ends of one device are the sums of the ranks' ends, so the
    rank's own are the offsets before their pending sum. Gradients of weights are sums over rows.
    """
    found = labels_of_grouped(node, [len(layout.dims) for layout in layouts])
    if found is None:
        return None
    labels, results = found
    named = [
        (name, dim)
        for tensor, layout in zip(labels, layouts, strict=True)
        for name, dim in zip(tensor, layout.dims, strict=True)
    ]
    rows = {canonical(Layout((dim,))) for name, dim in named if name == "r"}
    if any(factor.split for name, dim in named if name == "g" for factor in dim) or len(rows) != 1:
        return None
    (bag_layout,) = rows
    columns = _split_columns(routes, named)
    if columns is None:
        return None
    dims = dict(named) | columns
    over_tp = {name for name, dim in columns.items() if any(factor.split for factor in dim)}

    def pending_in(tensor: str) -> frozenset[str]:
        """What is left to add up of a product over split columns."""
        return frozenset({"tp"}) if over_tp - set(tensor) else frozenset()

    if over_tp and not bag_layout.is_split:
        return Solution(
            tuple(Layout(tuple(dims[name] for name in tensor)) for tensor in labels),
            tuple(Layout(tuple(dims[name] for name in result), pending_in(result)) for result in results),
        )
    bags, offsets = bags_of(bag_layout), labels.index("g")
    pending = frozenset(each for axis in bag_layout.split_axes() for each in routes.splits[axis.name].mesh_axes)
    if len(bags) != 1 or layouts[offsets].partial != pending or (over_tp and "tp" in pending):
        return None
    if not _end_groups(operands[offsets], routes.sort(*bags)):
        return None
    dims["r"] = bag_layout.dims[0]
    return Solution(
        tuple(
            layout if i == offsets else Layout(tuple(dims[name] for name in tensor))
            for i, (tensor, layout) in enumerate(zip(labels, layouts, strict=True))
        ),
        tuple(
            Layout(tuple(dims[name] for name in result), pending_in(result) | (pending if "r" not in result else set()))
            for result in results
        ),
    )


def _split_columns(routes: Routes, named: list[tuple[str, Dim]]) -> dict[str, Dim] | None:
    """The dims k and n of a grouped product, at most one split, over tp; None where they are split otherwise."""
    found: dict[str, Dim] = {}
    for name, dim in named:
        if name in "kn" and (name not in found or any(factor.split for factor in dim)):
            found[name] = dim
    split = [factor for dim in found.values() for factor in dim if factor.split]
    if len(split) > 1 or any(is_fine(f) or mesh_axes(f, routes.splits) != ("tp",) for f in split):
        return None
    return found


def labels_of_grouped(node: fx.Node, ranks: list[int]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Labels of a grouped product's operands and results; None for a form that is not built."""
    if str(node.target) in _GROUPED:
        return _GROUPED[str(node.target)]
    if node.target != aten._grouped_mm.default or argument(node, 3, "bias") is not None:
        return None
    return next(((ops, out) for ops, out in _GROUPED_MM.items() if [len(op) for op in ops] == ranks), None)


def _end_groups(offsets: fx.Node, sort: fx.Node) -> bool:
    """Whether offsets[g] is the number of rows, sorted by `sort`, with a key in a group up to g.

    The groups are the bins of a histogram of the keys, which rise with the keys. Keys below the first bin would come
    before all groups without being counted, so there must be none.
    """
    if argument(sort, 2, "descending", False):
        return False
    counted = _without_conversions(offsets)
    if counted.target != aten.cumsum.default:
        return False
    histogram = _without_conversions(operands_of(counted)[0])
    if histogram.target != aten.histc.default:
        return False
    keys = _unmoved(operands_of(histogram)[0])
    if keys.target is operator.getitem and keys.args == (sort, 0):
        keys = sort
    if keys not in (sort, _unmoved(operands_of(sort)[0])):
        return False
    least = _least(operands_of(sort)[0])
    return least is not None and least >= argument(histogram, 2, "min", 0)


def _without_conversions(node: fx.Node) -> fx.Node:
    while node.target in (prims.convert_element_type.default, aten._to_copy.default, aten.clone.default):
        node = operands_of(node)[0]
    return node


def _unmoved(node: fx.Node) -> fx.Node:
    """The node whose elements these are, in any shape and dtype: conversions keep their order."""
    while node.target in _MOVES and node.target != aten.expand.default:
        node = operands_of(node)[0]
    return node


def _least(node: fx.Node) -> float | None:
    """A number that no element is less than; None if none is known."""
    node = _unmoved(node)
    if node.target is operator.getitem and isinstance(parent := node.args[0], fx.Node):
        finds = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)
        if parent.target in finds and node.args[1] == 1:
            return 0
    if node.target in (aten.argmax.default, aten.argmin.default):
        return 0
    if node.target == aten.clamp.default and (least := argument(node, 1, "min")) is not None:
        return least
    return None


_RULES: dict[object, RouteRule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.index.Tensor: _look_up,
    aten.index_select.default: _look_up,
    aten.index_put.default: _put,
    aten.gather.default: _along,
    aten.scatter_add.default: _along,
    aten._grouped_mm.default: _grouped,
    **dict.fromkeys(_GROUPED, _grouped),
}


def moves_rows(node: fx.Node) -> bool:
    """Whether an operator may sort rows, move them about by their numbers, or work on groups of them."""
    return node.target in _RULES or str(node.target) in _RULES


def is_grouped(node: fx.Node) -> bool:
    return node.target == aten._grouped_mm.default or str(node.target) in _GROUPED
