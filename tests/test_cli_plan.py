"""`evocompile plan`: from a config file to a table, JSON and a page, without a process group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evocompile.cli import main
from evocompile.plan import Plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def config(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


def test_a_plan_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    asked = ["plan", "--model", config(tmp_path), "--cluster", "h100", "--nodes", "2", "--seq", "1024", "--batch", "4"]
    assert main([*asked, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(found["candidates"][0]["plan"]))
    assert (plan.world, found["rows"], found["length"]) == (16, 4, 1024)
    assert str(plan).replace("'", "&#x27;") in page.read_text()


def test_what_cannot_be_planned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", config(tmp_path, model_type="nothing of that name")]) == 2
    assert "is no config of a causal language model" in capsys.readouterr().err
    assert main(["plan", "--model", config(tmp_path), "--cluster", "abacus"]) == 2
    assert "--cluster abacus: no file, and no preset; those are dgx-a100-80g" in capsys.readouterr().err
    assert main(["plan", "--model", str(tmp_path / "nowhere.json")]) == 2
    assert "is no file: write module:factory" in capsys.readouterr().err
    path = tmp_path / "untyped.json"
    path.write_text("{}")
    assert main(["plan", "--model", str(path)]) == 2
    assert "it has no model_type" in capsys.readouterr().err


def test_inspect_takes_a_config_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", config(tmp_path), "--world", "2"]) == 0
    assert "rank 0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nowhere/plan.html", "."])
def test_a_page_that_cannot_be_written_is_refused_before_the_search(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["plan", "--model", "torch.nn:Identity", "--cluster", "h100", "--seq", "8", "--html", name])
    assert "a folder" in capsys.readouterr().err
