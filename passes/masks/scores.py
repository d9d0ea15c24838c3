"""Recovers a whole score function: every tensor over (b, h, q, k) that it reads becomes a function of positions.

A grid of a score function (`dense_attention`) is, by what can be proven of it:

- a condition or a number by cases of positions and tables, as any mask (`recover.py`);
- data of one position: a tensor (B or 1, H or 1, N), by heads a param, else a float table;
- a function of k - q that is computed in floats, as a relative position's bucket or slope: computed for every k - q.

Then what is -inf is split off as the mask. A finite number that is as low as numbers go does the same, but for a row
that attends nowhere: there the softmax is over equal numbers, and all keys count alike.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from torch import fx

from evocompile.errors import MaskError
from evocompile.kernels.mask import B, H, K, Mask, Q, normalize, table
from evocompile.kernels.score import Score, float_table, frozen, param, parse_score, where
from evocompile.program import val

from .dead_rows import live_rows
from .recover import MaskRecovery, refusal
from .relative import constant_node, of_relative_positions
from .rules import MOVES, broadcast
from .values import Unproven, Value, only_number

aten = torch.ops.aten
_ARITHMETIC = {aten.add: operator.add, aten.sub: operator.sub, aten.mul: operator.mul, aten.div: operator.truediv}
_LOWEST = torch.finfo(torch.bfloat16).min  # a mask's finite number is at most this


class Recovered(NamedTuple):
    """What `evocompile::attention` gets; params: those to append to the ones that the attention has."""

    mask: Mask
    tables: list[fx.Node]
    score: str
    params: list[fx.Node]
    rows_may_be_dead: bool = False


class ScoreRecovery:
    """Recovers score functions over the grids of one graph, with the tables of one `MaskRecovery`."""

    def __init__(self, masks: MaskRecovery) -> None:
        self.masks = masks
        self._known: dict[tuple[object, ...], Recovered] = {}

    def recover(
        self, mask: fx.Node | None, is_causal: bool, score: str, grids: list[fx.Node], params: int
    ) -> Recovered:
        """As `MaskRecovery.recover`, for a score function with grids; params: how many the attention has already."""
        if score == "s":
            mask_alone, tables = self.masks.recover(mask, is_causal)
            return Recovered(mask_alone, tables, score, [])
        key = (mask, is_causal, score, *grids, params)
        if key not in self._known:
            self._known[key] = self._recover(mask, is_causal, score, grids, params)
        return self._known[key]

    def _recover(
        self, mask: fx.Node | None, is_causal: bool, score: str, grids: list[fx.Node], params: int
    ) -> Recovered:
        expression = parse_score(score).expression
        extra: list[fx.Node] = []
        for index, grid in enumerate(grids):
            expression = self._replaced(expression, index, grid, params, extra)
        masked = _Masked()
        keep, number = masked.split(expression)
        origin = grids[0] if grids else mask
        if number.has(sympy.oo, sympy.nan):
            raise refusal(origin, "it computes with infinite scores")
        keep = self.masks.settled(keep)
        if mask is not None or is_causal:
            keep = self.masks.domain.settle(keep & self.masks.condition(mask, is_causal))
        dead = bool(masked.kinds) and not self.masks.reaches_every_query(keep)
        if dead:
            keep, number = self._with_dead_rows(keep, number, masked.kinds, origin)
        if B in (keep.free_symbols | number.free_symbols) - _rows_of_tables(keep, number):
            raise refusal(origin, "it depends on the number of the batch row, not only on that row's data")
        result, tables, (number,) = self.masks.finish(keep, number)
        return Recovered(result, tables, str(Score.of(number)), extra, dead)

    # ---- grids

    def _replaced(
        self, expression: sympy.Expr, index: int, grid: fx.Node, params: int, extra: list[fx.Node]
    ) -> sympy.Expr:
        """The score function with a grid's symbol replaced by what the grid is."""
        if val(grid).is_floating_point():
            return expression.subs(sympy.Symbol(f"x{index}", real=True), self._number(grid, params, extra))
        symbol = sympy.Symbol(f"i{index}", integer=True)
        conditions = [each for each in expression.atoms(Relational) if symbol in each.free_symbols]
        if conditions:
            condition = self.masks.as_condition(grid)
            known = {each: condition if isinstance(each, sympy.Ne) else sympy.Not(condition) for each in conditions}
            assert all(each.args[0] == symbol and each.args[1] == 0 for each in conditions), conditions
            expression = _with_conditions(expression, known)
        if symbol in expression.free_symbols:
            expression = expression.subs(symbol, self._number(grid, params, extra))
        return expression

    def _number(self, grid: fx.Node, params: int, extra: list[fx.Node]) -> sympy.Expr:
        coordinates = broadcast(val(grid).shape, (B, H, Q, K))
        is_float = val(grid).is_floating_point()
        attempts = (self._of_one_position, self._of_parts, self._of_distance) if is_float else (self._of_distance,)
        try:
            value = self.masks.value(grid, coordinates)
            return _by_cases(value) if is_float else only_number(value)
        except (Unproven, MaskError) as error:
            for attempt in attempts:
                found = attempt(grid, params, extra)
                if found is not None:
                    return found
            raise error if isinstance(error, MaskError) else refusal(grid, str(error)) from None

    def _of_one_position(self, grid: fx.Node, params: int, extra: list[fx.Node]) -> sympy.Expr | None:
        """A float tensor along at most one position."""
        sizes = (*[1] * (4 - val(grid).dim()), *val(grid).shape)
        if (sizes[2] > 1 and sizes[3] > 1) or not val(grid).is_floating_point():
            return None
        position, length = (Q, sizes[2]) if sizes[2] > 1 else (K, sizes[3])
        position = position if length > 1 else sympy.S.Zero
        may_mask = self._may_mask(grid)
        if sizes[1] == 1:
            made = self._after(grid, (aten.reshape.default, [sizes[0], length]))
            layout = ("batch" if sizes[0] > 1 else "one", "position")
            number = float_table(self.masks.add_table(made, layout, length), position)
            if not may_mask:
                return number
            kept = self.masks.add_table(self._after(made, (aten.gt.Scalar, _LOWEST)), layout, length)
            return where(sympy.Ne(table(kept, position), 0), number, _rational(_LOWEST))
        if may_mask:
            return None
        if sizes[0] == length == 1:
            extra.append(self._after(grid, (aten.reshape.default, [sizes[1]])))
            return param(params + len(extra) - 1)
        steps = [(aten.reshape.default, [sizes[0], sizes[1], length]), (aten.permute.default, [1, 0, 2])]
        if sizes[0] == 1:
            steps.append((aten.squeeze.dims, [1]))
        extra.append(self._after(grid, *steps))
        row = (B,) if sizes[0] > 1 else ()
        return param(params + len(extra) - 1, *row, position)

    def _of_parts(self, grid: fx.Node, params: int, extra: list[fx.Node]) -> sympy.Expr | None:
        """A sum, a product or a choice, as of a bias and a mask, by its parts."""
        packet = getattr(grid.target, "overloadpacket", None)
        coordinates = broadcast(val(grid).shape, (B, H, Q, K)) if val(grid).dim() <= 4 else ()

        def part(each: object) -> sympy.Expr:
            return self._number(each, params, extra) if isinstance(each, fx.Node) else _rational(float(each))  # type: ignore[arg-type]

        try:
            if packet in _ARITHMETIC and not grid.kwargs:
                return _ARITHMETIC[packet](*(part(each) for each in grid.args))
            if packet == aten.where:
                condition, held, otherwise = grid.args
                return where(self.masks.as_condition(condition), part(held), part(otherwise))  # type: ignore[arg-type]
            if packet == torch.ops.prims.convert_element_type:
                return part(grid.args[0])
            source = grid.args[0] if grid.args else None
            if packet in MOVES and isinstance(source, fx.Node) and val(source).dim() <= 4:
                moved = MOVES[packet](self.masks.domain, grid, coordinates)
                return part(source) if moved == broadcast(val(source).shape, (B, H, Q, K)) else None
        except MaskError:
            pass
        return None

    def _may_mask(self, grid: fx.Node) -> bool:
        """Whether a float tensor may hold numbers as low as they go: floats of the user's, or computed with such."""
        waiting, seen = [grid], {grid}
        while waiting:
            node = waiting.pop()
            numbers = [each for each in node.args if isinstance(each, int | float)]
            user = node.op == "placeholder" and node not in self.masks.constants and val(node).is_floating_point()
            if user or any(abs(each) >= -_LOWEST for each in numbers):
                return True
            waiting += [each for each in node.all_input_nodes if each not in seen]
            seen.update(node.all_input_nodes)
        return False

    def _of_distance(self, grid: fx.Node, params: int, extra: list[fx.Node]) -> sympy.Expr | None:
        """A tensor (1, H or 1, S, T) that no input enters and that depends on k - q alone."""
        values = of_relative_positions(self.masks, grid)
        if values is None:
            return None
        made, offset = constant_node(self.masks.graph_module, grid, values), self.masks.domain.queries - 1
        if values.shape[0] > 1:
            extra.append(made)
            return param(params + len(extra) - 1, K - Q + offset)
        index = self.masks.add_table(made, ("one", "position"), values.shape[1])
        return float_table(index, K - Q + offset) if values.is_floating_point() else table(index, K - Q + offset)

    def _after(self, node: fx.Node, *steps: tuple[object, object]) -> fx.Node:
        """The steps (operator, argument) on the node, behind it in the graph."""
        anchor = node if node.op != "placeholder" else list(node.graph.find_nodes(op="placeholder"))[-1]
        for target, argument in steps:
            with node.graph.inserting_after(anchor):
                made = node.graph.call_function(target, (node, argument))  # type: ignore[arg-type]
            made.meta["val"] = target(val(node), argument)  # type: ignore[operator]
            made.meta["stack_trace"] = node.meta.get("stack_trace")
            node = anchor = made
        return node

    # ---- rows that attend nowhere

    def _with_dead_rows(
        self, keep: Boolean, number: sympy.Expr, kinds: set[str], origin: fx.Node
    ) -> tuple[Boolean, sympy.Expr]:
        """Rows that attend nowhere attend everywhere, with equal scores."""
        live = live_rows(self.masks, keep) if len(kinds) == 1 else None
        if live is None:
            reason = "a query that attends nowhere would average over all keys: use a bool mask, or -inf"
            raise refusal(origin, f"it masks with a finite number, and {reason}")
        alive = sympy.Ne(table(self.masks.add_table(live, ("batch", "position"), self.masks.domain.queries), Q), 0)
        equal = number - frozen(number) if kinds == {"added"} else sympy.S.Zero
        return keep | sympy.Not(alive), where(alive, number, equal)


def _rational(number: float) -> sympy.Expr:
    return sympy.Rational(*number.as_integer_ratio())


class _Masked:
    """Splits a score function into where it is not -inf, and what it is there.

    kinds: how finite numbers that stand for -inf enter: "added" to scores, or "put" into their place.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def split(self, number: sympy.Expr, kind: str = "put") -> tuple[Boolean, sympy.Expr]:
        if number.is_number and number != 0 and not number.is_finite and number < 0:
            return sympy.false, sympy.S.Zero
        if number.is_number and number.is_finite and number <= _LOWEST:
            self.kinds.add(kind)
            return sympy.false, sympy.S.Zero
        if isinstance(number, sympy.Add):
            parts = [self.split(each, "added") for each in number.args]
            return sympy.And(*(keep for keep, _ in parts)), sympy.Add(*(each for _, each in parts))
        if isinstance(number, where):
            condition, held, otherwise = number.args
            (keep, one), (other_keep, other) = self.split(held, kind), self.split(otherwise, kind)
            kept = sympy.Or(sympy.And(condition, keep), sympy.And(sympy.Not(condition), other_keep))
            if keep == sympy.false or other_keep == sympy.false or one == other:
                return kept, other if keep == sympy.false else one
            return kept, where(normalize(condition), one, other)
        return sympy.true, number


def _with_conditions(number: sympy.Basic, known: dict[Relational, Boolean]) -> sympy.Basic:
    """xreplace that leaves `where` as it is while its condition changes."""
    if number in known:
        return known[number]  # type: ignore[index]
    if not number.args:
        return number
    return number.func(*(_with_conditions(each, known) for each in number.args))


def _by_cases(value: Value) -> sympy.Expr:
    """A value as a number: nested `where`s."""
    if not isinstance(value, tuple):
        return where(value, sympy.S.One, sympy.S.Zero)
    *others, (_, number) = value
    for condition, each in others:
        number = where(condition, each, number)
    return number


def _rows_of_tables(*expressions: sympy.Basic) -> set[sympy.Symbol]:
    """{B} if b occurs only as the row of tables and params."""
    leaves = {leaf for each in expressions for leaf in each.atoms(AppliedUndef)}
    zero = dict.fromkeys(leaves, sympy.S.Zero)
    return set() if any(B in each.xreplace(zero).free_symbols for each in expressions) else {B}
