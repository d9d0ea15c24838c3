"""An operator that fails on one rank: its error names the model's line, and the other ranks hear of it at once.

Ids beyond the vocabulary fail on the rank that has their position, and the others would wait for it until the
group's time-out. So a rank that fails in a program writes why into the store under which the ranks met, and leaves the
model's process groups: gloo then ends the waits of the others, who raise with what they read. The next call of the
model compiles anew, with new groups.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch.distributed as dist
from torch import fx

from .collectives import Communicators, is_boundary, is_start, is_wait
from .errors import DeadlockError
from .program import source_line
from .segments import Segment, Step

PLACES = "__evocompile_places__"  # a global of generated code: which line of which function runs what
Place = Step | int  # a position within the segment that runs

_SHOWN = 6  # lines of a segment that Inductor has made one function


@contextmanager
def heard_by_all(communicators: Communicators) -> Iterator[None]:
    """While a program runs. Raises DeadlockError in the place of the error of a wait that another rank has ended."""
    try:
        yield
    except Exception as error:
        nodes = nodes_of(error)
        lines = _lines(nodes)
        where = f"in {lines}" if lines else "in the program"
        if dist.get_world_size() == 1:
            error.add_note(f"evocompile ran {where}")
            raise
        own = f"rank {dist.get_rank()} failed {where}\n  {type(error).__name__}: {error}"
        first = communicators.give_up(own)
        if first != own and (not nodes or is_start(nodes[-1]) or is_wait(nodes[-1])):
            raise DeadlockError(f"{first}\n  This rank waited for it. Calls of the model compile again") from error
        error.add_note(f"evocompile: {own}")
        raise


def nodes_of(error: BaseException) -> list[fx.Node]:
    """What of a graph ran when an error was raised in generated code: one node, or a segment's; none elsewhere."""
    found: list[fx.Node] = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        place = frame.f_globals.get(PLACES, {}).get((code.co_name, number - code.co_firstlineno))
        if isinstance(place, fx.Node):
            found = [place]
        elif isinstance(place, Segment):
            found = list(place.nodes)
        elif place is not None:
            found = [found[place]]
    return found


def _lines(nodes: list[fx.Node]) -> str:
    """The model's lines, each once."""
    computed = (node for node in nodes if not is_boundary(node) or len(nodes) == 1)
    lines = dict.fromkeys(source_line(node) for node in computed if node.meta.get("stack_trace"))
    return ", or\n  ".join(islice(lines, _SHOWN)) + (", or later" if len(lines) > _SHOWN else "")
