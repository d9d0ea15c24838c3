"""What each schedule puts on the wire, in closed form: bytes that one rank sends for one attention.

Let P ranks share N positions evenly, n = N/P each, for B rows, H query heads and Hk key/value heads of dims D (q, k)
and E (v, out). Operands travel in their dtype, states and gradients in the accumulation dtype.
With B = 1, Hk = H, D = E and hidden size h = H·D they are the papers' formulas:

    ring        2·N·h·(P-1)/P forward, for a mask that is not causal (2310.01889)
    balanced    N·h·(P-1)/P forward, 3 times that in all (2310.03294, section 3.2): half of a causal ring's blocks,
                and queries and states for those that helpers take
    ulysses     4·N·h/P · (P-1)/P forward (2309.14509, section 3.2)
    double ring as the ring, of which only P/w - 1 blocks come from other windows (2406.18485, section 4.4)

A causal mask and a sliding window leave out what no query sees, also parts of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .attention_report import Sizes


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank sends in a forward and in a backward."""

    forward: int
    backward: int


def _of_keys(sizes: Sizes, sent: int, returned: int) -> Volume:
    """sent: positions of keys and values that the rank gives to others, in both directions of the step; returned:
    positions of others' for which it returns gradients."""
    row = sizes.batch * sizes.kv_heads * (sizes.dim + sizes.v_dim)
    return Volume(sent * row * sizes.itemsize, sent * row * sizes.itemsize + returned * row * sizes.state_itemsize)


def ring(sizes: Sizes, length: int, ranks: int, rank: int, causal: bool) -> Volume:
    """Its n keys to each other rank; under a causal mask to the P-1-r later ones, and from the r earlier ones."""
    n = length // ranks
    sent, fetched = (ranks - 1 - rank, rank) if causal else (ranks - 1, ranks - 1)
    return _of_keys(sizes, sent * n, fetched * n)


def window(sizes: Sizes, length: int, ranks: int, rank: int, width: int) -> Volume:
    """A ring under a causal window of `width` keys: the last W-1 of its own and earlier keys are needed behind it.

    The volume does not depend on N while all ranks behind, or before, hold W-1 positions.
    """
    n = length // ranks
    behind, before = n * (ranks - 1 - rank), n * rank
    sent = sum(min(n, max(0, width - 1 - i * n)) for i in range(ranks - 1 - rank))
    fetched = min(width - 1, before)
    assert sent == min(width - 1, behind)
    return _of_keys(sizes, sent, fetched)


def zigzag(sizes: Sizes, length: int, ranks: int, rank: int) -> Volume:
    """Causal, 2P chunks of N/2P: the early chunk to the P-1-r later ranks, both chunks to the r earlier ones.

    Over all ranks that is 3/4 of a ring that sends whole blocks to everyone.
    """
    chunk = length // (2 * ranks)
    later = ranks - 1 - rank
    return _of_keys(sizes, (later + 2 * rank) * chunk, (rank + 2 * later) * chunk)


def balanced(sizes: Sizes, length: int, ranks: int, rank: int) -> Volume:
    """Causal. Of the T = ⌊P/2⌋ blocks after the own one, min(T, P-1-r) come from r for their owners' jobs; r's queries
    go to max(0, T'-(P-r)+1) helpers, T' = ⌊(P-1)/2⌋, and r helps max(0, T'-r) times.

    A helper's job moves q there and (out, lse) back; in the backward q, out, d_out and lse there and dq back.
    """
    n, steps, helped_steps = length // ranks, ranks // 2, (ranks - 1) // 2
    lent, fetched = min(steps, ranks - 1 - rank), min(steps, rank)
    helpers, helps = max(0, helped_steps - (ranks - rank) + 1), max(0, helped_steps - rank)
    own = _of_keys(sizes, lent * n, fetched * n)
    row = sizes.batch * sizes.heads * n
    queries, state = row * sizes.dim * sizes.itemsize, row * (sizes.v_dim + 1) * sizes.state_itemsize
    there = row * ((sizes.dim + 2 * sizes.v_dim) * sizes.itemsize + sizes.state_itemsize)
    back = row * sizes.dim * sizes.state_itemsize
    return Volume(
        own.forward + helpers * queries + helps * state,
        own.backward + helpers * there + helps * back,
    )


def double_ring(sizes: Sizes, length: int, ranks: int, width: int) -> tuple[Volume, Volume]:
    """Not causal, windows of w ranks: within a window, and between windows.

    P/w - 1 blocks cross between windows; in each of the P/w rounds the block that is here goes to w-1 neighbours.
    """
    n, windows = length // ranks, ranks // width
    within, between = windows * (width - 1) * n, (windows - 1) * n
    return _of_keys(sizes, within, within), _of_keys(sizes, between, between)


def ulysses(sizes: Sizes, length: int, heads: list[int], kv_heads: list[int], rank: int) -> Volume:
    """q, k and v of the others' heads go, out of the own heads comes back; then d_out goes, dq, dk and dv come back.

    heads, kv_heads: of each rank. A key/value head that several ranks need goes to each, and its gradients come back in
    the accumulation dtype, to be summed.
    """
    ranks = len(heads)
    rows = sizes.batch * (length // ranks)
    others, own = sum(heads) - heads[rank], heads[rank]
    other_keys, own_keys = sum(kv_heads) - kv_heads[rank], kv_heads[rank]
    is_shared = sum(kv_heads) > sizes.kv_heads
    gradient = sizes.state_itemsize if is_shared else sizes.itemsize
    width = sizes.dim + sizes.v_dim
    there = rows * (others * sizes.dim + other_keys * width) * sizes.itemsize
    back = rows * (ranks - 1) * own * sizes.v_dim * sizes.itemsize
    d_out = rows * others * sizes.v_dim * sizes.itemsize
    gradients = rows * (ranks - 1) * (own * sizes.dim + own_keys * width) * gradient
    return Volume(there + back, d_out + gradients)
