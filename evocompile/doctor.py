"""doctor: what of this machine and its installation matters to evocompile, as text."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping

import torch
import torch.distributed as dist

from .attention_backends import attention_table
from .kernels import dispatch
from .torch_private import CHECKED_ON


def doctor() -> tuple[str, bool]:
    """A line per finding, and whether training can work here."""
    problems = []
    torch_version = torch.__version__.split("+")[0]
    known = torch_version in CHECKED_ON
    if not known:
        problems.append(f"torch {torch_version} was not tested: pip install torch=={CHECKED_ON[-1]}")
    if not dist.is_available():
        problems.append("this torch has no torch.distributed, so there can be no ranks: install one that has")
    asked = dispatch.forced()
    if asked is not None and asked not in dispatch.NAMES:
        problems.append(f"{dispatch.VARIABLE}={asked}: there are {', '.join(dispatch.NAMES)}")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None and not torch.cuda.is_available():
        problems.append("no C++ compiler, which backend='inductor' needs on the CPU: install g++, or use 'eager'")
    findings = {
        "evocompile": _version("evocompile"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__} ({'tested' if known else 'NOT tested; tested: ' + ', '.join(CHECKED_ON)})",
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "devices": _devices(),
        "process groups": _process_groups(),
        "CUDA allocator": allocator(torch.cuda.is_available(), os.environ),
        "attention asked for": asked or "none: the first that serves",
        "C++ compiler": compiler or "none",
    }
    width = max(map(len, findings))
    lines = [f"{what:<{width}}  {found}" for what, found in findings.items()]
    lines += ["", f"attention backends on {device.type}, by dtype, head dims and kind of mask"]
    lines += attention_table(device)
    return "\n".join([*lines, *(f"problem: {each}" for each in problems)]), not problems


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return f"CPU only, {torch.get_num_threads()} threads"
    if accelerator.type == "cuda":
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"{torch.accelerator.device_count()} of type {accelerator.type}"


def allocator(has_cuda: bool, environment: Mapping[str, str]) -> str:
    """What keeps fragmentation down on a card, or how to have it."""
    if not has_cuda:
        return "not used: no CUDA device"
    settings = [environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    if any("expandable_segments:True" in each.replace(" ", "") for each in settings):
        return "segments that grow"
    return (
        "segments of fixed sizes, which lengths that change leave holes in: "
        "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def _process_groups() -> str:
    if not dist.is_available():
        return "none"
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return ", ".join(f"{name}: {'yes' if there else 'no'}" for name, there in available.items())
