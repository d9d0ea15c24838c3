"""Random small programs, drawn operator by operator, as the source text of a `forward`.

`draw_program` runs every line on real tensors while it writes it, so that it knows all shapes, and leaves out what is
not finite. What it draws from are the kinds of operators that have sharding rules.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

VOCABULARY = 5
_LARGEST = 1 << 12  # elements of a value
_MOST = 100.0  # size of an entry

Draw = Callable[[st.SearchStrategy[Any]], Any]


# ---- what the programs call


def attend(x: Tensor, weight: Tensor, causal: bool, window: int | None) -> Tensor:
    """Attention with two heads over dim -2 of a (B, S, D); weight (D, 12)."""
    q, k, v = (x @ weight).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind()
    mask = None
    if window is not None:
        positions = torch.arange(x.shape[1])
        distance = positions[:, None] - positions[None, :]
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and window is None)
    return out.transpose(1, 2).flatten(2)


def route(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """The two best experts of each row, by sorting; x (N, D), router (D, E), experts (E, D)."""
    scores, chosen = (x @ router).softmax(-1).topk(2, -1)
    order = chosen.flatten().argsort(stable=True)
    rows = torch.tanh(x[order // 2]) * experts[chosen.flatten()[order]] * scores.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // 2, rows)


def number(x: Tensor, dim: int) -> Tensor:
    """0, 1, … along `dim`, to be broadcast against x."""
    return torch.arange(x.shape[dim]).view([-1 if d == dim else 1 for d in range(x.dim())])


ENVIRONMENT: dict[str, Any] = {"torch": torch, "F": F, "attend": attend, "route": route, "number": number}


# ---- a program


@dataclass
class Text:
    """A program as it is written. shapes: of the values so far, by name; weights: shapes of the parameters."""

    batch: int
    length: int
    width: int
    lines: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: list[tuple[int, ...]] = field(default_factory=list)

    def weight(self, *shape: int) -> str:
        self.weights.append(shape)
        return f"self.w{len(self.weights) - 1}"

    @property
    def source(self) -> str:
        return "\n".join(["def forward(self, x, ids):", *(f"    {line}" for line in self.lines)])

    def __repr__(self) -> str:
        return f"\nbatch={self.batch} length={self.length} width={self.width}, weights {self.weights}\n{self.source}\n"


class Program(nn.Module):
    """The module of a text. Its source is known to linecache, so that errors can show its lines."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate(text.weights):
            self.register_parameter(f"w{i}", nn.Parameter(_random(shape, generator)))
        name = f"<program {hash(text.source):x}>"
        linecache.cache[name] = (len(text.source), None, text.source.splitlines(keepends=True), name)
        namespace = dict(ENVIRONMENT)
        exec(compile(text.source, name, "exec"), namespace)
        self.function = namespace["forward"]

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.function(self, x, ids)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7


def inputs(text: Text) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (text.batch, text.length), generator=generator)
    return {"x": _random((text.batch, text.length, text.width), generator), "ids": ids}


# ---- kinds of operators: each draws one expression of a value, or gives none

Kind = Callable[[Draw, Text, str, tuple[int, ...]], "str | None"]


def _dim(draw: Draw, shape: tuple[int, ...]) -> int:
    return draw(st.integers(0, len(shape) - 1))


def pointwise(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str:
    forms = [
        "torch.tanh({a})",
        "F.gelu({a})",
        "{a} * torch.sigmoid({a})",
        "{a} + 1.5",
        "{a} / 3",
        "-{a}",
        "torch.where({a} > 0, {a}, {a} / 2)",
        "{a}.clamp(min=-0.5)",
        "{a}.detach() * {a}",
        "{a}.float().double()",
        "torch.zeros_like({a}) + {a}.sin()",
    ]
    return draw(st.sampled_from(forms)).format(a=a)


def binary(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    fitting = [b for b, other in text.shapes.items() if _broadcasts(shape, other)]
    b = draw(st.sampled_from(fitting))
    forms = ["{a} + {b}", "{a} - {b}", "{a} * torch.tanh({b})", "torch.maximum({a}, {b})", "{a} / (1 + {b}.square())"]
    return draw(st.sampled_from(forms)).format(a=a, b=b)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def with_ids(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if shape[:2] != (text.batch, text.length):
        return None
    ids = f"ids[(...,{' None,' * (len(shape) - 2)})]"
    forms = ["{a} * ({ids} % 3)", "torch.where({ids} > 2, {a}, 0.0)", "{a}.masked_fill({ids} == 1, 0.5)"]
    return draw(st.sampled_from(forms)).format(a=a, ids=ids)


def with_positions(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    dim = _dim(draw, shape)
    forms = ["{a} * number({a}, {dim})", "torch.where(number({a}, {dim}) % 2 == 0, {a}, 2 * {a})"]
    return draw(st.sampled_from(forms)).format(a=a, dim=dim)


def reduction(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    dim, keep = _dim(draw, shape), draw(st.booleans())
    forms = ["sum({d}, {k})", "mean({d}, {k})", "amax({d}, {k})", "logsumexp({d}, {k})", "var({d}, correction=0)"]
    whole = ["sum()", "mean()", "square().mean()", "amax()"]
    pair = tuple(sorted({dim, _dim(draw, shape)}))
    form = draw(st.sampled_from([*forms, *(f"{each}" for each in whole), "sum({p}, {k})", "min({d}).values"]))
    return f"{a}.{form.format(d=dim, k=keep, p=pair)}"


def along(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    dim = _dim(draw, shape)
    forms = ["softmax({d})", "log_softmax({d})", "cumsum({d})", "sort({d}).values", "flip({d})", "roll(1, {d})"]
    some = draw(st.integers(1, shape[dim]))
    return f"{a}.{draw(st.sampled_from([*forms, f'topk({some}, {{d}}).values'])).format(d=dim)}"


def contraction(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    wide = draw(st.integers(1, 4))
    forms = [lambda: f"{a} @ {text.weight(shape[-1], wide)}", lambda: f"{a} @ {text.weight(shape[-1])}"]
    forms.append(lambda: f"F.linear({a}, {text.weight(wide, shape[-1])}, {text.weight(wide)})")
    if len(shape) > 1:
        forms.append(lambda: f"{a} @ {a}.transpose(-1, -2)")
        forms.append(lambda: f"({a} @ {a}.transpose(-1, -2)).softmax(-1) @ {a}")
        forms.append(lambda: f"{a}.transpose(-1, -2) @ {a}")
        forms.append(lambda: f"torch.einsum('i...j,i...k->jk', {a}, {a})")
        forms.append(lambda: f"torch.einsum('ij...,ik...->jk', {a}, {a})")
    return draw(st.sampled_from(forms))()


def view(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    first = _dim(draw, shape)
    last = draw(st.integers(first, len(shape) - 1))
    forms = [f"{a}.flatten({first}, {last})", f"{a}.unsqueeze({first})", f"{a}.reshape(-1)"]
    size = shape[first]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    inner = draw(st.sampled_from(divisors))
    forms.append(f"{a}.unflatten({first}, ({size // inner}, {inner}))")
    forms.append(f"{a}.reshape({', '.join(map(str, shape[::-1]))})")
    order = draw(st.permutations(range(len(shape))))
    forms += [f"{a}.permute({', '.join(map(str, order))})", f"{a}.permute({', '.join(map(str, order))}).flatten()"]
    forms += [f"{a}.expand(2, {', '.join(map(str, shape))})", f"{a}.squeeze({first})"]
    return draw(st.sampled_from(forms))


def cut(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    dim = _dim(draw, shape)
    size = shape[dim]
    lo = draw(st.integers(0, size - 1))
    hi, step = draw(st.integers(lo + 1, size)), draw(st.sampled_from([1, 1, 2]))
    before = ":, " * dim
    pads = [0, 0] * (len(shape) - 1 - dim) + [draw(st.integers(0, 2)), draw(st.integers(0, 2))]
    first = draw(st.integers(1, size))
    parts = [f"{a}.split({first}, {dim})[0]", f"{a}.chunk(2, {dim})[-1]", f"{a}.select({dim}, {lo})"]
    window = f"{a}[{before}{lo}:{hi}]"
    forms = [window, f"{a}[{before}{lo}:{hi}:{step}]", f"F.pad({a}, {pads})", f"F.pad({a}, {pads}, value=0.5)", *parts]
    if size > 1:
        forms += [f"{a}[{before}1:] - {a}[{before}:-1]", f"F.pad({a}[{before}1:], {[*pads[:-2], 0, 1]}) + {a}"]
    return draw(st.sampled_from(forms))


def join(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return f"torch.stack(({a}, 2 * {a}))"
    dim = _dim(draw, shape)
    alike = [b for b, other in text.shapes.items() if _alike(shape, other, dim)]
    b = draw(st.sampled_from(alike))
    forms = [f"torch.cat(({a}, {b}), {dim})", f"torch.stack(({a}, 2 * {a}), {dim})", f"{a}.repeat_interleave(2, {dim})"]
    return draw(st.sampled_from(forms))


def _alike(a: tuple[int, ...], b: tuple[int, ...], but: int) -> bool:
    return len(a) == len(b) and all(m == n for i, (m, n) in enumerate(zip(a, b, strict=True)) if i != but)


def look_up(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    if not shape:
        return None
    dim = _dim(draw, shape)
    size = shape[dim]
    before = ":, " * dim
    forms = [
        f"{a}[{before}ids[0] % {size}]",
        f"{a}[{before}ids % {size}]",
        f"{a}.index_select({dim}, torch.arange({size}) // 2)",
        f"{text.weight(VOCABULARY, 3)}[ids]",
        f"F.embedding(ids, {text.weight(VOCABULARY, text.width)})",
        f"{text.weight(size + 3)}[:{size}] * {a}.movedim({dim}, -1)",
    ]
    if shape[:2] == (text.batch, text.length) and len(shape) == 3:
        forms += [f"{a}.gather(2, (ids % {shape[2]})[..., None])", f"{a} * F.one_hot(ids % {shape[2]}, {shape[2]})"]
    return draw(st.sampled_from(forms))


def layer(draw: Draw, text: Text, a: str, shape: tuple[int, ...]) -> str | None:
    """What models are made of: norms, attention, experts, losses."""
    if len(shape) < 2:
        return None
    width = shape[-1]
    forms = [
        lambda: f"F.layer_norm({a}, ({width},), {text.weight(width)}, {text.weight(width)})",
        lambda: f"F.rms_norm({a}, ({width},), {text.weight(width)})",
        lambda: f"route({a}.flatten(0, -2), {text.weight(width, 3)}, {text.weight(3, width)})",
    ]
    if shape[:2] == (text.batch, text.length) and len(shape) == 3:
        causal, window = draw(st.booleans()), draw(st.sampled_from([None, 2, 4]))
        logits = lambda: f"({a} @ {text.weight(width, VOCABULARY)})"  # noqa: E731
        forms += [lambda: f"attend({a}, {text.weight(width, 12)}, {causal}, {window})"] * 2
        forms += [
            lambda: f"F.cross_entropy({logits()}.flatten(0, 1), ids.flatten(), ignore_index=1)",
            lambda: f"F.cross_entropy({logits()}[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction='sum')",
        ]
    return draw(st.sampled_from(forms))()


KINDS: list[Kind] = [
    pointwise, binary, with_ids, with_positions, reduction, along, contraction, view, cut, join, look_up, layer
]  # fmt: skip


@st.composite
def programs(draw: Draw) -> Text:
    """A text of one to seven operators; it returns a loss of some of its values, and one of the values."""
    text = Text(
        batch=draw(st.integers(1, 3)),
        length=draw(st.sampled_from([1, 2, 3, 5, 7, 8, 11, 13])),
        width=draw(st.integers(1, 4)),
    )
    text.lines.append(f"v0 = x * {text.weight(text.width)}")
    values: dict[str, Tensor] = {}
    _run(text, text.lines[0], values)
    for _ in range(draw(st.integers(1, 7))):
        kind, operand = draw(st.sampled_from(KINDS)), draw(st.sampled_from(list(text.shapes)))
        weights = len(text.weights)
        expression = kind(draw, text, operand, text.shapes[operand])
        line = f"v{len(text.lines)} = {expression}"
        if expression is None or not _run(text, line, values):
            del text.weights[weights:]
            continue
        text.lines.append(line)
    kept = draw(st.lists(st.sampled_from(list(text.shapes)), min_size=1, max_size=3, unique=True))
    text.lines.append(f"return {' + '.join(f'{name}.sin().sum()' for name in kept)}, {kept[0]}.detach()")
    return text


def _run(text: Text, line: str, values: dict[str, Tensor]) -> bool:
    """Runs one line; whether its value can be used further."""
    name, expression = line.split(" = ", 1)
    module = Program(Text(0, 0, 0, ["return None"], weights=text.weights))
    try:
        with torch.no_grad():
            value = eval(expression, {**ENVIRONMENT, **values, **inputs(text), "self": module})
    except (RuntimeError, IndexError):
        return False
    size = math.prod(value.shape)
    if not 0 < size <= _LARGEST or not bool(value.isfinite().all()) or float(value.abs().max()) > _MOST:
        return False
    values[name], text.shapes[name] = value, tuple(value.shape)
    return True
