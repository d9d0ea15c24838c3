"""The passes, in the order in which they run. Each takes a program and returns it one step further on."""

from __future__ import annotations

import evocompile.kernels.attention  # noqa: F401 (registers the operators that the passes rewrite)
from evocompile.program import Pass

from .annotate import annotate
from .canonicalize import canonicalize
from .chunk_rows import chunk_rows, find_chunks
from .in_time import in_time
from .localize import localize
from .micro_batches import micro_batches
from .offload import offload
from .overlap import overlap
from .pool import pool
from .recompute import recompute
from .rematerialize import rematerialize
from .seed_random import seed_random
from .shard_states import shard_states
from .split_attention import split_attention

PASSES = (
    Pass("canonicalize", canonicalize, frozenset({"captured"}), frozenset({"canonical attention"})),
    Pass("seed_random", seed_random, frozenset({"captured"}), frozenset({"seeded draws"})),
    Pass(
        "recompute", recompute, frozenset({"canonical attention", "seeded draws"}), frozenset({"copies for backward"})
    ),
    Pass("find_chunks", find_chunks, frozenset({"copies for backward"}), frozenset({"regions by rows"})),
    Pass("annotate", annotate, frozenset({"regions by rows"}), frozenset({"annotations"})),
    Pass("localize", localize, frozenset({"annotations"}), frozenset({"local shapes"})),
    Pass("chunk_rows", chunk_rows, frozenset({"local shapes"}), frozenset({"loops over rows"})),
    Pass("split_attention", split_attention, frozenset({"loops over rows"}), frozenset({"attention steps"})),
    Pass("in_time", in_time, frozenset({"attention steps"}), frozenset({"real ranks"})),
    Pass("shard_states", shard_states, frozenset({"local shapes", "real ranks"}), frozenset({"sharded states"})),
    Pass(
        "rematerialize",
        rematerialize,
        frozenset({"attention steps", "sharded states"}),
        frozenset({"forward and backward"}),
    ),
    Pass("offload", offload, frozenset({"forward and backward"}), frozenset({"saved values placed"})),
    Pass("micro_batches", micro_batches, frozenset({"saved values placed"}), frozenset({"variants of a step"})),
    Pass("overlap", overlap, frozenset({"variants of a step"}), frozenset({"schedule"})),
    Pass("pool", pool, frozenset({"schedule"}), frozenset({"buffers"})),
)
