"""fold: a model with many equal layers is captured with few of them, and what one more of them costs is multiplied.

Layers are the children of a `ModuleList` that are alike: the same classes, parameters and attributes, down to the last
submodule, where a number that is the layer's own index counts as that. They may come in a period (local, local,
global), and behind layers of other kinds. With n layers, of which the last n - q repeat with period p, captures with
a and a + p layers are taken, a = q + p + (n - q) mod p, but 2 at least. The cost of n layers is that with a layers and
(n - a) / p times the difference. A model that does not run with fewer layers is captured whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from .capture import capture
from .errors import CaptureError
from .graph_costs import Counts, count, tensor_pattern
from .plan import Plan
from .precision import Precision
from .program import InputKind, Program

log = logging.getLogger("evocompile")

Counted = dict[str, Counts]


@dataclass(frozen=True)
class Folded:
    """A model's counts by mode of recomputation. layers: how many repeat. captured: with how many it was captured.

    period: of layers, whose costs are `repeated`. program: the smallest capture; batch, sequence: its B and S.
    larger: the capture with a period more, if there is one.
    """

    counts: Counted
    repeated: Counted | None
    layers: int
    captured: int
    period: int
    program: Program
    larger: Program | None
    batch: int
    sequence: int

    @property
    def times(self) -> int:
        """How many periods of layers are in the model beyond those that were captured."""
        return (self.layers - self.captured) // self.period if self.period else 0

    def over_tensor(self, degree: int) -> Folded | None:
        """The counts under tp of this degree; `None` where it splits nothing."""
        if degree not in self._patterns:
            self._patterns[degree] = tensor_pattern(self.program, degree)
        pattern = self._patterns[degree]
        if not pattern:
            return None
        if pattern not in self._over_tensor:
            self._over_tensor[pattern] = _counted(self.program, self.larger, self.times, degree)
        counts, repeated = self._over_tensor[pattern]
        return replace(self, counts=counts, repeated=repeated)

    @cached_property
    def _patterns(self) -> dict[int, frozenset[tuple[str, str]]]:
        return {}

    @cached_property
    def _over_tensor(self) -> dict[frozenset[tuple[str, str]], tuple[Counted, Counted | None]]:
        return {}


def fold(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    precision: Precision | None = None,
    forward: Callable[..., Any] | None = None,
) -> Folded:
    """The counts of a call `model(*args, **kwargs)`; the model is as before when it returns."""
    taken = forward or model.forward

    def captured(layers: int | None) -> Program:
        with shortened(model, layers):
            return capture(taken, model, args, dict(kwargs), precision=precision).program

    lists = repeating(model)
    depth = max((len(each) for each in lists.values()), default=0)
    patterns = {ends(keys(each)) for each in lists.values() if len(each) == depth}
    if depth:
        first, period = max(patterns)
        few = first + period + (depth - first) % period
        few += period * (few < 2)  # one layer is both the first and the last
        if few + 2 * period <= depth:
            try:
                small, larger = captured(few), captured(few + period)
            except (CaptureError, IndexError) as error:  # the model counts its layers itself
                log.warning("the model does not run with fewer layers, so all %d are captured: %s", depth, error)
            else:
                return _folded(small, larger, depth, few, period)
    program = captured(None)
    return Folded(count(program), None, depth, depth, 0, program, None, *_sizes(program))


def whole(program: Program) -> Folded:
    """The counts of a call that is captured already, with all its layers."""
    return Folded(count(program), None, 0, 0, 0, program, None, *_sizes(program))


def _folded(small: Program, larger: Program, depth: int, few: int, period: int) -> Folded:
    counts, repeated = _counted(small, larger, (depth - few) // period)
    return Folded(counts, repeated, depth, few, period, small, larger, *_sizes(small))


def _counted(small: Program, larger: Program | None, times: int, tensor: int = 1) -> tuple[Counted, Counted | None]:
    """The counts of the model, and of a period of its layers, under tp of a degree."""
    base = count(small, tensor)
    if larger is None:
        return base, None
    more = count(larger, tensor)
    repeated = {mode: more[mode].plus(base[mode], -1) for mode in base}
    return {mode: base[mode].plus(repeated[mode], times) for mode in base}, repeated


def _sizes(program: Program) -> tuple[int, int]:
    """B, and the S that a plan would split."""
    from .passes.canonicalize import canonicalize
    from .passes.choose_schedule import sequence_length

    shapes = [each.shape for each in program.inputs_of(InputKind.USER) if each.shape]
    length = sequence_length(canonicalize(program.bind(Plan(), 0)))
    return max((shape[0] for shape in shapes[:1]), default=1), length or 1


@contextmanager
def shortened(model: nn.Module, layers: int | None) -> Iterator[None]:
    """Inside, the longest lists of layers have their first `layers` only."""
    lists = repeating(model) if layers is not None else {}
    depth = max((len(each) for each in lists.values()), default=0)
    replaced: list[tuple[nn.Module, str, nn.ModuleList]] = []
    try:
        for name, each in lists.items():
            if len(each) == depth:
                parent, _, child = name.rpartition(".")
                owner = model.get_submodule(parent)
                replaced.append((owner, child, each))
                owner._modules[child] = nn.ModuleList(list(each)[:layers])
        yield
    finally:
        for owner, child, whole in replaced:
            owner._modules[child] = whole


def repeating(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The outermost lists of three layers and more."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) > 2 and name and not inside:
            found[name] = module
    return found


def keys(layers: nn.ModuleList) -> list[Any]:
    """What each layer is: equal for equal layers. A number that is every layer's own index says nothing of it."""
    described = [dict(_described(layer)) for layer in layers]
    indices = {path for path in described[0] if all(each.get(path) == i for i, each in enumerate(described))}
    return [{path: value for path, value in each.items() if path not in indices} for each in described]


def ends(keys: list[Any]) -> tuple[int, int]:
    """(first, period): from `first` on, keys repeat with `period`; the smallest sum of both."""
    count_ = len(keys)
    for total in range(1, count_ + 1):
        for period in range(1, total + 1):
            first = total - period
            if all(keys[i] == keys[i + period] for i in range(first, count_ - period)):
                return first, period
    return 0, count_


def _described(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in layer.named_modules():
        yield path, type(module)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            yield f"{path}.{name}", (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))):
                yield f"{path}.{name}", value
