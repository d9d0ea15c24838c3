"""What parallelize() leaves as it was. Imports nothing of evocompile before it has looked at the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tests.models.zoo import Case


def places() -> dict[str, Mapping[str, Any]]:
    """Tables that other systems of this kind write to, by name."""
    import transformers.masking_utils as masking
    import transformers.modeling_utils as modeling
    from transformers.models.llama import modeling_llama

    return {
        "torch": vars(torch),
        "torch.Tensor": vars(torch.Tensor),
        "torch.nn.Module": vars(torch.nn.Module),
        "torch.nn.Linear": vars(torch.nn.Linear),
        "torch.nn.functional": vars(torch.nn.functional),
        "torch.autograd": vars(torch.autograd),
        "torch.distributed": vars(dist),
        "torch.optim.Optimizer": vars(torch.optim.Optimizer),
        "modeling_llama": vars(modeling_llama),
        "LlamaForCausalLM": vars(modeling_llama.LlamaForCausalLM),
        "LlamaModel": vars(modeling_llama.LlamaModel),
        "LlamaAttention": vars(modeling_llama.LlamaAttention),
        "modeling_utils": vars(modeling),
        "PreTrainedModel": vars(modeling.PreTrainedModel),
        "ALL_ATTENTION_FUNCTIONS": dict(modeling.ALL_ATTENTION_FUNCTIONS),
        "masking_utils": vars(masking),
        "ALL_MASK_ATTENTION_FUNCTIONS": dict(masking.ALL_MASK_ATTENTION_FUNCTIONS),
    }


def changes() -> list[str]:
    """The entries that are not the same object any more after a parallel model has trained a step."""
    import sys

    case = Case("llama")
    plain = case.build()
    plain(**case.inputs())[0].backward()
    before = {name: dict(table) for name, table in places().items()}
    assert not any(name.startswith("evocompile") for name in sys.modules)
    from evocompile import Plan, parallelize

    model = parallelize(case.build(), plan=Plan(cp=dist.get_world_size()), backend="eager")
    model(**case.inputs())[0].backward()
    after = places()
    changed = [
        f"{name}.{key}" for name, table in before.items() for key in table if after[name].get(key) is not table[key]
    ]
    if type(model) is not type(plain) or "forward" in vars(plain):
        changed.append("the model's class")
    return changed
