"""What one device computes: loss, gradients, and parameters after three steps, from the plain eager model.

Runs in a process of its own (`python -m tests.models.reference OUT CASE…`) that never imports evocompile.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.models.zoo import Case

STEPS = 3
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2)}


def train(case: Case) -> dict[str, Any]:
    """Loss and gradients of the first step; losses and parameters after `STEPS` of each optimizer.

    noise: per optimizer, the entries whose gradient was once below the tolerance: AdamW turns their noise into steps.
    """
    result: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model = case.build()
        optimizer = make(model.parameters())
        losses = []
        for step in range(STEPS):
            loss = model(**case.inputs(step))[0]
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            if step == 0:
                result["loss"], result["gradients"] = loss.detach(), gradients
                noise = {n: torch.zeros_like(g, dtype=torch.bool) for n, g in gradients.items()}
            for n, floor in gradient_floors(gradients).items():
                noise[n] |= gradients[n].abs() <= floor
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        result[name] = {
            "losses": losses,
            "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
            "noise": noise,
        }
    return result


def gradient_floors(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error that a gradient may have: 1e-5 of its largest entry, or of 1e-3 of the model's largest."""
    largest = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
    return {name: 1e-5 * max(own, 1e-3 * max(largest.values())) for name, own in largest.items()}


def compute(cases: list[Case], out: Path) -> dict[Case, dict[str, Any]]:
    """The reference of every case, computed in another process."""
    texts = [json.dumps(dataclasses.asdict(case)) for case in cases]
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.models.reference", str(out), *texts], check=True, cwd=root)
    return dict(zip(cases, torch.load(out, weights_only=False), strict=True))  # of ours: the safe way takes seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save([train(Case(**json.loads(text))) for text in sys.argv[2:]], sys.argv[1])
    assert not any(name.startswith("evocompile") for name in sys.modules)
