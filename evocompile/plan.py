"""The plan: how one model is spread over the ranks. Frozen, printable, round-trips through JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from .errors import PlanError

ATTENTION_SCHEDULES = ("zigzag", "ring", "balanced", "auto")
RECOMPUTE, AUTO = ("none", "attention", "full"), "auto"
OVERLAP = ("selective", "all", "none")
PLACEMENTS = ("head-first", "context-first")


@dataclass(frozen=True)
class Shard:
    """Over how many ranks each state is sharded: 1 replicates it, the number of replicas R shards it fully.

    params:    P, the parameters that a rank computes with; gathered within P ranks where they are used.
    grads:     G, the gradients while they are accumulated; reduced and scattered within G ranks in each micro-batch.
    optimizer: O, the optimizer's parameters and state; gradients are reduced on to it in the last micro-batch, and
               parameters come back from it once a step.

    Nested: P divides G, G divides O, O divides R; each is over consecutive ranks, so those of a node first. (1, 1, 1)
    is data parallelism (DDP), (1, 1, R) ZeRO-1, (1, R, R) ZeRO-2, (R, R, R) ZeRO-3, (D, D, D) HSDP or MiCS.
    """

    params: int = 1
    grads: int = 1
    optimizer: int = 1

    def __post_init__(self) -> None:
        for name, degree in dataclasses.asdict(self).items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise PlanError(f"Shard.{name} must be a positive number of ranks, got {degree!r}")
        if self.grads % self.params or self.optimizer % self.grads:
            raise PlanError(
                f"{self}: the degrees are nested, so params must divide grads, and grads must divide optimizer"
            )


@dataclass(frozen=True)
class Plan:
    """How the work is split.

    dp:         replicas that each take a part of the batch.
    cp:         ranks that split the sequence and exchange key/value blocks.
    shard:      degrees of parameter, gradient and optimizer shards; `None`: all three over all ranks.
    ulysses:    ranks that split the sequence and exchange it for heads around every attention (all-to-all). The
                sequence is split over cp * ulysses ranks together; blocks are exchanged among the cp ranks of equal
                heads. Heads need not divide: ranks hold uneven numbers of them, and the key/value heads that they need.
    placement:  which ranks are neighbours: "head-first" those that exchange heads, "context-first" those that exchange
                blocks (LoongTrain, 2406.18485, section 4.3).
    inner_ring: ranks of the windows of a double ring (LoongTrain, section 4.4): a block of keys and values crosses to a
                window once, and is handed on within it. Divides cp; 1 is the single ring.
    attention:  "zigzag" (two chunks a rank, equal causal work at every step), "balanced" (contiguous chunks, ranks
                that would idle under a causal mask help others), "ring" (contiguous chunks, for other masks), or
                "auto": the order that the model's attentions take least time in, and for each attention the schedule
                within it, by work and bytes. Under each, a rank fetches only the keys that its queries can see.
    microbatches: parts of the batch that a step computes one after another, forward and backward, for a call that
                returns the loss alone. The loss is that of the whole batch.
    recompute:  what backward computes again of each layer: "none"; "attention": everything but the attention, whose
                forward and exchanges run once; "full": everything, as ordinary checkpoints of layers do; a tuple of
                these, one for each layer; the bytes that a rank may save for backward at most, or "auto": as few as
                it takes for a step to fit in `parallelize(memory=…)`. With the last two each layer does the one or
                the other, so that it takes the least time.
    recompute_layers: the fraction of the layers that do, the first ones.
    loss_chunk: bytes of logits that exist at once on a rank: a loss is computed for some rows after others, and
                backward computes logits again. 0: all at once; `None`: 64 MiB, where a rank's are over 256 MiB.
    mlp_chunk:  the same of the values inside of MLPs; 0: all at once.
    offload:    the fraction of the bytes saved for backward that wait in host memory (pinned on CUDA), the first ones;
                backward fetches them a layer ahead of their use.
    tp:         ranks that split the weights themselves, along the hidden units of MLPs and the heads of attentions, and
                compute parts of the same tokens. They are neighbours.
    overlap:    where communication starts and is waited for: "selective" beside the computation that hides it, a layer
                ahead of its use, and never in the way of what the computation waits for; "all": whatever can start
                starts; "none": where it is needed.
    pp: only its default is built yet.
    """

    dp: int = 1
    cp: int = 1
    ulysses: int = 1
    tp: int = 1
    pp: int = 1
    shard: Shard | None = None
    attention: str = "zigzag"
    placement: str = "head-first"
    inner_ring: int = 1
    recompute: str | int | tuple[str, ...] = "none"
    recompute_layers: float = 1.0
    overlap: str = "selective"
    microbatches: int = 1
    loss_chunk: int | None = None
    mlp_chunk: int = 0
    offload: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "ulysses", "tp", "pp", "microbatches", "inner_ring"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise PlanError(f"Plan.{name} must be a positive integer, got {degree!r}")
        for name in ("loss_chunk", "mlp_chunk"):
            size = getattr(self, name)
            given = isinstance(size, int) and not isinstance(size, bool) and size >= 0
            if not given and (name, size) != ("loss_chunk", None):
                raise PlanError(f"Plan.{name} must be a number of bytes, got {size!r}")
        if self.pp != 1:
            raise PlanError(f"Plan.pp={self.pp} is not built yet; use pp=1 with dp, cp, ulysses and tp")
        for name, allowed in (
            ("attention", ATTENTION_SCHEDULES),
            ("placement", PLACEMENTS),
            ("overlap", OVERLAP),
        ):
            if getattr(self, name) not in allowed:
                raise PlanError(f"Plan.{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, allowed))}")
        self._check_recompute()
        if self.recompute == "none" and self.recompute_layers != 1.0:
            raise PlanError(
                f"Plan.recompute_layers={self.recompute_layers} says how many layers compute again, but "
                "recompute='none' says that none does: choose recompute='attention' or 'full'"
            )
        if self.cp % self.inner_ring:
            raise PlanError(f"Plan.inner_ring={self.inner_ring} does not divide cp={self.cp}")
        if self.inner_ring > 1 and self.attention == "balanced":
            raise PlanError(
                "Plan.inner_ring is for the rings, not for attention='balanced', whose blocks are not handed on"
            )
        if self.shard is not None and self.replicas % self.shard.optimizer:
            raise PlanError(
                f"{self.shard}: optimizer does not divide the {self.replicas} replicas dp*cp*ulysses*tp of this plan"
            )
        for name in ("recompute_layers", "offload"):
            part = getattr(self, name)
            if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 <= part <= 1:
                raise PlanError(f"Plan.{name} must be a fraction from 0 to 1, got {part!r}")

    def _check_recompute(self) -> None:
        is_budget = type(self.recompute) is int and self.recompute > 0
        is_by_layer = isinstance(self.recompute, tuple) and set(self.recompute) <= set(RECOMPUTE)
        if self.recompute not in (*RECOMPUTE, AUTO) and not is_budget and not is_by_layer:
            choices = ", ".join(map(repr, RECOMPUTE))
            raise PlanError(
                f"Plan.recompute={self.recompute!r}: choose one of {choices}, a tuple of these for each layer, or a "
                f"number of bytes, or {AUTO!r}"
            )
        if self.recompute not in RECOMPUTE and self.recompute_layers != 1.0:
            what = f"{self.recompute} bytes choose" if is_budget else f"{self.recompute!r} chooses"
            raise PlanError(f"Plan.recompute={what} the layers: leave out recompute_layers={self.recompute_layers}")

    def __str__(self) -> str:
        """The plan as one would write it: what has its default is left out."""
        fields = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        written = [f"{name}={value!r}" for name, value, default in fields if name in ("dp", "cp") or value != default]
        return f"Plan({', '.join(written)})"

    @property
    def world(self) -> int:
        """Number of ranks: the product of the degrees."""
        return self.dp * self.cp * self.ulysses * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """R: number of ranks among which the states can be sharded."""
        return self.dp * self.cp * self.ulysses * self.tp

    @property
    def shard_degrees(self) -> Shard:
        """The shard degrees with the default filled in."""
        return self.shard or Shard(params=self.replicas, grads=self.replicas, optimizer=self.replicas)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a plan in JSON: {error}") from error
        if not isinstance(fields, dict):
            raise PlanError(f"a plan in JSON is an object, got {type(fields).__name__}")
        unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(Plan)})
        if unknown:
            raise PlanError(f"unknown fields in the plan: {', '.join(unknown)}")
        if isinstance(fields.get("recompute"), list):
            fields["recompute"] = tuple(fields["recompute"])
        if fields.get("shard") is not None:
            try:
                fields["shard"] = Shard(**fields["shard"])
            except TypeError as error:
                raise PlanError(f"Plan.shard: {error}") from error
        return Plan(**fields)
