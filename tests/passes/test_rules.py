"""Rules that are more than a table: custom operators, routing by sorting, and what is noted of gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn

import evocompile
from evocompile import ShardingError
from evocompile.capture import capture
from evocompile.passes.rules.custom import CUSTOM
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import InputKind, Note, Program
from evocompile.virtual import virtual_step
from tests.equality import assert_equals_one_device

BATCH, LENGTH, WIDTH, EXPERTS = 2, 11, 4, 3
PLANS = [Plan(cp=3), Plan(dp=2, cp=2, attention="ring")]


class Model(nn.Module):
    """A scalar of a function of an activation (B, S, D), ids (B, S) and weights."""

    def __init__(self, function: Callable[..., Tensor], **weights: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        for name, shape in weights.items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(drawn))

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        weights = [each for name, each in self.named_parameters() if name != "scale"]
        made = self.function(x * self.scale, ids, *weights)
        values = made if isinstance(made, tuple) else (made,)
        return values[0].sin().sum(), *(value.detach() for value in values)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": torch.randint(0, 9, (BATCH, LENGTH), generator=generator)}


def notes_on(model: nn.Module) -> list[Note]:
    """Checks the model on all plans; what was noted on the last."""
    for plan in PLANS:
        model.zero_grad()
        programs = assert_equals_one_device(model, batch(), plan)
    return programs[0].notes


# ---- custom operators


@library.custom_op("rules_test::decay", mutates_args=())
def decay(x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """A scan over dim 1, and its last state."""
    states = [x[:, 0]]
    for i in range(1, x.shape[1]):
        states.append(states[-1] * rate + x[:, i])
    return torch.stack(states, 1), states[-1].clone()


@decay.register_fake
def _(x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x[:, 0])


@library.custom_op("rules_test::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(w)


@gate.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@library.custom_op("rules_test::gate_backward", mutates_args=())
def gate_backward(d_out: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(w)
    return d_out * s, (d_out * x * s * (1 - s)).flatten(0, -2).sum(0)


@gate_backward.register_fake
def _(d_out: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


gate.register_autograd(
    lambda ctx, d_out: gate_backward(d_out, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
GATE, GATE_BACKWARD = torch.ops.rules_test.gate.default, torch.ops.rules_test.gate_backward.default
DECAY = torch.ops.rules_test.decay.default


@pytest.fixture
def clean() -> Any:
    yield
    CUSTOM.clear()


def gated() -> Model:
    return Model(lambda x, ids, w: gate(x, w), w=(WIDTH,))


def test_without_a_rule_a_custom_operator_is_gathered_and_noted(clean: Any) -> None:
    notes = notes_on(gated())
    assert [note.what for note in notes] == [f"gathered for {GATE}", f"gathered for {GATE_BACKWARD}"]
    for note in notes:
        assert note.why == "there is no sharding rule for the operator"
        assert note.bytes == BATCH * LENGTH * WIDTH * 8
        assert "test_rules.py" in note.source and "gate(x, w)" in note.source


def test_a_rule_keeps_it_split(clean: Any) -> None:
    evocompile.register_sharding_rule(GATE, "b s d, d -> b s d")
    evocompile.register_sharding_rule(GATE_BACKWARD, "b s d, b s d, d -> b s d, d", summed="b s")
    assert notes_on(gated()) == []


def test_a_rule_may_depend_on_the_call(clean: Any) -> None:
    def rule(node: torch.fx.Node) -> str:
        names = " ".join("abc"[: node.args[0].meta["val"].dim() - 1])
        return f"{names} d, d -> {names} d"

    evocompile.register_sharding_rule(GATE, rule)
    evocompile.register_sharding_rule(GATE_BACKWARD, "(b s) d, (b s) d, d -> (b s) d, d", summed="b s")
    with pytest.raises(ShardingError, match="the size of 'b', 's' is seen nowhere"):
        notes_on(Model(lambda x, ids, w: gate(x.flatten(0, 1), w), w=(WIDTH,)))
    evocompile.register_sharding_rule(GATE_BACKWARD, "n d, n d, d -> n d, d", summed="n")  # replaces the first
    assert notes_on(Model(lambda x, ids, w: gate(x.flatten(0, 1), w), w=(WIDTH,))) == []


def test_a_dim_that_must_be_whole_is_gathered(clean: Any) -> None:
    evocompile.register_sharding_rule(DECAY, "b s d, d -> b s d, b d", whole="s")

    def function(x: Tensor, ids: Tensor) -> Tensor:
        states, last = decay(x.detach(), torch.full((WIDTH,), 0.5, dtype=torch.float64))
        return x * states + last[:, None]

    (note,) = notes_on(Model(function))
    assert note.what == f"gathered for {DECAY}" and note.why == "the operator needs a split dim whole"


@pytest.mark.parametrize(
    ("rule", "keywords", "message"),
    [
        ("b s d", {}, "is no rule"),
        ("b s d, d -> b s d -> d", {}, "is no rule"),
        ("b s+1, d -> b s d", {}, "names no dims"),
        ("b b d, d -> b d", {}, "occurs twice"),
        ("b s d, d -> b d", {}, "'s' is not in every result"),
        ("b s d, d -> b s d t", {}, "'t' is in a result but in no operand"),
        ("b s d, d -> b s d", {"summed": "x"}, "'x' is named as summed or whole, but is no dim"),
        ("b s d, d -> b d", {"summed": "s", "whole": "s"}, "cannot be both"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(rule: str, keywords: dict[str, str], message: str, clean: Any) -> None:
    with pytest.raises(ShardingError, match=message):
        evocompile.register_sharding_rule(GATE, rule, **keywords)
    assert GATE not in CUSTOM


@pytest.mark.parametrize(
    "operator", [torch.ops.aten.mm.default, torch.ops.aten.tanh.default, torch.ops.evocompile.attention.default]
)
def test_built_in_rules_are_not_replaced(operator: Any) -> None:
    with pytest.raises(ShardingError, match="has a rule of its own"):
        evocompile.register_sharding_rule(operator, "a b -> a b")


def test_only_overloads_have_rules() -> None:
    with pytest.raises(ShardingError, match=r"such as torch.ops.my.scale.default"):
        evocompile.register_sharding_rule(torch.ops.rules_test.gate, "b s d, d -> b s d")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("b s d -> b s d", "it is about 1 operands and 1 results, but the call has 2 and 1"),
        ("b d, d -> b d", "2 dims are named for a tensor of shape"),
        ("b s d, s -> b s d", "s=11 is named for a dim of size 4"),
        ("1 s d, d -> 1 s d", "1 is named for a dim of size 2"),
    ],
)
def test_a_rule_that_does_not_fit_names_the_line(rule: str, message: str, clean: Any) -> None:
    evocompile.register_sharding_rule(GATE, rule)
    with pytest.raises(ShardingError, match=message) as error:
        notes_on(gated())
    assert "gate(x, w)" in str(error.value) and "test_rules.py" in str(error.value)


# ---- notes


def test_a_gather_is_noted_once_for_all_layers() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).cumsum(1)
            return x.sum()

    model = Layers()
    program = run_passes(capture(model.forward, model, (), {"x": batch()["x"]}).program, Plan(cp=2), 0)
    (note,) = [note for note in program.notes if "cumsum" in note.what]
    assert note.bytes == 3 * BATCH * LENGTH * WIDTH * 8
    assert "x = layer(x).cumsum(1)" in note.source
    text = str(evocompile.inspect(model, {"x": batch()["x"]}, plan=Plan(cp=2)))
    assert text.count("gathered for aten.cumsum.default") == 1


# ---- routing


def chosen(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and numbers of the two best experts of each of N rows, (N, 2) each."""
    return (x @ router).softmax(-1).topk(2, -1)


def scatter_back(x: Tensor, ids: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """argsort, rows looked up, added back: as with `index_add`."""
    rows = x.flatten(0, 1)
    scores, numbers = chosen(rows, router)
    order = numbers.flatten().argsort(stable=True)
    made = torch.tanh(rows[order // 2]) * experts[numbers.flatten()[order]] * scores.flatten()[order][:, None]
    return torch.zeros_like(rows).index_add(0, order // 2, made).view_as(x)


def inverse_by_sorting(x: Tensor, ids: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    scores, numbers = chosen(rows, router)
    sorted_numbers, order = numbers.flatten().sort()
    made = (rows[order // 2] * experts[sorted_numbers])[order.argsort()]
    return (made.unflatten(0, (-1, 2)) * scores[..., None]).sum(1)


def inverse_by_putting(x: Tensor, ids: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    scores, numbers = chosen(rows, router)
    sorted_numbers, order = numbers.flatten().sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    made = (torch.sin(rows[order // 2]) * experts[sorted_numbers])[inverse]
    return (made.unflatten(0, (-1, 2)) * scores[..., None]).sum(1)


def gather_and_scatter(x: Tensor, ids: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """Rows by `gather` and `scatter_add` with row numbers that are expanded over the columns."""
    rows = x.flatten(0, 1)
    scores, numbers = chosen(rows, router)
    order = numbers.flatten().argsort()
    at = (order // 2)[:, None].expand(-1, WIDTH)
    made = torch.sin(rows.gather(0, at)) * experts[numbers.flatten()[order]] * scores.flatten()[order][:, None]
    return torch.zeros_like(rows).scatter_add(0, at, made)


def counted(x: Tensor, ids: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """A sum over rows in sorted order, and counts of the keys."""
    scores, numbers = chosen(x.flatten(0, 1), router)
    sorted_scores = scores.flatten()[numbers.flatten().argsort()]
    counts = torch.histc(numbers.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return sorted_scores.square().sum() * (counts * experts.sum(1) / numbers.numel()).sum()


ROUTED = [scatter_back, inverse_by_sorting, inverse_by_putting, gather_and_scatter, counted]


@pytest.mark.parametrize("function", ROUTED, ids=lambda function: function.__name__)
def test_rows_are_sorted_rank_by_rank(function: Callable[..., Tensor]) -> None:
    assert notes_on(Model(function, router=(WIDTH, EXPERTS), experts=(EXPERTS, WIDTH))) == []


def first_rows(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """The rows that come first: not every rank has them."""
    rows = x.flatten(0, 1)
    return rows[chosen(rows, router)[1][:, 0].argsort(stable=True)][:5]


def numbered_rows(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """Rows weighted by their place in the order."""
    rows = x.flatten(0, 1)
    order = chosen(rows, router)[1][:, 0].argsort(stable=True)
    return (rows[order] * torch.arange(len(order))[:, None]).sum(0)


def permutation_as_a_number(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    order = chosen(rows, router)[1][:, 0].argsort(stable=True)
    return rows * (order / len(order))[:, None]


def sorted_rows_meet_others(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    order = chosen(rows, router)[1][:, 0].argsort(stable=True)
    return rows[order] * rows


def two_orders_meet(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    numbers = chosen(rows, router)[1]
    return rows[numbers[:, 0].argsort(stable=True)] * rows[numbers[:, 1].argsort(stable=True)]


def pairs_in_order(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """Neighbours in the order, which may be on two ranks."""
    rows = x.flatten(0, 1)
    order = chosen(rows, router)[1][:, 0].argsort(stable=True)
    return rows[order].unflatten(0, (-1, 2)).prod(1)


def returned(x: Tensor, ids: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order itself, and rows in that order, are outputs."""
    rows = x.flatten(0, 1)
    order = chosen(rows, router)[1][:, 0].argsort(stable=True)
    return rows.sum(1), order, rows[order]


def running_sum(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return rows[chosen(rows, router)[1][:, 0].argsort(stable=True)].cumsum(0)


UNPROVEN = [
    first_rows,
    numbered_rows,
    permutation_as_a_number,
    sorted_rows_meet_others,
    two_orders_meet,
    pairs_in_order,
    returned,
    running_sum,
]


@pytest.mark.parametrize("function", UNPROVEN, ids=lambda function: function.__name__)
def test_where_the_order_matters_keys_are_gathered(function: Callable[..., Tensor]) -> None:
    notes = notes_on(Model(function, router=(WIDTH, EXPERTS)))
    assert any("sort" in note.what for note in notes)


# ---- grouped products


class Experts(nn.Module):
    """Rows in groups through torch's grouped product. offsets: how the ends of the groups are found."""

    def __init__(self, offsets: Callable[[Tensor, Tensor], Tensor], lowest: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.offsets, self.lowest = offsets, lowest
        self.router = nn.Parameter(torch.randn(16, EXPERTS, generator=generator))
        self.experts = nn.Parameter(torch.randn(EXPERTS, 16, 16, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, numbers = (rows @ self.router).softmax(-1).topk(2, -1)
        if self.lowest:
            numbers = numbers - self.lowest
        keys, order = numbers.flatten().sort(stable=True)
        made = torch._grouped_mm(
            rows[order // 2].bfloat16(), self.experts.bfloat16(), offs=self.offsets(numbers.flatten(), keys)
        )
        made = made.float() * scores.flatten()[order][:, None]
        return torch.zeros_like(rows).index_add(0, order // 2, made).square().sum()


def _ends(keys: Tensor) -> Tensor:
    return torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


def _grouped_programs(model: Experts, plan: Plan) -> list[Program]:
    captured = capture(model.forward, model, (), _grouped_batch()).program
    whole = Plan(dp=plan.dp, cp=plan.cp, attention=plan.attention, shard=evocompile.Shard(1, 1, 1))
    return [run_passes(captured, whole, rank) for rank in range(plan.world)]


def _grouped_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, LENGTH, 16, generator=torch.Generator().manual_seed(2))}


def _check_grouped(model: Experts, ranks: list[Program]) -> None:
    """Products are in bfloat16, so the ranks' terms of a weight's gradient are rounded each for itself."""
    values = {name: each.detach() for name, each in model.named_parameters()} | _grouped_batch()
    given = [values[each.name] for each in ranks[0].inputs if each.kind is not InputKind.TANGENT]
    step = virtual_step(ranks, [given] * len(ranks))
    expected = model(**_grouped_batch())
    expected.backward()
    for outputs, gradients in zip(step.outputs, step.gradients, strict=True):
        torch.testing.assert_close(outputs[0], expected.detach(), rtol=1e-5, atol=1e-5)
        for name, each in model.named_parameters():
            torch.testing.assert_close(gradients[name], each.grad, rtol=0.03, atol=0.03 * float(each.grad.abs().max()))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("of", ["keys as they come", "sorted keys"])
def test_groups_are_multiplied_rank_by_rank(of: str, plan: Plan) -> None:
    model = Experts(lambda numbers, keys: _ends(keys if of == "sorted keys" else numbers))
    ranks = _grouped_programs(model, plan)
    assert ranks[0].notes == []
    _check_grouped(model, ranks)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_groups_that_are_not_proven_to_be_the_keys_are_gathered(plan: Plan) -> None:
    """Offsets that count something else. Keys below the first group, whose rows would shift all others."""
    model = Experts(lambda numbers, keys: _ends((numbers + 1) % EXPERTS))
    ranks = _grouped_programs(model, plan)
    assert any("sort" in note.what for note in ranks[0].notes)
    _check_grouped(model, ranks)
    below = _grouped_programs(Experts(lambda numbers, keys: _ends(keys), lowest=1), plan)
    assert any("sort" in note.what for note in below[0].notes)
