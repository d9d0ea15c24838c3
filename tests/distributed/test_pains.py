"""What goes wrong for people who train on long sequences today, row by row of the design's PAINS.

Rows whose tests stand elsewhere, with others of their kind:

6   also rows that see no key: tests/kernels/test_attention.py, `test_row_6_dead_rows`, and in models
    tests/models/test_written_families.py, `test_padding_whose_rows_attend_nowhere`.
7   merging states: tests/kernels/test_numerics.py; 8 bf16 around the ring: there too.
10  the check itself hangs: tests/test_agreement.py, `test_row_10_…` and those after it, and test_same_call.py, which
    finds one rank with a compiled program and one without (`test_row_10_…`).
14  errors deep in the compiler: tests/test_capture_errors.py, `test_row_14_…`.
15  recompiles: `padded_lengths_share_programs` and `each_signature_is_compiled_once` on ranks; that a message names
    what changed: tests/test_guards.py, `test_row_15_guards_see_changes_of_the_call`.
18  checkpoints: test_checkpoints.py.
11  overlap that is off, or silently not happening: tests/passes/test_overlap.py, `test_row_11_…` and
    `test_the_order_that_runs_is_the_order_planned`.
12  gathers of weights: tests/passes/test_rematerialize.py, test_recompute.py where only some layers compute again, and
    in tests/passes/test_overlap.py `test_only_the_order_changes_and_no_weight_is_gathered_again`.
16  memory known before it runs: tests/test_memory.py, `test_row_16_it_is_known_without_the_memory`; a
    program that does not fit is refused before it runs: tests/distributed/test_memory.py.
19  models side by side: test_one_device.py, `test_models_side_by_side`.
20  sinks, dropout in attention: tests/passes/test_written_attention.py; Ulysses: tests/passes/test_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evocompile import passes, pipeline
from evocompile.collectives import program_events
from evocompile.errors import DeadlockError, VerificationError
from evocompile.passes.verify import agree
from evocompile.plan import Plan, Shard
from evocompile.program import Program
from tests.conftest import References
from tests.distributed import failing, training
from tests.distributed.jobs import Job, Jobs, selected_jobs
from tests.distributed.launch import launch
from tests.distributed.untouched import changes
from tests.models.compare import assert_gradients, assert_loss, assert_parameters
from tests.models.zoo import VOCABULARY, Case
from tests.virtual_model import captured, virtual_model

GPT = Case("gpt")


def shard(degree: int) -> Shard:
    return Shard(degree, degree, degree)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Jobs:
    return Jobs(selected_jobs(request), timeout=1200)


def equals_one_device(case: Case, plan: Plan, batches: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """Steps on the virtual cluster against the plain model; what the plain model gives."""
    virtual, plain = virtual_model(case, plan), case.build()
    expected = [training.step(plain, batch) for batch in batches]
    for batch, each in zip(batches, expected, strict=True):
        losses, gradients, _ = virtual.step(batch)
        for loss in losses:
            assert_loss(loss, each["losses"][0])
        assert_gradients(gradients, each["gradients"])
    return expected


# --- row 1: the label at a shard boundary ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [GPT, Case("llama")], ids=["cut logits", "padded labels"])
@pytest.mark.parametrize("plan", [Plan(cp=4), Plan(cp=4, attention="ring")], ids=["zigzag", "ring"])
def test_row_1_label_at_a_shard_boundary(case: Case, plan: Plan) -> None:
    """Each label that stands first in a chunk belongs to the logits that are last in another rank's chunk."""
    chunks = 2 * plan.cp if plan.attention == "zigzag" else plan.cp
    batches = [case.inputs()]
    for boundary in range(case.length // chunks, case.length, case.length // chunks):
        batch = case.inputs()
        batch["labels"][:, boundary] = (batch["input_ids"][:, boundary] + 7) % VOCABULARY
        batches.append(batch)
    first, *others = equals_one_device(case, plan, batches)
    for other in others:  # the label matters
        assert abs(float(other["losses"][0] / first["losses"][0]) - 1) > 1e-4


# --- row 2: no factor of the degree ----------------------------------------------------------------------------------

ACCUMULATED = [Job(training.accumulate, GPT, plan) for plan in (Plan(cp=4), Plan(dp=4), Plan(dp=2, cp=2))]


@pytest.mark.parametrize("job", ACCUMULATED, ids=str)
def test_row_2_no_factor_of_the_degree(job: Job, jobs: Jobs) -> None:
    expected = training.accumulate_on(job.case.build(), job.case)
    for result in jobs.results(job):
        for loss, reference in zip(result["losses"], expected["losses"], strict=True):
            assert_loss(loss, reference)
        for name, gradient in expected["gradients"].items():
            factor = float((result["gradients"][name] * gradient).sum() / gradient.square().sum())
            assert factor == pytest.approx(1, rel=1e-4), f"{name} is {factor} times one device's"
        assert_gradients(result["gradients"], expected["gradients"])


# --- row 2b: what AdamW hides, SGD shows -----------------------------------------------------------------------------

DESCENDED = [Job(training.descend, GPT, Plan(dp=2, cp=2, shard=shard(degree))) for degree in (1, 2, 4)]


@pytest.mark.parametrize("job", DESCENDED, ids=str)
def test_row_2b_plain_descent(job: Job, jobs: Jobs, references: References) -> None:
    for result in jobs.results(job):
        expected = references[job.case]["sgd"]
        for loss, reference in zip(result["losses"], expected["losses"], strict=True):
            assert_loss(loss, reference)
        assert_parameters(result["parameters"], expected)


# --- rows 3 and 6: one global count, shards without a token ----------------------------------------------------------


def labelled(valid: dict[int, list[int]]) -> dict[str, Tensor]:
    """GPT's batch with labels at these positions of each row alone."""
    batch = GPT.inputs()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for row, positions in valid.items():
        batch["labels"][row, positions] = batch["input_ids"][row, positions]
    return batch


@pytest.mark.parametrize(
    ("plan", "valid"),
    [
        # contiguous chunks of 4; the logits of position p are for the label at p + 1: 3, 1, 0 and 2 tokens a rank
        (Plan(cp=4, attention="ring"), {0: [1, 2, 4, 5, 13, 15]}),
        # replicas of 12 and 1 tokens, and of 9 and none
        (Plan(dp=2, cp=2), {0: list(range(1, 13)), 1: [8]}),
        (Plan(dp=2, cp=2), {0: list(range(3, 12))}),
    ],
)
def test_row_3_one_global_mean(plan: Plan, valid: dict[int, list[int]]) -> None:
    (expected,) = equals_one_device(GPT, plan, [labelled(valid)])
    assert abs(mean_of_means(plan, labelled(valid)) / float(expected["losses"][0]) - 1) > 1e-3


def mean_of_means(plan: Plan, batch: dict[str, Tensor]) -> float:
    """What the loss would be if each replica, or each contiguous chunk, took its own mean."""
    logits = GPT.build()(**batch)[1].detach()
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
    losses, counted = losses.view(GPT.batch, -1), batch["labels"][:, 1:] != -100
    dim = 0 if plan.dp > 1 else 1
    parts = [
        (loss[count].sum() / max(1, int(count.sum())))
        for loss, count in zip(losses.chunk(plan.dp * plan.cp, dim), counted.chunk(plan.dp * plan.cp, dim), strict=True)
    ]
    return float(sum(parts)) / len(parts)


@pytest.mark.parametrize("plan", [Plan(cp=4), Plan(cp=4, attention="ring"), Plan(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("position", [1, 8, 15])
def test_row_6_a_single_valid_token(plan: Plan, position: int) -> None:
    """All other ranks contribute zero, not NaN. (A query row without keys: tests/kernels/test_attention.py.)"""
    (expected,) = equals_one_device(GPT, plan, [labelled({0: [position]})])
    assert expected["losses"][0].isfinite()


# --- rows 4 and 5: windows and documents are not run as plainly causal -----------------------------------------------


@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(cp=4, attention="ring"), Plan(cp=4, attention="balanced")], ids=str)
@pytest.mark.parametrize("model", ["mistral", "gemma3"])
def test_row_4_a_sliding_window(model: str, plan: Plan) -> None:
    case = Case(model, length=17, seed=2)
    (expected,) = equals_one_device(case, plan, [case.inputs()])
    wide = case.build()
    wide.config.sliding_window = 512
    for layer in wide.model.layers:
        layer.self_attn.sliding_window = 512
    loss = wide(**case.inputs()).loss.detach()
    assert abs(float(loss / expected["losses"][0]) - 1) > 1e-4  # the window matters


@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(dp=2, cp=2), Plan(cp=4, attention="balanced")], ids=str)
def test_row_5_packed_documents(plan: Plan) -> None:
    case = Case("llama", length=17, seed=2, form="packed")
    (expected,) = equals_one_device(case, plan, [case.inputs()])
    whole = torch.ones(case.batch, case.length, dtype=torch.int64)  # given a mask, the model looks for no documents
    loss = case.build()(**case.inputs(), attention_mask=whole).loss.detach()
    assert abs(float(loss / expected["losses"][0]) - 1) > 1e-4  # the borders matter


# --- row 17: nothing has to divide -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [Plan(cp=4), Plan(cp=5, attention="ring"), Plan(cp=7, attention="balanced"), Plan(dp=2, cp=3)],
    ids=str,
)
def test_row_17_nothing_has_to_divide(plan: Plan) -> None:
    """3 query heads, 1 key/value head, 13 positions, 3 rows; parameters of 36, 56, 67 rows over all ranks."""
    case = Case("llama-bias", length=13, batch=3)
    equals_one_device(case, plan, [case.inputs()])


@pytest.mark.parametrize("length", [2, 3])
def test_row_17_fewer_positions_than_ranks(length: int) -> None:
    case = Case("llama", length=length, seed=1)
    batch = case.inputs()
    batch["labels"] = batch["input_ids"].clone()
    equals_one_device(case, Plan(cp=4), [batch])


# --- row 9: a pass that drops or reorders a collective ---------------------------------------------------------------


def broken_programs(monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], None]) -> list[Program]:
    """The programs of a real model after one more pass, which breaks rank 1's."""

    def careless(program: Program) -> Program:
        if program.rank == 1:
            change(program)
        return program

    monkeypatch.setattr(passes, "PASSES", passes.PASSES)  # restored after the test
    failing.add_pass(careless)
    program = captured(GPT)[1].program
    return [pipeline.run_passes(program, Plan(dp=2, cp=2, shard=shard(2)), rank) for rank in range(4)]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "exchange"])
def test_row_9_a_dropped_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerificationError, match=r"after careless: .* before its wait|after careless: .* has 0 waits"):
        broken_programs(monkeypatch, lambda program: failing.drop_wait(program, failing.starts(program, kind)[-1]))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "exchange"])
def test_row_9_a_dropped_collective(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(program: Program) -> None:
        failing.drop_collective(program, failing.starts(program, kind)[-1])

    with pytest.raises((VerificationError, DeadlockError)):
        agree([program_events(program) for program in broken_programs(monkeypatch, change)])


def test_row_9_sound_programs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    agree([program_events(program) for program in broken_programs(monkeypatch, lambda program: None)])


@pytest.mark.parametrize("alike", [False, True], ids=["of other sizes", "of equal size"])
def test_row_9_reordered_collectives(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal size they would block nobody, and give each parameter the other's values on one rank."""

    def change(program: Program) -> None:
        failing.swap(*failing.neighbouring_gathers(program, alike))

    programs = broken_programs(monkeypatch, change)
    with pytest.raises(DeadlockError, match=r"all_gather 'forward\..*' of rank . on group params:0,1 meets"):
        agree([program_events(program) for program in programs])


SWAPPED = Job(failing.run_with_swapped_gathers, GPT, Plan(dp=2, cp=2))


@pytest.mark.parametrize("job", [SWAPPED], ids=str)
def test_row_9_before_the_first_step(job: Job, jobs: Jobs) -> None:
    """Rank 1's compiler goes wrong: no rank runs the step, both say why."""
    for error in jobs.results(job):
        assert error.startswith("DeadlockError: all_gather") and "parameter blocks" in error


# --- row 13: nothing process-wide ------------------------------------------------------------------------------------


def test_row_13_nothing_process_wide() -> None:
    for outcome in launch(changes, 2, timeout=600):
        assert outcome.error is None, outcome.error
        assert outcome.result == []


# --- nothing hangs: a rank that ends, or stalls, in the middle of a backward ------------------------------------------


def test_a_rank_that_dies_makes_the_others_raise() -> None:
    *others, dead = launch(failing.train_until, 3, failing.die, timeout=300, group_timeout=60)
    assert dead.error == "died with exit code 7"
    for outcome in others:
        assert outcome.error is None, outcome.error
        assert outcome.result < 60


def test_a_rank_that_stalls_makes_the_others_raise() -> None:
    *others, _ = launch(failing.train_until, 2, failing.stall, timeout=300, group_timeout=failing.PATIENCE)
    for outcome in others:
        assert outcome.error is None, outcome.error
        assert outcome.result < failing.PATIENCE + 5
