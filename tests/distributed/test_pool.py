"""The pool of buffers on real ranks: the same bits, and no new memory after the first step."""

from __future__ import annotations

import torch

from evocompile.plan import Plan
from tests.distributed.launch import run_ranks
from tests.distributed.pooling import job

PLANS = [Plan(cp=2), Plan(tp=2, overlap="none")]


def test_after_the_first_step_every_request_is_served_from_the_pool() -> None:
    for found in run_ranks(job, 2, PLANS):
        for (reports, trained), (unused, expected) in found:
            first, second, third = reports
            assert first.buffers == second.buffers == third.buffers > 0
            assert first.bytes == third.bytes > 0
            assert first.requests - first.served == first.buffers
            for before, after in ((first, second), (second, third)):
                assert after.requests - before.requests == after.served - before.served == first.requests
            assert unused[-1].requests == 0
            assert all(torch.equal(trained[name], expected[name]) for name in expected)
