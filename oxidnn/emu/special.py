"""Special registers as arrays over the threads of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from oxidnn.emu.memory import Array

if TYPE_CHECKING:
    from oxidnn.emu.machine import State


def special_register(S: State, name: str, dtype: np.dtype) -> Array:
    """The value of a special register for the threads of a batch; (1,) where all agree."""
    launch = S.launch
    T, count = S.T, S.ctas
    tx, ty, tz = launch.threads
    head, _, axis = name[1:].partition(".")
    which = "xyz".find(axis) if axis else 0

    def uniform(number: int) -> Array:
        return np.array([number]).astype(dtype)

    def spread(per_cta: Array) -> Array:
        return uniform(int(per_cta[0])) if count == 1 else np.repeat(per_cta.astype(dtype), T)

    if head == "tid":
        size = (tx, ty, tz)[which]
        if size == 1:
            return uniform(0)
        below = (1, tx, tx * ty)[which]
        return S.program.pattern((name, launch.threads, count), lambda: (S.thread // below % size).astype(dtype))
    if head == "ntid":
        return uniform(launch.threads[which])
    if head == "nctaid":
        return uniform(launch.grid[which])
    if head == "ctaid":
        return uniform(0) if launch.grid[which] == 1 else spread(S.coordinates()[which])
    if head == "clusterid":
        return spread(S.coordinates()[which] // launch.cluster[which])
    if head == "nclusterid":
        return uniform(launch.grid[which] // launch.cluster[which])
    if head == "cluster_ctaid":
        return spread(S.coordinates()[which] % launch.cluster[which])
    if head == "cluster_nctaid":
        return uniform(launch.cluster[which])
    if head == "cluster_ctarank":
        return spread(S.coordinates()[3])
    if head == "cluster_nctarank":
        return uniform(launch.cluster[0] * launch.cluster[1] * launch.cluster[2])
    if head == "is_explicit_cluster":
        return np.array([launch.cluster != (1, 1, 1)])
    if head == "laneid":
        return S.program.pattern((name, T, count), lambda: S.lane.astype(dtype))
    if head == "warpid":
        if T <= 32:
            return uniform(0)
        return S.program.pattern((name, T, count), lambda: (S.thread >> 5).astype(dtype))
    if head == "nwarpid":
        return uniform(S.warps_per_cta)
    if head.startswith("lanemask_"):
        one: Array = np.array([1], np.uint64)
        lane = S.lane.astype(np.uint64)
        lower: Array = (one << lane) - one
        this = one << lane
        full = np.array([0xFFFFFFFF], np.uint64)
        found: dict[str, Array] = {"eq": this, "lt": lower, "le": lower | this, "gt": full & ~(lower | this), "ge": full & ~lower}
        return found[head[9:]].astype(dtype)
    if head in ("dynamic_smem_size", "total_smem_size", "aggr_smem_size"):
        return uniform(launch.dynamic_smem if head[0] == "d" else S.shared.size)
    if head == "smid":
        return spread((S.first_cta + np.arange(count)) % 4)
    if head == "nsmid":
        return uniform(4)
    return uniform(0)  # gridid, pm counters
