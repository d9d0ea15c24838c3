"""torch's optimizers, and a user's, on shards: the numbers of one device, or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import evocompile
from evocompile.errors import StateError
from evocompile.optimizers import NEEDS_WHOLE, REFUSED, check_optimizer
from evocompile.plan import Plan, Shard
from tests.distributed.launch import run_ranks
from tests.distributed.optimizing import OPTIMIZERS, optimize, optimize_all
from tests.redundant_model import Model, batch

WHOLE_ONLY = [each.__name__ for each in NEEDS_WHOLE]
SHARDED = [name for name in OPTIMIZERS if name not in [*WHOLE_ONLY, "Rprop"]]


def on_ranks() -> dict[str, Any]:
    results = optimize_all([*SHARDED, "Rprop"], 2) | optimize_all(WHOLE_ONLY, 1)
    results["refused"] = optimize_all(WHOLE_ONLY, 2)
    results["sentence"] = []
    for passed in (False, True):  # the optimizer made after parallelize(), or before
        model, plan = Model(), Plan(cp=2, shard=Shard(1, 1, 2))
        if not passed:
            evocompile.parallelize(model, plan=plan, backend="eager")
        optimizer = torch.optim.LBFGS(model.parameters())
        try:
            if passed:
                evocompile.parallelize(model, plan=plan, backend="eager", optimizer=optimizer)
            model(**batch(0))
        except StateError as error:
            results["sentence"].append(str(error))
        del optimizer
    return results


def test_optimizers_equal_one_device_or_are_refused() -> None:
    for result in run_ranks(on_ranks, 2):
        for name in [*SHARDED, *WHOLE_ONLY]:
            assert isinstance(result[name], dict), f"{name}: {result[name]}"
            torch.testing.assert_close(result[name], optimize(name, None), rtol=1e-6, atol=1e-7)
        # The refusals have a reason: without them torch raises in the first step.
        assert isinstance(result["Rprop"], str)
        assert all(isinstance(each, str) for each in result["refused"].values())
        assert len(result["sentence"]) == 2
        for sentence in result["sentence"]:
            assert "LBFGS takes each parameter as a whole" in sentence
            assert "Shard(optimizer=1)" in sentence


def test_only_what_fails_is_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    for name, make in OPTIMIZERS.items():
        optimizer = make(parameters)
        if type(optimizer) in REFUSED:
            with pytest.raises(StateError, match="by index"):
                check_optimizer(optimizer, 1)
        else:
            check_optimizer(optimizer, 1)
            if name in WHOLE_ONLY:
                with pytest.raises(StateError, match="as a whole"):
                    check_optimizer(optimizer, 2)
            else:
                check_optimizer(optimizer, 2)
