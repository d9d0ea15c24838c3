"""Ranks of one machine share Inductor's work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from filelock import FileLock

from evocompile.shared_compile import compile_segments
from evocompile.torch_private import inductor_cache_folder
from tests.distributed.launch import run_ranks
from tests.graph_builder import layers


def cache_misses() -> int:
    """Of a rank that compiles the two segments at the same time as its peer."""
    from torch._dynamo.utils import counters

    from evocompile.compile import compile_graph

    build, graph_module = layers(3)
    dist.barrier()
    compiled = compile_graph(graph_module)
    expected = graph_module(*build.random_inputs())
    assert all(own.allclose(other) for own, other in zip(compiled(build.random_inputs()), expected, strict=True))
    return counters["inductor"]["fxgraph_cache_miss"]


def test_each_segment_is_compiled_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert sum(run_ranks(cache_misses, 2, timeout=300)) == 2


def test_a_segment_that_another_compiles_is_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiled all the same, where the other never ends."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("evocompile.shared_compile._PATIENCE", 0.1)
    order: list[str] = []
    monkeypatch.setattr(
        "evocompile.torch_private.compile_with_inductor", lambda graph: order.append(graph) or (graph, [])
    )
    keys = ["one", "two", "three"]
    graphs = {key: layers(1)[1].graph for key in keys}
    compile_segments([("one", graphs["one"])])
    (used,) = Path(inductor_cache_folder(), "evocompile").glob("*.lock")
    order.clear()
    with FileLock(used):
        done = compile_segments([(key, graphs[key]) for key in keys])
    assert order == [graphs["two"], graphs["three"], graphs["one"]]
    assert [graph for graph, _ in done] == [graphs[key] for key in keys]
