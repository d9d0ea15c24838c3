"""The driver and its segments, against the plain graph."""

import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from evocompile import torch_private
from evocompile.compile import CompiledGraph, compile_graph, restride
from evocompile.errors import InputError

from .graph_builder import GraphBuilder, aten, layers, many_layers, random_graph, wait

IOTA = {"start": 0, "step": 1, "dtype": torch.int64, "device": "cpu", "requires_grad": False}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the tests of this file, empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
        yield path


@pytest.fixture
def inductor_calls(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs given to Inductor, which are then run as they are: what can be tested without compiling."""
    graphs: list[fx.Graph] = []

    def compile_plainly(graph: fx.Graph) -> tuple[Callable[[list[Tensor]], Any], list[tuple[int, ...]]]:
        graphs.append(graph)
        module = fx.GraphModule(torch.nn.Module(), graph)

        def run(inputs: list[Tensor]) -> Any:
            values = list(inputs)
            inputs.clear()
            return module(*values)

        return run, [node.meta["val"].stride() for node in graph.output_node().args[0]]

    monkeypatch.setattr(torch_private, "compile_with_inductor", compile_plainly)
    return graphs


def assert_same(compiled: CompiledGraph, graph_module: fx.GraphModule, inputs: list[Tensor]) -> None:
    """Equal results, `None` where the graph returns `None`, and an emptied input list."""
    expected, boxed = graph_module(*inputs), list(inputs)
    found = compiled(boxed)
    assert boxed == []
    assert [value is None for value in found] == [value is None for value in expected]
    for own, other in zip(found, expected, strict=True):
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed: int, inductor_calls: list[fx.Graph]) -> None:
    build, graph_module = random_graph(seed)
    for backend in ("eager", "inductor"):
        compiled = compile_graph(graph_module, backend=backend)  # type: ignore[arg-type]
        for run in range(2):
            assert_same(compiled, graph_module, build.random_inputs(run))


def test_equal_layers_are_compiled_once(inductor_calls: list[fx.Graph]) -> None:
    build, graph_module = layers(6)
    told: list[str] = []
    compiled = compile_graph(graph_module, progress=told.append)
    assert len(inductor_calls) == 2
    assert told == ["compiling segment 1 of 2 (6 operators)", "compiling segment 2 of 2 (2 operators)"]
    assert compiled.source.count("= segment_1(") == compiled.source.count("= segment_2(") == 6
    assert_same(compiled, graph_module, build.random_inputs())


def test_the_source_reads_like_the_schedule() -> None:
    _, graph_module = layers(2)
    compiled = compile_graph(graph_module, backend="eager")
    compile(compiled.source, "driver", "exec")
    driver = compiled.source[compiled.source.index("def run(") :]
    called = re.findall(r" = (c10d_functional_wait_tensor_default|segment_\d)\(", driver)
    layer = ["c10d_functional_wait_tensor_default", "segment_1", "c10d_functional_wait_tensor_default", "segment_2"]
    assert called == layer * 2
    assert "# float32[6, 8]" in driver


def test_an_error_shows_the_line_of_the_driver() -> None:
    build, graph_module = layers(1)
    compiled = compile_graph(graph_module, backend="eager")
    inputs = build.random_inputs()
    inputs[1] = inputs[1][:3, :3]
    with pytest.raises(RuntimeError) as error:
        compiled(inputs)
    assert "= aten_mm_default(mul_tensor_1, permute_default)" in str(error.traceback[-2].statement)


def test_outputs_of_every_sort(inductor_calls: list[fx.Graph]) -> None:
    """Inputs, unused inputs, constants, `None`, one value twice, and views of inputs and of results."""
    build = GraphBuilder()
    x, unused = build.input(2, 3, name="inputs"), build.input(2, 2, name="run")  # names that the driver uses itself
    table = build.constant(torch.arange(3.0), "segment_1")
    total = build.call(aten.add.Tensor, build.call(aten.mul.Tensor, x, x), table)
    turned = build.call(aten.permute.default, total, [1, 0])
    view = build.call(aten.permute.default, x, [1, 0])
    graph_module = build.finish([x, None, total, turned, total, view, table, None, unused])
    for backend in ("eager", "inductor"):
        compiled = compile_graph(graph_module, backend=backend)  # type: ignore[arg-type]
        inputs = build.random_inputs()
        assert_same(compiled, graph_module, inputs)
        found = compiled(list(inputs))
        assert found[0] is inputs[0] and found[2] is found[4] and found[6] is graph_module.segment_1
        assert found[3].data_ptr() == found[2].data_ptr() and found[5].data_ptr() == inputs[0].data_ptr()


def test_values_die_after_their_last_use() -> None:
    """At the second boundary of a layer only its operand, the residual and the outputs are alive."""
    build, graph_module = layers(3)
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def resolve(node: fx.Node) -> Callable[..., Any]:
        def boundary(value: Tensor) -> Tensor:
            seen.append(weakref.ref(value))
            alive.append(sum(each() is not None for each in seen))
            return value.clone()

        return boundary

    compiled = compile_graph(graph_module, backend="eager", resolve=resolve)
    inputs = build.random_inputs()
    compiled(inputs)
    assert len(alive) == 6 and max(alive) == 1


def test_a_segments_inputs_die_inside_it() -> None:
    build = GraphBuilder()
    x = build.input(4)
    moved = build.call(wait, x)
    graph_module = build.finish([build.call(aten.abs.default, build.call(aten.neg.default, moved))])
    moved_tensor: list[weakref.ref[Tensor]] = []
    alive_at_abs: list[bool] = []

    def boundary(value: Tensor) -> Tensor:
        copy = value.clone()
        moved_tensor.append(weakref.ref(copy))
        return copy

    compiled = compile_graph(graph_module, backend="eager", resolve=lambda node: boundary)
    original = compiled.__globals__["aten_abs_default"]  # type: ignore[attr-defined]

    def spy(value: Tensor) -> Tensor:
        alive_at_abs.append(moved_tensor[0]() is not None)
        return original(value)

    compiled.__globals__["aten_abs_default"] = spy  # type: ignore[attr-defined]
    compiled([torch.ones(4)])
    assert alive_at_abs == [False]


def test_resolve_gives_the_executor_of_each_boundary() -> None:
    build, graph_module = layers(2)
    called: list[str] = []

    def resolve(node: fx.Node) -> Callable[..., Any]:
        def boundary(value: Tensor) -> Tensor:
            called.append(node.name)
            return value

        return boundary

    compiled = compile_graph(graph_module, backend="eager", resolve=resolve)
    assert_same(compiled, graph_module, build.random_inputs())
    assert called == [node.name for node in graph_module.graph.nodes if node.target is wait]


def test_other_strides_than_planned_are_mended() -> None:
    """An input and the value of a boundary come transposed, where the graph has views that need contiguous ones."""
    build = GraphBuilder()
    x = build.input(4, 6)
    moved = build.call(wait, build.call(aten.view.default, x, [6, 4]))
    flat = build.call(aten.neg.default, build.call(aten.abs.default, build.call(aten.view.default, moved, [24])))
    graph_module = build.finish([flat])
    compiled = compile_graph(
        graph_module, backend="eager", resolve=lambda node: lambda value: value.t().contiguous().t()
    )
    value = torch.randn(6, 4).t()
    torch.testing.assert_close(compiled([value])[0], -value.reshape(24).abs())


def test_restride() -> None:
    value = torch.randn(3, 1, 4)
    assert restride(value, (4, 99, 1), "x") is value  # the stride of a dim of size 1 says nothing
    turned = restride(value, (1, 3, 3), "x")
    assert turned.stride() == (1, 3, 3) and torch.equal(turned, value)
    with pytest.raises(InputError, match=r"position_ids arrived with strides \(4, 1\).*expanded"):
        restride(torch.zeros(2, 4), (0, 1), "position_ids")


def test_expanded_inputs_are_taken_as_they_were_captured() -> None:
    build = GraphBuilder()
    with build.mode:
        positions = build.input_like(torch.arange(4.0).expand(2, 4), "positions")
    graph_module = build.finish([build.call(aten.cos.default, build.call(aten.mul.Tensor, positions, 0.5))])
    compiled = compile_graph(graph_module, backend="eager")
    value = torch.arange(4.0).expand(2, 4)
    torch.testing.assert_close(compiled([value])[0], (value * 0.5).cos())
    with pytest.raises(InputError, match="positions"):
        compiled([value.contiguous()])


def test_twenty_thousand_nodes_in_seconds() -> None:
    graph_module = many_layers(2000)
    assert len(graph_module.graph.nodes) > 20_000
    start = time.process_time()
    compile_graph(graph_module, backend="eager")
    assert time.process_time() - start < 10  # 2 s on a quiet machine


def test_eager_does_not_import_inductors_compiler() -> None:
    script = """
import sys
from tests.graph_builder import layers
from evocompile.compile import compile_graph
compile_graph(layers(1)[1], backend="eager")
assert "torch._inductor.compile_fx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent)


# --- Inductor itself: seconds for each compiled segment ---------------------------------------------------------------


def test_inductor(inductor_cache: Path) -> None:
    """A transformer-like block: what is whole in our graphs is decomposed, constants, views as outputs, no inputs."""
    build = GraphBuilder()
    table, x = build.input(10, 8, name="table"), build.input(3, 8)
    weight = build.input(16, 8, name="weight")
    ids = build.constant(torch.tensor([1, 7, 1]), "ids")
    embedded = build.call(aten.add.Tensor, build.call(aten.embedding.default, table, ids), x)
    squares = build.call(aten.mean.dim, build.call(aten.mul.Tensor, embedded, embedded), [-1], True)
    normed = build.call(aten.mul.Tensor, embedded, build.call(aten.rsqrt.default, squares))
    gate = build.call(aten.mm.default, normed, build.call(aten.permute.default, weight, [1, 0]))
    gate = build.call(aten.mul.Tensor, gate, build.call(aten.sigmoid.default, gate))
    gathered = build.call(wait, build.call(aten.permute.default, gate, [1, 0]))
    mask = build.call(
        aten.ge.Scalar, build.call(torch.ops.prims.iota.default, 3, **IOTA), 1
    )  # a segment without inputs
    moved = build.call(wait, mask)
    back = build.call(aten.mm.default, build.call(aten.permute.default, gathered, [1, 0]), weight)
    kept = build.call(aten.where.self, build.call(aten.unsqueeze.default, moved, 1), back, x)
    lost = build.call(aten.embedding_dense_backward.default, kept, ids, 10, -1, False)
    turned = build.call(aten.permute.default, kept, [1, 0])
    graph_module = build.finish([kept, None, turned, lost, normed, kept])
    compiled = compile_graph(graph_module, backend="inductor")
    assert "compiled by Inductor" in compiled.source
    assert_same(compiled, graph_module, build.random_inputs())
    strided = build.random_inputs()
    strided[1] = strided[1].t().contiguous().t()
    assert_same(compiled, graph_module, strided)


def test_inductor_caches_across_layers_and_graphs(inductor_cache: Path) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    for count in (3, 2):
        build, graph_module = layers(count)
        assert_same(compile_graph(graph_module), graph_module, build.random_inputs())
    assert counters["inductor"]["fxgraph_cache_miss"] == 2
    assert counters["inductor"]["fxgraph_cache_hit"] == 2


def test_inductor_takes_empty_tensors(inductor_cache: Path) -> None:
    build, graph_module = layers(1, rows=0)
    compiled = compile_graph(graph_module)
    assert_same(compiled, graph_module, build.random_inputs())


def test_inductor_where_nothing_is_left_to_compute(inductor_cache: Path) -> None:
    build = GraphBuilder()
    x = build.input(2, 3)
    same = build.call(aten.mul.Tensor, build.call(aten.add.Tensor, x, 0), 1)
    graph_module = build.finish([build.call(aten.permute.default, same, [1, 0])])
    assert_same(compile_graph(graph_module), graph_module, build.random_inputs())


def test_compiling_ignores_the_callers_modes(inductor_cache: Path) -> None:
    """The first call may come inside autocast and with gradients on."""
    build, graph_module = layers(1)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = compile_graph(graph_module)
    assert_same(compiled, graph_module, build.random_inputs())
