"""Clusters: presets, files, and the bandwidth of groups."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evocompile.cluster import PRESETS, Cluster, Device, Link
from evocompile.collective_costs import group
from evocompile.errors import PlanError

SMALL = Cluster(
    "made up",
    nodes=4,
    devices=8,
    device=Device({"float32": 1e12}, 1e9, 1e10),
    inside=Link(100.0, 1.0),
    across=Link(10.0, 5.0),
    congestion=((8, 1.0), (1 << 62, 2.0)),
)


def test_a_preset_can_be_changed() -> None:
    cluster = Cluster("h100", nodes=3, devices=4)
    assert cluster.world == 12
    assert cluster.device == PRESETS["h100"][0]
    assert str(cluster) == "h100: 3 nodes of 4 devices, 77 GB each, 360 GB/s inside, 45 GB/s across"


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"no preset of that name; choose one of dgx-a100-80g, .* or give device"):
        Cluster("dgx-1")
    with pytest.raises(PlanError, match=r"Cluster.nodes must be a positive number, got 0"):
        Cluster("h100", nodes=0)


def test_files(tmp_path: Path) -> None:
    """What a file leaves out is the preset's; a cluster's own JSON gives it back."""
    path = tmp_path / "ours.json"
    path.write_text('{"name": "h100", "nodes": 2, "across": {"bandwidth": 1e9}, "device": {"linear": 0.5}}')
    cluster = Cluster.from_file(path)
    assert (cluster.across.bandwidth, cluster.across.latency) == (1e9, PRESETS["h100"][3].latency)
    assert (cluster.device.linear, cluster.device.memory) == (0.5, PRESETS["h100"][0].memory)
    path.write_text(SMALL.to_json())
    assert Cluster.from_file(path) == SMALL
    yaml = pytest.importorskip("yaml")
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(json.loads(SMALL.to_json())))
    assert Cluster.from_file(tmp_path / "ours.yaml") == SMALL


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "an object with at least a name"),
        ('{"name": "h100", "links": 3}', "no field links; there are name, nodes"),
        ('{"name": "h100", "inside": {"latencies": 3}}', "no field inside.latencies; there are bandwidth, latency"),
        ('{"name": "h100", "device": 3}', "device must be an object, got 3"),
        ('{"name": "h100", "inside": {"bandwidth": "fast"}}', "inside.bandwidth must be a number, got 'fast'"),
        ('{"name": "h100", "device": {"flops": {"float32": 0}}}', "device.flops.float32 must be a positive number"),
    ],
)
def test_files_that_say_nothing_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=message):
        Cluster.from_file(path)
    with pytest.raises(PlanError, match="No such file"):
        Cluster.from_file(tmp_path / "nowhere.json")


def test_a_file_may_write_numbers_as_text_and_list_few_types(tmp_path: Path) -> None:
    """YAML 1.1 reads 80e9 as text. A preset keeps the types that the file does not list."""
    path = tmp_path / "ours.json"
    path.write_text('{"name": "h100", "device": {"memory": "80e9", "flops": {"bfloat16": 5e14}}}')
    device = Cluster.from_file(path).device
    assert (device.memory, device.peak("bfloat16")) == (80e9, 5e14)
    assert device.peak("float32") == PRESETS["h100"][0].peak("float32")
    lean = Device({"bfloat16": 1e12}, 1e9, 1e10)
    assert lean.peak("bfloat16") == 1e12
    with pytest.raises(PlanError, match="not float64: add it, or float32"):
        lean.peak("float64")


def test_worlds_that_run() -> None:
    assert Cluster.for_world(6, "cpu").world == 6
    assert Cluster.for_world(32, "cuda", "NVIDIA H200").nodes == 4
    assert Cluster.for_world(12, "cuda", "NVIDIA A100-SXM4-80GB") == Cluster("dgx-a100-80g", devices=12)


def test_bandwidth_of_groups() -> None:
    """Inside a node; over whole nodes; one rank of each node; more ranks than congestion leaves alone."""
    found = group(SMALL, np.array([4, 16, 4, 2]), np.array([1, 1, 8, 16]))
    assert found.bandwidth.tolist() == [100, 8 * 10 / 2, 10, 10]
    assert found.own.tolist() == [100, 5, 10, 10]
    assert found.ring.tolist() == [3, 14 * 1 + 5, 3 * 5, 5]
    assert found.outside.tolist() == [0, 8 / 15, 1, 1]
    assert float(group(SMALL, 1, 1).ring) == 0
