"""The examples: on 2 ranks the losses of one process, and files that one process can read."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.distributed import hf_saving
from tests.distributed.launch import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("peft")
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SAVING = {"hf_trainer": "model.safetensors", "peft_lora": "adapter_model.safetensors"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, folder: Path) -> list[float]:
    return example(name).main(*[str(folder / name)] * (name in SAVING))


def on_ranks(names: list[str], folder: Path) -> dict[str, list[float]]:
    # what torchrun sets beside the ranks, as Accelerate asks for it; the ranks have met already
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    saving = hf_saving.straight_and_again(folder, folder)
    return {name: run(name, folder) for name in names} | saving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, NAMES, folder / "ranks", timeout=400)


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, results: list[dict[str, Any]], folder: Path) -> None:
    expected = run(name, folder / "one")
    assert len(expected) == 4 and len(set(expected)) == 4
    for result in results:
        # Trainer rounds what it logs
        assert result[name] == pytest.approx(expected, rel=2e-3 if name == "hf_trainer" else 1e-5)
    if name in SAVING:
        from safetensors.torch import load_file

        one, ranks = (load_file(folder / each / name / SAVING[name]) for each in ("one", "ranks"))
        assert list(one) == list(ranks) and one
        for key, value in one.items():
            torch.testing.assert_close(ranks[key], value, rtol=1e-3, atol=1e-4)
    if name == "hf_trainer":
        assert (folder / "ranks" / name / "checkpoint-4" / "optimizer.pt").exists()


def test_their_own_checkpoints(results: list[dict[str, Any]], folder: Path) -> None:
    """Saved by Trainer and Accelerate on two ranks, loaded there and on one device, each by the library's own means."""
    one = hf_saving.straight_and_again(folder / "one", folder / "ranks")
    for library in ("trainer", "accelerate"):
        expected = one[library]
        assert len(set(expected)) == hf_saving.STEPS
        again = expected if library == "trainer" else expected[hf_saving.SAVED :]  # Trainer keeps its log
        for found in (one, *results):
            assert found[library] == pytest.approx(expected, rel=1e-5)
            assert found[f"{library} again"] == pytest.approx(again, rel=1e-5)
