"""Cutting a graph, and which segments count as equal."""

import cProfile

import pytest
import torch
from torch import fx

import evocompile.kernels.attention  # noqa: F401  defines the attention operators
from evocompile.collectives import is_boundary
from evocompile.segments import Segment, as_graph, cut, structure

from .graph_builder import GraphBuilder, aten, layers, many_layers, random_graph, wait


def segments_of(graph_module: fx.GraphModule) -> list[Segment]:
    return [step for step in cut(graph_module.graph) if isinstance(step, Segment)]


def test_boundaries_keep_their_order_and_stay_outside() -> None:
    _, graph_module = layers(3)
    steps = cut(graph_module.graph)
    driven = [step for step in steps if isinstance(step, fx.Node) and is_boundary(step)]
    assert driven == [node for node in graph_module.graph.nodes if is_boundary(node)]
    assert not any(is_boundary(node) for step in steps if isinstance(step, Segment) for node in step.nodes)


@pytest.mark.parametrize("seed", range(30))
def test_every_value_is_there_before_it_is_read(seed: int) -> None:
    _, graph_module = random_graph(seed)
    there = {node for node in graph_module.graph.nodes if node.op in ("placeholder", "get_attr")}
    for step in cut(graph_module.graph):
        if isinstance(step, Segment):
            assert there.issuperset(step.inputs)
            assert all(isinstance(node.meta["val"], torch.Tensor) for node in (*step.inputs, *step.outputs))
            there.update(step.outputs)
        else:
            assert there.issuperset(step.all_input_nodes)
            there.add(step)
    (output,) = graph_module.graph.find_nodes(op="output")
    assert there.issuperset(output.all_input_nodes)


def test_equal_layers_have_few_kinds_of_segments() -> None:
    _, graph_module = layers(5)
    found = segments_of(graph_module)
    assert len(found) == 2 * 5  # before and behind the second boundary of each layer
    assert len({structure(segment) for segment in found}) == 2


def test_equal_segments_have_equal_text() -> None:
    _, graph_module = layers(4)
    found = segments_of(graph_module)
    for kind in (found[0::2], found[1::2]):
        assert len({str(as_graph(segment)) for segment in kind}) == 1


def small(scalar: object = 1.0, *, width: int = 4, swap: bool = False, both: bool = False) -> Segment:
    build = GraphBuilder()
    x, y = build.input(2, width, name="x"), build.input(2, width, name="y")
    total = build.call(aten.add.Tensor, x, y)
    scaled = build.call(aten.mul.Tensor, total, scalar)
    last = build.call(aten.sub.Tensor, *((total, scaled) if swap else (scaled, total)))
    (segment,) = segments_of(build.finish([last, scaled] if both else [last]))
    return segment


def test_structure_tells_apart_what_differs() -> None:
    kinds = [
        small(0.0),
        small(-0.0),
        small(1.0),
        small(1),
        small(True),
        small(width=5),
        small(swap=True),
        small(both=True),
    ]
    assert len({structure(segment) for segment in kinds}) == len(kinds)
    assert structure(small(float("nan"))) == structure(small(float("nan")))


def test_structure_ignores_names_and_metadata() -> None:
    plain, decorated = small(), small()
    for node in decorated.nodes:
        node.name = f"renamed_{node.name}"
        node.meta["stack_trace"] = "elsewhere"
    assert structure(plain) == structure(decorated)


def test_the_wiring_of_inputs_counts() -> None:
    def segment(repeated: bool) -> Segment:
        build = GraphBuilder()
        x, y = build.input(2, 2, name="x"), build.input(2, 2, name="y")
        total = build.call(aten.add.Tensor, x, x if repeated else y)
        return segments_of(build.finish([build.call(aten.mul.Tensor, total, y)]))[0]

    assert structure(segment(True)) != structure(segment(False))


def test_views_and_single_operators_are_left_to_the_driver() -> None:
    build = GraphBuilder()
    x = build.input(4, 4)
    turned = build.call(aten.permute.default, build.call(wait, x), [1, 0])
    moved = build.call(wait, build.call(aten.clone.default, turned))
    outputs = [build.call(aten.neg.default, build.call(aten.abs.default, moved))]
    steps = cut(build.finish(outputs).graph)
    assert [type(step) for step in steps] == [fx.Node, fx.Node, fx.Node, fx.Node, Segment]


def test_tuples_are_taken_apart_where_they_are_made() -> None:
    build = GraphBuilder()
    x = build.input(4, 4)
    pair = build.call(aten.sort.default, build.call(aten.neg.default, x), 1)
    first = build.item(pair, 0)
    moved = build.call(wait, first)
    second = build.item(pair, 1)  # behind the boundary in the graph
    graph_module = build.finish([moved, second])
    segment, boundary = cut(graph_module.graph)
    assert isinstance(segment, Segment) and segment.outputs == (first, second)
    assert boundary is moved


def test_side_effects_stay_with_the_driver_and_unused_runs_disappear() -> None:
    build = GraphBuilder()
    x = build.input(4, 4)
    build.call(aten.neg.default, build.call(aten.abs.default, x))
    written = build.call(aten.mul_.Tensor, x, 2)
    assert cut(build.finish([written]).graph) == [written]


def test_constants_are_inputs_of_a_segment() -> None:
    build = GraphBuilder()
    x, table = build.input(3), build.constant(torch.ones(3), "table")
    scaled = build.call(aten.mul.Tensor, build.call(aten.add.Tensor, x, table), table)
    (segment,) = segments_of(build.finish([scaled]))
    assert segment.inputs == (x, table)


def test_cutting_is_linear() -> None:
    """Counted in Python calls, which a busy machine does not change."""

    def calls(count: int) -> int:
        graph_module = many_layers(count)
        profile = cProfile.Profile()
        with profile:
            for segment in segments_of(graph_module):
                structure(segment)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(400) < 9 * calls(50)


def test_getitem_of_a_boundary_is_the_drivers() -> None:
    build = GraphBuilder()
    q = build.input(1, 2, 3, 4, name="q")
    step = build.call(torch.ops.evocompile.attention_step.default, q, q, q, [], None, None, "True", [0, 3], [0, 3], 0.5)
    out, lse = build.item(step, 0), build.item(step, 1)
    result = build.call(aten.mul.Tensor, build.call(aten.exp.default, out), 2.0)
    steps = cut(build.finish([result, lse]).graph)
    assert steps[:3] == [step, out, lse] and isinstance(steps[3], Segment)
