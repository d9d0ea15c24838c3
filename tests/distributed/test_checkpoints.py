"""Checkpoints: saved under one plan, loaded under another, and runs that are killed (row 18 of the design's PAINS)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evocompile import Checkpoints, StateError
from tests.distributed import checkpointing
from tests.distributed.launch import Outcome, launch, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(folder: Path) -> checkpointing.Run:
    """The run on one device, whose checkpoints are in "one"."""
    run = checkpointing.Run(folder / "one", None)
    run.train()
    return run


@pytest.fixture(scope="module")
def four(folder: Path, one: checkpointing.Run) -> list[dict[str, Any]]:
    return run_ranks(checkpointing.on_four_ranks, 4, folder)


@pytest.fixture(scope="module")
def survivors(folder: Path) -> list[Outcome]:
    """What becomes of the ranks of a run of which the last is killed in its third save."""
    return launch(checkpointing.killed, 2, folder, timeout=100)


@pytest.fixture(scope="module")
def two(folder: Path, four: list[dict[str, Any]], survivors: list[Outcome]) -> list[dict[str, Any]]:
    return run_ranks(checkpointing.on_two_ranks, 2, folder)


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert value.dtype == found[name].dtype and torch.equal(value, found[name]), name


def test_row_18_saved_under_one_plan_loads_under_any_other(
    folder: Path, one: checkpointing.Run, four: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    state = checkpointing.whole_state(one)
    assert any(name.endswith("exp_avg") for name in state)  # the optimizer's state is among it
    for result in (*four, *two):
        same_bits(result["one"], state)
    for result in two:
        same_bits(result["four"], four[0]["four"])
        same_bits(result["hsdp"], state)
    for name, expected in (("four", four[0]["four"]), ("two", two[0]["two"])):
        same_bits(checkpointing.loaded(folder / name, None), expected)


def test_names_are_the_models_own(folder: Path, four: list[dict[str, Any]]) -> None:
    saved = torch.distributed.checkpoint.FileSystemReader(folder / "four" / "step-00000008").read_metadata()
    names = {name.removeprefix("model.") for name in saved.state_dict_metadata if name.startswith("model.")}
    assert names == set(checkpointing.Dropping().state_dict())


def test_a_run_that_was_killed_goes_on_as_if_it_had_not(two: list[dict[str, Any]]) -> None:
    for result in two:
        losses = result["losses"]["two"]
        assert len(losses) == 8
        assert result["losses"]["killed"] == losses[4:]
        same_bits(result["killed"], result["two"])


def test_a_kill_in_a_save_leaves_the_checkpoint_before_and_no_rank_waits(
    survivors: list[Outcome], two: list[dict[str, Any]]
) -> None:
    *others, killed = survivors
    assert killed.error == "died with exit code -9"
    for each in others:
        assert each.error is None, each.error
        assert each.result < 20 + 5  # the time-out of the run's checkpoints
    for result in two:
        assert result["steps"] == [[2, 4], [4, 6, 8]]  # `keep` of them, and none that is incomplete


def test_what_does_not_fit_is_refused(folder: Path, one: checkpointing.Run, tmp_path: Path) -> None:
    model = checkpointing.Dropping()
    with pytest.raises(StateError, match=r"no complete checkpoint of step 3 in .*; complete are \[6, 8\]"):
        Checkpoints(folder / "one", model).load(3)
    with pytest.raises(StateError, match=r"of another model: \['model.extra.weight'\] are only in the model, \[\]"):
        model.extra = nn.Linear(2, 2, bias=False)
        Checkpoints(folder / "one", model).load()
    with pytest.raises(StateError, match=r"no state for 'loader'; it has \['schedule'\]"):
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(one.model.parameters()), 2)
        Checkpoints(folder / "one", checkpointing.Dropping(), loader=schedule).load()
    with pytest.raises(StateError, match=r"'scale' is on the meta device: give the model memory before"):
        Checkpoints(folder / "one", checkpointing.Dropping().to("meta")).load()
    with pytest.raises(StateError, match="at least one checkpoint has to stay"):
        Checkpoints(tmp_path, model, keep=0)
    alone = Checkpoints(tmp_path, model)
    assert alone.load() is None
    alone.save(1, note="weights alone")
    assert alone.load() == {"note": "weights alone", "step": 1}
    with pytest.raises(StateError, match="has no optimizer state"):
        Checkpoints(tmp_path, model, torch.optim.SGD(model.parameters())).load()


def test_an_optimizer_before_its_first_step_stays_so(tmp_path: Path) -> None:
    """The library's own functions make a state up, with one step counted."""
    run = checkpointing.Run(tmp_path, None)
    state = checkpointing.whole_state(run)
    run.checkpoints.save(0, epoch=0, batch=0)
    assert not run.optimizer.state
    run.train()
    assert run.optimizer.state
    run.checkpoints.save(9)
    run.checkpoints.load(9)
    assert len(run.optimizer.state) < sum(each.requires_grad for each in run.model.parameters())  # two have none
    other = checkpointing.Run(tmp_path, None, keep=9)
    other.checkpoints.save(0)
    run.checkpoints.load(0)
    assert not run.optimizer.state
    same_bits(checkpointing.whole_state(run), state)


def test_a_save_beside_the_training_saves_the_state_at_its_call(tmp_path: Path) -> None:
    run = checkpointing.Run(tmp_path, None)
    state = checkpointing.whole_state(run)
    run.checkpoints.save(1, asynchronous=True)
    with torch.no_grad():
        for each in run.model.parameters():
            each.fill_(7)
    run.checkpoints.load()
    same_bits(checkpointing.whole_state(run), state)
