"""How long communication takes: bytes over the bandwidth of a group, and its latency. Works on numpy arrays.

A group is `ranks` ranks, `stride` apart. It has m = min(ranks, devices // stride) ranks in a node of `devices`. Ring
collectives put v(n-1)/n bytes on the wire per rank; where a group crosses nodes, its m members share m of the node's
ways out, and its bandwidth is the smaller of that and the one inside. What each rank sends to ranks of its own choice
(all-to-all, key/value blocks) takes the rank's own way out. NCCL's bandwidth is not one α-β line (AMSP, 2311.00257);
larger groups get less of the network, as `Cluster.congestion` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .cluster import Cluster

Array = Any  # numpy arrays of one shape, or numbers


class Group(NamedTuple):
    """bandwidth: bytes/s of a ring collective. own: of what a rank sends straight to others, the slowest way.

    ring, tree: seconds of latency of a gather or scatter, and of an all-reduce. hop: of one message.
    """

    bandwidth: Array
    own: Array
    ring: Array
    tree: Array
    hop: Array
    outside: Array


def group(cluster: Cluster, ranks: Array, stride: Array) -> Group:
    ranks, stride = np.asarray(ranks, float), np.asarray(stride, float)
    members = np.minimum(ranks, np.maximum(1, np.floor(cluster.devices / stride)))
    crosses = members < ranks
    factor = np.ones_like(ranks)
    below = 0
    for most, each in cluster.congestion:
        factor = np.where((ranks > below) & (ranks <= most), each, factor)
        below = most
    across = cluster.across.bandwidth / factor
    inside = cluster.inside.bandwidth
    nodes = np.ceil(ranks / members)
    near, far = cluster.inside.latency, cluster.across.latency
    return Group(
        np.where(crosses, np.minimum(inside, across * members), inside),
        np.where(crosses, across, inside),
        np.where(ranks > 1, (ranks - nodes) * near + (nodes - 1) * far, 0.0),
        np.where(ranks > 1, 2 * ((members - 1) * near + np.log2(nodes) * far), 0.0),
        np.where(ranks > 1, np.where(crosses, far, near), 0.0),
        np.where(ranks > 1, (ranks - members) / np.maximum(ranks - 1, 1), 0.0),
    )


def exchange_seconds(each: Group, inside: float, sent: Array) -> Array:
    """An all-to-all: what goes to the own node and what leaves it go at once."""
    return np.maximum(sent * (1 - each.outside) / inside, sent * each.outside / each.own)
