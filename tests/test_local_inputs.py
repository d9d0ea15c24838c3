"""Batches that arrive in parts, on the virtual cluster: model families, masks, uneven and empty parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evocompile.capture import capture
from evocompile.errors import InputError
from evocompile.guards import TensorSpec
from evocompile.layout import Split
from evocompile.local_inputs import Parts, _Passed, parts_of
from evocompile.mesh import Mesh
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import InputKind, Program
from tests.conftest import References
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import VirtualModel

COMBINATIONS = [
    (Case("llama", batch=3, length=13), Plan(dp=2), (2, 1)),
    (Case("llama", batch=3, length=13), Plan(dp=2, cp=2), (1, 2)),
    (Case("llama-tied", batch=3, length=9), Plan(dp=3, cp=2), (1, 0, 2)),
    (Case("gpt", batch=4, length=11), Plan(dp=2, cp=2, attention="ring"), (3, 1)),
    (Case("llama", batch=3, length=13, form="left"), Plan(dp=2, cp=2), (2, 1)),
    (Case("mistral", batch=3, length=13, form="right"), Plan(dp=2, cp=2), (1, 2)),
    (Case("llama", batch=3, length=13, form="packed"), Plan(dp=2, cp=2), (2, 1)),
    (Case("mixtral-auxiliary", batch=3, length=9), Plan(dp=2, cp=2), (2, 1)),
    (Case("bert", batch=3, length=9, form="right"), Plan(dp=2, cp=2), (2, 1)),
]


class InParts(VirtualModel):
    """Every rank is given its replica's rows only."""

    def _inputs(self, program: Program, batch: dict[str, Tensor]) -> list[Tensor]:
        rows, replica = program.batch_parts, program.coordinate["dp"]
        lo = sum(rows[:replica])
        names = {each.name for each in program.inputs if each.is_part}
        return super()._inputs(
            program, {name: each[lo : lo + rows[replica]] if name in names else each for name, each in batch.items()}
        )


def in_parts(case: Case, plan: Plan, rows: tuple[int, ...]) -> InParts:
    model, batch = case.build(), case.inputs()
    part = {name: each[: rows[0]] for name, each in batch.items()}
    captured = capture(model.forward, model, (), part, parts=Parts(rows, frozenset(batch)))
    return InParts(
        [run_passes(captured.program, plan, rank) for rank in range(plan.world)],
        {name: each.detach().clone() for name, each in model.named_parameters(remove_duplicate=False)},
        dict(model.named_buffers(remove_duplicate=False)),
        plan.shard_degrees,
    )


@pytest.fixture(scope="module", autouse=True)
def computed(references: References) -> None:
    references.compute([case for case, *_ in COMBINATIONS])


@pytest.mark.parametrize(("case", "plan", "rows"), COMBINATIONS, ids=str)
def test_one_step_equals_one_device(case: Case, plan: Plan, rows: tuple[int, ...], references: References) -> None:
    _, gradients, outputs = in_parts(case, plan, rows).step(case.inputs())
    for own in outputs:
        loss = next(each for each in own if not each.ndim and each.is_floating_point())
        assert_loss(loss, references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])


def test_only_counts_and_sums_are_communicated_over_dp_in_the_forward() -> None:
    model = in_parts(Case("llama", batch=3, length=13), Plan(dp=2), (2, 1))
    program = model.programs[0]
    assert program.forward is not None
    kinds = [
        (each.kind, each.sent)
        for node, each in program.collectives.items()
        if node.graph is program.forward.graph and not each.why.startswith("parameter")
    ]
    assert {kind for kind, _ in kinds} == {"all_reduce"} and all(sent <= 8 for _, sent in kinds), kinds
    users = [node.meta["val"].shape for node, each in _placed(program) if each.kind is InputKind.USER]
    assert users == [(2, 13), (2, 13)]


def _placed(program: Program) -> list[tuple]:
    assert program.forward is not None
    return list(zip(program.forward.graph.find_nodes(op="placeholder"), program.inputs, strict=False))


def test_given_parts_are_the_intervals_of_a_split() -> None:
    split = Split("dp", 3, "contiguous", 5, (2, 0, 3))
    assert [split.intervals(index) for index in range(3)] == [((0, 2),), (), ((2, 5),)]


# --- what makes one batch --------------------------------------------------------------------------------------------


def passed(*shapes: tuple[int, ...], same: bool = True) -> _Passed:
    specs = {f"input{i}": TensorSpec(shape, torch.int64, False) for i, shape in enumerate(shapes)}
    return _Passed(specs, {name: str(same or spec) for name, spec in specs.items()})


DP2 = Mesh.of(Plan(dp=2))


def test_inputs_with_as_many_rows_on_every_rank_are_parts() -> None:
    found = parts_of([passed((), (2, 5), (2,), (1, 5), (7,)), passed((), (1, 5), (1,), (1, 5), (7,))], DP2)
    assert found == Parts((2, 1), frozenset({"input1", "input2"}))
    assert str(found) == "parts of 2, 1 rows"


def test_what_makes_no_batch_is_refused() -> None:
    with pytest.raises(InputError, match="no input of the call has dims"):
        parts_of([passed(()), passed(())], DP2)
    with pytest.raises(InputError, match=r"\(2, 6\) on rank 1 and .* \(2, 5\) on rank 0"):
        parts_of([passed((2, 5)), passed((2, 6))], DP2)
    with pytest.raises(InputError, match="rank 1 passes the inputs"):
        parts_of([passed((2, 5)), passed((2, 5), (2,))], DP2)
    with pytest.raises(InputError, match="'input1' has not the 2 and 1 rows"):
        parts_of([passed((2, 5), (5,)), passed((1, 5), (5,), same=False)], DP2)
    with pytest.raises(InputError, match=r"differs between ranks 0 and 1, which belong to one replica: .* all 2 ranks"):
        parts_of([passed((2, 5)), passed((2, 5), same=False)], Mesh.of(Plan(cp=2)))
