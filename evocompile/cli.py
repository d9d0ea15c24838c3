"""The command line: `evocompile demo | plan | inspect | simulate | doctor`."""

from __future__ import annotations

import argparse
import importlib
import inspect as python_inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EvocompileError, PlanError
from .plan import Plan

if TYPE_CHECKING:
    from torch import nn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. 1: the command found a fault. 2: it was asked for what cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except EvocompileError as error:
        print(f"evocompile: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evocompile: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evocompile", description="Train unmodified PyTorch models on many devices.")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser(
        "demo",
        help="train a small Llama on local processes and compare with one device",
        description="Trains a small Llama of transformers on N local processes (gloo, CPU) and on one device, prints "
        "both losses for each step, and exits with 1 if the numbers differ.",
    )
    demo.add_argument("--ranks", type=_positive, required=True, metavar="N", help="number of processes")
    demo.add_argument("--steps", type=_positive, default=20, help="training steps (default: %(default)s)")
    demo.add_argument("--backend", choices=("inductor", "eager"), default="inductor", help="default: %(default)s")
    demo.add_argument("--seed", type=int, default=0, help="of the weights and of the batches (default: %(default)s)")
    _add_degrees(demo)
    demo.add_argument("--json", action="store_true", help="end with everything that was found, as one line of JSON")
    demo.set_defaults(run=_demo)

    inspect = commands.add_parser(
        "inspect",
        help="print a rank's program",
        description="Compiles for one rank of a world that need not exist, and prints plan, "
        "communication and the names of the passes, or the graph after one of them.",
    )
    model = inspect.add_mutually_exclusive_group(required=True)
    model.add_argument("--demo-model", action="store_true", help="the demo's Llama")
    model.add_argument(
        "--model",
        metavar="MODULE:FACTORY|CONFIG",
        help="a function that returns a model, which is called with input_ids (and labels, where it takes them), or "
        "a model and the keyword arguments of a call; or a config file of transformers (JSON, with its model_type)",
    )
    inspect.add_argument("--world", type=_positive, required=True, metavar="N", help="number of ranks")
    inspect.add_argument("--rank", type=int, default=0, help="whose program (default: %(default)s)")
    _add_degrees(inspect)
    inspect.add_argument("--batch", type=_positive, default=2, help="rows (default: %(default)s)")
    inspect.add_argument("--seq", type=_positive, default=64, help="length of a row (default: %(default)s)")
    inspect.add_argument("--precision", help="type of the computation (default: the model's)")
    inspect.add_argument("--stage", metavar="NAME", help="only the graph after this pass")
    inspect.set_defaults(run=_inspect)

    simulate = commands.add_parser(
        "simulate",
        help="say when which rank computes, communicates and waits in a step",
        description="Compiles one plan for all its ranks, which need not exist, and runs a step of them on computation "
        "queues and links, by predicted costs.",
    )
    model = simulate.add_mutually_exclusive_group(required=True)
    model.add_argument("--demo-model", action="store_true", help="the demo's Llama")
    model.add_argument("--model", metavar="MODULE:FACTORY", help="as for inspect; it is made on meta")
    simulate.add_argument("--ranks", type=_positive, required=True, metavar="N", help="number of ranks")
    _add_degrees(simulate)
    simulate.add_argument("--batch", type=_positive, default=2, help="rows (default: %(default)s)")
    simulate.add_argument("--seq", type=_positive, default=64, help="length of a row (default: %(default)s)")
    simulate.add_argument("--precision", help="type of the computation (default: the model's)")
    simulate.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose costs (default: %(default)s)")
    simulate.add_argument("--trace", type=_writable, metavar="FILE", help="also write the timeline for ui.perfetto.dev")
    simulate.set_defaults(run=_simulate)

    plan = commands.add_parser(
        "plan",
        help="find the fastest plan for a cluster",
        description="Searches all plans for a model on a cluster that need not exist: no GPU, no process group, no "
        "memory for the weights.",
    )
    plan.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FACTORY|CONFIG",
        help="as for inspect",
    )
    plan.add_argument("--cluster", default="dgx-a100-80g", metavar="NAME|FILE", help="default: %(default)s")
    plan.add_argument("--nodes", type=_positive, help="number of nodes (default: the cluster's, 1 for a name)")
    plan.add_argument("--devices", type=_positive, help="devices of a node, if others than the cluster's")
    plan.add_argument("--batch", type=_positive, default=8, help="rows (default: %(default)s)")
    plan.add_argument("--seq", type=_positive, default=4096, help="length of a row (default: %(default)s)")
    plan.add_argument("--precision", default="bf16", help="type of the computation (default: %(default)s)")
    plan.add_argument(
        "--simulate", type=int, default=0, metavar="N", help="order the N fastest by simulations of their graphs"
    )
    plan.add_argument("--json", action="store_true", help="everything that was found, as JSON")
    plan.add_argument("--html", type=_writable, metavar="FILE", help="also write it as a page")
    plan.set_defaults(run=_search)

    doctor = commands.add_parser("doctor", help="say what of this machine and its installation matters")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_degrees(parser: argparse.ArgumentParser) -> None:
    """How a command is given its plan: see `_plan`."""
    parser.add_argument("--dp", type=_positive, help="ranks that split the batch (default: those that --cp leaves)")
    parser.add_argument("--cp", type=_positive, help="ranks that split the sequence (default: those that --dp leaves)")
    parser.add_argument(
        "--plan-json", metavar="JSON", help='a whole plan instead, such as \'{"cp": 2, "attention": "ring"}\''
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _demo(options: argparse.Namespace) -> int:
    from .demo import DemoError, Job, run_demo

    plan = _plan(options.ranks, options.dp, options.cp, options.plan_json)
    try:
        report = run_demo(Job(plan, options.steps, options.seed, options.backend))
    except DemoError as error:
        print(f"evocompile: {error}", file=sys.stderr)
        return 1
    print(report)
    if options.json:
        print(report.to_json())
    return 0 if report.passed else 1


def _plan(ranks: int, dp: int | None, cp: int | None, plan_json: str | None, option: str = "--ranks") -> Plan:
    """The plan that the options of `_add_degrees` say, for as many ranks as `option` does."""
    if plan_json is not None:
        if dp is not None or cp is not None:
            raise PlanError("--plan-json is a whole plan: leave --dp and --cp out, or put them into it")
        plan = Plan.from_json(plan_json)
    else:
        if dp is None:
            dp = ranks // cp if cp is not None else 1
        plan = Plan(dp=dp, cp=ranks // dp if cp is None else cp)
    if plan.world != ranks:
        raise PlanError(
            f"{plan} needs {plan.world} ranks, but {option} is {ranks}: make the product of its degrees {ranks}"
        )
    return plan


def _inspect(options: argparse.Namespace) -> int:
    from .inspect import inspect
    from .precision import Precision

    if not 0 <= options.rank < options.world:
        raise PlanError(f"--rank {options.rank}: the ranks of --world {options.world} are 0 to {options.world - 1}")
    plan = _plan(options.world, options.dp, options.cp, options.plan_json, "--world")
    precision = Precision.of(options.precision)
    model, inputs = _model_and_inputs(options)
    found = inspect(model, inputs, plan=plan, rank=options.rank, precision=precision)
    if options.stage is None:
        print(found)
    elif options.stage in found.stages:
        print(found.stages[options.stage])
    else:
        raise PlanError(f"--stage {options.stage}: choose one of {', '.join(found.stages)}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from .capture import capture
    from .pipeline import run_passes
    from .precision import Precision
    from .rates import Rates
    from .simulate import simulate_step

    plan = _plan(options.ranks, options.dp, options.cp, options.plan_json)
    if options.demo_model:
        model, inputs = _model_and_inputs(options)
    else:
        model, inputs = _call_to_plan(options.model, options.batch, options.seq)
    captured = capture(model.forward, model, (), inputs, precision=Precision.of(options.precision))
    programs = [run_passes(captured.program, plan, rank) for rank in range(plan.world)]
    timeline = simulate_step(programs, Rates.of(options.device))
    print(plan)
    print(f"a step takes {1e3 * timeline.seconds:.3f} ms, by predicted costs of {options.device}")
    print(timeline)
    if options.trace:
        options.trace.write_text(json.dumps(timeline.chrome_trace()))
        print(f"timeline in {options.trace}: open it at ui.perfetto.dev")
    return 0


def _search(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from .cluster import PRESETS, Cluster
    from .search import search
    from .search_report import as_dict, as_html

    if options.cluster not in PRESETS and not Path(options.cluster).is_file():
        raise PlanError(f"--cluster {options.cluster}: no file, and no preset; those are {', '.join(PRESETS)}")
    cluster = Cluster(options.cluster) if options.cluster in PRESETS else Cluster.from_file(options.cluster)
    cluster = replace(cluster, nodes=options.nodes or cluster.nodes, devices=options.devices or cluster.devices)
    model, inputs = _call_to_plan(options.model, options.batch, options.seq)
    found = search(model, inputs, cluster, precision=options.precision, simulated=options.simulate)
    if options.html:
        options.html.write_text(as_html(found))
    print(json.dumps(as_dict(found)) if options.json else found)
    return 0


def _writable(name: str) -> Path:
    """A file to be written at the end, checked before the work that it is for."""
    path = Path(name)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name}: a folder, or a file in a folder that does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name}: no permission to write it")
    return path


def _call_to_plan(name: str, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model on meta, from a factory or from a config of transformers, and a call of it."""
    import torch

    with torch.device("meta"):
        made = _of_config(name) if os.path.isfile(name) else _factory(name)()
        return _with_call(made, batch, seq)


def _of_config(path: str) -> nn.Module:
    from .demo import require_transformers

    require_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with open(path) as file:
            fields = json.load(file)
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise ValueError("it has no model_type")
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"--model {path} is no config of a causal language model of transformers: {error}") from error


def _model_and_inputs(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    if options.demo_model:
        from . import demo, demo_model

        demo.require_transformers()
        return demo_model.build(0), demo_model.batch(0, 0, options.batch, options.seq)
    if os.path.isfile(options.model):
        import torch

        with torch.device("meta"):
            made = _of_config(options.model)
    else:
        made = _factory(options.model)()
    return _with_call(made, options.batch, options.seq)


def _with_call(made: Any, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    """A factory's model, with the call that it gave or one of ids and labels."""
    import torch

    if isinstance(made, tuple):
        model, inputs = made
        return model, dict(inputs)
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    takes_labels = "labels" in python_inspect.signature(made.forward).parameters
    return made, {"input_ids": ids, "labels": ids.clone()} if takes_labels else {"input_ids": ids}


def _factory(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise PlanError(
            f"--model {name} is no file: write module:factory, such as mypackage.models:build, or a config's path"
        )
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"--model {name}: {error}") from error


def _doctor(_options: argparse.Namespace) -> int:
    from .doctor import doctor

    text, healthy = doctor()
    print(text)
    return 0 if healthy else 1
