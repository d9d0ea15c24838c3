"""Reading rows of tensors from safetensors files: a rank reads its own rows, into memory that is theirs already.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a header, the header in
JSON, which gives dtype, shape and the range of bytes of each tensor, then those bytes, row-major. Rows of dim 0 are one
range. Files are read, not mapped, so that what was read is counted once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import StateError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """Where a tensor is: its first byte in the file, which is in row-major order."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) of dim 0, on the CPU."""
        return self._read((hi - lo, *self.shape[1:]), lo)

    def whole(self) -> Tensor:
        """The tensor, on the CPU."""
        return self._read(self.shape, 0)

    def _read(self, shape: tuple[int, ...], row: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype)
        size = tensor.numel() * tensor.element_size()
        if size:
            each_row = size // shape[0] if shape else size
            read_into(self.file, self.start + row * each_row, tensor.reshape(-1).view(torch.uint8))
        return tensor


def read_into(file: Path, start: int, memory: Tensor) -> None:
    """Fill `memory`, (bytes,) of uint8, from a file. Raises StateError if the file is too short."""
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        view = memoryview(memory.numpy().data)
        while view:
            read = stream.readinto(view)
            if not read:
                raise StateError(f"{file} ends before the tensors that its header names")
            view = view[read:]


def entries(path: str | Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, or of a folder as `save_pretrained` writes it (with an index, or one file)."""
    path = Path(path)
    if path.is_file():
        return _entries_of_file(path)
    if (path / INDEX).exists():
        files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    elif (path / SINGLE).exists():
        files = [SINGLE]
    else:
        raise StateError(f"{path} is no safetensors file, and no folder with {SINGLE} or {INDEX}")
    found: dict[str, Entry] = {}
    for file in files:
        found |= _entries_of_file(path / file)
    return found


def _entries_of_file(file: Path) -> dict[str, Entry]:
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise StateError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, each in header.items():
        if each["dtype"] not in DTYPES:
            raise StateError(f"{name!r} in {file} has the type {each['dtype']}, which is not supported")
        start = 8 + length + each["data_offsets"][0]
        found[name] = Entry(file, start, DTYPES[each["dtype"]], tuple(each["shape"]))
    return found
