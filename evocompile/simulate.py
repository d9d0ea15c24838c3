"""Simulation of the programs of all ranks on a computation queue and links: when what runs, and who waits for what.

Communications are matched as the virtual cluster matches them: group by group, each rank's in order. A communication
begins when all ranks concerned have started it and it is the first of its group on each. On a rank, communications of
several groups that are under way share the link evenly, in each direction (as on gloo; OVERLAP.md of the design). A
rank computes one node after the other, starts cost nothing, and a wait stands still until its communication is over.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .collectives import Event, is_start, is_wait
from .mesh import group_ranks
from .program import Program
from .rates import Rates, transfer_event


@dataclass(frozen=True)
class Work:
    """One node of a rank's program. seconds: of computation, or of the communication that a start begins.

    event: of a start. start: for a wait, the position of its start.
    """

    name: str
    seconds: float = 0.0
    event: Event | None = None
    start: int = -1


@dataclass(frozen=True)
class Span:
    """What ran on a rank from `begin` to `end`, in seconds. track: "compute", "wait" or the name of a group.

    node: position in the rank's work; for a wait, that of its start.
    """

    rank: int
    track: str
    name: str
    begin: float
    end: float
    node: int


@dataclass(frozen=True)
class Timeline:
    """spans: of all ranks. seconds: when the last rank has finished. exposed: by rank, how long it stood still."""

    spans: list[Span]
    seconds: float
    exposed: list[float]

    def computing(self, rank: int) -> float:
        return sum(span.end - span.begin for span in self.spans if span.rank == rank and span.track == "compute")

    def of_starts(self, rank: int) -> dict[int, tuple[float, float]]:
        """By position of a start: seconds that its communication takes on the wire, and that the rank waits for it."""
        wire: dict[int, tuple[float, float]] = {}
        waited: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.rank != rank or span.track == "compute":
                continue
            if span.track == "wait":
                waited[span.node] += span.end - span.begin
            else:
                begin, end = wire.get(span.node, (span.begin, span.end))
                wire[span.node] = min(begin, span.begin), max(end, span.end)
        return {node: (end - begin, waited[node]) for node, (begin, end) in wire.items()}

    def waits(self, rank: int) -> list[Span]:
        """Where the rank stands still, longest first."""
        found = [span for span in self.spans if span.rank == rank and span.track == "wait"]
        return sorted(found, key=lambda span: span.begin - span.end)

    def __str__(self) -> str:
        """For each rank how long it computes, waits and idles, and for which nodes it waits longest; milliseconds."""
        rows = ["rank  computes  waits  done at  longest waits"]
        for rank in sorted({span.rank for span in self.spans}):
            waits = self.waits(rank)
            end = max(span.end for span in self.spans if span.rank == rank)
            longest = ", ".join(f"{each.name} {1e3 * (each.end - each.begin):.3f}" for each in waits[:3])
            waited = sum(each.end - each.begin for each in waits)
            times = f"{1e3 * self.computing(rank):8.3f}  {1e3 * waited:5.3f}  {1e3 * end:7.3f}"
            rows.append(f"{rank:4}  {times}  {longest}".rstrip())
        return "\n".join(rows)

    def chrome_trace(self, measured: Sequence[Span] = ()) -> dict[str, Any]:
        """The timeline in the Chrome trace format, which ui.perfetto.dev opens: a process a rank, a track a queue.

        measured: spans of a real step, which become a process of their own beside each rank's predicted one.
        """
        events, names = [], []
        for number, (kind, spans) in enumerate((("predicted", self.spans), ("measured", measured))):
            for span in spans:
                times = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
                process = 2 * span.rank + number if measured else span.rank
                events.append({"ph": "X", "pid": process, "tid": span.track, "name": span.name, **times})
            for rank in sorted({span.rank for span in spans}):
                process = 2 * rank + number if measured else rank
                name = f"rank {rank}, {kind}" if measured else f"rank {rank}"
                names.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


# --- from programs -------------------------------------------------------------------------------------------------


def work_of(graphs: Iterable[fx.Graph], rank: int, rates: Rates) -> list[Work]:
    """What the rank does when it runs these graphs one after the other."""
    found: list[Work] = []
    for graph in graphs:
        position: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if is_start(node):
                event = transfer_event(node)
                position[node] = len(found)
                found.append(Work(node.name, rates.transfer(event, rank), event))
            elif is_wait(node):
                found.append(Work(node.name, start=position[node.args[0]]))
            elif seconds := rates.compute(node):
                found.append(Work(node.name, seconds))
    return found


def step_work(program: Program, rates: Rates) -> list[Work]:
    """A step of one micro-batch: the forward, with the refresh of parameters where there is one, and the backward."""
    graphs = [program.first or program.forward, program.backward]
    return work_of([each.graph for each in graphs if each is not None], program.rank, rates)


def simulate_step(programs: Sequence[Program], rates: Rates) -> Timeline:
    """A step of all ranks' programs."""
    return simulate([step_work(program, rates) for program in programs])


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Ticket:
    """One rank's part of a communication."""

    rank: int
    node: int
    work: Work
    parts: int = 0  # of it, not yet carried out
    done: bool = False


@dataclass(eq=False)
class _Transfer:
    """What crosses links together. left: seconds on idle links. links: (rank, direction)."""

    tickets: list[_Ticket]
    links: list[tuple[int, str]]
    left: float
    begin: float


def simulate(ranks: Sequence[Sequence[Work]], *, alone: int | None = None) -> Timeline:
    """Run the ranks' work. alone: the global rank of the only one that is given, whose peers are always ready."""
    return _Simulation(ranks, alone).run()


class _Simulation:
    def __init__(self, ranks: Sequence[Sequence[Work]], alone: int | None) -> None:
        self._ranks = ranks
        self._alone = alone
        self._now = 0.0
        self._spans: list[Span] = []
        self._at = [0] * len(ranks)  # the next work of each rank
        self._tickets: list[dict[int, _Ticket]] = [{} for _ in ranks]
        self._queues: dict[tuple[str, int], deque[_Ticket]] = defaultdict(deque)
        self._joined: dict[str, list[_Ticket]] = defaultdict(list)
        self._halves: dict[tuple[str, int, int], _Ticket] = {}
        self._transfers: list[_Transfer] = []
        self._timers: list[tuple[float, int, int]] = []  # (when, tie-breaker, rank): computation that ends
        self._blocked: dict[int, tuple[_Ticket, float]] = {}
        self._count = itertools.count()

    def run(self) -> Timeline:
        for rank in range(len(self._ranks)):
            self._advance(rank)
        while self._timers or self._transfers:
            shares = self._shares()
            ends = [transfer.left / shares[transfer] for transfer in self._transfers]
            step = min(ends, default=float("inf"))
            if self._timers:
                step = min(step, self._timers[0][0] - self._now)
            self._now += step
            for transfer in self._transfers:
                transfer.left -= step * shares[transfer]
            finished = [each for each, end in zip(self._transfers, ends, strict=True) if end <= step]
            self._transfers = [each for each in self._transfers if each not in finished]
            for transfer in finished:
                self._finish(transfer)
            while self._timers and self._timers[0][0] <= self._now:
                self._advance(heapq.heappop(self._timers)[2])
        assert not self._blocked, f"ranks {sorted(self._blocked)} block one another"
        exposed = [0.0] * len(self._ranks)
        for span in self._spans:
            if span.track == "wait":
                exposed[self._index(span.rank)] += span.end - span.begin
        return Timeline(self._spans, self._now, exposed)

    def _index(self, rank: int) -> int:
        return rank if self._alone is None else 0

    def _name(self, index: int) -> int:
        return index if self._alone is None else self._alone

    def _shares(self) -> dict[_Transfer, float]:
        """The part of its links' bandwidth that each transfer has."""
        users: dict[tuple[int, str], int] = defaultdict(int)
        for transfer in self._transfers:
            for link in transfer.links:
                users[link] += 1
        return {transfer: 1 / max(users[link] for link in transfer.links) for transfer in self._transfers}

    # --- ranks

    def _advance(self, index: int) -> None:
        """Run a rank's work from where it stands, until it computes or has to wait."""
        work, rank = self._ranks[index], self._name(index)
        while self._at[index] < len(work):
            node = self._at[index]
            each = work[node]
            if each.event is not None:
                self._post(_Ticket(rank, node, each), index)
            elif each.start >= 0:
                ticket = self._tickets[index][each.start]
                if not ticket.done:
                    self._blocked[index] = (ticket, self._now)
                    return
            else:
                self._at[index] += 1
                end = self._now + each.seconds
                self._spans.append(Span(rank, "compute", each.name, self._now, end, node))
                heapq.heappush(self._timers, (end, next(self._count), index))
                return
            self._at[index] += 1

    # --- communication

    def _post(self, ticket: _Ticket, index: int) -> None:
        event = ticket.work.event
        assert event is not None
        self._tickets[index][ticket.node] = ticket
        queue = self._queues[event.group, ticket.rank]
        queue.append(ticket)
        if len(queue) == 1:
            self._activate(ticket)

    def _activate(self, ticket: _Ticket) -> None:
        """The ticket is the first of its group on its rank."""
        event = ticket.work.event
        assert event is not None
        both = [(ticket.rank, "out"), (ticket.rank, "in")]
        if event.kind == "exchange":
            ticket.parts = len(event.sent) + len(event.received)
            if not ticket.parts:
                self._complete(ticket)
                return
            if self._alone is not None:
                links = both[: bool(event.sent)] + both[1 : 1 + bool(event.received)]
                self._begin([ticket] * ticket.parts, links, ticket.work.seconds)
                return
            for receiver, _ in event.sent:
                self._meet((event.group, ticket.rank, receiver), ticket)
            for sender, _ in event.received:
                self._meet((event.group, sender, ticket.rank), ticket)
            return
        ticket.parts = 1
        joined = self._joined[event.group]
        joined.append(ticket)
        if self._alone is not None or len(joined) == len(group_ranks(event.group)):
            members = list(joined)
            joined.clear()
            links = [(each.rank, direction) for each in members for direction in ("out", "in")]
            self._begin(members, links, max(each.work.seconds for each in members))

    def _meet(self, channel: tuple[str, int, int], ticket: _Ticket) -> None:
        peer = self._halves.pop(channel, None)
        if peer is None:
            self._halves[channel] = ticket
            return
        _, sender, receiver = channel
        event = ticket.work.event
        assert event is not None
        larger = max(sum(size for _, size in halves) for halves in (event.sent, event.received))
        size = dict(event.sent)[receiver] if ticket.rank == sender else dict(event.received)[sender]
        self._begin([ticket, peer], [(sender, "out"), (receiver, "in")], ticket.work.seconds * size / larger)

    def _begin(self, tickets: list[_Ticket], links: list[tuple[int, str]], seconds: float) -> None:
        transfer = _Transfer(tickets, links, seconds, self._now)
        if seconds and links:
            self._transfers.append(transfer)
        else:
            self._finish(transfer)

    def _finish(self, transfer: _Transfer) -> None:
        for ticket in dict.fromkeys(transfer.tickets):
            event = ticket.work.event
            assert event is not None
            span = Span(ticket.rank, event.group, ticket.work.name, transfer.begin, self._now, ticket.node)
            self._spans.append(span)
        for ticket in transfer.tickets:
            ticket.parts -= 1
            if not ticket.parts:
                self._complete(ticket)

    def _complete(self, ticket: _Ticket) -> None:
        event = ticket.work.event
        assert event is not None
        ticket.done = True
        queue = self._queues[event.group, ticket.rank]
        assert queue.popleft() is ticket
        if queue:
            self._activate(queue[0])
        index = self._index(ticket.rank)
        if index in self._blocked and self._blocked[index][0] is ticket:
            _, since = self._blocked.pop(index)
            if self._now > since:
                name = self._ranks[index][self._at[index]].name
                self._spans.append(Span(ticket.rank, "wait", name, since, self._now, ticket.node))
            self._at[index] += 1
            self._advance(index)
