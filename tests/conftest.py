from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

# One compile cache for all tests of a checkout, and for the processes that they start.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "inductor"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


class References:
    """What one device computes for a case, from a process that never imports evocompile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[Any, dict[str, Any]] = {}

    def compute(self, cases: list[Any]) -> None:
        """Computes all cases in one process, which costs one import of transformers instead of one each."""
        from tests.models.reference import compute

        missing = [case for case in dict.fromkeys(cases) if case not in self.known]
        if missing:
            self.known.update(compute(missing, self.folder / f"{len(self.known)}.pt"))

    def __getitem__(self, case: Any) -> dict[str, Any]:
        self.compute([case])
        return self.known[case]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))
