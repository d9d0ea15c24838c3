"""The checkpoints of a training run in one folder: what `torch.distributed.checkpoint` leaves to do.

That library writes and reads the tensors: each rank its own rows, under the model's own names, so that any other plan,
world or single device can load them. What a run needs beside it is here: a folder for each step, that counts only once
all of it is on disk; a process group of its own, so that a save may run beside the training; optimizer state under
parameter names, also where some parameters have none; random generators and the position in the data.
"""

from __future__ import annotations

import io
import random
import re
import shutil
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from .errors import StateError

_STEP = re.compile(r"step-(\d+)")


class Stateful(Protocol):
    """What has a state to be saved: a schedule of learning rates, a `GradScaler`, a data loader with a position."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Checkpoints:
    """Saves and loads a run: model, optimizer, random generators and whatever else it needs to go on.

        checkpoints = Checkpoints("checkpoints", model, optimizer, schedule=schedule)
        position = checkpoints.load() or {"epoch": 0, "batch": 0}
        …
        checkpoints.save(step, asynchronous=True, epoch=epoch, batch=batch)
        …
        checkpoints.finish()

    folder:    where all ranks can read and write; the checkpoint of step 3 is its `step-00000003`, a checkpoint of
               `torch.distributed.checkpoint` with the keys `model.…`, `optimizer.state.…` and `rest.<rank>`.
    model:     parallelised, or plain on one device: each can load what the other has saved, bit for bit.
    keep:      how many complete checkpoints stay; the oldest go once a newer one is complete.
    timeout:   how long a rank waits for the others in a save or load before it raises.
    stateful:  objects with `state_dict` and `load_state_dict`, by a name of your choice. Each rank saves its own.

    All ranks make one, after `parallelize`, and call its methods alike.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        keep: int = 2,
        timeout: timedelta = timedelta(minutes=30),
        **stateful: Stateful,
    ) -> None:
        if keep < 1:
            raise StateError(f"keep={keep}: at least one checkpoint has to stay")
        self._folder = Path(folder)
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._stateful = stateful
        self._rank, self._group = 0, None
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
            self._group = dist.new_group(backend="gloo", timeout=timeout)  # of its own: a save may run beside training
        self._pending: tuple[int, Future[Any]] | None = None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending, as this rank sees them."""
        found = [(_STEP.fullmatch(path.name), path) for path in self._folder.glob("step-*")]
        return sorted(int(match[1]) for match, path in found if match and (path / ".metadata").exists())

    def save(self, step: int, *, asynchronous: bool = False, **values: Any) -> None:
        """Save the run as it is after `step` steps.

        asynchronous: return once the state is copied into the host's memory; writing goes on beside the training. The
                      next `save`, or `finish`, waits for it and raises if it failed.
        values:       small things that `load` gives back, such as the position in the data.

        A checkpoint counts once it is complete: a run that dies before loads the one before. Raises StateError if it
        could not be completed, on the other ranks too, at the latest after `timeout`.
        """
        self.finish()
        path = self._path(step)
        if self._rank == 0:
            _remove(path)
        had_state = self._optimizer is not None and bool(self._optimizer.state)
        state = self._tensors()
        if self._optimizer is not None and not had_state:  # the library has made one up, with one step counted
            self._optimizer.state.clear()
            state["optimizer"]["state"].clear()
        state["rest"] = {str(self._rank): self._rest(step, values)}
        try:
            if self._group is not None:
                dist.barrier(group=self._group)
            if asynchronous:
                future = dcp.async_save(state, checkpoint_id=path, process_group=self._group, no_dist=self._alone)
                assert isinstance(future, Future)
                self._pending = step, future
            else:
                dcp.save(state, checkpoint_id=path, process_group=self._group, no_dist=self._alone)
        except Exception as error:  # CheckpointException, or what a lost connection raises
            raise self._incomplete(step, error) from error
        if not asynchronous:
            self._remove_old()

    def finish(self) -> None:
        """Wait for the save that is under way, if one is. Raises StateError if it failed."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:
            raise self._incomplete(step, error) from error
        self._remove_old()

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Load the newest complete checkpoint, or that of `step`: model, optimizer, generators and stateful objects.

        The values that were given to `save`, and "step"; `None` where there is no checkpoint yet. Any plan, world or
        single device may have saved it. Generators and stateful objects are this rank's own, and rank 0's on ranks
        that the saving run did not have. Raises StateError for another model or optimizer, or an incomplete checkpoint.
        """
        self.finish()
        steps = self.steps()
        if step is not None and step not in steps:
            raise StateError(f"there is no complete checkpoint of step {step} in {self._folder}; complete are {steps}")
        step = self._as_rank_0(steps[-1] if step is None and steps else step)
        if step is None:
            return None
        reader = dcp.FileSystemReader(self._path(step))
        saved = set(reader.read_metadata().state_dict_metadata)
        if self._optimizer is not None:  # with a state of its own, or with gradients, it would not ask for all of it
            self._optimizer.state.clear()
            self._optimizer.zero_grad()
        state = self._tensors()
        _check_names(state, saved)
        _forget_missing(state.get("optimizer", {}).get("state", {}), saved)
        rank = str(self._rank if f"rest.{self._rank}" in saved else 0)
        state["rest"] = {rank: b""}
        dcp.load(state, storage_reader=reader, process_group=self._group, no_dist=self._alone)
        if self._optimizer is not None:
            options = StateDictOptions(strict=False)  # not every parameter has a state
            set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"], options=options)
        set_model_state_dict(self._model, state["model"])
        rest = torch.load(io.BytesIO(state["rest"][rank]), weights_only=False)
        for name, each in self._stateful.items():
            if name not in rest["stateful"]:
                raise StateError(f"the checkpoint has no state for {name!r}; it has {sorted(rest['stateful'])}")
            each.load_state_dict(rest["stateful"][name])
        _set_generators(rest["generators"])
        return rest["values"]

    # --- what is saved -----------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        on_meta = [name for name, each in self._model.state_dict().items() if getattr(each, "is_meta", False)]
        if on_meta:
            raise StateError(
                f"{on_meta[0]!r} is on the meta device: give the model memory before its checkpoint is loaded, with "
                "model.to_empty(device=…), or with evocompile.materialize() where buffers are not in the checkpoint"
            )
        state: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        if self._optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self._model, self._optimizer)
        return state

    def _rest(self, step: int, values: dict[str, Any]) -> bytes:
        buffer = io.BytesIO()
        rest = {
            "values": {**values, "step": step},
            "stateful": {name: each.state_dict() for name, each in self._stateful.items()},
            "generators": _generators(),
        }
        torch.save(rest, buffer)
        return buffer.getvalue()

    # --- the folder --------------------------------------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        return self._group is None

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _as_rank_0(self, step: int | None) -> int | None:
        """Rank 0's choice: others may see the folder a moment earlier or later."""
        if self._group is None:
            return step
        chosen = [step]
        dist.broadcast_object_list(chosen, group=self._group, group_src=0)
        return chosen[0]

    def _remove_old(self) -> None:
        if self._rank == 0:
            for step in self.steps()[: -self._keep]:
                _remove(self._path(step))

    def _incomplete(self, step: int, error: Exception) -> StateError:
        complete = self.steps()
        before = f"the last complete one is of step {complete[-1]}" if complete else "there is none before it"
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return StateError(f"the checkpoint of step {step} was not completed ({reason[0]}); {before}, in {self._folder}")


def _remove(path: Path) -> None:
    """Remove a checkpoint; half removed, it does not count as complete."""
    (path / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


# --- names -----------------------------------------------------------------------------------------------------------


def _check_names(state: dict[str, Any], saved: set[str]) -> None:
    """The library ignores what the model lacks, so a checkpoint of another model would load in part."""
    own = {f"model.{name}" for name in state["model"]}
    theirs = {name for name in saved if name.startswith("model.")}
    if own != theirs:
        raise StateError(
            f"the checkpoint is of another model: {sorted(own - theirs)[:3]} are only in the model, "
            f"{sorted(theirs - own)[:3]} only in the checkpoint"
        )
    if "optimizer" in state and not any(name.startswith("optimizer.") for name in saved):
        raise StateError("the checkpoint has no optimizer state: load it with Checkpoints(folder, model)")


def _forget_missing(states: dict[str, dict[str, Any]], saved: set[str]) -> None:
    """Leave out the states of parameters that had none when saved, as no gradient had reached them yet."""
    for parameter in list(states):
        if not any(f"optimizer.state.{parameter}.{key}" in saved for key in states[parameter]):
            del states[parameter]


# --- random generators -----------------------------------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    """The states of this process' default generators, the current accelerator's included."""
    states = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    numpy.random.set_state(states["numpy"])
    random.setstate(states["python"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        torch.get_device_module(accelerator).set_rng_state(states[accelerator.type])
