"""Clusters: what devices compute, hold and send. By name, from a file, or measured (`evocompile.calibrate`).

Bandwidths are bytes per second that one device sends while it receives as many; a collective over a group that fills m
devices of each node has m of the node's shares of the network (`evocompile/collective_costs.py`).

Efficiencies are the part of the device's peak that large products and attention reach, as measured by others:
0.62 for linear layers in bf16 (Megatron-LM, 2205.05198, table 5; InternEvo, 2401.09149), 0.55 for attention
(FlashAttention-2, 2307.08691, figures 4 to 6, forward and backward on A100, head dim 128).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PlanError

GB, TFLOPS = 1e9, 1e12


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s of one device, in one direction. latency: seconds of one hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """flops: peak FLOP/s by dtype ("bfloat16"), dense. memory: bytes that a program may use. memory_bandwidth: bytes/s.

    linear, attention: the part of the peak that products and attention reach. operator: seconds that each takes beyond
    its work: launch, ramp and tail.
    """

    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    linear: float = 0.62
    attention: float = 0.55
    operator: float = 5e-6

    def peak(self, dtype: str) -> float:
        """FLOP/s in `dtype`; that of float32 where it is not listed."""
        for listed in (dtype, "float32"):
            if listed in self.flops:
                return self.flops[listed]
        raise PlanError(f"Device.flops lists {', '.join(self.flops)}, and not {dtype}: add it, or float32")


def _gpu(bf16: float, fp32: float, memory: float, bandwidth: float, attention: float = 0.55) -> Device:
    # 4 % of the memory is the context, the communicators and the allocator's fragments.
    flops = {
        "bfloat16": bf16 * TFLOPS,
        "float16": bf16 * TFLOPS,
        "float32": fp32 * TFLOPS,
        "float64": fp32 * TFLOPS / 2,
    }
    return Device(flops, 0.96 * memory * GB, bandwidth * GB, attention=attention)


# Dense peaks, memory and its bandwidth: NVIDIA's data sheets of A100 (80 GB SXM), A800, H100, H200 (SXM), HGX B200.
# Attention on Hopper: FlashAttention-3 (2407.08608, figure 5) reaches 0.6 to 0.75 forward, less backward.
_A100, _H100 = _gpu(312, 19.5, 80, 2039), _gpu(989, 67, 80, 3350, 0.6)
_H200, _B200 = _gpu(989, 67, 141, 4800, 0.6), _gpu(2250, 80, 180, 8000, 0.6)

# device, devices of a node, link inside, link across.
# NVLink: 300 GB/s (A100), 200 (A800), 450 (H100, H200), 900 (B200) in one direction, of which NCCL reaches about 0.78
# (NVIDIA nccl-tests: 230 to 240 GB/s bus bandwidth on DGX A100). Across: NICs of 200 (A100) or 400 Gb/s,
# one for each GPU (DGX data sheets), of which 0.9 is reached; A800 nodes with 4 HDR cards: 800 Gb/s for 8 GPUs (AMSP,
# 2311.00257, section 6). Latencies: 2 to 10 µs per hop (nccl-tests at small sizes). Gloo over loopback: measured with
# `calibrate` on two cores.
PRESETS: dict[str, tuple[Device, int, Link, Link]] = {
    "dgx-a100-80g": (_A100, 8, Link(235 * GB, 3e-6), Link(22.5 * GB, 8e-6)),
    "a800": (_A100, 8, Link(160 * GB, 3e-6), Link(12.5 * 0.9 * GB, 8e-6)),
    "h100": (_H100, 8, Link(360 * GB, 3e-6), Link(45 * GB, 8e-6)),
    "h200": (_H200, 8, Link(360 * GB, 3e-6), Link(45 * GB, 8e-6)),
    "b200": (_B200, 8, Link(700 * GB, 3e-6), Link(45 * GB, 8e-6)),
    "laptop": (
        Device({"float32": 0.3 * TFLOPS, "bfloat16": 0.1 * TFLOPS}, 12 * GB, 50 * GB),
        4,
        Link(3 * GB, 1e-4),
        Link(0.1 * GB, 1e-3),
    ),
    "cpu-gloo": (
        Device({"float32": 0.05 * TFLOPS, "bfloat16": 0.02 * TFLOPS}, 8 * GB, 10 * GB),
        8,
        Link(1 * GB, 2e-4),
        Link(0.1 * GB, 1e-3),
    ),
}


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `devices` devices each. What is left out is that of the preset `name`.

    congestion: by how much the links across nodes get slower for groups of up to so many ranks (InternEvo's simulator,
                2401.09149: 1 up to 16 ranks, 1.1 up to 32, …, 1.5 for more than 512).
    """

    name: str
    nodes: int = 1
    devices: int = None  # type: ignore[assignment]
    device: Device = None  # type: ignore[assignment]
    inside: Link = None  # type: ignore[assignment]
    across: Link = None  # type: ignore[assignment]
    congestion: tuple[tuple[int, float], ...] = (
        (16, 1.0),
        (32, 1.1),
        (64, 1.2),
        (256, 1.3),
        (512, 1.4),
        (1 << 62, 1.5),
    )

    def __post_init__(self) -> None:
        given = {"device": self.device, "devices": self.devices, "inside": self.inside, "across": self.across}
        if self.name not in PRESETS and None in given.values():
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise PlanError(
                f"Cluster({self.name!r}): no preset of that name; choose one of {', '.join(PRESETS)}, or give {missing}"
            )
        for (name, value), known in zip(given.items(), PRESETS.get(self.name, given.values()), strict=True):
            object.__setattr__(self, name, known if value is None else value)
        for name in ("nodes", "devices"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise PlanError(f"Cluster.{name} must be a positive number, got {count!r}")

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.nodes} nodes of {self.devices} devices, {self.device.memory / GB:.0f} GB each, "
            f"{self.inside.bandwidth / GB:g} GB/s inside, {self.across.bandwidth / GB:g} GB/s across"
        )

    @staticmethod
    def for_world(world: int, device: str, name: str = "") -> Cluster:
        """What is known of a launched world: the type of its devices ("cuda", "cpu"), and a GPU's name.

        Whole nodes of the preset, or one node. A function of its arguments alone, so that all ranks get the same.
        """
        if device != "cuda":
            return Cluster("cpu-gloo", devices=world)
        preset = next((known for part, known in _GPUS if part in name.upper()), "dgx-a100-80g")
        devices = PRESETS[preset][1]
        if world % devices or world < devices:
            return Cluster(preset, devices=world)
        return Cluster(preset, nodes=world // devices)

    @staticmethod
    def from_file(path: str | Path) -> Cluster:
        """A cluster from a JSON or YAML file: {"name", "nodes", "devices", "device": {…}, "inside": {…}, "across": …}.

        `name` may be a preset's, of which the file then changes what it gives, fields of `device` and links too.
        """
        fields = _read(Path(path))
        return _from_fields(fields, str(path))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


_GPUS = (("B200", "b200"), ("H200", "h200"), ("H100", "h100"), ("A800", "a800"), ("A100", "dgx-a100-80g"))


def _read(path: Path) -> Any:
    try:
        text = path.read_text()
    except OSError as error:
        raise PlanError(f"cluster file {path}: {error.strerror}") from error
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError:
            raise PlanError(f"cluster file {path}: YAML needs PyYAML; install it, or write JSON") from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"cluster file {path} is no YAML: {error}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"cluster file {path} is no JSON: {error}") from error


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`base` with the numbers of `changes`, down to the entries of `flops`; what takes time may take none."""
    if not isinstance(changes, Mapping):
        raise TypeError(f"{where} must be an object, got {changes!r}")
    changed = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            changed[name] = _changed(base.get(name, {}), value, f"{where}.{name}")
            continue
        try:
            changed[name] = float(value)  # YAML 1.1 reads 80e9, without a point, as text
        except (TypeError, ValueError):
            raise ValueError(f"{where}.{name} must be a number, got {value!r}") from None
        if not (changed[name] > 0 or (changed[name] == 0 and name in ("latency", "operator"))):
            raise ValueError(f"{where}.{name} must be a positive number, got {value!r}")
    return changed


def _from_fields(fields: Any, where: str) -> Cluster:
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise PlanError(f"cluster file {where}: an object with at least a name")
    fields = dict(fields)
    _check_names(fields, Cluster, where, "")
    preset = PRESETS.get(fields["name"])
    bases: dict[str, dict[str, Any]] = {}
    if preset is not None:
        known = {"device": preset[0], "inside": preset[2], "across": preset[3]}
        bases = {name: dataclasses.asdict(value) for name, value in known.items()}  # type: ignore[call-overload]
    try:
        for name, kind in (("device", Device), ("inside", Link), ("across", Link)):
            if name in fields:
                _check_names(fields[name], kind, where, f"{name}.")
                fields[name] = kind(**_changed(bases.get(name, {}), fields[name], name))
        if "congestion" in fields:
            fields["congestion"] = tuple((int(ranks), float(factor)) for ranks, factor in fields["congestion"])
        return Cluster(**fields)
    except (TypeError, ValueError) as error:
        raise PlanError(f"cluster file {where}: {error}") from error


def _check_names(fields: Any, kind: type, where: str, prefix: str) -> None:
    known = [each.name for each in dataclasses.fields(kind)]
    unknown = [name for name in fields if name not in known] if isinstance(fields, Mapping) else []
    if unknown:
        names = ", ".join(f"{prefix}{name}" for name in unknown)
        raise PlanError(f"cluster file {where}: no field {names}; there are {', '.join(known)}")
