"""canonicalize: recovered predicates equal the masks that the models compute, entry by entry; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from evocompile.capture import capture
from evocompile.errors import MaskError
from evocompile.kernels.mask import parse_mask
from evocompile.passes.canonicalize import canonicalize
from evocompile.program import Program, placeholders

ops = torch.ops.evocompile
BATCH, LENGTH = 2, 12
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 7
ATTENTIONS = (ops.attention.default, ops.attention_backward.default)


def capture_program(model: nn.Module, **inputs: Any) -> Program:
    return capture(model.forward, model, (), inputs).program


def value_of(program: Program, node: fx.Node, inputs: dict[str, Tensor]) -> Tensor:
    """The real value of a node of the joint graph that depends on user inputs only."""
    assert program.joint is not None
    names = dict(zip(placeholders(program.joint.graph), (each.name for each in program.inputs), strict=True))

    def run(each: fx.Node) -> Any:
        if each.op == "placeholder":
            return inputs[names[each]]
        if each.op == "get_attr":
            return getattr(program.joint, str(each.target))
        return each.target(*fx.map_arg(each.args, run), **fx.map_arg(each.kwargs, run))  # type: ignore[operator]

    return run(node)


def attentions(program: Program, *targets: Any) -> list[fx.Node]:
    assert program.joint is not None
    return [node for node in program.joint.graph.nodes if node.target in (targets or ATTENTIONS)]


def true_masks(program: Program, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The masks of the captured attentions, by running the model's own operators; (B, H, S, T) each."""
    masks = []
    for node in attentions(program, ops.dense_attention.default):
        q, k, _, mask, is_causal, _, *form = node.args
        mask = form[4][0] if form else mask
        (batch, heads, rows, _), columns = q.meta["val"].shape, k.meta["val"].shape[2]
        allowed = torch.ones(rows, columns, dtype=torch.bool)
        if mask is not None:
            value = value_of(program, mask, inputs)
            allowed = value if value.dtype == torch.bool else value == 0
        allowed = allowed & torch.ones(rows, columns, dtype=torch.bool).tril() if is_causal else allowed
        masks.append(allowed.expand(batch, heads, rows, columns))
    return masks


def recovered_masks(program: Program, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The same from the predicates and tables of the canonical program."""
    masks = []
    for node in attentions(program, ops.attention.default):
        q, k, _, tables, text, _ = node.args
        (batch, heads, rows, _), columns = q.meta["val"].shape, k.meta["val"].shape[2]
        values = [value_of(program, table, inputs) for table in tables]
        for table, value in zip(tables, values, strict=True):
            assert table.meta["val"].shape == value.shape == (value.shape[0], columns) and value.shape[0] in (1, batch)
        positions = torch.arange(rows), torch.arange(columns)
        masks.append(
            parse_mask(text).evaluate(*positions, values, batch, heads, "cpu").expand(batch, heads, rows, columns)
        )
    return masks


def check(model: nn.Module, *batches: dict[str, Tensor], text: str | tuple[str, ...]) -> Program:
    """Canonicalizes the model's program, and compares predicate and true mask on every batch of inputs."""
    program = capture_program(model, **batches[0])
    expected = [true_masks(program, batch) for batch in batches]
    canonicalize(program)
    found = [recovered_masks(program, batch) for batch in batches]
    for masks, truths in zip(found, expected, strict=True):
        assert len(masks) == len(truths) > 0
        assert all(torch.equal(mask, truth) for mask, truth in zip(masks, truths, strict=True))
    texts = [node.args[4] for node in attentions(program, ops.attention.default)]
    assert texts == ([text] * len(texts) if isinstance(text, str) else list(text))
    assert not attentions(program, ops.dense_attention.default, ops.dense_attention_backward.default)
    return program


def square_nodes(program: Program) -> list[fx.Node]:
    """Nodes as large as a mask."""
    assert program.joint is not None
    values = [(node, node.meta.get("val")) for node in program.joint.graph.nodes]
    return [node for node, value in values if isinstance(value, Tensor) and value.shape[-2:] == (LENGTH, LENGTH)]


# ---- transformers


def llama(**config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**TINY, **config}))


TINY = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "use_cache": False,
}


def padding(*rows: list[int]) -> dict[str, Tensor]:
    return {"input_ids": IDS, "attention_mask": torch.tensor(rows)}


LEFT = padding([0] * 3 + [1] * (LENGTH - 3), [1] * LENGTH)
RIGHT = padding([1] * LENGTH, [1] * 5 + [0] * (LENGTH - 5))


def test_llama_is_causal() -> None:
    program = check(llama(), {"input_ids": IDS, "labels": IDS.clone()}, text="k <= q")
    assert square_nodes(program) == []


def test_llama_with_padding_and_one_table_for_all_layers() -> None:
    program = check(llama(), LEFT, RIGHT, text="(k <= q) & (t0(b, k) != 0)")
    assert square_nodes(program) == []
    forward, backward = attentions(program, ATTENTIONS[0]), attentions(program, ATTENTIONS[1])
    assert len(forward) == len(backward) == 2
    assert len({tuple(node.args[-3]) for node in forward + backward}) == 1
    assert all(node.meta["stack_trace"] for node in forward)
    assert [value.shape for value in backward[0].meta["val"]] == [
        node.meta["val"].shape for node in backward[0].args[1:4]
    ]


def test_llama_with_packed_documents() -> None:
    def batch(*rows: list[int]) -> dict[str, Tensor]:
        return {"input_ids": IDS, "position_ids": torch.tensor([[i for n in row for i in range(n)] for row in rows])}

    batches = batch([5, 7], [12]), batch([1, 1, 10], [4, 4, 4]), {"input_ids": IDS, "position_ids": 3 * IDS - 1}
    program = check(llama(), *batches, text="(k <= q) & (t0(b, k) == t0(b, q))")
    assert square_nodes(program) == []


def test_llama_with_packed_documents_that_all_rows_share() -> None:
    inputs = {"input_ids": IDS, "position_ids": torch.tensor([[*range(5), *range(7)]])}
    check(llama(num_hidden_layers=1), inputs, text="(k <= q) & (t0(b, k) == t0(b, q))")


def test_mistral_window() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**TINY, sliding_window=4))
    check(model, {"input_ids": IDS}, text="(k <= q) & (k > q - 4)")
    packed = {"input_ids": IDS, "position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]])}
    check(model, packed, text="(k <= q) & (k > q - 4) & (t0(b, k) == t0(b, q))")
    wide = MistralForCausalLM(MistralConfig(**TINY, sliding_window=LENGTH))
    check(wide, LEFT, RIGHT, text="(k <= q) & (t0(b, k) != 0)")


def test_gemma3_has_a_mask_for_each_kind_of_layer() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**TINY, head_dim=8, sliding_window=4, layer_types=kinds)
    check(Gemma3ForCausalLM(config), {"input_ids": IDS}, text=("(k <= q) & (k > q - 4)", "k <= q"))


# ---- modules that build their own mask


class Attention(nn.Module):
    """One projection and one attention under the mask that `build(inputs)` gives."""

    def __init__(self, build: Any, **sdpa: Any) -> None:
        super().__init__()
        self.project = nn.Linear(4, 24)
        self.build, self.sdpa = build, sdpa
        self.register_buffer("tril", torch.ones(16, 16).tril().view(1, 1, 16, 16))

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        mask = self.build(self, **inputs) if self.build else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.sdpa).sum()


X = torch.randn(BATCH, LENGTH, 4)
LOW = torch.finfo(torch.float32).min


def positions() -> tuple[Tensor, Tensor]:
    steps = torch.arange(LENGTH)
    return steps[:, None], steps[None, :]


def ones(dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=dtype)


def summed(_: nn.Module) -> Tensor:
    return torch.where(ones().tril(), 0.0, LOW) + torch.where(ones().tril(-2), LOW, 0.0)


def prefix(_: nn.Module) -> Tensor:
    q, k = positions()
    return (k <= q) | (k < 5)


def chunks(_: nn.Module) -> Tensor:
    q, k = positions()
    return (torch.div(q, 4, rounding_mode="floor") == k // 4) & (q >= k)


def strided(_: nn.Module) -> Tensor:
    q, k = positions()
    return ((q - k) % 3 == 0).logical_and(k <= q)


def band(_: nn.Module) -> Tensor:
    q, k = positions()
    return (q - k).abs() < 3


def heads(_: nn.Module) -> Tensor:
    q, k = positions()
    return (k <= q) & (q - k < (2 + 3 * torch.arange(2))[:, None, None])


def clamped(_: nn.Module) -> Tensor:
    q, k = positions()
    return torch.maximum(k, torch.full_like(k, 3)) <= q.clamp(min=5)


def merged_dims(_: nn.Module) -> Tensor:
    flat = torch.arange(LENGTH * LENGTH)
    return (flat % LENGTH <= flat // LENGTH).view(1, 1, LENGTH, LENGTH)


def joined(_: nn.Module) -> Tensor:
    full, causal = ones()[:4], ones().tril()[4:]
    return torch.cat([full, causal])


def flipped(_: nn.Module) -> Tensor:
    return ones().tril().flip(0).flip(1)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda _: ones().tril(), "k <= q"),
        (lambda _: ones(torch.float32).tril() != 0, "k <= q"),
        (lambda _: ~ones().triu(1), "k <= q"),
        (lambda _: torch.full((LENGTH, LENGTH), float("-inf")).triu(1), "k <= q"),
        (lambda _: torch.zeros(LENGTH, LENGTH).masked_fill(ones().triu(1), LOW), "k <= q"),
        (lambda _: (1.0 - ones(torch.float32).tril()) * LOW, "k <= q"),
        (summed, "(k <= q) & (k > q - 2)"),
        (lambda _: torch.where(ones().tril(-1), 0.0, float("-inf")), "k <= q - 1"),
        (lambda _: ones(), "True"),
        (lambda _: F.pad(ones()[:, 2:], (2, 0)), "k > 1"),
        (prefix, "(k <= 4) | (k <= q)"),
        (chunks, "((k // 4) == (q // 4)) & (k <= q)"),
        (strided, "(((2*k + q) % 3) == 0) & (k <= q)"),
        (band, "(k <= q + 2) & (k > q - 3)"),
        (heads, "(k <= q) & (k > q - 3*h - 2)"),
        (clamped, None),
        (merged_dims, "k <= q"),
        (joined, "(k <= q) | (q <= 3)"),
        (flipped, "k > q - 1"),
    ],
)  # fmt: skip
def test_mask_of_positions(build: Any, text: str | None) -> None:
    program = capture_program(Attention(build), x=X)
    truth = true_masks(program, {})
    canonicalize(program)
    assert all(torch.equal(*pair) for pair in zip(recovered_masks(program, {}), truth, strict=True))
    if text is not None:
        assert [node.args[-2] for node in attentions(program)] == [text, text]
    assert not [node for node in square_nodes(program) if node.meta["val"].dtype == torch.bool]


@pytest.mark.parametrize(("sdpa", "text"), [({}, "True"), ({"is_causal": True}, "k <= q")])
def test_no_mask(sdpa: dict[str, Any], text: str) -> None:
    check(Attention(None, **sdpa), {"x": X}, text=text)


def by_length(_: nn.Module, lengths: Tensor) -> Tensor:
    return (torch.arange(LENGTH) < lengths[:, None])[:, None, None, :]


def by_start(_: nn.Module, lengths: Tensor) -> Tensor:
    q, k = positions()
    return (k <= q) & (q >= lengths[:, None, None, None])


def by_shared_documents(_: nn.Module, documents: Tensor) -> Tensor:
    return documents[:, None] == documents


def by_documents_or_prefix(_: nn.Module, documents: Tensor, lengths: Tensor) -> Tensor:
    numbers = documents.cumsum(0).expand(BATCH, LENGTH)
    same = (numbers[:, :, None] == numbers[:, None, :]) | (torch.arange(LENGTH) < lengths[:, None])[:, None, :]
    return (same & ones().tril())[:, None]


LENGTHS, DOCUMENTS = torch.tensor([4, 9]), torch.tensor([0, 0, 0, 1, 1, 0, 0, 2, 2, 2, 2, 3])


@pytest.mark.parametrize(
    ("build", "inputs", "text"),
    [
        (by_length, {"lengths": LENGTHS}, "t0(b, k) != 0"),
        (by_start, {"lengths": LENGTHS}, "(k <= q) & (t0(b, q) != 0)"),
        (by_shared_documents, {"documents": DOCUMENTS}, "t0(b, k) == t0(b, q)"),
        (
            by_documents_or_prefix,
            {"documents": DOCUMENTS, "lengths": LENGTHS},
            "(k <= q) & ((t0(b, k) == t0(b, q)) | (t1(b, k) != 0))",
        ),
    ],
)
def test_mask_with_data(build: Any, inputs: dict[str, Tensor], text: str) -> None:
    check(Attention(build), {"x": X, **inputs}, text=text)


def test_data_of_a_batch_row_alone_becomes_a_table() -> None:
    def build(_: nn.Module, rows: Tensor) -> Tensor:
        return (rows > 0)[:, None, None, None] | ones().tril()

    check(Attention(build), {"x": X, "rows": torch.tensor([0, 1])}, text="(k <= q) | (t0(b, k) != 0)")


def test_rows_longer_than_the_attention() -> None:
    def build(_: nn.Module, padding: Tensor) -> Tensor:
        return padding[:, None, None, :LENGTH] != 0

    rows = torch.arange(BATCH * 20).view(BATCH, 20) % 3
    check(Attention(build), {"x": X, "padding": rows}, text="t0(b, k) != 0")


def test_documents_numbered_along_the_batch_are_not_taken_for_packed_ones() -> None:
    def build(_: nn.Module, ids: Tensor) -> Tensor:
        numbers = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        numbers, ids = numbers.transpose(0, 1), ids.transpose(0, 1)  # steps of 1 are now between rows of the batch
        return ((numbers[:, :, None] == numbers[:, None, :]) & (ids[:, None, :] <= ids[:, :, None]))[:, None]

    ids = torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH) * 5 % 13
    text = "(t0(b, k) == t0(b, q)) & (t1(b, k) <= t1(b, q))"
    check(Attention(build), {"x": torch.randn(LENGTH, LENGTH, 4), "ids": ids}, text=text)


# ---- what cannot be proven


@pytest.mark.parametrize(
    ("build", "inputs", "reason"),
    [
        (lambda _, mask: mask, {"mask": ones()[None, None]}, "reads mask, of shape"),
        (lambda _: torch.rand(LENGTH, LENGTH) > 0.5, {}, "aten.rand"),
        (lambda _: ones().tril().cumsum(-1) > 3, {}, "aten.cumsum"),
        (lambda _: torch.arange(BATCH)[:, None, None, None] * 3 < positions()[1], {}, "number of the batch row"),
        (lambda _: (positions()[0] & positions()[1]) == 0, {}, "bits of integers"),
        (lambda _: (positions()[0] - positions()[1]).to(torch.int8) * 20 >= 0, {}, "may not fit into torch.int8"),
    ],
)
def test_refused_with_the_source_line_the_operator_and_the_way_out(build: Any, inputs: Any, reason: str) -> None:
    program = capture_program(Attention(build), x=X, **inputs)
    with pytest.raises(MaskError, match=reason) as refusal:
        canonicalize(program)
    assert "test_canonicalize.py:" in str(refusal.value) and "is_causal=True" in str(refusal.value)
