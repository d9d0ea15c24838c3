"""SimpleFSDP (as in torchtitan, which is not installed) under torch.compile.

Each parameter is a DTensor shard, and reading it gathers it: `redistribute` to replicas, whose gradient is a mean over
the ranks. The whole model is one graph for Inductor, with its default settings; core's overlap scheduler
(`aten_distributed_optimizations.enable_overlap_scheduling`) asks for a GPU's bandwidth on the CPU and fails. Gathered
weights are kept for the backward. The mask, of which transformers builds S x S values under torch.compile, is taken
away, so that attention is causal by its flag as without compilation.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from transformers.models.llama import modeling_llama

from .workload import Batch, Training, own_rows, plain


def prepare(model: nn.Module, batch: Batch) -> Training:
    modeling_llama.create_causal_mask = lambda **_: None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = {}
    for prefix, module in list(model.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            module._parameters[name] = named[f"{prefix}.{name}"] = sharded
        if own:
            module.__class__ = type(f"Gathered{type(module).__name__}", (type(module),), {n: _gathered(n) for n in own})
    compiled = torch.compile(model)
    rows = own_rows(batch)
    return plain(model, lambda: compiled(**rows).loss, named)


def _gathered(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        sharded = module._parameters[name]
        return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    return property(read)
