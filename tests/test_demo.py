"""The demo, what it compares, the command line, and the doctor."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evocompile import cli, demo, demo_model
from evocompile.demo import Difference, Job, Report, compare, furthest, relative
from evocompile.doctor import allocator, doctor
from evocompile.plan import Plan

TINY = Job(Plan(cp=2), steps=1, seed=0, backend="eager")


def result(**changes: Any) -> demo_model.Result:
    """What a run might have found; changes replace entries."""
    tensors = {"large": torch.tensor([1.0, -100.0]), "small": torch.tensor([1e-4, 0.0])}
    return {"losses": [5.0, 4.0], "gradients": tensors, "parameters": {"w": torch.tensor([0.5, 2.0])}, **changes}


def failed(*ranks: demo_model.Result) -> list[str]:
    _, differences = compare(result(), ranks)
    return [each.what for each in differences if not each.passed]


# --- the comparison --------------------------------------------------------------------------------------------------


def test_equal_runs_pass() -> None:
    losses, differences = compare(result(), [result(), result()])
    assert losses == [(5.0, 5.0), (4.0, 4.0)]
    assert all(each.passed and each.value == 0.0 for each in differences)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"losses": [5.0 * (1 + 2e-6), 4.0]}, "loss of step 1"),
        ({"losses": [5.0, 4.0 * (1 + 2e-4)]}, "loss of steps 2 to 2"),
        ({"losses": [5.0, math.nan]}, "loss of steps 2 to 2"),
        (
            {"gradients": {"large": torch.tensor([1.0, -100.002]), "small": torch.zeros(2)}},
            "gradients of step 1",
        ),
        ({"gradients": {"large": torch.tensor([1.0, -100.0]), "small": torch.tensor([1e-4, 2e-6])}}, "gradients"),
        (
            {"gradients": {"large": torch.tensor([1.0, math.nan]), "small": torch.zeros(2)}},
            "gradients of step 1",
        ),
        ({"parameters": {"w": torch.tensor([0.5, 2.1])}}, "parameters after step 2"),
    ],
)
def test_each_difference_is_found(changes: dict[str, Any], found: str) -> None:
    (what,) = failed(result(**changes))
    assert what.startswith(found)


def test_the_loss_of_every_rank_counts() -> None:
    assert failed(result(), result(losses=[5.1, 4.0])) == ["loss of step 1"]
    assert failed(result(), result(losses=[math.nan, 4.0])) == ["loss of step 1"]


def test_tiny_gradients_are_measured_against_the_models_largest() -> None:
    one = {"large": torch.tensor([100.0]), "tiny": torch.tensor([1e-9])}
    many = {"large": torch.tensor([100.0]), "tiny": torch.tensor([2e-9])}
    assert furthest(one, many, floor=0.1) == pytest.approx(1e-8)
    assert relative(2.0, 3.0) == 0.5 and relative(2.0, math.inf) == math.inf and relative(2.0, math.nan) == math.inf


def test_a_report_says_what_failed() -> None:
    report = Report(TINY, [(5.0, 5.5)], [Difference("loss", 0.1, 1e-6)], {"exchange": (1234, 2)}, {"ranks": 1.0})
    assert not report.passed
    assert "TOO LARGE" in str(report) and "1,234      2" in str(report)
    assert json.loads(report.to_json())["differences"] == [{"what": "loss", "value": 0.1, "allowed": 1e-6}]


# --- the data --------------------------------------------------------------------------------------------------------


def test_batches_are_pieces_of_the_text_and_repeat() -> None:
    text = demo_model.TEXT.read_text(encoding="ascii")
    assert 15_000 < len(text) < 25_000
    one = demo_model.batch(3, seed=1)
    assert one["input_ids"].shape == (demo_model.BATCH, demo_model.LENGTH)
    assert all(bytes(row).decode() in text for row in one["input_ids"].tolist())
    assert torch.equal(one["labels"], demo_model.batch(3, seed=1)["labels"])
    assert not torch.equal(one["labels"], demo_model.batch(4, seed=1)["labels"])


# --- whole runs ------------------------------------------------------------------------------------------------------


def evocompile(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evocompile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_two_ranks_have_the_numbers_of_one_device() -> None:
    done = evocompile("demo", "--ranks", "2", "--backend", "eager", "--steps", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    *table, line = done.stdout.splitlines()
    found = json.loads(line)
    assert found["passed"] and len(found["losses"]) == 3
    assert found["losses"][-1][0] < found["losses"][0][0], "it learns"
    assert {"all_gather", "reduce_scatter", "exchange"} <= found["sent"].keys()
    assert table[0].split() == ["step", "one", "device", "2", "ranks", "difference"]
    assert "2 ranks: step 3 of 3" in done.stderr and "step 3 of 3" not in done.stdout


def dies(rank: int, _job: Job, _folder: str, _threads: int) -> None:
    """A rank: number 1 dies, the others wait as in a collective whose peer is gone."""
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def waits(_rank: int, _job: Job, folder: str, _threads: int) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


def in_time(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dead_rank_ends_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "_rank_main", dies)
    with pytest.raises(demo.DemoError, match=r"rank 1 failed, so the demo was stopped: .*exit code 7"):
        demo._run_ranks(TINY, tmp_path, 1)


def run_waiting_ranks(folder: str) -> None:
    demo._rank_main = waits
    demo._run_ranks(TINY, Path(folder), 1)


def is_interrupted(_rank: int, _job: Job, _folder: str, _threads: int) -> None:
    raise KeyboardInterrupt


def test_ranks_without_results_end_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "_rank_main", is_interrupted)
    with pytest.raises(demo.DemoError, match=r"a rank ended without a result: .*0\.pt"):
        demo._run_ranks(TINY, tmp_path, 1)


def test_an_interrupt_kills_the_ranks(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("spawn").Process(target=run_waiting_ranks, args=(str(tmp_path),))
    parent.start()
    try:
        assert parent.pid is not None
        assert in_time(lambda: len(list(tmp_path.iterdir())) == 2, 240)
        ranks = [int(path.name) for path in tmp_path.iterdir()]
        os.kill(parent.pid, signal.SIGINT)
        parent.join(60)
        assert parent.exitcode not in (0, None)
        assert in_time(lambda: not any(map(is_running, ranks)), 10)
    finally:
        parent.kill()


def test_a_failed_reference_ends_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_model, "__file__", str(tmp_path / "missing.py"))
    with pytest.raises(demo.DemoError, match="the single-device run ended with exit code 2"):
        demo._run_one_device(TINY, tmp_path, 1)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo", "required: --ranks"),
        ("demo --ranks 0", "'0' is not a positive number"),
        ("demo --ranks two", "'two' is not a positive number"),
        ("demo --ranks 3 --dp 2", "needs 2 ranks, but --ranks is 3"),
        ("demo --ranks 2 --cp 4 --dp 1", "needs 4 ranks, but --ranks is 2"),
        ("demo --ranks 2 --plan-json {", "not a plan in JSON"),
        ('demo --ranks 2 --plan-json {"pipeline":2}', "unknown fields in the plan: pipeline"),
        ('demo --ranks 2 --plan-json {"cp":2} --cp 2', "leave --dp and --cp out"),
        ("inspect --world 2", "--demo-model --model is required"),
        ("inspect --world 2 --demo-model --rank 2", "the ranks of --world 2 are 0 to 1"),
        ("inspect --world 4 --demo-model --dp 3", "needs 3 ranks, but --world is 4"),
        ('inspect --world 2 --demo-model --plan-json {"cp":4}', "Plan(dp=1, cp=4) needs 4 ranks, but --world is 2"),
        ('inspect --world 2 --demo-model --plan-json {"cp":2} --dp 2', "leave --dp and --cp out"),
        ("inspect --world 2 --demo-model --precision bf8", "'bf8'"),
        ("inspect --world 2 --model tests", "write module:factory"),
        ("inspect --world 2 --model no_such_module:build", "No module named 'no_such_module'"),
        ("inspect --world 2 --model json:build", "has no attribute 'build'"),
        ("train", "invalid choice: 'train'"),
    ],
)
def test_mistakes_get_a_sentence(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = cli.main(arguments.split())
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and message in captured.err and "Traceback" not in captured.err and not captured.out


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ((4, None, None, None), Plan(cp=4)),
        ((4, 2, None, None), Plan(dp=2, cp=2)),
        ((4, None, 1, None), Plan(dp=4)),
        ((4, 4, 1, None), Plan(dp=4)),
        ((2, None, None, '{"cp": 2, "attention": "ring"}'), Plan(cp=2, attention="ring")),
    ],
)
def test_plans_of_the_command_line(arguments: tuple[Any, ...], plan: Plan) -> None:
    assert cli._plan(*arguments) == plan


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", "--ranks", "2"]) == 2
    assert capsys.readouterr().err.endswith("not installed: pip install 'transformers>=5'\n")
    assert cli.main(["inspect", "--demo-model", "--world", "2"]) == 2


def perceptron() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    class Perceptron(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - self.last(torch.tanh(self.hidden(x)))).square().mean()

    return Perceptron(), {"x": torch.randn(4, 6)}


def test_inspect_prints_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "--model", f"{__name__}:perceptron", "--world", "2", "--rank", "1"]
    assert cli.main(command) == 0
    everything = capsys.readouterr().out
    assert "rank 1 of 2" in everything and "shard_states" in everything
    assert cli.main([*command, "--stage", "shard_states"]) == 0
    stage = capsys.readouterr().out
    assert "all_gather" in stage and "joint:" in stage and "joint:" not in everything
    assert cli.main([*command, "--stage", "shard"]) == 2
    assert "choose one of canonicalize, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("degrees", "plan"),
    [
        ("", "Plan(dp=1, cp=4)"),
        ("--dp 2", "Plan(dp=2, cp=2)"),
        ("--cp 1", "Plan(dp=4, cp=1)"),
        ('--plan-json {"dp":2,"cp":2,"shard":{"params":2,"grads":2,"optimizer":4}}', "Shard(params=2, grads=2,"),
    ],
)
def test_inspect_takes_a_plan(degrees: str, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "--model", f"{__name__}:perceptron", "--world", "4", "--rank", "3", *degrees.split()]
    assert cli.main(command) == 0
    found = capsys.readouterr().out
    assert plan in found and "rank 3 of 4" in found, found


def test_inspect_takes_a_precision(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "--model", f"{__name__}:perceptron", "--world", "2", "--stage", "shard_states"]
    assert cli.main([*command, "--precision", "bf16"]) == 0
    assert "bf16" in capsys.readouterr().out
    assert cli.main(command) == 0
    assert "bf16" not in capsys.readouterr().out


def test_doctor_knows_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["doctor"]) == 0
    found = capsys.readouterr().out
    assert torch.__version__ in found and "gloo: yes" in found
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    text, healthy = doctor()
    assert not healthy and "problem: torch 2.1.0 was not tested: pip install torch==2.13.0" in text


def test_doctor_says_how_the_allocator_is_to_be_set() -> None:
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in allocator(True, {})
    assert "export" in allocator(True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator(True, {name: "max_split_size_mb:64, expandable_segments: True"}) == "segments that grow"
    assert "no CUDA device" in allocator(False, {})
