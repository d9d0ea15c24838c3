"""A training step of evocompile and of its peers: one model, two ranks, one core each, the same links, in one run.

    pip install -e '.[peers]' && python benchmarks/peers.py [--repeats 9] [--links unshaped 1gbit 500mbit]

Llama of hidden 256, MLP 704, 4 layers, 8 heads / 4 key/value heads, vocabulary 2048, 2048 tokens, float32, AdamW.
Needs root and iproute2: each rank runs in a network namespace of its own (shaped_network.py), whose link is left
unlimited or limited to a rate. Two tables: the sequence of a batch of one is split, or two rows and any plan.

Every system has processes of its own, all of which are there from the beginning; in turns, each takes one step after a
barrier, and the time is that of its slower rank. All have seen the same batch as often, so losses can be compared at
every step, and the first gradients parameter by parameter, with those of the single process, which is eager and knows
nothing of any peer. Medians; ratios are to half the median of the single process.

Two tables, and last one JSON object: {"step_ratio_to_best_peer": the largest over tables and links of evocompile's best
time over its best peer's, "tables": {table: {link: {system: {"step_s", "ratio", "loss_error", "gradient_error"}, or
null}}}, "why_null": {system: reason}, "machine"}. loss_error: the largest difference over all steps. gradient_error:
the largest of a parameter's differences over its largest value.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peer_training.workload import Batch, Training, batch_of, build, plain
from shaped_network import Network, network
from torch import Tensor, nn

Losses = list[float]
REFERENCE = "single"


class Table(NamedTuple):
    """rows: of the batch. systems: `peer_training`'s files, and those of `OURS`."""

    rows: int
    systems: tuple[str, ...]


TABLES = {
    "sequence split": Table(1, (REFERENCE, "alst", "evocompile_ring", "evocompile_ulysses")),
    "free plan": Table(2, (REFERENCE, "ddp", "fsdp2", "fsdp2_async", "simple_fsdp", "evocompile_dp", "evocompile_ddp")),
}
LINKS = ("unshaped", "1gbit", "500mbit")


# --- evocompile ------------------------------------------------------------------------------------------------------


def _ours(**plan: Any) -> Callable[[nn.Module, Batch], Training]:
    def prepare(model: nn.Module, batch: Batch) -> Training:
        import evocompile

        shard = plan.get("shard")
        chosen = {**plan, "shard": evocompile.Shard(*shard)} if shard else plan
        evocompile.parallelize(model, plan=evocompile.Plan(**chosen))
        return plain(model, lambda: model(**batch).loss)

    return prepare


OURS = {
    "evocompile_ring": _ours(cp=2, shard=(1, 2, 2)),
    "evocompile_ulysses": _ours(ulysses=2, shard=(1, 2, 2)),
    "evocompile_dp": _ours(dp=2, shard=(1, 2, 2)),
    "evocompile_ddp": _ours(dp=2, shard=(1, 1, 1)),
}


# --- a rank of a system ----------------------------------------------------------------------------------------------


def worker(system: str, rows: int, folder: Path) -> None:
    """Answers each line of its input by one line of output: the loss and seconds of a step; prepares at the first."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    training = None
    for number, _ in enumerate(sys.stdin):
        if training is None:
            dist.init_process_group("gloo")
            prepare = OURS.get(system) or importlib.import_module(f"peer_training.{system}").prepare
            training = prepare(build(), batch_of(rows))
        dist.barrier()
        begin = time.perf_counter()
        loss = training.backward()
        if number == 0:
            gradients = training.gradients()
            if rank == 0:
                torch.save({name: each.detach().clone() for name, each in gradients.items()}, folder / f"{system}.pt")
        training.update()
        print(json.dumps([float(loss), time.perf_counter() - begin]), file=replies, flush=True)


class System:
    """The processes of one system. seconds: of its steps, by link. why: it does not run."""

    def __init__(self, name: str, rows: int, links: Network, port: int, folder: Path) -> None:
        self.name, self.why, self.losses = name, "", Losses()
        self.seconds: dict[str, Losses] = {}
        self._folder = folder
        self._errors = [(folder / f"{name}.{rank}").open("w+") for rank in range(len(links.names))]
        command = [sys.executable, __file__, "--worker", name, "--rows", str(rows), "--folder", str(folder)]
        self.processes = []
        for rank, errors in enumerate(self._errors):
            places = links.environment(rank, port)
            if name == REFERENCE:
                places |= {"WORLD_SIZE": "1"}
            if name != REFERENCE or rank == 0:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
                started = subprocess.Popen(links.command(rank, command), env=os.environ | places, **pipes)
                self.processes.append(started)

    def ask(self) -> None:
        """Begin a step."""
        for process in self.processes:
            if process.poll() is None:
                print("step", file=process.stdin, flush=True)

    def answer(self, link: str | None = None) -> None:
        """The end of the step; its time counts for this link, if any."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            self._failed()
            return
        losses, seconds = zip(*map(json.loads, lines), strict=True)
        self.losses.append(statistics.fmean(losses))
        if link is not None:
            self.seconds.setdefault(link, []).append(max(seconds))

    def _failed(self) -> None:
        for process in self.processes:
            process.kill()
        said = []
        for errors in self._errors:
            errors.seek(0)
            said += [line.strip() for line in errors if "Error" in line and "Warning" not in line][-1:]
        self.why = said[0] if said else "a process ended without a word"
        print(f"{self.name} does not run: {self.why}", flush=True)

    def gradient_error(self) -> float:
        own, reference = (torch.load(self._folder / f"{name}.pt") for name in (self.name, REFERENCE))
        return max(_difference(own[name], reference[name]) for name in reference)

    def loss_error(self, reference: Losses) -> float:
        return max(abs(own - other) for own, other in zip(self.losses, reference, strict=True))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _difference(own: Tensor, reference: Tensor) -> float:
    return float((own - reference).abs().max() / reference.abs().max())


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(table: Table, names: Sequence[str], links: Sequence[str], repeats: int) -> tuple[dict[str, Any], dict]:
    """By link and system what the JSON says, and why some do not run."""
    systems: list[System] = []
    with network(2) as shaped, tempfile.TemporaryDirectory() as folder:
        try:
            for place, name in enumerate(names):
                systems.append(System(name, table.rows, shaped, 29520 + place, Path(folder)))
            for each in systems:  # compiles, one after the other
                each.ask()
                each.answer()
            for _ in range(2):
                _turn(systems, None)
            for _ in range(repeats):
                for link in links:
                    shaped.shape(None if link == "unshaped" else link)
                    _turn(systems, link)
            return _results(systems, links), {each.name: each.why for each in systems if each.why}
        finally:
            for each in systems:
                each.end()


def _turn(systems: Sequence[System], link: str | None) -> None:
    for each in systems:
        if not each.why:
            each.ask()
            each.answer(link)


def _results(systems: Sequence[System], links: Sequence[str]) -> dict[str, Any]:
    reference = systems[0]
    assert reference.name == REFERENCE and not reference.why, "the single process is what the others are compared with"
    half = statistics.median(itertools.chain(*reference.seconds.values())) / 2  # no link concerns it
    errors = {each.name: (each.loss_error(reference.losses), each.gradient_error()) for each in systems if not each.why}
    found: dict[str, Any] = {link: {} for link in links}
    for link in links:
        for each in systems:
            step = None if each.why else statistics.median(each.seconds[link])
            found[link][each.name] = step and {
                "step_s": round(step, 4),
                "ratio": round(step / half, 3),
                "loss_error": float(f"{errors[each.name][0]:.2g}"),
                "gradient_error": float(f"{errors[each.name][1]:.2g}"),
            }
    return found


def ratio_to_best_peer(found: dict[str, Any]) -> float | None:
    """Of one table and link."""
    steps = {name: each["step_s"] for name, each in found.items() if each and name != REFERENCE}
    ours = [step for name, step in steps.items() if name in OURS]
    peers = [step for name, step in steps.items() if name not in OURS]
    return round(min(ours) / min(peers), 3) if ours and peers else None


def print_table(name: str, table: Table, found: dict[str, Any], links: Sequence[str]) -> None:
    print(f"\n{name}, batch {table.rows}: step seconds (over half of those of the single process)")
    print(f"| system | {' | '.join(links)} | loss error | gradient error |")
    print("|---" * (len(links) + 3) + "|")
    for system in found[links[0]]:
        cells = [found[link][system] for link in links]
        if all(cells):
            times = [f"{each['step_s']:.3f} ({each['ratio']:.2f})" for each in cells]
            print(
                "|", " | ".join([system, *times, *(str(cells[0][f"{of}_error"]) for of in ("loss", "gradient"))]), "|"
            )
        else:
            print(f"| {system} |" + " null |" * (len(links) + 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="unshaped, or a rate as tc writes it")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--systems", nargs="+", help="only these, beside the single process")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # given to the ranks, with the two that follow
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.rows, options.folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the network is taken down
    tables: dict[str, Any] = {}
    why: dict[str, str] = {}
    for name in options.tables:
        table = TABLES[name]
        chosen = [each for each in table.systems if each == REFERENCE or each in (options.systems or table.systems)]
        tables[name], reasons = measure(table, chosen, options.links, options.repeats)
        why |= reasons
        print_table(name, table, tables[name], options.links)
    ratios = [ratio_to_best_peer(found) for by_link in tables.values() for found in by_link.values()]
    known = [each for each in ratios if each is not None]
    worst = max(known) if len(known) == len(ratios) else None
    machine = f"{os.cpu_count()} cores, CPU, gloo, {platform.machine()}, torch {torch.__version__}"
    print(json.dumps({"step_ratio_to_best_peer": worst, "tables": tables, "why_null": why, "machine": machine}))


if __name__ == "__main__":
    main()
