"""Before the first step: all ranks tell one another what they are about to run, and agree on it or raise alike.

Everything goes through the key-value store under which the default process group met, so it needs no communicator and
no device, and it cannot hang: it polls under a deadline of its own. Who comes too late is decided once for all ranks,
by the first entry in the store, so all ranks raise the same error or none does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import fx

from . import torch_private
from .collectives import Event, group_names
from .errors import DeadlockError, InputError, PlanError
from .mesh import group_ranks
from .passes.verify import agree

DEFAULT_TIMEOUT = timedelta(minutes=5)
_WAYS_OUT = {
    "what the model computes": ". The model's code, a Python number that it uses or a part of it depends on the rank: "
    "pass what differs between ranks as a part of the batch, or leave it out"
}
_DEVICE = re.compile(r"device\(type='(\w+)'(?:, index=\d+)?\)")  # each rank has its own
_FAREWELL = 30.0  # seconds that a rank waits, once everything is known, for the others to have read it too


def agree_across_ranks(
    events: list[Event],
    fingerprint: Mapping[str, str],
    *,
    failure: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world: int | None = None,
    timeout: timedelta | None = None,
) -> tuple[str, ...]:
    """Prove on every rank that the programs of all ranks fit together; the names of all their groups, sorted.

    events:      this rank's starts and waits (`collectives.program_events`).
    fingerprint: what must be equal on all ranks, by name: versions, plan, shapes.
    failure:     why this rank has no program, if it has none. Where no rank has one, none is told of the others'.
    store, rank, world: those of the default process group when left out.
    timeout:     for all ranks to come; when left out five minutes, or the default group's if that is smaller.
    Every rank must call it the same number of times. Raises, equally on all ranks: PlanError where fingerprints
    differ, DeadlockError where programs would block one another or where ranks do not come, with their numbers.
    """
    meeting = _Meeting("programs", store, rank, world, timeout)
    body, groups = encode(events, meeting.rank)
    key = hashlib.sha256(body.encode()).hexdigest()
    result = {"what compiling the call gives": failure or "a program"}
    own = {"fingerprint": {**fingerprint, **result}, "groups": groups, "body": key, "failed": failure is not None}
    head = json.dumps(own)
    with meeting.attended(head, {key: body}) as heads:
        everyone = [json.loads(each) for each in heads]
        bodies = {each: meeting.blob(each) for each in sorted({each["body"] for each in everyone})}
    if all(each["failed"] for each in everyone):
        return ()
    _check_equal([each["fingerprint"] for each in everyone])
    programs = [decode(bodies[each["body"]], each["groups"], rank) for rank, each in enumerate(everyone)]
    agree(programs)
    return tuple(sorted(set().union(*map(group_names, programs))))


def check_same_inputs(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    ranks: Sequence[int],
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Check that the ranks of one replica were given the same batch; each of `ranks` calls it.

    Raises, equally on all of them, InputError naming the first input that differs and the ranks on which it does, and
    DeadlockError naming the ranks that do not come.
    """
    meeting = _Meeting(f"inputs {','.join(map(str, ranks))}", store, rank, None, timeout, ranks)
    own = json.dumps([[name, digest(tensor)] for name, tensor in zip(names, tensors, strict=True)])
    with meeting.attended(own, {}) as heads:
        everyone = [json.loads(each) for each in heads]
    lists = {rank: [name for name, _ in each] for rank, each in zip(ranks, everyone, strict=True)}
    if other := [rank for rank in ranks if lists[rank] != lists[ranks[0]]]:
        raise InputError(
            f"{_list(other)} passed the inputs {lists[other[0]]}, rank {ranks[0]} passed {lists[ranks[0]]}: "
            "call the model with the same arguments on every rank of a replica"
        )
    for index, name in enumerate(lists[ranks[0]]):
        values = [each[index][1] for each in everyone]
        if other := [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]:
            raise InputError(
                f"input {name!r} differs between ranks: {_list(other)} passed another value than rank {ranks[0]}. "
                "Every rank of a replica must be given the same batch: seed the data loader alike on all of them and "
                "use no DistributedSampler among them"
            )


def digest(tensor: torch.Tensor) -> str:
    """A hash of shape, dtype and contents, equal on every device; copies 64 MiB at a time to the host."""
    sha = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for part in data.split(1 << 26) if data.numel() else ():
        sha.update(part.cpu().numpy())
    return sha.hexdigest()


def computation(graph: fx.Graph) -> str:
    """What a captured graph computes, in a few words that are equal where it is: operators, numbers, shapes."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    sha = hashlib.sha256()
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else None for each in values]
        arguments = fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        called = node.target if node.op == "get_attr" else node.op if node.op != "call_function" else str(node.target)
        sha.update(_DEVICE.sub(r"\1", f"{called} {arguments} {shapes}").encode())
    return f"{len(numbers)} operators (fingerprint {sha.hexdigest()[:12]})"


def _check_equal(fingerprints: list[dict[str, str]]) -> None:
    for name in sorted(set().union(*fingerprints)):
        by_value: dict[str | None, list[int]] = defaultdict(list)
        for rank, each in enumerate(fingerprints):
            by_value[each.get(name)].append(rank)
        if len(by_value) > 1:
            values = "; ".join(f"{_list(ranks)}: {value}" for value, ranks in by_value.items())
            raise PlanError(f"{name} must be equal on all ranks, but is {values}{_WAYS_OUT.get(name, '')}")


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


# --- encoding --------------------------------------------------------------------------------------------------------


def encode(events: Sequence[Event], rank: int) -> tuple[str, list[str]]:
    """Events as compressed text, and the groups that they name, in the order of their first use.

    In the text groups are numbers and peers are distances within the group, so that ranks with symmetric programs
    have the same text: it is sent and read once for all of them.
    """
    groups = list(dict.fromkeys(event.group for event in events if event.group))
    number = {name: index for index, name in enumerate(groups)}
    members = {name: group_ranks(name) for name in groups}

    def distances(event: Event, peers: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        ranks = members[event.group]
        own = ranks.index(rank)
        return sorted(((ranks.index(peer) - own) % len(ranks), size) for peer, size in peers)

    rows = [
        [event.kind, event.node, event.start]
        if event.kind == "wait"
        else [
            event.kind,
            event.node,
            number[event.group],
            event.dtype,
            event.size,
            distances(event, event.sent),
            distances(event, event.received),
            event.what,
        ]
        for event in events
    ]
    text = json.dumps(rows, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode())).decode(), groups


def decode(body: str, groups: Sequence[str], rank: int) -> list[Event]:
    """The inverse of `encode` for the rank that encoded."""
    members = [group_ranks(name) for name in groups]

    def peers(group: int, distances: list[list[int]]) -> tuple[tuple[int, int], ...]:
        ranks = members[group]
        own = ranks.index(rank)
        return tuple((ranks[(own + distance) % len(ranks)], size) for distance, size in distances)

    return [
        Event("wait", row[1], start=row[2])
        if row[0] == "wait"
        else Event(
            kind=row[0],
            node=row[1],
            group=groups[row[2]],
            dtype=row[3],
            size=row[4],
            sent=peers(row[2], row[5]),
            received=peers(row[2], row[6]),
            what=row[7],
        )
        for row in json.loads(zlib.decompress(base64.b64decode(body)))
    ]


# --- meeting ---------------------------------------------------------------------------------------------------------


class _Meeting:
    """One exchange of a message of each rank with all ranks, through a store, under a deadline."""

    def __init__(
        self,
        purpose: str,
        store: dist.Store | None,
        rank: int | None,
        world: int | None,
        timeout: timedelta | None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self._ranks = list(ranks) if ranks is not None else list(range(world or dist.get_world_size()))
        if timeout is None:
            timeout = min(DEFAULT_TIMEOUT, torch_private.default_group_timeout()) if store is None else DEFAULT_TIMEOUT
        self._timeout = timeout.total_seconds()
        store = torch_private.default_store() if store is None else store
        # The store counts the rounds: it forgets them with the process group, and no state is left in the process.
        turn = store.add(f"evocompile/{purpose}/round of {self.rank}", 1)
        self._store = dist.PrefixStore(f"evocompile/{purpose}/{turn}/", store)

    @contextlib.contextmanager
    def attended(self, message: str, blobs: Mapping[str, str]) -> Iterator[list[bytes]]:
        """Publish this rank's message, and blobs by content hash; the messages of all ranks, in order.

        After the block every rank has read what it needs: one that then raises and exits takes nothing from others.
        """
        deadline = time.monotonic() + self._timeout
        try:
            for key, blob in blobs.items():
                if self._store.add(f"claim {key}", 1) == 1:
                    self._store.set(f"blob {key}", blob)
            self._store.set(f"message {self.rank}", message)
            missing = [] if self._gather("arrived", deadline) else self._missing()
            own = " ".join(map(str, missing)) or "complete"
            verdict = self._store.compare_set("verdict", "", own).decode()
        except dist.DistError as error:
            raise DeadlockError(f"lost the store under which the ranks meet, as its host has ended: {error}") from error
        if verdict != "complete":
            raise DeadlockError(
                f"{_list([int(rank) for rank in verdict.split()])} did not come to the check before the first step "
                f"within {self._timeout:.0f} s. They ended, or run another program: every rank must call the model the "
                "same number of times"
            )
        keys = [f"message {rank}" for rank in self._ranks]
        yield self._store.multi_get(keys)
        with contextlib.suppress(dist.DistError):  # nothing is needed from the store any more
            if self._gather("read", time.monotonic() + _FAREWELL) and self.rank == self._ranks[0]:
                for key in keys + [f"blob {key}" for key in blobs]:
                    self._store.delete_key(key)

    def blob(self, key: str) -> str:
        return self._store.get(f"blob {key}").decode()

    def _gather(self, what: str, deadline: float) -> bool:
        """Count this rank in; whether all ranks were, before the deadline."""
        if self._store.add(what, 1) == len(self._ranks):
            self._store.set(f"all {what}", "")
            return True
        pause = 0.001
        while not self._store.check([f"all {what}"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def _missing(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"message {rank}"])]
