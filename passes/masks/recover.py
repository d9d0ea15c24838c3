"""Recovers an attention mask's predicate from the operators that compute the mask.

The question is asked backwards: which value has the mask at (b, h, q, k)? Each operator passes it on to its operands
at their coordinates (`rules.py`) until it reaches

- positions (`iota`), constants, and small tensors that no input enters, which are computed and read off;
- data: a tensor over (batch, position) that depends on the inputs, as a padding mask or packed document numbers. It
  becomes a table of the predicate: the graph's node itself, brought to the shape (B or 1, N).

So the S×T mask is never built, whatever S is. What no rule proves is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import Tensor, fx

from evocompile.errors import MaskError
from evocompile.kernels.mask import B, H, K, Mask, Q, table, table_index
from evocompile.kernels.score import float_table
from evocompile.program import source_line, val
from evocompile.torch_private import OpOverload, is_fake, outside_fake_mode

from ..build import fake_mode_of
from .constants import band_of
from .documents import position_ids, with_steps_of_one
from .rules import Coordinates, broadcast, element, passes_on
from .values import Cases, Domain, Unproven, Value, choose, constant, single, truth

aten = torch.ops.aten

_WAY_OUT = (
    "Build the mask from positions (comparisons of torch.arange), from integer or bool inputs of shape "
    "(batch, sequence) such as attention_mask or position_ids, or use is_causal=True"
)
_TABLE_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CHECKED_SIZE = 1 << 16  # elements up to which a mask that no input enters is computed and compared

Layout = tuple[str, ...]  # for each dimension of a table's node: "batch", "position" or "one"


class MaskRecovery:
    """Recovers masks of one shape (B, H, S, T) from one graph; masks and tables are shared between attentions."""

    def __init__(
        self, graph_module: fx.GraphModule, domain: Domain, constants: Mapping[fx.Node, Tensor] | None = None
    ) -> None:
        self.domain = domain
        self.graph_module = graph_module
        self._values: dict[tuple[fx.Node, Coordinates], Value] = {}
        self._tables: list[tuple[fx.Node, Layout, int]] = []
        self._emitted: dict[tuple[fx.Node, Layout, int], fx.Node] = {}
        self._masks: dict[fx.Node, tuple[Mask, list[fx.Node]]] = {}
        self._computed: dict[fx.Node, Tensor] = {}
        self.constants = constants or {}
        self._computed.update(self.constants)
        self._largest = _input_free(graph_module, self.constants)
        self._computed_size = 4 * domain.batch * max(domain.queries, domain.keys)  # room for a `diff` with its padding

    def recover(self, node: fx.Node | None, is_causal: bool = False) -> tuple[Mask, list[fx.Node]]:
        """The predicate of a mask node, and its tables as nodes of the graph, (B or 1, N) each.

        node: `None` (everything attends), or broadcastable to (B, H, S, T); bool (True attends), or float: 0 where it
        attends, -inf or the least finite number where it does not. is_causal adds k <= q.
        Raises MaskError with the source line of the operator that stopped the proof.
        """
        mask, tables = (Mask.full(), []) if node is None else self._recover(node)
        if is_causal:
            mask = Mask.of(self.domain.settle(mask.expression & (K <= Q)))
        return mask, tables[: mask.table_count]

    # ---- what the recovery of score functions asks for

    def condition(self, node: fx.Node | None, is_causal: bool) -> Boolean:
        """Where a mask node lets attend, over this recovery's tables. Raises MaskError."""
        known = sympy.true if node is None else self._condition(node)
        return self.domain.settle(known & (K <= Q)) if is_causal else known

    def as_condition(self, node: fx.Node) -> Boolean:
        """Where a tensor over (b, h, q, k) is not 0. Raises MaskError."""
        try:
            return truth(self.domain, self.value(node, broadcast(val(node).shape, (B, H, Q, K))))
        except Unproven as error:
            raise refusal(next(iter(node.users)), str(error)) from None
        except RecursionError:
            raise refusal(node, "it takes too many operators") from None

    def settled(self, condition: Boolean) -> Boolean:
        """A condition in normal form, with what is known of position ids."""
        return self.domain.settle(with_steps_of_one(self.domain.settle(condition), self._positions_of()))

    def add_table(self, node: fx.Node, layout: Layout, length: int) -> int:
        """The index of a table."""
        entry = (node, layout, length)
        if entry not in self._tables:
            self._tables.append(entry)
        return self._tables.index(entry)

    def emit_table(self, index: int) -> fx.Node:
        return self._emit(*self._tables[index])

    def is_constant(self, node: fx.Node) -> bool:
        """Whether no input enters a node."""
        return node in self._largest

    @property
    def device(self) -> torch.device:
        return next(val(node).device for node in self.graph_module.graph.nodes if isinstance(val(node), Tensor))

    @property
    def fake_mode(self) -> Any:
        return fake_mode_of(self.graph_module.graph)

    def finish(self, condition: Boolean, number: sympy.Expr) -> tuple[Mask, list[fx.Node], tuple[sympy.Expr]]:
        """Mask and score function with their tables numbered from 0, and those tables."""
        leaves = [leaf for each in (condition, number) for leaf in each.atoms(AppliedUndef)]
        leaves = sorted((leaf for leaf in leaves if leaf.func.__name__[0] in "tf"), key=str)
        used = list(dict.fromkeys(table_index(leaf) for leaf in leaves))
        kinds = {"t": table, "f": float_table}
        renamed = {leaf: kinds[leaf.func.__name__[0]](used.index(table_index(leaf)), leaf.args[1]) for leaf in leaves}
        tables = [self._emit(*self._tables[index]) for index in used]
        return Mask.of(condition.xreplace(renamed)), tables, (number.xreplace(renamed),)

    def _recover(self, node: fx.Node) -> tuple[Mask, list[fx.Node]]:
        if node not in self._masks:
            self._masks[node] = self._finish(self._condition(node))
            self._check(node, *self._masks[node])
        return self._masks[node]

    def value(self, node: fx.Node, coordinates: Coordinates) -> Value:
        """The value of a node at these coordinates. Raises MaskError."""
        key = (node, coordinates)
        if key not in self._values:
            self._values[key] = self._value(node, coordinates)
        return self._values[key]

    def _value(self, node: fx.Node, coordinates: Coordinates) -> Value:
        free = node in self._largest
        if free and self._largest[node] <= self._computed_size:
            known = _read_off(self.compute(node), coordinates)
            if known is not None:
                return known
        if free and (node in self.constants or node.op == "get_attr"):
            banded = self._band(self.compute(node), coordinates)
            if banded is not None:
                return banded
        layout = self._layout(node, coordinates)
        if layout and not free and not passes_on(node):
            return self._table(node, *layout)
        if not layout and node.op != "call_function":
            shape = tuple(val(node).shape)
            raise Unproven(f"it reads {node.name}, of shape {shape}, whose values are known only when the model runs")
        try:
            return element(self, node, coordinates)
        except (Unproven, MaskError) as error:
            if layout:
                return self._table(node, *layout)
            raise error if isinstance(error, MaskError) else refusal(node, str(error)) from None

    def _band(self, tensor: Tensor, coordinates: Coordinates) -> Value | None:
        """A stored S×T tensor of two values, one of them along a band of the diagonal; `None` for another one."""
        if not {*coordinates} <= {Q, K, sympy.S.Zero} or Q not in coordinates or K not in coordinates:
            return None
        for dim, coordinate in reversed([*enumerate(coordinates)]):
            if coordinate.is_number:
                tensor = tensor.select(dim, int(coordinate))
        tensor = tensor if coordinates.index(Q) < coordinates.index(K) else tensor.T
        matrix = tensor[: self.domain.queries, : self.domain.keys]
        values = matrix.unique()
        if len(values) != 2:
            return None
        for chosen, other in ((values[1], values[0]), (values[0], values[1])):
            band = band_of(matrix == chosen)
            if band is not None:
                (start_slope, start), (end_slope, end) = band
                inside = (start + Q * (start_slope or 0) <= K) & (end + Q * (end_slope or 0) >= K)
                held, otherwise = (constant(each.item(), matrix.dtype) for each in (chosen, other))
                return choose(self.domain, self.domain.settle(inside), held, otherwise)
        return None

    # ---- tables

    def _layout(self, node: fx.Node, coordinates: Coordinates) -> tuple[Layout, sympy.Symbol] | None:
        """How a node is a table at these coordinates, and of which position; `None` when it is not one."""
        fake = val(node)
        if not isinstance(fake, Tensor) or fake.dtype not in _TABLE_DTYPES:
            return None
        lengths = {B: self.domain.batch, Q: self.domain.queries, K: self.domain.keys}
        layout, positions, batches = [], [], 0
        for size, coordinate in zip(fake.shape, coordinates, strict=True):
            if size == 1:
                layout.append("one")
            elif lengths.get(coordinate) != size:
                return None
            elif coordinate == B:
                layout.append("batch")
                batches += 1
            else:
                layout.append("position")
                positions.append(coordinate)
        if batches > 1 or len(positions) > 1:
            return None
        return tuple(layout), positions[0] if positions else K

    def _table(self, node: fx.Node, layout: Layout, position: sympy.Symbol) -> Value:
        length = self.domain.queries if position == Q else self.domain.keys
        entry = (node, layout, length)
        if entry not in self._tables:
            self._tables.append(entry)
        leaf = table(self._tables.index(entry), position)
        return sympy.Ne(leaf, 0) if val(node).dtype == torch.bool else single(leaf)

    def _finish(self, condition: Boolean) -> tuple[Mask, list[fx.Node]]:
        """The mask with its tables numbered from 0, and their nodes."""
        leaves = sorted(condition.atoms(AppliedUndef), key=lambda leaf: table_index(leaf))
        used = list(dict.fromkeys(table_index(leaf) for leaf in leaves))
        renamed = {leaf: table(used.index(table_index(leaf)), leaf.args[1]) for leaf in leaves}
        mask = Mask.of(condition.xreplace(renamed))
        return mask, [self._emit(*self._tables[index]) for index in used]

    def _emit(self, node: fx.Node, layout: Layout, length: int) -> fx.Node:
        """The node as a table (batch or 1, length): only its dimensions are moved, and repeated where it has none."""
        entry = (node, layout, length)
        if entry not in self._emitted:
            self._emitted[entry] = _as_table(node, layout, length)
        return self._emitted[entry]

    # ---- the whole mask

    def _condition(self, node: fx.Node) -> Boolean:
        """Where a mask node lets attend."""
        fake = val(node)
        try:
            value = self.value(node, broadcast(fake.shape, (B, H, Q, K)))
        except Unproven as error:  # an input of the model, which has no source line
            raise refusal(next(iter(node.users)), str(error)) from None
        except RecursionError:
            raise refusal(node, "it takes too many operators") from None
        condition = self._attends(node, value) if isinstance(value, tuple) else value
        condition = self.domain.settle(with_steps_of_one(self.domain.settle(condition), self._positions_of()))
        outside = condition.xreplace(dict.fromkeys(condition.atoms(AppliedUndef), sympy.S.Zero))
        if B in outside.free_symbols:
            raise refusal(node, "it depends on the number of the batch row, not only on that row's data")
        return condition

    def _attends(self, node: fx.Node, value: Cases) -> Boolean:
        """Where an additive mask is 0. Elsewhere it must be -inf or as low as a finite number goes."""
        dtype = val(node).dtype
        if not dtype.is_floating_point:
            raise refusal(node, f"a mask of {dtype} is neither bool nor additive")
        lowest = max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)
        others = [number for _, number in value if number != 0]
        for number in others:
            if not number <= lowest:
                raise refusal(node, f"it adds {sympy.N(number, 6)} to scores, which is neither 0 nor -inf")
        condition = sympy.Or(*(condition for condition, number in value if number == 0))
        if any(number != -sympy.oo for number in others) and not self.reaches_every_query(condition):
            reason = "a query that attends nowhere would average over all keys: use a bool mask, or -inf"
            raise refusal(node, f"it masks with a finite number, {sympy.N(others[0], 6)}, and {reason}")
        return condition

    def reaches_every_query(self, condition: Boolean) -> bool:
        """Whether every query attends to its own position, or every query to the first one, whatever the data."""
        own = self.domain.queries <= self.domain.keys and self.domain.settle(condition.xreplace({K: Q}))
        return sympy.true in (own, self.domain.settle(condition.xreplace({K: sympy.S.Zero})))

    def _positions_of(self) -> dict[int, int]:
        """Tables of document numbers -> the tables of position ids that they come from (see `mask_documents`)."""
        found = {}
        for index, (node, layout, _) in enumerate(list(self._tables)):
            source = position_ids(node) if layout[-1:] == ("position",) else None
            if source is None:
                continue
            value = self.value(source, broadcast(val(source).shape, (B, K)))
            if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0][1], AppliedUndef):
                found[index] = table_index(value[0][1])
        return found

    def _check(self, node: fx.Node, mask: Mask, tables: list[fx.Node]) -> None:
        """A small mask that no input enters is computed, and must be what the predicate says."""
        if tables or self._largest.get(node, _CHECKED_SIZE + 1) > _CHECKED_SIZE:
            return
        with outside_fake_mode():
            queries, keys = torch.arange(self.domain.queries), torch.arange(self.domain.keys)
            said = mask.evaluate(queries, keys, [], self.domain.batch, self.domain.heads, "cpu")
            true = self.compute(node)
            true = true if true.dtype == torch.bool else true == 0
            assert torch.equal(*torch.broadcast_tensors(said, true)), f"{mask} is not the mask {node}"

    def compute(self, node: fx.Node) -> Tensor:
        """The real value of a node that no input enters, on the CPU."""
        if node not in self._computed:
            with outside_fake_mode():
                self._computed[node] = self._run(node)
        return self._computed[node]

    def _run(self, node: fx.Node) -> Tensor:
        if node.op == "get_attr":
            return _attribute(self.graph_module, node).detach().cpu()
        args = fx.map_arg(node.args, self.compute)
        kwargs = {**fx.map_arg(node.kwargs, self.compute)}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return node.target(*args, **kwargs)  # type: ignore[operator]


def refusal(node: fx.Node, reason: str) -> MaskError:
    what = node.target if node.op == "call_function" else node.name
    return MaskError(
        f"{source_line(node)}\n  An attention mask comes from here that cannot be proven to be a function of positions "
        f"and input tables: {what}: {reason}.\n  {_WAY_OUT}."
    )


def _input_free(graph_module: fx.GraphModule, constants: Mapping[fx.Node, Tensor]) -> dict[fx.Node, int]:
    """The nodes that depend on no input, each with the size of the largest tensor needed for it, in elements."""
    largest: dict[fx.Node, int] = {}
    for node in graph_module.graph.nodes:
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            continue
        if node in constants:
            known = True
        elif node.op == "get_attr":
            real = _attribute(graph_module, node)
            known = isinstance(real, Tensor) and not is_fake(real)
        else:
            known = isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")
            known = known and torch.Tag.nondeterministic_seeded not in node.target.tags
            known = known and all(each in largest for each in node.all_input_nodes)
        if known:
            largest[node] = max([fake.numel(), *(largest[each] for each in node.all_input_nodes)])
    return largest


def _attribute(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = graph_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _read_off(tensor: Tensor, coordinates: Coordinates) -> Value | None:
    """A computed tensor as an affine function of the coordinates, or as a constant; `None` when it is neither."""
    symbolic: list[sympy.Expr] = []
    for size, coordinate in zip(tensor.shape, coordinates, strict=True):
        if coordinate.is_Integer and not 0 <= coordinate < size:
            return None
        if coordinate.is_Integer:
            tensor = tensor.select(len(symbolic), int(coordinate))
        else:
            symbolic.append(coordinate)
    if tensor.numel() == 0:
        return None
    origin = tensor.flatten()[0]
    if bool((tensor == origin).all()):
        return constant(origin.item(), tensor.dtype)
    if tensor.dtype not in _TABLE_DTYPES or tensor.dtype == torch.bool:
        return None
    number, affine = sympy.Integer(origin.item()), torch.zeros_like(tensor, dtype=torch.int64) + origin
    for dim, coordinate in enumerate(symbolic):
        line = tensor[tuple(slice(None) if each == dim else 0 for each in range(tensor.dim()))].long()
        step = int(line[1] - line[0]) if len(line) > 1 else 0
        number += step * coordinate
        affine += step * torch.arange(len(line)).view(-1, *[1] * (tensor.dim() - 1 - dim))
    return single(number) if torch.equal(affine, tensor.long()) else None


def _as_table(node: fx.Node, layout: Layout, length: int) -> fx.Node:
    """Inserts, behind the node, what brings it to the shape (batch or 1, length)."""
    graph = node.graph
    anchor = node if node.op != "placeholder" else list(graph.find_nodes(op="placeholder"))[-1]
    kept = [role for role in layout if role != "one"]
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    ones = [dim for dim, role in enumerate(layout) if role == "one"]
    if ones:
        steps.append((aten.squeeze.dims, (ones,)))
    if kept == ["position", "batch"]:
        steps.append((aten.permute.default, ([1, 0],)))
    if "batch" not in kept:
        steps.append((aten.unsqueeze.default, (0,)))
    if "position" not in kept:
        steps += [(aten.unsqueeze.default, (1,)), (aten.expand.default, ([-1, length],))]
    for target, args in steps:
        with graph.inserting_after(anchor):
            made = graph.call_function(target, (node, *args))
        made.meta["val"] = target(val(node), *args)
        made.meta["stack_trace"] = node.meta.get("stack_trace")
        node = anchor = made
    return node
