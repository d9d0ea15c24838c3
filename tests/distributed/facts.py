"""Facts: functions that assert something on every rank. All facts of a module run in one launch, failures kept apart.

test_on_ranks, facts = ...                  # no magic: see test_forms.py
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from tests.distributed.launch import run_ranks

Fact = Callable[[], None]


def check_facts(module: str, names: list[str]) -> dict[str, str]:
    """The tracebacks of the facts that do not hold, by name. All ranks run all of them, whatever fails."""
    failures = {}
    for name in names:
        try:
            getattr(importlib.import_module(module), name)()
        except BaseException:
            failures[name] = traceback.format_exc()
        dist.barrier()
    return failures


class Facts:
    """The outcomes of a module's selected facts, by number of ranks."""

    def __init__(self, module: str, selected: dict[int, list[str]]) -> None:
        self._module = module
        self._selected = selected
        self._failures: dict[int, list[dict[str, str]]] = {}

    def check(self, world: int, name: str) -> None:
        if world not in self._failures:
            names = self._selected[world]
            self._failures[world] = run_ranks(check_facts, world, self._module, names, timeout=900)
        for rank, found in enumerate(self._failures[world]):
            assert name not in found, f"rank {rank}:\n{found[name]}"


def selected_facts(request: pytest.FixtureRequest) -> Facts:
    """For a fixture of module scope: the facts among the selected tests, which have the parameters `world`, `fact`."""
    selected: dict[int, list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if getattr(item, "module", None) is request.module and "fact" in parameters:
            selected.setdefault(parameters["world"], []).append(parameters["fact"])
    return Facts(request.module.__name__, selected)


def on_ranks(facts: dict[int, Sequence[Fact]]) -> pytest.MarkDecorator:
    """Parametrises a test by `world` and `fact`. facts: by number of ranks."""
    pairs = [(world, fact.__name__) for world, each in facts.items() for fact in each]
    return pytest.mark.parametrize(("world", "fact"), pairs, ids=[f"{name}-{world}" for world, name in pairs])
