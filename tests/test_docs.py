"""The snippets of README.md and docs/*.md that are marked as runnable run.

A fence says how: "python run" for a part of the page's one script, "python run ranks=2" for a script of its own that
two ranks run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists()]

_FENCE = re.compile(r"^```python run(?: ranks=(?P<ranks>\d+))?$")


def scripts(page: str) -> list[tuple[int, str]]:
    """The scripts of a page as (ranks, text). Their lines stand where they stand in the page, so tracebacks fit."""
    lines = page.splitlines()
    joined = [""] * len(lines)
    apart = []
    start, ranks = None, 1
    for number, line in enumerate(lines):
        if start is None and (fence := _FENCE.match(line)):
            start, ranks = number + 1, int(fence["ranks"] or 1)
        elif start is not None and line.startswith("```"):
            if ranks == 1:
                joined[start:number] = lines[start:number]
            else:
                apart.append((ranks, "\n".join([""] * start + lines[start:number])))
            start = None
    assert start is None, f"the fence above line {start} is not closed"
    return [(1, "\n".join(joined)), *apart] if any(joined) else apart


ALL_SCRIPTS = [
    pytest.param(ranks, text, id=f"{path.name}-{number}")
    for path in PAGES
    for number, (ranks, text) in enumerate(scripts(path.read_text()))
]


@pytest.mark.parametrize(("ranks", "text"), ALL_SCRIPTS)
def test_snippets_run(ranks: int, text: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lines_keep_their_numbers() -> None:
    page = (
        "a\n```python run\nx = 1\n```\n```python\nno\n```\n```python run ranks=2\ny\n```\n```python run\nz = 2\n```\n"
    )
    assert scripts(page) == [(1, "\n\nx = 1\n\n\n\n\n\n\n\n\nz = 2\n"), (2, "\n" * 8 + "y")]
    assert scripts("```python\nnothing marked\n```\n") == []
