"""Inductor's work, shared by the ranks of a machine: each distinct segment is compiled by one of them.

Ranks that begin together would compile the same segments in the same order, each for itself. Instead a rank passes over
a segment that another is compiling, and takes it from Inductor's cache on disk when it has been through the others. So
P ranks with equal segments compile about 1/P of them each. The operating system releases the lock of a rank that is
killed; where the cache is off, every rank compiles all, as it would alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from torch import fx

from . import torch_private
from .torch_private import CompiledSegment

_PATIENCE = 600.0  # seconds for another rank's segment; then this rank compiles it too


def compile_segments(
    segments: Sequence[tuple[Hashable, fx.Graph]], progress: Callable[[str], None] | None = None
) -> list[CompiledSegment]:
    """Each graph compiled; see `torch_private.compile_with_inductor`.

    segments: graphs, each with a key that is the same on all ranks that have the graph.
    progress: is told one sentence before each.
    """
    folder = Path(torch_private.inductor_cache_folder(), "evocompile")
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[int, CompiledSegment] = {}

    def compile_one(number: int) -> None:
        graph = segments[number][1]
        if progress is not None:
            size = sum(node.op == "call_function" for node in graph.nodes)
            progress(f"compiling segment {number + 1} of {len(segments)} ({size} operators)")
        done[number] = torch_private.compile_with_inductor(graph)

    for patience in (0.0, _PATIENCE):
        for number, (key, _) in enumerate(segments):
            if number in done:
                continue
            # Few files, used again and again: two segments that fall on one only wait for each other.
            bucket = hashlib.sha256(repr(key).encode()).hexdigest()[:2]
            try:
                with FileLock(folder / f"{bucket}.lock", timeout=patience):
                    compile_one(number)
            except Timeout:
                if patience:
                    compile_one(number)
    return [done[number] for number in range(len(segments))]
