"""Weights from safetensors files: each rank reads its own rows, holds nothing else, and has the files' bits."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evocompile import Plan, Shard, StateError, materialize, parallelize, safetensors_files
from tests.distributed.facts import Facts, on_ranks, selected_facts
from tests.distributed.small import gpt, plans, same_step, tokens
from tests.distributed.test_meta_weights import on_meta, reset
from tests.distributed.test_parallelize import whole_state
from tests.distributed.test_unsharded import llama, shared_folder
from tests.models.zoo import PlainGPT


@dataclass
class Counts:
    """read: bytes from files. held: the most bytes of live tensors at a read, what is read now included."""

    read: int = 0
    held: int = 0


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    counts, before = Counts(), live_bytes()
    read_into = safetensors_files.read_into

    def counted(file: Path, start: int, memory: Tensor) -> None:
        read_into(file, start, memory)
        counts.read += memory.numel()
        counts.held = max(counts.held, live_bytes() - before)

    monkeypatch.setattr(safetensors_files, "read_into", counted)
    yield counts


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python can see, `meta` left out."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    plain = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain if not each.is_meta
    }
    return sum(storages.values())


def saved(model: nn.Module) -> Path:
    """A folder with the model, in several files, as transformers writes it."""
    folder = shared_folder()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / safetensors_files.INDEX).exists()
    dist.barrier()
    return folder


def llama_on_meta() -> nn.Module:
    return on_meta(lambda: type(llama())(llama().config).double())


def a_rank_reads_and_holds_its_own_rows() -> None:
    source = llama()
    folder = saved(source)
    model = parallelize(llama_on_meta(), **plans())
    own = sum(8 * each.to_local().numel() for each in model.parameters())
    with pytest.MonkeyPatch.context() as patch, counting(patch) as counts:
        materialize(model, model._init_weights, weights=folder)
    largest = max(8 * each.to_local().numel() for each in model.parameters())
    assert counts.read == own
    assert own - largest <= counts.held <= own + largest + 2**12, (counts, own)  # buffers and other small things
    for name, value in whole_state(model).items():
        assert torch.equal(value, source.state_dict()[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied, and once in the files
    same_step(model, source, model(**tokens(), use_cache=False).loss, source(**tokens(), use_cache=False).loss)


def one_file_with_gaps_and_other_types() -> None:
    """What the file lacks is drawn by `init`, which changes nothing that the file has; float32 becomes float64."""
    file = shared_folder() / "some.safetensors"
    source = gpt()
    state = {name: each.float() for name, each in source.state_dict().items() if name != "head.weight"}
    del state["norm.bias"]
    if dist.get_rank() == 0:
        save_file({name: each.contiguous() for name, each in state.items()}, file)
    dist.barrier()
    with pytest.raises(StateError, match=r"some.safetensors has no 'norm.bias': pass an init function"):
        materialize(parallelize(on_meta(PlainGPT).double(), **plans()), weights=file)
    model = parallelize(on_meta(PlainGPT).double(), **plans())

    def init(module: nn.Module) -> None:
        reset(module)
        if isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.bias, 3.0)
            nn.init.constant_(module.weight, 4.0)

    materialize(model, init, weights=file)
    found = whole_state(model)
    for name, value in state.items():
        assert torch.equal(found[name], value.double()), name
    assert torch.equal(found["norm.bias"], torch.full((24,), 3.0, dtype=torch.float64))
    torch.optim.AdamW(model.parameters()).step()


class Counted(nn.Module):
    """A persistent buffer, a scalar parameter, a type that numpy does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("steps", torch.tensor([7, 8]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x.bfloat16()).float() * self.scale * self.steps[0]).mean()


def buffers_scalars_and_bfloat16() -> None:
    file, source = shared_folder() / "model.safetensors", Counted()
    if dist.get_rank() == 0:
        save_file(source.state_dict() | {"extra.weight": torch.ones(2)}, file)
    dist.barrier()
    expect: Callable[..., object] = pytest.warns if dist.get_rank() == 0 else no_warning
    with expect(UserWarning, match="no place for 1 of the weights in .*: extra.weight"):
        model = materialize(parallelize(on_meta(Counted), **plans()), weights=file.parent)
    source_state = source.state_dict()
    for name, value in whole_state(model).items():
        assert value.dtype == source_state[name].dtype
    assert torch.equal(model.steps, source.steps) and model.scale.to_local().item() == 2.5
    model(torch.ones(2, 5)).backward()
    whole = Shard(1, 1, 1)
    copies = parallelize(on_meta(Counted), backend="eager", plan=Plan(cp=dist.get_world_size(), shard=whole))
    materialize(copies, weights=file.parent)
    assert torch.equal(copies.linear.weight.to_local(), source.linear.weight)


@contextmanager
def no_warning(*_: object, **__: object) -> Iterator[None]:
    yield


def files_that_do_not_fit_are_refused() -> None:
    folder = Path(tempfile.mkdtemp())
    with pytest.raises(StateError, match=r"is no safetensors file, and no folder with model.safetensors or"):
        materialize(parallelize(on_meta(Counted), **plans()), weights=folder)
    save_file({"linear.weight": torch.ones(4, 5)}, folder / "model.safetensors")
    with pytest.raises(StateError, match=r"'linear.weight' is \(3, 5\) in the model and \(4, 5\) in "):
        materialize(parallelize(on_meta(Counted), **plans()), weights=folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])
    entry = safetensors_files.entries(folder)["linear.weight"]
    with pytest.raises(StateError, match="ends before the tensors"):
        entry.whole()
    (folder / "model.safetensors").write_bytes(b"no such thing, but long enough")
    with pytest.raises(StateError, match="is no safetensors file"):
        safetensors_files.entries(folder)
    with pytest.raises(StateError, match="takes an init function, a file of weights, or both"):
        materialize(parallelize(on_meta(PlainGPT), **plans()))


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Facts:
    return selected_facts(request)


@on_ranks(
    {
        2: (
            a_rank_reads_and_holds_its_own_rows,
            one_file_with_gaps_and_other_types,
            buffers_scalars_and_bfloat16,
            files_that_do_not_fit_are_refused,
        )
    }
)
def test_on_ranks(world: int, fact: str, facts: Facts) -> None:
    facts.check(world, fact)
