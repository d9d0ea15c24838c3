"""Outputs that stay split over the ranks until somebody looks at them.

A training step returns its loss and, beside it, logits that are often far larger than a device's memory. So what a
forward returns beside a differentiable scalar is a `LazyOutput`: shape, dtype and device are known, and nothing is
communicated until a value is used. Then the whole tensor is gathered, in the model's order, once.

Of a loss that is computed in chunks (passes/chunk_rows.py) the logits do not exist at all: the output holds what they
are computed from, and they are computed when they are used.

Gathering is a collective: if one rank uses a lazy output, every rank that computes with the same batch rows has to.
Printing does not gather, so that `if rank == 0: print(outputs)` is safe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import torch_private
from .errors import EvocompileError
from .layout import Layout, Sharding, whole_from_parts
from .mesh import Mesh, group_name
from .program import Recipe, placeholders

PATIENCE = 10.0  # seconds of waiting for the other ranks until a warning says so
log = logging.getLogger("evocompile")


@dataclass(frozen=True)
class Assembly:
    """How the ranks' parts of one output become the whole: its layout, and who holds the other parts."""

    layout: Layout
    sharding: Sharding
    mesh: Mesh
    rank: int

    def __post_init__(self) -> None:
        assert not self.layout.partial, "an output is returned before its sum is finished"

    def ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` gathers from."""
        return self.mesh.peers(rank, self.sharding.mesh_axes(self.layout))

    @property
    def group(self) -> str:
        """Name of this rank's communicator."""
        return group_name("output", self.ranks(self.rank))

    @property
    def all_groups(self) -> set[str]:
        """Names of all ranks' communicators: every rank takes part in creating each."""
        return {group_name("output", self.ranks(rank)) for rank in range(self.mesh.world)}

    def gather(self, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """The whole value. Parts of different sizes are padded to the largest; bytes travel, so any dtype does."""
        shardings = [self.sharding.at(self.mesh.coordinate(rank)) for rank in self.ranks(self.rank)]
        shapes = [torch.Size(sharding.local_shape(self.layout)) for sharding in shardings]
        own = part.contiguous().flatten().view(torch.uint8)
        padded = own.new_zeros(max(shape.numel() for shape in shapes) * part.element_size())
        padded[: own.numel()] = own
        received = [torch.empty_like(padded) for _ in shapes]
        _wait_aloud(dist.all_gather(received, padded, group=group, async_op=True))
        parts = [
            buffer[: shape.numel() * part.element_size()].view(part.dtype).view(shape)
            for buffer, shape in zip(received, shapes, strict=True)
        ]
        return whole_from_parts(parts, shardings, self.layout)


def _wait_aloud(work: dist.Work | None) -> None:
    """Waits, and says after a while what for: other ranks that do not use the output are the likely reason."""
    assert work is not None
    slow = threading.Timer(
        PATIENCE,
        lambda: log.warning(
            "rank %d is gathering an output of the parallel model and waits for the other ranks: every rank has to use "
            "the output, also where only one prints it",
            dist.get_rank(),
        ),
    )
    slow.daemon = True
    slow.start()
    try:
        work.wait()
    finally:
        slow.cancel()


class _Value:
    """This rank's part, then the whole; shared by a lazy output and what is detached from it."""

    def __init__(self, part: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self._part: Tensor | None = part
        self._whole: Tensor | None = None
        self._gather = gather

    @property
    def is_gathered(self) -> bool:
        return self._whole is not None

    def whole(self) -> Tensor:
        if self._whole is None:
            assert self._part is not None
            with torch.no_grad():
                self._whole, self._part = self._gather(self._part), None
        return self._whole


class LazyOutput(Tensor):
    """A tensor of which this rank holds a part, gathered on its first use; a plain tensor in every computation.

    A gradient that reaches it raises: a term of the loss that is computed from it, outside of the compiled forward,
    would otherwise be dropped.
    """

    _value: _Value
    _name: str

    @staticmethod
    def __new__(
        cls, value: _Value, name: str, shape: Iterable[int], dtype: torch.dtype, device: torch.device, grad: bool
    ) -> LazyOutput:
        self = torch_private.wrapper_tensor(cls, tuple(shape), dtype, device, grad)
        self._value = value
        self._name = name
        return self

    @staticmethod
    def of(
        part: Tensor,
        gather: Callable[[Tensor], Tensor],
        name: str,
        shape: Iterable[int],
        dtype: torch.dtype,
        grad: bool,
    ) -> LazyOutput:
        """The lazy output `name` of a forward, of which `gather` makes the whole value from what this rank holds.

        grad: on one device it would require a gradient.
        """
        return LazyOutput(_Value(part, gather), name, shape, dtype, part.device, grad)

    @property
    def is_gathered(self) -> bool:
        """Whether the whole value is here, so that using it costs no communication."""
        return self._value.is_gathered

    def whole(self) -> Tensor:
        """The whole value, as a plain tensor (collective on first use)."""
        whole = self._value.whole()
        return without_gradient(whole, self._name) if self.requires_grad and torch.is_grad_enabled() else whole

    def __repr__(self) -> str:  # type: ignore[override]
        if self.is_gathered:
            return repr(self.whole())
        return f"LazyOutput({self._name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _OF_METADATA:
            return super().__torch_function__(function, types, args, kwargs or {})
        if function in _DETACHING and isinstance(args[0], LazyOutput):
            return _detached(args[0])
        return function(*_wholes(args), **_wholes(dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Reached only from within torch, below autograd."""
        if function is torch.ops.aten.detach.default:
            return _detached(args[0])
        return function(*_wholes(args), **_wholes(dict(kwargs or {})))


def _detached(lazy: LazyOutput) -> LazyOutput:
    with torch.no_grad():
        return LazyOutput(lazy._value, lazy._name, lazy.shape, lazy.dtype, lazy.device, False)


def _wholes(value: Any) -> Any:
    """The same nest of containers with lazy outputs gathered."""
    if isinstance(value, LazyOutput):
        return value.whole()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_wholes, value))
    if type(value) is dict:
        return {key: _wholes(each) for key, each in value.items()}
    return value


_ATTRIBUTES = (
    "shape dtype device layout ndim requires_grad grad grad_fn is_leaf itemsize nbytes output_nr "
    "is_cpu is_cuda is_meta is_mps is_xpu is_nested is_quantized is_sparse"
)
_METHODS = (
    "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed "
    "stride is_contiguous storage_offset __len__ __hash__"
)
_FUNCTIONS = "numel is_floating_point is_complex is_signed get_device"
_OF_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
}
_DETACHING = {Tensor.detach, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


def computed(recipe: Recipe, rows: Tensor, parameters: Sequence[Tensor], versions: Sequence[int], name: str) -> Tensor:
    """An output from the whole value that it is computed from, with the parameters of its forward (collective).

    versions: of the parameters in that forward. Raises EvocompileError if they have been written to since.
    """
    if [each._version for each in parameters] != list(versions):
        raise EvocompileError(
            f"{name} of the parallel forward is used after the parameters have changed. It is computed when it is used "
            "first, since the plan does not let it exist whole in the forward. Use it before the optimizer's step, or "
            "keep it with Plan(loss_chunk=0)"
        )
    with torch.autocast(rows.device.type, enabled=False):
        wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
        places = placeholders(recipe.graph.graph)[1:]
        values = [each.to(node.meta["val"].dtype) for each, node in zip(wholes, places, strict=True)]
        (result,) = recipe.graph(rows, *values)
    return result


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise EvocompileError(
            f"a gradient reached {ctx.name} of the parallel forward. Beside a differentiable scalar, a forward's other "
            "outputs are values, not part of the differentiated graph. Compute this term of the loss inside of the "
            "model's forward (or in the loss_fn given to parallelize), and return it as part of the loss; or use "
            "detach() if no gradient is meant."
        )


def without_gradient(value: Tensor, name: str) -> Tensor:
    """The same value, requiring a gradient as it would on one device, and raising if one arrives."""
    return _WithoutGradient.apply(value.detach().requires_grad_(), name)  # type: ignore[no-untyped-call]
