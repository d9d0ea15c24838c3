"""launch_order: the proof that all ranks launch what they share in one order, across groups too.

Within a group the order is equal, or `agree` would fail. Across groups gloo takes any, but on a GPU each launch needs
room, and two ranks that launch two communications in opposite orders may hold what the other needs. So the union of
the ranks' orders must have no cycle; then, too, whichever communication is first in it can always go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from evocompile.errors import DeadlockError
from evocompile.virtual import Ticket


class LaunchOrder:
    """Collects which starts are one communication (`match`), then looks for a cycle (`check`)."""

    def __init__(self) -> None:
        self._of: dict[Ticket, Ticket] = {}

    def match(self, tickets: Sequence[Ticket]) -> None:
        """These starts of several ranks are one communication; a rank's exchange may be part of two matches."""
        first = self._find(tickets[0])
        for each in tickets[1:]:
            self._of[self._find(each)] = first

    def _find(self, ticket: Ticket) -> Ticket:
        while (parent := self._of.setdefault(ticket, ticket)) is not ticket:
            self._of[ticket] = self._of[parent]
            ticket = parent
        return ticket

    def check(self, launched: Sequence[Sequence[Ticket]]) -> None:
        """launched: each rank's starts in its order. Raises DeadlockError naming two of a cycle."""
        after: dict[Ticket, set[Ticket]] = defaultdict(set)
        before: dict[Ticket, int] = defaultdict(int)
        for tickets in launched:
            own = [self._find(each) for each in tickets]
            for earlier, later in pairwise(own):
                before[earlier] += 0
                if earlier is not later and later not in after[earlier]:
                    after[earlier].add(later)
                    before[later] += 1
        free = [each for each, count in before.items() if not count]
        done = 0
        while free:
            done += 1
            for each in after[free.pop()]:
                before[each] -= 1
                if not before[each]:
                    free.append(each)
        if done < len(before):
            left = [each for each, count in before.items() if count]
            shown = "; ".join(str(each) for each in left[:4])
            raise DeadlockError(f"the ranks launch their communications in orders that contradict one another: {shown}")
