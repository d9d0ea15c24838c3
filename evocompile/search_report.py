"""What a search has found, as text, JSON and HTML."""

from __future__ import annotations

import dataclasses
import html
import json
from typing import Any

from .search import GB, Candidate, Found, Reason


def text(found: Found) -> str:
    """A table of candidates, what the chosen plan spends and holds, and what its neighbours would cost."""
    best = found.candidates[0]
    lines = [
        f"{found.cluster}",
        f"batch {found.rows} x {found.length} positions; Φ = {found.phi:,} parameters",
        f"{found.considered:,} plans considered, {found.fitting:,} fit, in {found.took:.2f} s",
        "",
        f"{'seconds':>10}  {'GB':>7}  plan",
    ]
    lines += [
        f"{each.seconds:>10.4g}  {each.memory / GB:>7.4g}  {each.plan}{_by_simulator(each)}"
        for each in found.candidates
    ]
    lines += ["", f"the first spends, of {best.seconds:.4g} s"]
    lines += [f"  {seconds:>9.4g} s  {name}" for name, seconds in _sorted(best.spent, 1e-4 * best.seconds)]
    lines += [f"and holds, of {found.cluster.device.memory / GB:.4g} GB"]
    lines += [f"  {size / GB:>9.4g} GB  {name}" for name, size in _sorted(best.held, 1e-4 * best.memory)]
    lines += ["", "why not"]
    lines += [f"  {each.instead}: {_cost(each, found)}" for each in found.reasons]
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def _sorted(terms: Any, least: float) -> list[tuple[str, float]]:
    return sorted(((name, value) for name, value in terms.items() if value > least), key=lambda each: -each[1])


def _by_simulator(candidate: Candidate) -> str:
    return "" if candidate.simulated is None else f"  ({candidate.simulated:.4g} s simulated)"


def _cost(reason: Reason, found: Found) -> str:
    if not reason.fits:
        return f"needs {reason.memory / GB:.4g} GB, {(reason.memory - found.cluster.device.memory) / GB:.3g} too many"
    share = reason.seconds / found.candidates[0].seconds
    return "the same time" if abs(share) < 5e-5 else f"{reason.seconds:+.3g} s ({share:+.1%})"


def as_dict(found: Found) -> dict[str, Any]:
    """Plain data, for JSON."""

    def plan_of(candidate: Candidate) -> dict[str, Any]:
        return {**dataclasses.asdict(candidate), "plan": json.loads(candidate.plan.to_json())}

    return {
        "cluster": json.loads(found.cluster.to_json()),
        "rows": found.rows,
        "length": found.length,
        "parameters": found.phi,
        "considered": found.considered,
        "fitting": found.fitting,
        "search_seconds": found.took,
        "candidates": [plan_of(each) for each in found.candidates],
        "why_not": [
            {**dataclasses.asdict(each), "plan": json.loads(each.plan.to_json()), "says": _cost(each, found)}
            for each in found.reasons
        ],
        "notes": list(found.notes),
    }


_PAGE = """<!doctype html>
<meta charset="utf-8"><title>evocompile plan</title>
<style>body {{ font: 15px/1.5 sans-serif; margin: 2em; max-width: 70em }} td {{ padding: 2px 12px }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }} code {{ font-size: 13px }}
.bar {{ background: #4a7; height: 12px }}</style>
<h1>{plan}</h1><p>{about}</p>
<h2>Candidates</h2>{candidates}<h2>Seconds of a step</h2>{spent}
<h2>Bytes of a device</h2>{held}<h2>Why not</h2>{reasons}
"""


def as_html(found: Found) -> str:
    """One page that needs nothing else."""
    best = found.candidates[0]
    about = (
        f"{found.cluster}. Batch {found.rows} × {found.length}, {found.phi:,} parameters. {found.considered:,} plans."
    )
    return _PAGE.format(
        plan=_code(best.plan),
        about=html.escape(about),
        candidates=_table([_row(each) for each in found.candidates]),
        spent=_bars(best.spent, best.seconds, 1, "s"),
        held=_bars(best.held, found.cluster.device.memory, GB, "GB"),
        reasons=_table([(html.escape(each.instead), html.escape(_cost(each, found))) for each in found.reasons]),
    )


def _row(candidate: Candidate) -> tuple[str, ...]:
    plan = _code(candidate.plan) + _by_simulator(candidate)
    return f"{candidate.seconds:.4g} s", f"{candidate.memory / GB:.4g} GB", plan


def _code(value: Any) -> str:
    return f"<code>{html.escape(str(value))}</code>"


def _table(rows: list[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _bars(terms: Any, whole: float, unit: float, name: str) -> str:
    return _table(
        [
            (
                html.escape(what),
                f"{value / unit:.4g} {name}",
                f'<div class="bar" style="width:{400 * value / whole:.0f}px"></div>',
            )
            for what, value in _sorted(terms, 0)
        ]
    )
