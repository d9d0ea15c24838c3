"""Costs of a model under any plan, as sympy expressions that can be printed, and evaluated for many plans at once.

From the counts of a captured graph (`graph_costs.py`) come, for a rank and a step:

    work      FLOPs of products and of attention
    sent      bytes that a rank sends, by purpose (AMSP, 2311.00257, section 4; `passes/volumes.py`)
    held      bytes of states (2311.00257, section 3), activations and buffers
    seconds   from these and the cluster's speeds; what hides behind what as in InternEvo's simulator (2401.09149)

Symbols: B rows and S positions of the batch; k micro-batches; dp, cp, u (ulysses), tp; P, G, O the shard degrees;
r the part of the layers that recompute; N0, N1, … pairs of queries and keys of each kind of attention; F_bfloat16, …
FLOP/s of products, F_attention of attention; t_operator
seconds of an operator beyond its work; W_x bytes/s, t_x latency of the group of purpose x, V_x of what goes
straight from rank to rank, of which the part x_x leaves the node.

Attention's work is that of the slowest rank: under a causal mask (2·cp-1)/cp times the mean for contiguous chunks
("ring"), (cp+1)/cp for an even "balanced" schedule (2310.03294: it idles once), else the mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import sympy
from sympy import Expr, Integer, Mod, Piecewise, ceiling, floor

from .fold import Folded
from .graph_costs import Amount, Attention, Counts, Parameter, Small
from .kernels.blocks import blocks
from .passes.chunk_rows import AUTOMATIC

B, S, k, dp, cp, u, tp, P, G, O, r = sympy.symbols("B S k dp cp u tp P G O r", positive=True)  # noqa: E741
F_attention, W_memory, W_inside = sympy.symbols("F_attention W_memory W_inside", positive=True)
t_operator = sympy.Symbol("t_operator", positive=True)
hides = sympy.Symbol("hides", nonnegative=True)  # 1 where traffic of states hides behind work, 0 where it does not
STILL_SEEN = sympy.Rational(1, 5)  # of traffic that hides: λ of InternEvo's simulator
SCHEDULES = ("zigzag", "balanced", "ring")
ADAM = 2
Exprs = dict[str, Expr]
Size = Callable[[Parameter], int]


def Max(*args: Expr | int) -> Expr:
    return sympy.Max(*args, evaluate=False)


def Min(*args: Expr | int) -> Expr:
    return sympy.Min(*args, evaluate=False)


def of_group(what: str, purpose: str) -> sympy.Symbol:
    return sympy.Symbol(f"{what}_{purpose}", nonnegative=True)


@dataclass(frozen=True, eq=False)
class Costs:
    """Of one call of a model, for every plan.

    states: tensors of a parameter's shape in the optimizer's state.
    exchanged: bytes of an element of attention's states and gradients on the wire, where another system's are meant.
    bucket: bytes of the tensors whose gradients are reduced together; 0: each by itself.
    """

    folded: Folded
    states: int = ADAM
    exchanged: int = 0
    bucket: float = 0

    def over_tensor(self, degree: int) -> Costs:
        """The costs under tp of this degree, which must split something (`Folded.over_tensor`)."""
        folded = self.folded.over_tensor(degree) if degree > 1 else self.folded
        assert folded is not None, f"tp={degree} splits nothing"
        key = id(folded.counts)
        if key == id(self.folded.counts):
            return self
        if key not in self._over_tensor:
            self._over_tensor[key] = dataclasses.replace(self, folded=folded)
        return self._over_tensor[key]

    @cached_property
    def _over_tensor(self) -> dict[int, Costs]:
        return {}

    @cached_property
    def functions(self) -> dict[tuple[str, ...], Any]:
        """Expressions that were compiled, with the names of their symbols (`evaluate.py`)."""
        return {}

    def counts(self, mode: str) -> Counts:
        return self.folded.counts[mode]

    @property
    def layers(self) -> int:
        """As recomputation counts them: one for each attention."""
        return sum(self.counts("none").attended.values())

    @cached_property
    def kinds(self) -> list[Attention]:
        """The model's kinds of attention; N0 is the number of pairs of the first."""
        return list(self.counts("none").attended)

    @cached_property
    def dtypes(self) -> list[str]:
        """Types in which products are computed."""
        return sorted({*self.counts("none").forward, *self.counts("none").backward})

    @property
    def parameters(self) -> Counter[Parameter]:
        return self.counts("none").parameters

    @property
    def phi(self) -> int:
        """Φ: elements of all parameters."""
        return sum(math.prod(each.shape) * count for each, count in self.parameters.items())

    def pairs(self, length: int) -> dict[str, float]:
        """The pairs of each kind of attention in a sequence of `length` positions."""
        found = {}
        for i, kind in enumerate(self.kinds):
            queries, keys = (length if n is None else n for n in kind.lengths)
            found[f"N{i}"] = float(sum(each.pairs for each in blocks(kind.mask, (0, queries), (0, keys))))
        return found

    def is_causal(self, kind: Attention) -> bool:
        """Whether attention leaves out about half of all pairs: later keys."""
        length = self.folded.sequence
        queries, keys = (length if n is None else n for n in kind.lengths)
        return queries == keys and self.pairs(length)[f"N{self.kinds.index(kind)}"] == length * (length + 1) / 2

    # --- work ---------------------------------------------------------------------------------------------------------

    @cache  # noqa: B019 (costs live as long as a search, and are few)
    def work(self, mode: str, schedule: str) -> Exprs:
        """FLOPs of a rank in a step, by what and where."""
        none, counts = self.counts("none"), self.counts(mode)
        found: Exprs = {}
        for dtype in self.dtypes:
            forward, backward = (_expr(each.get(dtype, Amount())) for each in (none.forward, none.backward))
            again = _expr(counts.backward.get(dtype, Amount())) - backward
            parts = {"forward": forward, "backward": backward, "again": r * again}
            found |= {f"{dtype}, {where}": k * each for where, each in parts.items()}
        found["attention, forward"] = k * self._attended(none.attended, 2, 2, schedule)
        found["attention, backward"] = k * self._attended(none.attended_backward, 6, 4, schedule)
        found["attention, again"] = k * r * self._attended(counts.again, 2, 2, schedule)
        return found

    def _attended(self, calls: Counter[Attention], dim: int, v_dim: int, schedule: str) -> Expr:
        total = Integer(0)
        for kind, count in calls.items():
            pairs = sympy.Symbol(f"N{self.kinds.index(kind)}", positive=True)
            heads = ceiling(kind.heads / (u * _over_heads(kind)))
            share = (_slowest(schedule) if self.is_causal(kind) else 1) / cp
            total += count * B / (dp * k) * heads * pairs * share * (dim * kind.dim + v_dim * kind.v_dim)
        return total

    # --- bytes held ---------------------------------------------------------------------------------------------------

    @cache  # noqa: B019
    def held(self, mode: str) -> Exprs:
        """Bytes of a rank, by term. Their sum is what has to fit.

        The peak is where backward begins, with all activations and no gradient, or where it ends, with all gradients.
        """
        none, counts = self.counts("none"), self.counts(mode)
        own_copy = self._elements(lambda p: p.itemsize if p.itemsize != p.held else 0)
        same_type = self._elements(lambda p: p.itemsize if p.itemsize == p.held else 0)
        activations = self._interpolated(none.peak, counts.peak)
        if none.logits:
            chunked = self._interpolated(none.chunked, counts.chunked)
            activations = Piecewise((chunked, _expr(none.logits) > AUTOMATIC), (activations, True))
        gathered = Piecewise((0, sympy.Eq(P, 1)), (self._gathered_at_once(), True))
        accumulated = self._elements(lambda p: p.accumulated * p.trained) / G
        gradients = self._elements(lambda p: p.held * p.trained) / O
        return {
            "parameters to compute with": (own_copy + Piecewise((0, sympy.Eq(P, O)), (same_type, True))) / P,
            "gradients of micro-batches": Piecewise((0, sympy.Eq(k, 1)), (accumulated, True)),
            "optimizer": self._elements(lambda p: p.held * (1 + self.states * p.trained)) / O,
            "activations": activations,
            "gathered": gathered,
            "gradients, beyond activations": Max(0, gradients - activations - gathered),
        }

    def _gathered_at_once(self) -> int:
        """Weights of two layers, as one is gathered ahead, and the largest outside of layers (the head's)."""
        two_layers, outside = 0, [0]
        for each, count in self.parameters.items():
            size = math.prod(each.shape) * each.itemsize if each.passes else 0
            in_layer = count // self.layers if self.layers else 0
            two_layers += 2 * in_layer * size
            outside += [] if in_layer else [size]
        return two_layers + max(outside)

    def _interpolated(self, none: Amount, mode: Amount) -> Expr:
        return _expr(none) + r * (_expr(mode) - _expr(none))

    def _elements(self, size: Size, mode: str = "none") -> Expr:
        """Σ size · elements; rows are padded to a multiple of O."""
        by_rows: Counter[int] = Counter()
        for each, count in self.counts(mode).parameters.items():
            if each.shape:
                by_rows[each.shape[0]] += count * size(each) * math.prod(each.shape[1:])
        return sum((n * O * ceiling(rows / O) for rows, n in by_rows.items() if n), Integer(0))

    def _without_dims(self, size: Size) -> int:
        return sum(size(each) * count for each, count in self.parameters.items() if not each.shape)

    # --- bytes sent ---------------------------------------------------------------------------------------------------

    @cache  # noqa: B019
    def sent(self, mode: str, schedule: str) -> Exprs:
        """Bytes that a rank sends in a step, by the purpose of the group; of attention's blocks, the rank with most."""
        replicas = dp * cp * u * tp
        reduced = self._elements(lambda p: p.reduced * p.trained)
        scalars = self._without_dims(lambda p: p.reduced * p.trained)
        forward, backward, again = (self._blocks(schedule, part) for part in (0, 1, 2))
        return {
            "params": k * self._gathered(mode) * (P - 1) / P,
            "grads": k * reduced * (G - 1) / G,
            "refresh": self._elements(lambda p: p.itemsize) * (O - P) / (P * O),
            "grads_on": reduced * (O - G) / (G * O),
            "grads_copies": 2 * (reduced / replicas * (replicas / O - 1) + scalars * (replicas - 1) / replicas),
            "cp": k * (forward + r * self._again(mode) * again),
            "cp, backward": k * backward,
            "ulysses": k * (1 + r * self._again(mode)) * self._heads(False),
            "ulysses, backward": k * self._heads(True),
            "tp, gather": k * self._small(mode, lambda each: each.is_stream and each.purpose == "gather"),
            "tp, reduce": k * self._small(mode, lambda each: each.is_stream and each.purpose == "reduce"),
            "gather": k * self._small(mode, lambda each: not each.is_stream and each.purpose == "gather"),
            "reduce": k * self._small(mode, lambda each: not each.is_stream and each.purpose == "reduce"),
        }

    def _gathered(self, mode: str) -> Expr:
        """Bytes of all gathers of a micro-batch, at P = ∞."""
        none, most = (self._elements(lambda p: p.itemsize * p.passes, each) for each in ("none", mode))
        return none + r * (most - none)

    def _again(self, mode: str) -> int:
        """Whether layers that recompute attend, and exchange, again."""
        return int(bool(self.counts(mode).again))

    def _blocks(self, schedule: str, part: int) -> Expr:
        """Of the rank that sends most, in a forward (part 0, 2: again) or a backward (1) of a micro-batch."""
        total = Integer(0)
        for i, (kind, count) in enumerate(self.counts("none").attended.items()):
            if kind.lengths[1] is not None:
                continue
            rows, n = B / (dp * k), S / cp
            keys = rows * Max(_kv_heads(kind) / u, 1) * (kind.dim + kind.v_dim)
            causal, sent = self.is_causal(kind), kind._replace(exchanged=self.exchanged)
            most = _most_sent(sent, schedule, causal, keys, rows * ceiling(kind.heads / (u * _over_heads(kind))), part)
            if not causal:
                seen = sympy.Symbol(f"N{i}", positive=True) / S
                most = keys * Min(seen, S * (cp - 1) / cp) / n * _types(sent, part)
            total += count * n * most
        return total

    def _heads(self, backward: bool) -> Expr:
        """All-to-alls of a micro-batch."""
        total = Integer(0)
        for kind, count in self.counts("none").attended.items():
            rows = B / (dp * k) * S / (cp * u)
            others = kind.heads / _over_heads(kind) * (u - 1) / u
            keys = Max(_kv_heads(kind) * (u - 1) / u, (u - 1) * Min(1, _kv_heads(kind)))
            parts = others * (kind.dim + kind.v_dim) + keys * (kind.dim + kind.v_dim)
            total += count * rows * parts * kind.itemsize
        return total

    def _small(self, mode: str, chosen: Callable[[Small], bool]) -> Expr:
        """What layouts ask for. Sums over the batch are left to the runtime where micro-batches are added up."""
        total = Integer(0)
        for each, amount in self._repeated_small(mode):
            if chosen(each):
                ranks = (dp if each.batch else 1) * (cp * u if each.sequence else 1) * (tp if each.tensor else 1)
                volume = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1}.get(
                    each.kind, (ranks - 1) / ranks
                )
                once = Piecewise((1, sympy.Eq(k, 1)), (0, True)) if each.batch else 1
                total += once * amount * volume
        return total

    def _repeated_small(self, mode: str) -> Iterator[tuple[Small, Expr]]:
        """Bytes of each collective, with those that recomputing layers do again."""
        none, most = self.counts("none").small, self.counts(mode).small
        for each in dict.fromkeys([*none, *most]):
            yield each, self._interpolated(none.get(each, Amount()), most.get(each, Amount()))

    def _stream_calls(self, mode: str) -> Expr:
        """Gathers and scatters of tokens over tp, in a micro-batch."""
        none, most = (sum(n for each, n in self.counts(m).calls.items() if each.is_stream) for m in ("none", mode))
        return none + r * (most - none)

    # --- seconds ------------------------------------------------------------------------------------------------------

    @cache  # noqa: B019
    def seconds(self, mode: str, schedule: str) -> Exprs:
        """Seconds of a step by what they are spent on, each less what hides behind another."""
        work, sent = self.work(mode, schedule), self.sent(mode, schedule)
        products = sum((work[key] / _speed(key) for key in work if not key.startswith("attention")), Integer(0))
        last = sum((work[key] / _speed(key) for key in work if key.endswith("backward")), Integer(0)) / k
        attention = {where: work[f"attention, {where}"] / F_attention for where in ("forward", "backward", "again")}
        calls = sum(self.counts("none").attended.values())
        tensors = sum(self.parameters.values())
        gathers = sum(count * each.passes for each, count in self.parameters.items())
        weights = self._collective("params", sent["params"], k * gathers)
        weights += self._collective("grads", sent["grads"], k * tensors)
        calls_of_states = math.ceil(2 * self.phi / self.bucket) if self.bucket else tensors
        states = self._collective("grads_on", sent["grads_on"], calls_of_states)
        states += sent["grads_copies"] / of_group("W", "grads_copies") + calls_of_states * of_group("a", "grads_copies")
        refresh = self._collective("refresh", sent["refresh"], calls_of_states)
        messages = calls * k * _steps(schedule) * of_group("h", "cp")
        forward = sent["cp"] / of_group("V", "cp") + messages
        backward = sent["cp, backward"] / of_group("V", "cp") + 2 * messages
        part = 1 - 1 / (_steps(schedule) + 1)  # of attention's steps, those during which blocks are under way
        optimizer = self._elements(lambda p: p.held * p.trained * (3 + 2 * self.states)) / O
        return {
            "products": products,
            "attention": sum(attention.values(), Integer(0)),
            "key/value exchange": Max(0, forward - part * (attention["forward"] + attention["again"]))
            + Max(0, backward - part * attention["backward"]),
            "all-to-all": self._straight(sent["ulysses"] + sent["ulysses, backward"], 8 * k * calls),
            "weights": _behind(weights, products),
            "gradients to the optimizer": _behind(states, last),
            "refresh": _behind(refresh, (products + attention["forward"]) / (3 * k)),
            "tensor parallel": self._collective(
                "tp", sent["tp, gather"] + sent["tp, reduce"], k * self._stream_calls(mode)
            ),
            "small sums": (sent["gather"] + sent["reduce"]) / of_group("W", "reduce") + k * of_group("a", "reduce"),
            "optimizer": optimizer / W_memory,
            "operators": k * t_operator * (self.counts("none").operators + r * self._operators_again(mode)),
        }

    def _operators_again(self, mode: str) -> Expr:
        return _number(self.counts(mode).operators - self.counts("none").operators)

    def _collective(self, purpose: str, sent: Expr, calls: Expr | int) -> Expr:
        return sent / of_group("W", purpose) + calls * of_group("t", purpose)

    def _straight(self, sent: Expr, calls: Expr) -> Expr:
        leaves = of_group("x", "ulysses")
        at_once = Max(sent * (1 - leaves) / W_inside, sent * leaves / of_group("V", "ulysses"))
        return at_once + calls * of_group("h", "ulysses")


def _expr(amount: Amount) -> Expr:
    batch, sequence = (Integer(1), B, B / (dp * k)), (Integer(1), S, S / (cp * u))
    parts = (1, 1, tp)
    terms = (_number(value) * batch[b] * sequence[s] / parts[t] for (b, s, t), value in amount.items())
    return sum(terms, Integer(0))


def _over_heads(kind: Attention) -> Expr | int:
    """Ranks of tp that share the query heads."""
    return tp if kind.split else 1


def _kv_heads(kind: Attention) -> Expr | int:
    """Key/value heads of a rank of tp: one where each is at several ranks."""
    return kind.kv_heads / tp if kind.split == "heads" else Integer(kind.kv_heads)


def _number(value: float) -> Expr:
    return Integer(int(value)) if value == int(value) else sympy.Float(value)


def _speed(key: str) -> Expr:
    dtype = key.split(",")[0]
    return F_attention if dtype == "attention" else sympy.Symbol(f"F_{dtype}", positive=True)


def _behind(traffic: Expr, work: Expr) -> Expr:
    """Seconds that traffic adds to the work behind which it hides, if it does."""
    return (1 - hides) * traffic + hides * (Max(0, traffic - work) + STILL_SEEN * Min(traffic, work))


def _steps(schedule: str) -> Expr:
    """Steps at which blocks come from others."""
    return floor(cp / 2) if schedule == "balanced" else cp - 1


def _slowest(schedule: str) -> Expr:
    """The most work of a rank under a causal mask, over the mean."""
    if schedule == "ring":
        return (2 * cp - 1) / cp
    return 1 + (1 - Mod(cp, 2)) / cp if schedule == "balanced" else Integer(1)


def _types(kind: Attention, part: int) -> int:
    """Bytes of an element of a block that is sent, and in the backward comes back as a gradient."""
    return kind.itemsize + (kind.on_wire if part == 1 else 0)


def _most_sent(kind: Attention, schedule: str, causal: bool, keys: Expr, rows: Expr, part: int) -> Expr:
    """Per position of a rank; see `passes/volumes.py`. At each step of a zigzag some rank sends both of its chunks."""
    if schedule != "balanced" or not causal:
        return (cp - 1) * keys * _types(kind, part)
    steps, helped = floor(cp / 2), floor((cp - 1) / 2)
    item, state = kind.itemsize, kind.on_wire
    if part != 1:  # rank 0 lends its keys at every step, and returns what it has computed for others
        return steps * keys * item + helped * rows * (kind.v_dim + 1) * state
    helper = steps * keys * item + helped * rows * kind.dim * state
    owner = steps * keys * state + helped * rows * ((kind.dim + 2 * kind.v_dim) * item + state)
    return Max(helper, owner)


def total(parts: Iterable[Expr]) -> Expr:
    return sum(parts, Integer(0))
