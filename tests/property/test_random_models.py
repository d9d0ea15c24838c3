"""Random small programs on random plans give one device's values and gradients."""

from __future__ import annotations

import os
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evocompile.plan import Plan, Shard
from tests.equality import assert_equals_one_device
from tests.property.programs import Program, Text, inputs, programs

EXAMPLES = int(os.environ.get("EVOCOMPILE_EXAMPLES", "0"))  # so many, other ones each time; 0: always the same


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dp, cp, ulysses = draw(
        st.sampled_from(
            [
                *((1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 1, 1), (2, 2, 1), (3, 1, 1), (2, 3, 1), (3, 2, 1)),
                *((1, 1, 3), (1, 2, 2), (2, 1, 2), (1, 3, 2)),
            ]
        )
    )
    order = draw(st.sampled_from(["zigzag", "ring"]))
    placement = draw(st.sampled_from(["head-first", "context-first"])) if ulysses > 1 else "head-first"
    replicas = dp * cp * ulysses
    degree = draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]))
    shard = Shard(degree, degree, degree)
    return Plan(dp=dp, cp=cp, ulysses=ulysses, attention=order, placement=placement, shard=shard)


def check(text: Text, plan: Plan) -> None:
    assert_equals_one_device(Program(text), inputs(text), plan)


@settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(text=programs(), plan=plans())
def test_random_program_equals_one_device(text: Text, plan: Plan) -> None:
    check(text, plan)


# What random programs have found before.
FOUND = {
    "halves of a gathered concatenation": (
        Plan(cp=3, attention="ring"),
        (1, 5, 1),
        [(1,)],
        """
        v0 = x * self.w0
        v1 = torch.cat((v0, v0), 1)
        v2 = torch.where(number(v1, 0) % 2 == 0, v1, 2 * v1)
        return v2.sin().sum(), v2.detach()
        """,
    ),
    "one or two intervals of a parameter that backward needs again": (
        Plan(dp=2, cp=2, shard=Shard(2, 2, 2)),
        (3, 8, 4),
        [(4,), (11,)],
        """
        v0 = x * self.w0
        v1 = (self.w1[:8] * v0.movedim(1, -1))
        return v1.log_softmax(2).sin().sum() + v1.sin().sum(), v1.detach()
        """,
    ),
    "a pending sum that is gathered along another axis stays pending": (
        Plan(dp=2, cp=3, attention="ring", shard=Shard(2, 2, 2)),
        (1, 11, 3),
        [(3,), (4,)],
        """
        v0 = x * self.w0
        v1 = self.w1[:1] * v0.movedim(0, -1)
        return v1.sin().sum(), v1.detach()
        """,
    ),
    "squeeze where only the rank's part has size one": (
        Plan(dp=2, cp=4, attention="ring", shard=Shard(2, 2, 2)),
        (2, 5, 1),
        [(1,)],
        """
        v0 = x * self.w0
        v1 = v0.squeeze(0).squeeze(1)
        return v1.sin().sum(), v1.detach()
        """,
    ),
    "a view of a scalar": (
        Plan(dp=2, cp=2, attention="ring"),
        (3, 7, 1),
        [(1,)],
        """
        v0 = x * self.w0
        v1 = v0.amax()
        return v1.sin().sum(), v0.detach()
        """,
    ),
    "an axis of size one, merged with others and gathered": (
        Plan(dp=2, cp=2),
        (1, 3, 3),
        [(3,)],
        """
        v0 = x * self.w0
        v1 = v0.flatten(0, 1).cumsum(0).flatten() + v0.permute(1, 2, 0).flatten().cumsum(0)
        return v1.sin().sum(), v1.detach()
        """,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_program_found_before(name: str) -> None:
    plan, sizes, weights, lines = FOUND[name]
    check(Text(*sizes, lines=dedent(lines).strip().splitlines(), weights=weights), plan)
