"""Classes whose instances are parallel: `@parallelize(plan=…) class GPT(nn.Module)`.

An instance is made parallel once the outermost constructor has returned, so that a subclass may add to what its base
has built. The class itself stays what it is: its constructor is wrapped, and that of every subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .errors import StateError

_FORM = "_evocompile_form"  # on a class: what to do before and after the construction of an instance
_BUILDING = "_evocompile_building"  # on an instance: its constructor has not returned yet


def parallel_class(
    cls: type[nn.Module], *, before: Callable[[], object], after: Callable[[nn.Module], object]
) -> type[nn.Module]:
    """`cls`, changed so that `before` and `after` run around the construction of its instances.

    A subclass of a parallel class may be given another form; the one nearest to an instance's class is used.
    """
    if _FORM in vars(cls):
        raise StateError(f"the class {cls.__name__} is parallelised already")
    is_wrapped = hasattr(cls, _FORM)
    setattr(cls, _FORM, (before, after))
    if not is_wrapped:
        _wrap_constructor(cls, cls)
        for subclass in _subclasses(cls):
            _wrap_constructor(subclass, cls)
        _wrap_future_subclasses(cls)
    return cls


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for each in subclasses:
        yield each
        yield from _subclasses(each)


def _wrap_constructor(cls: type, base: type) -> None:
    """Wrap the constructor that `cls` uses, unless it is that of `base` or of another subclass, wrapped there."""
    definer: type = next(each for each in cls.__mro__ if "__init__" in vars(each))
    if cls is not base and definer is not cls and issubclass(definer, base):
        return
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _BUILDING in vars(self):  # called by the constructor of a subclass
            original(self, *args, **kwargs)
            return
        before, after = getattr(type(self), _FORM)
        before()
        vars(self)[_BUILDING] = True
        try:
            original(self, *args, **kwargs)
        finally:
            vars(self).pop(_BUILDING)
        after(self)

    cls.__init__ = __init__  # type: ignore[misc]


def _wrap_future_subclasses(base: type) -> None:
    own = vars(base).get("__init_subclass__")

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        if own is None:
            super(base, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            own.__get__(None, cls)(**kwargs)
        _wrap_constructor(cls, base)

    base.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
