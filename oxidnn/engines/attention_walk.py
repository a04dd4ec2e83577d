"""The order in which persistent CTAs walk the tiles of attention, forward, on wgmma, and what time they take."""

from __future__ import annotations

from math import isqrt, log2

import numpy as np

from ..device import DeviceInfo
from ..ops.attention import AttentionProblem

TILE_CLOCKS = 3300  # between tiles
L2_SHARE = 0.5  # of L2 that keys and values of the heads at work may fill
CLOCKS = 1700  # in a microsecond
MEMORY_SHARE = 0.85  # of the time that memory takes: what it adds to that of the tiles is the less, the longer these take
MAX_PICKED, MAX_WALKED = 4096, 1 << 18  # tiles, of a head and in all, that are looked at one by one


def head_tiles(p: AttentionProblem, rows: int) -> tuple[int, int]:
    """(heads, of all batches; tiles of each)."""
    if p.is_varlen:
        return p.heads, -(-p.len_q // rows) + p.batch + 2
    return p.batch * p.heads, -(-p.len_q // rows)


def key_steps(p: AttentionProblem, rows: int, keys: int) -> np.ndarray:
    """Tiles of keys of the tiles of queries, from the first on; of at most MAX_PICKED of them, where there are more."""
    tiles = -(-p.len_q // rows)
    at = np.arange(0, tiles, max(1, tiles // MAX_PICKED)) * rows
    shift = 0 if p.alignment == "top_left" else p.len_kv - p.len_q
    end = np.full_like(at, p.len_kv) if p.right is None else np.minimum(p.len_kv, np.minimum(p.len_q, at + rows) + shift + p.right)
    begin = np.zeros_like(at) if p.left is None else np.maximum(0, at + shift - p.left)
    return np.maximum(0, -(-end // keys) - begin // keys)


def walk(p: AttentionProblem, rows: int, keys: int, clocks: float, device: DeviceInfo,
         between: float = TILE_CLOCKS) -> tuple[int, float]:
    """(how many heads' tiles are walked together, the longest of all of them first; microseconds). The fewer heads, the sooner L2 gives
    their keys and values again; but the CTAs should get equal shares. rows: of a tile; clocks: of a step, of `keys` keys;
    between: clocks between tiles."""
    pairs, q_tiles = head_tiles(p, rows)
    group, ctas = p.heads // p.heads_kv, min(device.num_sms, pairs * q_tiles)
    steps = key_steps(p, rows, keys)[::-1]
    tiles = steps * clocks + between
    held = p.len_kv * (p.dim_qk + p.dim_v) * p.desc("k").dtype.num_bytes / group  # bytes, for each head of q
    passes = len(tiles) and q_tiles * steps.mean() * keys / p.len_kv
    is_known = len(tiles) == q_tiles and pairs * q_tiles <= MAX_WALKED
    # From the longest to the shortest of all heads the shares are never far from equal.
    picked = _divisors(pairs) if is_known or p.right is None or p.left is not None else [pairs]
    found = []
    for n in picked:
        if n % group == 0 or n <= group:
            # Heads that L2 does not hold are read by each of their tiles that are not walked at the same time.
            is_held = max(n, group) * held <= device.l2_bytes * L2_SHARE
            reads = held * (1 if is_held else max(1.0, passes * n / max(n, ctas)))
            memory = (pairs * reads + p.num_bytes) / (device.bandwidth_gbs * 1e3)
            order = np.tile(np.repeat(tiles, n), pairs // n) if is_known else None
            share = pairs * q_tiles * float(tiles.mean()) / ctas if order is None else _largest_share(order, ctas)
            time = float(((share / CLOCKS) ** 3 + (MEMORY_SHARE * memory) ** 3) ** (1 / 3))
            found.append((time * (1 + 0.005 * log2(n)), n, time))
    _, n, time = min(found)
    return n, time


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _largest_share(tiles: np.ndarray, ctas: int) -> float:
    """Of the CTAs' shares of the tiles, which are walked in rounds, every other one backwards: the largest."""
    rounds = np.zeros((-(-len(tiles) // ctas), ctas))
    rounds.reshape(-1)[:len(tiles)] = tiles
    rounds[1::2] = rounds[1::2, ::-1]
    return float(rounds.sum(0).max())
