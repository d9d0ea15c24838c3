"""The errors that a user can meet. Each says where, why, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan


class EvocompileError(Exception):
    """Base class of every error that evocompile raises on purpose."""


class PlanError(EvocompileError, ValueError):
    """The plan does not fit the world, the model or the inputs, or asks for what is not built."""


class InputError(EvocompileError, ValueError):
    """The inputs of a call cannot be used: wrong device, different between ranks, mutated by the model."""


class CaptureError(EvocompileError, ValueError):
    """The model cannot be captured as one graph. The message names the model's source line."""


class MaskError(EvocompileError, ValueError):
    """An attention mask could not be proven to be a function of positions and input tables."""


class KernelError(EvocompileError, ValueError):
    """The attention backend that was asked for does not serve a case, or there is none of that name."""


class ShardingError(EvocompileError, ValueError):
    """A value cannot be sharded as the plan asks."""


class StateError(EvocompileError, ValueError):
    """Parameters, optimizer and the compiled program do not belong together."""


class DeadlockError(EvocompileError, RuntimeError):
    """The ranks' programs would block one another, or a rank did not answer in time."""


class VerificationError(EvocompileError, RuntimeError):
    """A pass broke an invariant of the program. This is a defect of evocompile, never of the model."""


class InfeasibleError(PlanError):
    """No plan fits the cluster. The message says what is short, by how much, and the nearest plan that fits.

    leanest: the plan that needs least memory, where there is one at all.
    """

    def __init__(self, message: str, leanest: Plan | None = None) -> None:
        super().__init__(message)
        self.leanest = leanest
