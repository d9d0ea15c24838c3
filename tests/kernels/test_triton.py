"""The Triton kernels: numbers in the interpreter, code by compiling ahead of time, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton, which has wheels for Linux only, is not installed: pip install evocompile[dev]",
)


def run(arguments: list[str], **environment: str) -> str:
    """Output of a Python process in the repository's root."""
    cache = {"TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "triton")}
    process = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | cache | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_numbers_in_the_interpreter() -> None:
    """Everything of interpreted.py, which shares no process with the rest."""
    output = run(["-m", "pytest", "tests/kernels/interpreted.py", "-p", "no:cacheprovider"], TRITON_INTERPRET="1")
    assert "skipped" not in output


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """What the kernels become for three architectures, none of which is here."""
    lines = run(["-m", "evocompile.kernels.triton.aot", "sm_80", "sm_90", "sm_100", "sm_90:32,256"]).splitlines()
    return [json.loads(line) for line in lines]


def test_they_compile_without_spills(compiled: list[dict[str, Any]]) -> None:
    assert {each["arch"] for each in compiled} == {"sm_80", "sm_90", "sm_100"}
    assert {each["head_dim"] for each in compiled} == {32, 64, 128, 256}
    names = {f"{kernel} {variant}" for kernel in ("forward", "dkdv", "dq") for variant in ("FULL", "MASKED")}
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert names <= {each["name"] for each in compiled if each["arch"] == arch}
    assert [each for each in compiled if each["stack_bytes"]] == []
    limits = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
    assert [each for each in compiled if each["shared_bytes"] > limits[each["arch"]]] == []


def test_they_use_what_the_architecture_has(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        if each["name"] == "prepare":
            continue
        # wgmma takes 64 rows at once, which at head dim 256 the registers do not hold in dk/dv
        small = each["head_dim"] == 256 and each["name"].startswith("dkdv")
        assert each["wgmma"] == (each["arch"] == "sm_90" and not small), each
        assert each["tcgen05"] == (each["arch"] == "sm_100"), each
        assert each["tma"] == (each["arch"] != "sm_80"), each
        assert each["setmaxnreg"] == each["name"].startswith("specialised"), each


def test_the_benchmark_prints_the_table(compiled: list[dict[str, Any]]) -> None:
    """Where no GPU is, it says so; its last line is one JSON object."""
    command = ["benchmarks/kernels.py", "--arch", "sm_90", *(["--aot"] if torch.cuda.is_available() else [])]
    lines = run(command).splitlines()
    assert lines[0].startswith("kernel" if torch.cuda.is_available() else "no GPU here")
    found = json.loads(lines[-1])["kernels"]
    assert {"name", "arch", "head_dim", "registers", "shared_bytes", "stack_bytes", "wgmma", "tma"} <= set(found[0])
    assert found == [each for each in compiled if each["arch"] == "sm_90"][: len(found)]
