"""Saved values in host memory: sent there by the forward, fetched by the backward ahead of their use.

On CUDA the host memory is pinned, and copies run on a stream of their own, beside the computation. On CPU a copy goes
to memory that is kept apart from tensors' own, so that accounts of tensors show what a device would hold.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Arrival:
    """A fetch under way. value: kept alive until it is there."""

    value: Tensor
    event: torch.cuda.Event


_arrivals: dict[int, _Arrival] = {}  # by id of the fetched value


def to_host(value: Tensor) -> Tensor:
    """A copy in host memory, with the same strides. On CUDA it may still be under way."""
    host = _host_like(value)
    if value.device.type != "cuda":
        return host.copy_(value)
    stream = _stream(value.device)
    stream.wait_stream(torch.cuda.current_stream(value.device))
    with torch.cuda.stream(stream):
        host.copy_(value, non_blocking=True)
    value.record_stream(stream)  # its memory is not reused before the copy has read it
    return host


def fetch_start(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy back what `to_host` has sent; the value, not to be read before `fetch_wait`."""
    value = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if device.type != "cuda":
        return value.copy_(host)
    stream = _stream(value.device)
    stream.wait_stream(torch.cuda.current_stream(value.device))  # whose memory the value may have been before
    with torch.cuda.stream(stream):
        value.copy_(host, non_blocking=True)
    _arrivals[id(value)] = _Arrival(value, stream.record_event())
    return value


def fetch_wait(value: Tensor) -> Tensor:
    """The value that `fetch_start` fetches, now valid for what the current stream does next."""
    arrival = _arrivals.pop(id(value), None)
    if arrival is not None:
        torch.cuda.current_stream(value.device).wait_event(arrival.event)
    return value


TRANSFERS = (to_host, fetch_start, fetch_wait)


def _host_like(value: Tensor) -> Tensor:
    """Uninitialised, for a value without holes. Pinned memory comes from torch's own pool of it."""
    if value.device.type == "cuda":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, pin_memory=True)
    size = value.numel() * value.element_size()
    apart = torch.frombuffer(bytearray(size), dtype=torch.uint8)
    return apart.view(value.dtype).as_strided(value.shape, value.stride())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
