"""Bytes of tensors that are alive, counted as operators make them: what an allocator's statistics say on a card."""

from evocompile.workspace import LiveBytes

__all__ = ["LiveBytes"]
