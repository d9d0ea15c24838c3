"""Predictions of the cost model against what others measured and printed.

    python benchmarks/published.py [FOLDER] [--table FILE.csv] [--fit]

FOLDER has the published tables (default: ../shared/published beside the repository). Every table is known by its
columns; `--table` predicts the rows of another file that has the columns of one of them. Each system is a plan, and
its model is captured, so nothing but the constants below is made for these tables: three for each cluster, speeds that
could be measured on it. `--fit` finds them again from FOLDER's seconds and MFU (least squares).

The last line is JSON: median and worst relative error of seconds, the number of rows, and what misses.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from evocompile.cluster import Cluster, Link
from evocompile.costs import Costs
from evocompile.evaluate import Evaluator, degrees_of
from evocompile.fold import Folded, fold
from evocompile.plan import Plan, Shard
from evocompile.precision import Precision

# hidden, layers, heads, key/value heads, MLP; `7B-33H` has one more head of 128 (published/README.md)
MODELS = {
    "7B": (4096, 32, 32, 32, 11008),
    "7B-GQA": (4096, 32, 32, 8, 11008),
    "7B-33H": (4224, 32, 33, 33, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "30B": (6656, 60, 52, 52, 17920),
}
VOCABULARY = 32000
BUCKET = 512 << 20  # bytes of gradients that are reduced together, but for ZeRO-3, which works by parameter


class Constants(NamedTuple):
    """linear: part of the peak that products reach. across, latency: bytes/s and seconds of a way out of a node.

    operator: seconds that an operator takes beyond its work. `None`: the preset's.
    """

    linear: float
    across: float
    latency: float | None = None
    operator: float | None = None


FITTED = {
    "dgx-a100-80g": Constants(0.6139, 13.37e9, operator=8.617e-5),
    "a800": Constants(0.5479, 11.05e9, latency=3.58e-5),
}


class Row(NamedTuple):
    """One published figure. unit: "s", "MFU" (per cent), "TGS" (tokens per device and second).

    hides: traffic of states hides behind work, but for what is named in `seen`.
    """

    table: str
    what: str
    system: str
    published: float
    unit: str
    cluster: str
    gpus: int
    model: str
    tokens: int
    rows: int
    plan: Plan
    hides: bool
    splits_weights: bool = False
    bucket: float = 0
    seen: tuple[str, ...] = ()


@cache
def costs_of(model: str, bucket: float = 0) -> Costs:
    """These systems exchange what attention computes in 16 bits, as they compute."""
    return Costs(folded(model), exchanged=2, bucket=bucket)


@cache
def folded(model: str) -> Folded:
    """Captured at two rows of 2,048 positions; what it costs is a polynomial in both."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, layers, heads, kv_heads, mlp = MODELS[model]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=1 << 20,
    )
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ids = torch.zeros(2, 2048, dtype=torch.int64)
    return fold(made, (), {"input_ids": ids, "labels": ids}, Precision("bf16", reduce="bf16", accumulate="bf16"))


@cache
def evaluator(row: Row, constants: Constants) -> Evaluator:
    base = Cluster(row.cluster)
    operator = base.device.operator if constants.operator is None else constants.operator
    device = dataclasses.replace(base.device, linear=constants.linear, operator=operator)
    across = Link(constants.across, base.across.latency if constants.latency is None else constants.latency)
    devices = min(base.devices, row.gpus)
    cluster = dataclasses.replace(base, nodes=row.gpus // devices, device=device, across=across)
    return Evaluator(costs_of(row.model, row.bucket), cluster, row.rows, row.tokens, row.hides)


def predict(row: Row, constants: Constants) -> float:
    """In the row's unit."""
    seconds = _seconds(row, spent(row, constants))
    trained = row.rows * row.tokens
    if row.unit == "TGS":
        return trained / row.gpus / seconds
    if row.unit == "MFU":
        hidden, layers, *_ = MODELS[row.model]
        model_flops = 6 * costs_of(row.model).phi + 12 * layers * hidden * row.tokens  # attention not halved
        return 100 * model_flops * trained / row.gpus / seconds / Cluster(row.cluster).device.peak("bfloat16")
    return seconds


def spent(row: Row, constants: Constants) -> dict[str, float]:
    """Seconds of a step by what they are spent on."""
    plan = row.plan
    part = np.array([1.0 if plan.recompute != "none" else 0.0])
    asked = degrees_of([plan]), plan.recompute, plan.attention, part
    terms = dict(evaluator(row, constants).spent(*asked))
    if row.seen:
        unhidden = evaluator(row._replace(hides=False), constants).spent(*asked)
        terms |= {name: unhidden[name] for name in row.seen}
    return {name: float(each[0]) for name, each in terms.items()}


def _seconds(row: Row, terms: Mapping[str, float]) -> float:
    """Where a system splits the weights themselves (Megatron), nothing of the states is sent."""
    left_out = {"weights", "gradients to the optimizer", "refresh"} if row.splits_weights else set()
    return sum(seconds for name, seconds in terms.items() if name not in left_out)


# --- tables -----------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[Row]:
    with path.open() as file:
        lines = list(csv.DictReader(file))
    columns = set(lines[0]) if lines else set()
    for needed, read in TABLES:
        if needed <= columns:
            return [row for line in lines for row in read(path.stem, line)]
    raise SystemExit(f"{path}: its columns are those of no published table: {', '.join(sorted(columns))}")


def _context(table: str, what: str, system: str, seconds: float, gpus: int, model: str, tokens: int) -> Row:
    """A system of the DistFlashAttn paper: one sequence a step, states sharded over all ranks (FSDP), or Megatron."""
    whole = Shard(gpus, gpus, gpus)
    plans = {
        "LightSeq": Plan(cp=gpus, attention="balanced", recompute="attention", shard=whole),
        "layer checkpoint": Plan(cp=gpus, attention="balanced", recompute="full", shard=whole),
        "Ulysses": Plan(ulysses=gpus, recompute="full", shard=whole),
        "Megatron": Plan(tp=gpus, recompute="full", shard=Shard(1, 1, 1)),
    }
    known = (table, what, system, seconds, "s", "dgx-a100-80g", gpus, model, tokens, 1)
    return Row(*known, plans[system], True, system == "Megatron")


def _iteration(table: str, line: Mapping[str, str]) -> Iterator[Row]:
    gpus, tokens, model = int(line["gpus"]), int(line["total_tokens"]), line["model"]
    what = f"{model}, {gpus} GPUs, {tokens} tokens"
    for column, system in (("megatron_s", "Megatron"), ("ulysses_s", "Ulysses"), ("lightseq_s", "LightSeq")):
        if line.get(column):
            yield _context(table, what, system, float(line[column]), gpus, model, tokens)


def _checkpointing(table: str, line: Mapping[str, str]) -> Iterator[Row]:
    tokens = 8 * int(line["tokens_per_gpu"])
    systems = (("layer_checkpoint_s", "layer checkpoint"), ("attention_output_checkpoint_s", "LightSeq"))
    for column, system in systems:
        yield _context(table, f"7B, 8 GPUs, {tokens} tokens", system, float(line[column]), 8, "7B", tokens)


def _mfu(table: str, line: Mapping[str, str]) -> Iterator[Row]:
    """4M tokens a step, in rows of 4,096; overlap of the gradients' traffic is what AMSP adds to the others."""
    gpus, degrees = int(line["gpus"]), ("params_shard", "grads_shard", "optimizer_shard")
    rows = (4 << 20) // 4096
    shard = Shard(*(int(line[name]) for name in degrees))
    plan = Plan(dp=gpus, shard=shard, microbatches=max(1, rows // gpus))
    system, what = line["system"], f"{line['model']}, {gpus} GPUs, {shard.params}/{shard.grads}/{shard.optimizer}"
    known = (table, what, system, float(line["mfu_percent"]), "MFU", "a800", gpus, line["model"], 4096, rows)
    yield Row(*known, plan, system == "AMSP", bucket=0 if system == "ZeRO-3" else BUCKET)


def _overlap(table: str, line: Mapping[str, str]) -> Iterator[Row]:
    """64 GPUs. The degrees were not published: parameters whole at 7B, within 4 at 13B, 8 at 30B, where they fit."""
    model, parts = line["model"], int(line["micro_batches"])
    params = {"7B": 1, "13B": 4}.get(model, 8)
    plan = Plan(dp=64, microbatches=parts, shard=Shard(params, params, 8))
    columns = {
        "all_tgs": (),
        "no_broadcast_overlap_tgs": ("refresh",),
        "no_allreduce_overlap_tgs": ("gradients to the optimizer",),
        "none_tgs": ("refresh", "gradients to the optimizer", "weights"),
    }
    for column, seen in columns.items():
        known = (table, f"{model}, {parts} micro-batches", column, float(line[column]), "TGS", "a800", 64, model, 4096)
        yield Row(*known, 64 * parts, plan, True, bucket=BUCKET, seen=seen)


TABLES = (
    ({"gpus", "total_tokens", "model", "lightseq_s"}, _iteration),
    ({"tokens_per_gpu", "layer_checkpoint_s", "attention_output_checkpoint_s"}, _checkpointing),
    ({"model", "gpus", "system", "mfu_percent", "params_shard"}, _mfu),
    ({"model", "micro_batches", "all_tgs", "none_tgs"}, _overlap),
)
EFFICIENCY = {"gpus", "ring_forward", "ring_both", "zigzag_forward", "zigzag_both"}


def efficiencies(path: Path) -> list[str]:
    """Predicted beside published: the balance of causal work on 8 GPUs, attention of Llama-3.1-8B, 8K tokens each."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    ring, zigzag = 100 * 8 / (2 * 8 - 1), 100.0
    return [
        f"  {line['gpus']}: ring {line['ring_both']} %, by balance alone {ring:.1f}; zigzag {line['zigzag_both']} %, "
        f"by balance alone {zigzag:.1f}: what is missing are smaller blocks, merges and exchanges that are seen"
        for line in lines
    ]


# --- constants --------------------------------------------------------------------------------------------------------


def fit(rows: list[Row]) -> Constants:
    """The constants of one cluster, by grids that get finer: relative errors of seconds, MFU in points."""

    def error(row: Row, constants: Constants) -> float:
        predicted = predict(row, constants)
        return math.log(predicted / row.published) if row.unit == "s" else (predicted - row.published) / 100

    def loss(constants: Constants) -> float:
        return sum(error(row, constants) ** 2 for row in rows)

    best = FITTED[rows[0].cluster]
    for step in (1.3, 1.1, 1.03, 1.01):
        while True:
            moves = itertools.product(*(_near(each, step) for each in best))
            nearby = [Constants(*each) for each in moves]
            better = min(nearby, key=loss)
            if better == best or loss(better) >= loss(best):
                break
            best = better
    return best


def _near(value: float | None, step: float) -> list[float | None]:
    return [None] if value is None else [float(f"{each:.4g}") for each in (value / step, value, value * step)]


# --- the report -------------------------------------------------------------------------------------------------------


def report(rows: list[Row], constants: Mapping[str, Constants]) -> dict[str, object]:
    predictions = [predict(row, constants[row.cluster]) for row in rows]
    errors, misses = [], []
    for row, predicted in zip(rows, predictions, strict=True):
        error = predicted / row.published - 1
        print(
            f"  {row.table:28} {row.what:32} {row.system:18} {row.published:9.4g} {predicted:9.4g} {row.unit:4} "
            f"{error:+7.1%}"
        )
        if row.unit == "s":
            errors.append(abs(error))
        if (row.unit == "s" and abs(error) > 0.2) or (row.unit == "MFU" and abs(predicted - row.published) > 4.5):
            misses.append(f"{row.table}: {row.what}, {row.system}: {predicted:.3g} for {row.published:.4g} {row.unit}")
    right, pairs, wrong = _ranking(rows, predictions)
    misses += wrong
    print(f"ranking of figures of one table that differ by more than 5 %: {right} of {pairs} right")
    for miss in misses:
        print(f"not reproduced: {miss}")
    return {
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "worst_error": round(max(errors), 4) if errors else None,
        "rows": len(rows),
        "seconds_rows": len(errors),
        "ranking_right": right,
        "ranking_pairs": pairs,
        "not_reproduced": misses,
    }


def _ranking(rows: list[Row], predictions: list[float]) -> tuple[int, int, list[str]]:
    right, pairs, wrong = 0, 0, []
    known = list(zip(rows, predictions, strict=True))
    for (one, a), (other, b) in itertools.combinations(known, 2):
        same = (one.table, one.what, one.unit) == (other.table, other.what, other.unit)
        same |= one.unit == other.unit == "MFU" and one.model == other.model
        if same and abs(one.published / other.published - 1) > 0.05:
            pairs += 1
            if (one.published < other.published) == (a < b):
                right += 1
            else:
                names = f"{one.table}: {one.what}: the order of {one.system} and {other.system}"
                wrong.append(f"{names}, {one.published:g} and {other.published:g}: {a:.3g} and {b:.3g}")
    return right, pairs, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "published"
    parser.add_argument("folder", nargs="?", type=Path, default=beside)
    parser.add_argument("--table", type=Path, help="predict the rows of this file instead")
    parser.add_argument("--fit", action="store_true", help="find the constants again")
    options = parser.parse_args()
    tables = [options.table] if options.table else sorted(options.folder.glob("*.csv"))
    if not tables:
        sys.exit(f"{options.folder} has no tables: name the folder of the published measurements")
    rows: list[Row] = []
    for path in tables:
        with path.open() as file:
            columns = set(next(csv.reader(file)))
        if columns >= EFFICIENCY:
            print(path.stem, *efficiencies(path), sep="\n")
        else:
            rows += rows_of(path)
    constants = dict(FITTED)
    if options.fit:
        for cluster in FITTED:
            known = [row for row in rows if row.cluster == cluster and row.unit in ("s", "MFU")]
            constants[cluster] = fit(known) if known else FITTED[cluster]
    for cluster, each in constants.items():
        print(f"{cluster}: {each}")
    print(json.dumps(report(rows, constants)))


if __name__ == "__main__":
    main()
