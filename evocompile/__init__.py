"""evocompile: compile an unmodified PyTorch model for training on many devices at very long context."""

from .checkpoint import Checkpoints
from .cluster import Cluster
from .errors import (
    CaptureError,
    DeadlockError,
    EvocompileError,
    InfeasibleError,
    InputError,
    KernelError,
    MaskError,
    PlanError,
    ShardingError,
    StateError,
    VerificationError,
)
from .padding import pad_batch
from .plan import Plan, Shard
from .precision import Precision

# Last, as these functions take the place of the submodules of their names: `evocompile.compile` is the function,
# `from evocompile.compile import …` still reaches the module.
from .inspect import inspect  # isort: skip
from .calibrate import calibrate  # isort: skip
from .integrations import adapt  # isort: skip
from .materialize import materialize  # isort: skip
from .parallelize import compile, parallelize  # isort: skip
from .passes.rules.custom import register_sharding_rule  # isort: skip
from .search import search  # isort: skip
from .unsharded import unsharded  # isort: skip

__all__ = [
    "CaptureError",
    "Checkpoints",
    "Cluster",
    "DeadlockError",
    "EvocompileError",
    "InfeasibleError",
    "InputError",
    "KernelError",
    "MaskError",
    "Plan",
    "PlanError",
    "Precision",
    "Shard",
    "ShardingError",
    "StateError",
    "VerificationError",
    "adapt",
    "calibrate",
    "compile",
    "inspect",
    "materialize",
    "pad_batch",
    "parallelize",
    "register_sharding_rule",
    "search",
    "unsharded",
]
