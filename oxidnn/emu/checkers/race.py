"""Order and data races, by vector clocks: who knows of whose accesses, and which in shared memory nothing orders.

Agents of a CTA: its warps, each warp's queue of cp.async copies and of bulk copies out of shared memory, each
warpgroup's wgmma queue, each warp's queue of bulk copies into global memory, and one per mbarrier (the copies that
signal it). The agents of a cluster share one table: `clock[cluster, a, b]` is the latest time of agent b that a knows
of. Per granule of shared memory stands the last write (pc, agent, time) and the time of each agent's last read. An
access races with an earlier one of another agent whose time it does not know. Times advance at releases.

bar.sync joins the clocks of its threads; a wait for copies or products acquires what the queue had done by the commit
of the group; an arrival at an mbarrier releases, and a successful wait acquires what arrived in the phases complete and
what the copies wrote. Atomics synchronise as the memory model has it: release = fence before (or .release), acquire =
fence after (or .acquire); one location stands for all of a cluster.

A warp is one agent. A lane that reads or overwrites what another lane of its warp has written is a race unless the warp's
time has advanced since, which bar.warp.sync and all that releases do; what it overwrites of their reads is not seen.

A clock row has sections of one time per agent. The first is what the row's agent knows to have happened. TMA and wgmma
see memory through the async proxy: the second section is what it knows to be fenced for that (fence.proxy.async), generic
writes that the async proxy may meet. The third is what it knows to be covered by a fence of GPU scope, so that an atomic
makes it known to other clusters. The row ends with two versions of what clusters have made known to all others
(`GlobalRace`): the latest an atomic has seen, and the latest known, which a fence takes from the first.

Most kernels read between barriers what was written before them. Reads are therefore only noted while nothing has been
written since the last barrier of all threads, and forgotten at the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import Access
from oxidnn.emu.memory import SHARED_BASE, Array, Fault

if TYPE_CHECKING:
    from oxidnn.emu.bulk import Issue
    from oxidnn.emu.machine import State
    from oxidnn.emu.program import Program

LANE_SHIFT = 26  # in a write's mark, above its time
OWN = 0x7FF << 32 | (1 << LANE_SHIFT) - 1  # agent and time
ALL_LANES, NO_LANE = 32, 33  # a matrix of the whole warp; an access that no lane makes
MANY = 1023  # state of a granule that several agents have read since its last write
VERBS = {"read": "reads", "write": "writes", "atomic": "updates", "async write": "copies to"}


def granule_of(widths: list[int]) -> int:
    """The size of what is tracked: the narrowest access, at most 4 bytes."""
    return min([4, *widths])


def shared_granule(program: Program) -> int:
    """The same for shared memory: at most the 16 bytes of a chunk."""
    widths = [16]
    for op in program.ops:
        mods = op.ins.modifiers
        if "access" in op.info and not ({"global", "param", "const", "local"} & set(mods) and op.ins.opcode != "cp"):
            widths.append(op.info["access"].width)
    return min(widths)


def fences_gpu(program: Program) -> bool:
    """Whether the program has a fence that orders more than a cluster."""
    return any(op.ins.opcode in ("fence", "membar") and "proxy" not in "".join(op.ins.modifiers)
               and not {"gpu", "gl", "sys"}.isdisjoint(op.ins.modifiers) for op in program.ops)


def reader_agents(program: Program, threads: int) -> int:
    """Agents per CTA that read: warps, and the queues that the program can use."""
    warps, groups = (threads + 31) // 32, (threads + 127) // 128
    return warps * (1 + program.has_copies + program.has_bulk_groups) + groups * program.has_products


BETWEEN_LANES = "missing is a bar.warp.sync between them"


def lane_name(lane: int) -> str:
    return "another instruction of the same warp" if lane == ALL_LANES else f"lane {lane} of the same warp"


class SharedRace:
    def __init__(self, S: State) -> None:
        self.S = S
        program = S.program
        self.warps, self.size = S.warps_per_cta, S.cluster_size
        self.clusters = S.ctas // self.size
        self.first_cluster = S.first_cta // self.size  # of the batch, in the grid
        # local agents of a CTA, in this order: warps, copy queues, bulk queues, wgmma queues, queues of bulk copies into
        # global memory, mbarriers
        self.copy_queue = self.warps
        self.bulk_queue = self.copy_queue + self.warps * program.has_copies
        self.product_queue = self.bulk_queue + self.warps * program.has_bulk_groups
        self.readers_per_cta = reader_agents(program, S.T)
        self.fixed_per_cta = self.readers_per_cta + self.warps * program.has_bulk_groups
        self.generic = self.bulk_queue * self.size  # agents below write through the generic proxy
        self.capacity = 0  # mbarriers per CTA
        self.is_proxied, self.is_published = program.is_async, fences_gpu(program)
        self.sections = 1 + self.is_proxied + self.is_published
        self.agents = self.fixed_per_cta * self.size
        self.row = self.agents * self.sections + 2
        self.clock = np.zeros((self.clusters, self.agents, self.row), np.int32)
        each = np.arange(self.agents)
        self.clock[:, each, each] = 1
        self.granule = shared_granule(program)
        granules = S.ctas * S.shared.stride // self.granule
        self.writes = np.zeros(granules, np.int64)  # pc << 44 | atomic << 43 | agent << 32 | lane << 26 | time
        self.num_readers = self.readers_per_cta * self.size
        self.reads = np.zeros(granules * self.num_readers, np.int32)  # time of every agent's last read
        self.readers = np.zeros(granules, np.int32)  # pc << 10 | agent + 1, or MANY
        self.updates = np.zeros(0, np.int32)  # as `reads`, of atomics; made when there is one
        self.per_cta = max(1, S.shared.stride // self.granule)
        total = S.ctas * self.warps
        self.committed, self.bulk_committed, self.products_committed = (np.zeros(total, np.int64) for _ in range(3))
        self.released: dict[Any, Array] = {}
        self.fenced: Array | None = None  # (clusters, agents, row): what the warp's last fence covered
        self.heard: Array | None = None  # the same: what the warp's atomics saw, acquired by a fence
        self.repeated: dict[int, tuple[Array, ...]] = {}  # agent, clock row and lane of all threads, so many times each
        self.by_lane: tuple[Array, ...] | None = None  # S.warp, and cluster, agent and clock row of its lanes
        self.location = np.zeros((self.clusters, self.row), np.int32)
        self.to_barrier = self.done = np.zeros((0, self.row), np.int32)  # by mbarrier: what arrivals brought; what waits get
        self.at_cluster = np.zeros((self.clusters, self.row), np.int32)
        self.past_cluster = np.zeros((self.clusters, self.row), np.int32)
        self.remote = np.zeros((S.ctas, self.agents), np.int32)  # by CTA: time of each agent's last access from another CTA
        self.remote_pc = np.zeros((S.ctas, self.agents), np.int32)
        self.noted: list[tuple[Array, Access, Array | None, int]] = []  # reads: index, access, positions, pc
        self.written = False  # something may have been written that not everybody knows of
        self.has_copies = self.size > 1

    # -- agents

    def more_barriers(self, old: int, new: int) -> None:
        """The table of mbarriers has grown from `old` to `new` per CTA."""
        self.flush()
        before, ctas = self.agents, self.S.ctas
        self.agents = (self.fixed_per_cta + new) * self.size
        self.row = self.agents * self.sections + 2
        self.by_lane = None

        def widen(rows: Array) -> Array:
            wide = np.zeros((*rows.shape[:-1], self.row), np.int32)
            for section in range(self.sections):
                wide[..., section * self.agents :][..., :before] = rows[..., section * before : (section + 1) * before]
            wide[..., -2:] = rows[..., -2:]
            return wide

        def taller(rows: Array) -> Array:
            tall = np.zeros((self.clusters, self.agents, self.row), np.int32)
            tall[:, :before] = widen(rows)
            return tall

        self.clock = taller(self.clock)
        each = np.arange(before, self.agents)
        self.clock[:, each, each] = 1
        self.released = {key: widen(table) for key, table in self.released.items()}
        if self.fenced is not None and self.heard is not None:
            self.fenced, self.heard = taller(self.fenced), taller(self.heard)
        self.location, self.at_cluster, self.past_cluster = widen(self.location), widen(self.at_cluster), widen(self.past_cluster)
        for name in ("to_barrier", "done"):
            table = np.zeros((ctas, new, self.row), np.int32)
            if old:
                table[:, :old] = widen(getattr(self, name)).reshape(ctas, old, self.row)
            setattr(self, name, table.reshape(ctas * new, self.row))
        self.remote, self.remote_pc = (np.pad(x, ((0, 0), (0, self.agents - before))) for x in (self.remote, self.remote_pc))
        self.capacity = new

    def lanes(self, positions: Array | None) -> tuple[Array, Array, Array]:
        """(cluster, agent, where the agent's clock row begins) of every thread."""
        known = self.by_lane
        if known is None or known[0] is not self.S.warp:
            cluster, agent = self._agent(self.S.warp)
            self.repeated.clear()
            known = self.by_lane = (self.S.warp, cluster, agent, (cluster * self.agents + agent) * self.row)
        _, cluster, agent, row = known
        return (cluster, agent, row) if positions is None else (cluster.take(positions), agent.take(positions), row.take(positions))

    def _warps(self, positions: Array | None) -> tuple[Array, Array, Array]:
        """(cluster, agent, number in the batch) of every warp among the threads."""
        S = self.S
        warp = S.warp if positions is None else S.warp.take(positions)
        warp = warp[np.r_[True, warp[1:] != warp[:-1]]]  # positions are sorted
        return *self._agent(warp), warp

    def _agent(self, warp: Array, queue: int = 0) -> tuple[Array, Array]:
        """(cluster, agent) of warps of the batch, or of their queues."""
        cta, local = warp // self.warps, warp % self.warps + queue
        if self.size == 1:
            return cta, local
        return cta // self.size, local * self.size + cta % self.size

    def _barrier(self, flat: Array) -> tuple[Array, Array]:
        cta, local = flat // self.capacity, flat % self.capacity + self.fixed_per_cta
        return cta // self.size, local * self.size + cta % self.size

    def name(self, agent: int, with_rank: bool = True) -> str:
        local, rank = agent // self.size, agent % self.size
        if local < self.copy_queue:
            text = f"warp {local}"
        elif local < self.bulk_queue:
            text = f"a cp.async of warp {local - self.copy_queue}"
        elif local < self.product_queue:
            text = f"a bulk copy of warp {local - self.bulk_queue}"
        elif local < self.readers_per_cta:
            text = f"a wgmma of warpgroup {local - self.product_queue}"
        elif local < self.fixed_per_cta:
            text = f"a bulk copy of warp {local - self.readers_per_cta}"
        else:
            place = self.S.mbarriers.places[local - self.fixed_per_cta] * 8 + SHARED_BASE
            text = f"an asynchronous copy that signals mbarrier {place:#x}{self.S.shared_name(place)}"
        return text + (f" of rank {rank}" if self.size > 1 and with_rank else "")

    def missing(self, agent: int, here: int) -> str:
        """What would have ordered an earlier access of `agent` before one of the agent `here`, of the same cluster."""
        local = agent // self.size
        if agent % self.size != here % self.size:
            hand_over = "a barrier.cluster, or a release and an acquire of cluster scope"
        else:
            hand_over = "a bar.sync, or an arrival at an mbarrier and a wait for it"
        if local < self.copy_queue:
            return f"missing is {hand_over} between them"
        if local < self.bulk_queue:
            wait, owner = "cp.async.wait_group", local - self.copy_queue
        elif local < self.product_queue:
            wait, owner = "cp.async.bulk.wait_group.read", local - self.bulk_queue
        elif local < self.readers_per_cta:
            wait, owner = "wgmma.wait_group", local - self.product_queue
        elif local < self.fixed_per_cta:
            wait, owner = "cp.async.bulk.wait_group", local - self.readers_per_cta
        else:
            return "missing is a wait for that mbarrier's phase between them"
        warps = range(4 * owner, 4 * owner + 4) if wait[0] == "w" else (owner,)
        if here // self.size in warps:
            return f"missing is a {wait} that covers it between them"
        return f"missing is a {wait} that covers it, then {hand_over}, between them"

    # -- order

    def _tick(self, cluster: Array, agent: Array) -> None:
        self.clock[cluster, agent, agent] += 1

    def _learn(self, cluster: Array, agent: Array, rows: Array) -> None:
        self.clock[cluster, agent] = np.maximum(self.clock[cluster, agent], rows)

    def barrier_all(self) -> None:
        """A barrier that all live threads of every CTA pass together."""
        w = self.warps
        if self.S.N == self.S.N0:
            if self.size > 1:
                self.flush()
            joined = self.clock[:, : w * self.size].reshape(self.clusters, w, self.size, self.row)
            joined[:] = joined.max(axis=1, keepdims=True)
            each = np.arange(w * self.size)
            self.clock[:, each, each] += 1
            self.noted.clear()
            self.written = self.has_copies
            return
        self.arrive("all", None)
        self.leave("all", None)

    def arrive(self, key: Any, positions: Array | None) -> None:
        """The warps release what they know to the barrier `key`."""
        self.flush()
        cluster, agent, warp = self._warps(positions)
        table = self.released.get(key)
        if table is None:
            table = self.released[key] = np.zeros((self.S.ctas, self.row), np.int32)
        np.maximum.at(table, warp // self.warps, self.clock[cluster, agent])
        self._tick(cluster, agent)

    def leave(self, key: Any, positions: Array | None) -> None:
        """The warps acquire what the barrier `key` has collected."""
        self.flush()
        cluster, agent, warp = self._warps(positions)
        self._learn(cluster, agent, self.released[key][warp // self.warps])

    def warp_sync(self, idx: Array | None) -> None:
        """bar.warp.sync orders the lanes of a warp."""
        cluster, agent, _ = self._warps(idx)
        self._tick(cluster, agent)

    def commit_copies(self, S: State, idx: Array | None) -> None:
        *_, warp = self._warps(idx)
        self.committed[warp] += 1
        self._tick(*self._agent(warp, self.copy_queue))

    def wait_copies(self, S: State, idx: Array | None, allowed: int | None) -> None:
        # group i (from 1) wrote at time i of the queue
        self.flush()
        cluster, agent, warp = self._warps(idx)
        _, queue = self._agent(warp, self.copy_queue)
        done = self.clock[cluster, queue, queue] if allowed is None else self.committed[warp] - allowed
        self.clock[cluster, agent, queue] = np.maximum(self.clock[cluster, agent, queue], done)

    def fence(self, idx: Array | None, is_wide: bool = False) -> None:
        """A fence covers all before it for later releases, and acquires what atomics before it saw. is_wide: of GPU scope."""
        self.flush()
        cluster, agent, _ = self._warps(idx)
        if self.fenced is None or self.heard is None:
            self.fenced = np.zeros((self.clusters, self.agents, self.row), np.int32)
            self.heard = np.zeros_like(self.fenced)
        self._learn(cluster, agent, self.heard[cluster, agent])
        known = self.clock[cluster, agent]
        if is_wide:
            known[:, -1] = np.maximum(known[:, -1], known[:, -2])
            covered = known[:, -2 - self.agents : -2]
            np.maximum(covered, known[:, : self.agents], out=covered)
            self.clock[cluster, agent] = known
        self.fenced[cluster, agent] = known
        self._tick(cluster, agent)

    def proxy_fence(self, idx: Array | None, is_release: bool = False) -> None:
        """fence.proxy.async, and (a release too) fence.mbarrier_init."""
        if not self.is_proxied:
            return
        self.flush()
        cluster, agent, _ = self._warps(idx)
        known = self.clock[cluster, agent]
        met = known[:, self.agents : 2 * self.agents]
        np.maximum(met, known[:, : self.agents], out=met)
        self.clock[cluster, agent] = known
        self._tick(cluster, agent)
        if is_release:
            self.fence(idx)

    def release(self, access: Access, positions: Array | None, to_all: bool = False) -> bool:
        """What a strong access releases to its cluster, and (to_all: one of GPU scope in global memory) to others. Whether it has
        made that a new version."""
        cluster, agent, _ = self._warps(positions)
        if "release" in access.order:
            known = self.clock[cluster, agent]
            np.maximum.at(self.location, cluster, known)
            known = known[:, : self.agents]
            self._tick(cluster, agent)
        elif self.fenced is not None:
            np.maximum.at(self.location, cluster, self.fenced[cluster, agent])
            if not (to_all and self.is_published):
                return False
            known = self.clock[cluster, agent, -2 - self.agents : -2]
            np.maximum.at(self.location[:, : self.agents], cluster, known)
        else:
            return False
        if to_all and known.any():
            self.S.global_race.publish(self.first_cluster + cluster, known)
            return True
        return False

    def acquire(self, access: Access, positions: Array | None, seen: Array | None = None) -> None:
        """What a strong access acquires. seen: the version that other clusters have released there, per thread."""
        cluster, agent, warps = self._warps(positions)
        version: Any = 0
        if seen is not None and np.count_nonzero(seen):
            of = self.S.warp if positions is None else self.S.warp.take(positions)
            version = np.maximum.reduceat(np.broadcast_to(seen, of.shape), np.searchsorted(of, warps))
            self.clock[cluster, agent, -2] = np.maximum(self.clock[cluster, agent, -2], version)
        if "acquire" in access.order:
            self._learn(cluster, agent, self.location[cluster])
            self.clock[cluster, agent, -1] = np.maximum(self.clock[cluster, agent, -1], version)
        elif self.heard is not None:
            self.heard[cluster, agent] = np.maximum(self.heard[cluster, agent], self.location[cluster])

    # -- mbarriers and clusters

    def _pairs(self, flat: Array, positions: Array | None) -> tuple[Array, Array, Array, Array]:
        """(cluster, agent, warp, barrier) of the distinct pairs of a warp and an mbarrier."""
        S = self.S
        warp = S.warp if positions is None else S.warp.take(positions)
        pairs = np.unique(warp * len(self.done) + flat)
        warp, flat = pairs // len(self.done), pairs % len(self.done)
        return *self._agent(warp), warp, flat

    def release_to(self, flat: Array, positions: Array | None, with_copies: bool = False) -> None:
        """The warps bring what they know to mbarriers; `with_copies`: also what their cp.async copies have done."""
        self.flush()
        cluster, agent, warp, flat = self._pairs(flat, positions)
        if self.size > 1:
            self._touch_remote(warp // self.warps, flat // self.capacity, agent, self.clock[cluster, agent, agent], self.S.pc)
        np.maximum.at(self.to_barrier, flat, self.clock[cluster, agent])
        if with_copies:
            np.maximum.at(self.to_barrier, flat, self.clock[cluster, self._agent(warp, self.copy_queue)[1]])
        self._tick(*self._agent(np.unique(warp)))

    def acquire_from(self, flat: Array, positions: Array) -> None:
        self.flush()
        cluster, agent, _, flat = self._pairs(flat, positions)
        rows = self.clock.reshape(-1, self.row)
        np.maximum.at(rows, cluster * self.agents + agent, self.done[flat])

    def knows(self, flat: Array, positions: Array) -> Array:
        """Whether the threads have acquired the last complete phase of these mbarriers already, by whatever way."""
        cluster, agent = self._agent(self.S.warp.take(positions))
        _, barrier = self._barrier(flat)
        return self.done[flat, barrier] <= self.clock[cluster, agent, barrier]

    def phase_done(self, flats: Array) -> None:
        """Phases are complete: waits get what arrived, and what the copies wrote."""
        self.flush()
        cluster, agent = self._barrier(flats)
        self.done[flats] = np.maximum(self.done[flats], self.to_barrier[flats])
        self.done[flats, agent] = self.clock[cluster, agent, agent]
        self._tick(cluster, agent)

    def _touch_remote(self, cta: Array, owner: Array, agent: Array, time: Array, pc: int) -> None:
        """Agents of the CTAs `cta` have accessed shared memory of the CTAs `owner`, which may not exit before it knows."""
        other = np.flatnonzero(cta != owner)
        if len(other):
            np.maximum.at(self.remote, (owner[other], agent[other]), time[other])
            self.remote_pc[owner[other], agent[other]] = pc

    def lent(self, issue: Issue, flat: int) -> None:
        """A copy that signals the mbarrier `flat` reads shared memory of the issuer's CTA, which may not exit before it is done."""
        cluster, agent = self._barrier(np.array([flat]))
        self._touch_remote(np.array([flat // self.capacity]), np.array([issue.cta]), agent, self.clock[cluster, agent, agent], self.S.pc)

    def exited(self, ctas: Array) -> None:
        """All threads of these CTAs have exited: accesses of peers to their shared memory must be known to have happened."""
        for cta in ctas.tolist():
            times = self.remote[cta]
            if not times.any():
                continue
            warps = cta * self.warps + np.arange(self.warps)
            cluster, agent = self._agent(warps)
            known = self.clock[cluster, agent].max(axis=0)[: self.agents]
            late = np.flatnonzero(times > known[: len(times)])
            if len(late):
                ins = self.S.program.ops[int(self.remote_pc[cta, late[0]])].ins
                raise Fault("race", f"CTA {self.S.cta_name(cta)} exits although its shared memory may still be used by "
                                    f"{self.name(int(late[0]))} at {self.S.program.where(ins.line)} ({ins.text}): missing is a "
                                    "barrier.cluster between that access and the exit")  # fmt: skip

    def cluster_arrive(self, idx: Array | None, releases: bool) -> None:
        self.flush()
        cluster, agent, _ = self._warps(idx)
        if releases:
            np.maximum.at(self.at_cluster, cluster, self.clock[cluster, agent])
            self._tick(cluster, agent)
        elif self.fenced is not None:
            np.maximum.at(self.at_cluster, cluster, self.fenced[cluster, agent])

    def cluster_done(self, clusters: Array) -> None:
        self.past_cluster[clusters] = self.at_cluster[clusters]

    def cluster_wait(self, positions: Array) -> None:
        self.flush()
        cluster, agent, _ = self._warps(positions)
        self._learn(cluster, agent, self.past_cluster[cluster])

    # -- queues

    def commit_bulk(self, idx: Array | None) -> None:
        *_, warp = self._warps(idx)
        self.bulk_committed[warp] += 1

    def wait_bulk(self, idx: Array | None, allowed: int, is_read: bool) -> None:
        """is_read: only until the copies have read their source."""
        self.flush()
        cluster, agent, warp = self._warps(idx)
        for first in (self.bulk_queue,) if is_read else (self.bulk_queue, self.readers_per_cta):
            _, queue = self._agent(warp, first)
            self.clock[cluster, agent, queue] = np.maximum(self.clock[cluster, agent, queue], self.bulk_committed[warp] - allowed)

    def into_global(self, issue: Issue) -> tuple[int, int, int, int]:
        """(cluster, agent, clock row of what it knows, time) of a bulk copy into global memory."""
        cluster, agent = self._issuer(issue)
        warp = int(self.S.warp[issue.position])
        who = (self.readers_per_cta + warp % self.warps) * self.size + issue.cta % self.size
        now = int(self.bulk_committed[warp]) + 1
        self.clock[cluster, who, who] = now
        return cluster, who, (cluster * self.agents + agent) * self.row, now

    def commit_products(self, warps: Array) -> None:
        self.products_committed[warps] += 1

    def wait_products(self, warps: Array, limit: Array) -> None:
        self.flush()
        cluster, agent = self._agent(warps)
        queue = self._product_agent(warps)
        self.clock[cluster, agent, queue] = np.maximum(self.clock[cluster, agent, queue], limit)

    def _product_agent(self, warps: Array) -> Array:
        cta = warps // self.warps
        return (self.product_queue + warps % self.warps // 4) * self.size + cta % self.size

    def products_read(self, S: State, warps: Array, used: list[tuple[Array, Array, Array | None]], positions: Array | None) -> None:
        """Operand tiles of warpgroups (4 warps each): per tile, the warpgroups that read it, 16-byte indices, and the warp of the
        group that reads each unit (A: its own rows; None: all four, B)."""
        self.flush()
        self.written = self.has_copies = True
        cluster, agent = self._agent(warps)
        each = (cluster * self.agents + agent) * self.row
        known = self.clock[cluster, agent].reshape(-1, 4, self.row).min(axis=1)
        cluster, queue = cluster[::4], self._product_agent(warps)[::4]
        self.clock[cluster, queue] = known
        self.clock[cluster, queue, queue] = now = (self.products_committed[warps[::4]] + 1).astype(np.int32)
        row = (cluster * self.agents + queue) * self.row
        for members, index, warp in used:
            cells = self._cells(index)
            repeat = len(cells) // len(members)
            who, rows, times = (np.repeat(x[members], repeat) for x in (queue, row, now))
            if warp is not None:
                rows = each[(members[:, None] * 4 + np.repeat(warp, 16 // self.granule)).reshape(-1)]

            def lane(at: int, lanes: Array = members * 128, per: int = repeat) -> int:
                return int(lanes[at // per])

            self._apply(S, "read", False, cells, who, rows, times, S.pc, positions, lane, True)

    def _cells(self, units: Array) -> Array:
        per = 16 // self.granule
        return units if per == 1 else (units[:, None] * per + np.arange(per)).reshape(-1)

    def _issuer(self, issue: Issue) -> tuple[int, int]:
        """(cluster, agent) of the warp of a thread that issues a copy."""
        local = int(self.S.warp[issue.position]) % self.warps
        return issue.cta // self.size, local * self.size + issue.cta % self.size

    def copy(self, issue: Issue, units: Array, kind: str, flat: int | None) -> None:
        """A bulk or tensor copy reads shared memory, or writes it on behalf of the mbarrier `flat`."""
        self.flush()
        self.written = self.has_copies = True
        cluster, agent = self._issuer(issue)
        if flat is None:
            warp = int(self.S.warp[issue.position])
            who = (self.bulk_queue + warp % self.warps) * self.size + issue.cta % self.size
            now = int(self.bulk_committed[warp]) + 1
            self.clock[cluster, who, who] = now
        else:
            who = int(self._barrier(np.array([flat]))[1][0])
            now = int(self.clock[cluster, who, who])
            owner = flat // self.capacity
            self._touch_remote(np.array([issue.cta]), np.array([owner]), np.array([who]), np.array([now]), self.S.pc)
        row = (cluster * self.agents + agent) * self.row
        position = np.array([issue.position])
        self._apply(self.S, kind, False, self._cells(units), who, row, now, self.S.pc, position, lambda at: 0, True)

    def signalled(self, issue: Issue, index: Array) -> None:
        """A copy will signal the mbarrier at the 8-byte `index`: its initialisation must be known, and fenced."""
        self.flush()
        cluster, agent = self._issuer(issue)
        row = (cluster * self.agents + agent) * self.row
        cells = np.unique((index[:, None] * 8 + np.arange(8)).reshape(-1) // self.granule)
        self._against_write(self.S, "read", False, cells, row, np.array([issue.position]), lambda at: 0, True)

    def will_signal(self, index: Array, idx: Array | None) -> None:
        """st.async of every lane will signal the mbarriers at the 8-byte indices: their initialisation must be known."""
        self.flush()
        cluster, agent = self._agent(self.S.warp if idx is None else self.S.warp.take(idx))
        row = (cluster * self.agents + agent) * self.row
        self._against_write(self.S, "read", False, index * 8 // self.granule, row, idx, lambda at: at, False)

    def stored(self, index: Array, width: int, flat: Array, idx: Array | None) -> None:
        """st.async of every lane, on behalf of the mbarriers `flat`."""
        self.flush()
        self.written = self.has_copies = True
        S = self.S
        cluster, agent = self._agent(S.warp if idx is None else S.warp.take(idx))
        who = self._barrier(flat)[1]
        now, row = self.clock[cluster, who, who], (cluster * self.agents + agent) * self.row
        cta = (S.warp if idx is None else S.warp.take(idx)) // self.warps
        self._touch_remote(cta, flat // self.capacity, who, now, S.pc)
        per = max(1, width // self.granule)
        cells = (index[:, None] * width + np.arange(per) * self.granule).reshape(-1) // self.granule
        who, row, now = (np.repeat(x, per) for x in (who, row, now))
        self._apply(S, "write", False, cells, who, row, now, S.pc, idx, lambda at: at // per, False)

    # -- accesses

    def access(self, S: State, index: Array, access: Access, idx: Array | None) -> None:
        """Check and record an access of `access.width` bytes per lane at the elements `index`."""
        if access.kind == "read" and not access.sync:
            if not self.written and len(self.noted) < 512:
                self.noted.append((index, access, idx, S.pc))
                return
        else:
            self.written = True
            self.has_copies |= access.kind == "async write"
        if self.noted:
            self.flush()
        self._track(S, index, access, idx, S.pc)

    def flush(self) -> None:
        """Record the noted reads; needed before a write, and before clocks or positions change."""
        if self.noted:
            noted, self.noted = self.noted, []
            for index, access, idx, pc in noted:
                self._track(self.S, index, access, idx, pc)

    def _track(self, S: State, index: Array, access: Access, idx: Array | None, pc: int) -> None:
        positions = idx
        if access.sync and access.kind != "read":
            self.release(access, positions)
        if access.sync and access.kind != "write":
            self.acquire(access, positions)
        _, agent, row = self.lanes(idx)
        if len(index) != len(agent):
            index = np.broadcast_to(index, (len(agent),))
        if access.kind == "async write":
            c, w, number = self._warps(idx)
            _, q = self._agent(number, self.copy_queue)
            own = self.clock[c, q, q]
            self.clock[c, q] = np.maximum(self.clock[c, q], self.clock[c, w])
            self.clock[c, q, q] = own
            shift = self.copy_queue * self.size
            agent, row = agent + shift, row + shift * self.row
        width, size = access.width, self.granule
        now = self.clock.reshape(-1).take(row + agent)
        by: Any = NO_LANE
        if access.kind != "async write":
            by = ALL_LANES if S.program.ops[pc].kind == "warp" else S.lane if idx is None else S.lane.take(idx)
        if self.size > 1:
            cta = (S.warp if idx is None else S.warp.take(idx)) // self.warps
            self._touch_remote(cta, index * width // S.shared.stride, agent, now, pc)
        if width > size:
            per = width // size
            cells = (index[:, None] * per + np.arange(per)).reshape(-1)
            now = np.repeat(now, per)
            whole = self.repeated.get(per) if idx is None else None
            if whole is None or access.kind == "async write" or isinstance(by, int):
                agent, row = np.repeat(agent, per), np.repeat(row, per)
                by = by if isinstance(by, int) else np.repeat(by, per)
                if idx is None and access.kind != "async write" and not isinstance(by, int):
                    self.repeated[per] = agent, row, by
            else:
                agent, row, by = whole
        else:
            per = 1
            cells = index if width == size else index * width // size
        atomic = access.kind == "atomic" or access.sync
        self._apply(S, access.kind, atomic, cells, agent, row, now, pc, positions, lambda at: at // per, False, by)

    def _against_write(
        self, S: State, kind: str, atomic: bool, cells: Array, row: Any, positions: Array | None, lane: Any, proxy: bool,
        by: Any = NO_LANE, own: Any = None,
    ) -> None:  # fmt: skip
        """Fault unless the last write of every cell is known to the agents whose clock rows begin at `row`. `by`: the lanes, which know of
        what others of their warp have written at its present time, as `own` says, only if it was they."""
        last = self.writes.take(cells)
        if not np.count_nonzero(last):
            return
        writer, time = last >> 32 & 0x7FF, last & (1 << LANE_SHIFT) - 1
        clock = self.clock.reshape(-1)

        def here(at: int) -> int:
            return int((row if isinstance(row, int) else row[at]) // self.row % self.agents)

        is_atomic = last >> 43 & 1
        known = clock.take(row + writer)
        clash = (np.maximum(time - is_atomic, 1) > known) & (last != 0)  # an atomic belongs to the fence before it
        if atomic:
            clash &= is_atomic == 0
        if np.count_nonzero(clash):
            at = int(np.flatnonzero(clash)[0])
            self._report(S, kind, int(cells[at]), lane(at), int(last[at]) >> 44, int(writer[at]), "write", positions, here(at))
        if by is not NO_LANE:
            recent = np.flatnonzero(last & OWN == own)  # by this agent, at its present time
            if len(recent):
                lanes = last[recent] >> LANE_SHIFT & 63
                mine = by if isinstance(by, int) else by[recent]
                alien = ((lanes != mine) | (lanes == ALL_LANES)) & (lanes != NO_LANE)
                if atomic:
                    alien &= is_atomic[recent] == 0
                if np.count_nonzero(alien):
                    k = int(np.flatnonzero(alien)[0])
                    at = int(recent[k])
                    self._report(S, kind, int(cells[at]), lane(at), int(last[at]) >> 44, -1 - int(lanes[k]), "write", positions, here(at))
        if not atomic and np.count_nonzero(is_atomic):  # the last of the atomics hides those before it
            some = np.flatnonzero(is_atomic)
            each = np.arange(self.num_readers)
            times = self.updates.take(cells[some, None] * self.num_readers + each)
            rows = np.broadcast_to(row, cells.shape)[some, None]
            late = (times > 0) & (np.maximum(times - 1, 1) > clock.take(rows + each)) & (each != (rows // self.row % self.agents))
            if np.count_nonzero(late):
                found, agents = np.nonzero(late)
                at = int(some[found[0]])
                self._report(S, kind, int(cells[at]), lane(at), int(last[at]) >> 44, int(agents[0]), "write", positions, here(at))
        if proxy:
            unfenced = (writer < self.generic) & (last != 0) & (time > clock.take(row + self.agents + writer))
            if np.count_nonzero(unfenced):
                at = int(np.flatnonzero(unfenced)[0])
                self._report(S, kind, int(cells[at]), lane(at), int(last[at]) >> 44, int(writer[at]), "", positions, here(at))

    def _apply(
        self, S: State, kind: str, atomic: bool, cells: Array, agent: Any, row: Any, now: Any, pc: int, positions: Array | None,
        lane: Any, proxy: bool, by: Any = NO_LANE,
    ) -> None:  # fmt: skip
        """Check and record accesses to `cells`. agent, its time `now`, and `row`, where the clock row of what it knows begins, are
        arrays over the cells or single numbers. lane(i): the executing lane of cell i. proxy: an access of the async proxy."""
        own = None if by is NO_LANE else np.asarray(agent, np.int64) << 32 | now
        self._against_write(S, kind, atomic, cells, row, positions, lane, proxy, by, own)
        if kind == "read" and atomic:
            return
        clock = self.clock.reshape(-1)
        if kind == "read":
            self.reads[cells * self.num_readers + agent] = now
            seen = self.readers.take(cells) & MANY
            state = np.where((seen == 0) | (seen == agent + 1), agent + 1, MANY)
            mark = (np.int32(pc << 10) | state).astype(np.int32)
            self.readers[cells] = mark
            # lanes of several warps may have met at one granule in this very instruction
            lost = self.readers.take(cells) != mark
            if np.count_nonzero(lost):
                self.readers[cells[lost]] = pc << 10 | MANY
            return
        seen = self.readers.take(cells) & MANY
        if np.count_nonzero(seen):
            agents, rows = np.broadcast_to(agent, cells.shape), np.broadcast_to(row, cells.shape)
            one = np.flatnonzero((seen > 0) & (seen < MANY))
            if len(one):
                other = seen[one] - 1
                late = self.reads.take(cells[one] * self.num_readers + other) > clock.take(rows[one] + other)
                late &= other != agents[one]
                if np.count_nonzero(late):
                    k = int(np.flatnonzero(late)[0])
                    at = int(one[k])
                    pc = int(self.readers[cells[at]]) >> 10
                    self._report(S, kind, int(cells[at]), lane(at), pc, int(other[k]), "read", positions, int(agents[at]))
            many = np.flatnonzero(seen == MANY)
            if len(many):
                each = np.arange(self.num_readers)
                times = self.reads.take(cells[many, None] * self.num_readers + each)
                late2 = (times > clock.take(rows[many, None] + each)) & (each != agents[many, None])
                if np.count_nonzero(late2):
                    found, columns = np.nonzero(late2)
                    at, agent2 = int(many[found[0]]), int(columns[0])
                    pc = int(self.readers[cells[at]]) >> 10
                    self._report(S, kind, int(cells[at]), lane(at), pc, agent2, "read", positions, int(agents[at]))
            self.readers[cells] = 0
        mark64 = np.int64(pc << 44 | atomic << 43) | np.asarray(agent, np.int64) << 32 | np.asarray(by, np.int64) << LANE_SHIFT | now
        self.writes[cells] = mark64
        if atomic:
            if not len(self.updates):
                self.updates = np.zeros_like(self.reads)
            self.updates[cells * self.num_readers + agent] = now
        else:
            lost = (self.writes.take(cells) ^ mark64) >> 32 & 0x7FF != 0
            if np.count_nonzero(lost):
                at = int(np.flatnonzero(lost)[0])
                rival = int(self.writes[cells[at]]) >> 32 & 0x7FF
                self._report(S, kind, int(cells[at]), lane(at), pc, rival, "write", positions, int(np.broadcast_to(agent, cells.shape)[at]))

    def _report(
        self, S: State, kind: str, cell: int, lane: int, pc: int, agent: int, what: str, positions: Array | None, here: int
    ) -> None:
        """`what`: the other side's "read" or "write" that is not ordered; "": its write lacks a proxy fence. `here`: the agent of
        this side. agent: of the other side; below zero, -1 - lane, another lane of this agent."""
        offset = cell % self.per_cta * self.granule + SHARED_BASE
        ins = S.program.ops[pc].ins
        place = f"{VERBS[kind]} shared address {offset:#x}{S.shared_name(offset)}"
        if agent < 0:
            who, missing = lane_name(-1 - agent), BETWEEN_LANES
        else:
            who, missing = self.name(agent), self.missing(agent, here)
        other = f"by {who} at {S.program.where(ins.line)} ({ins.text})"
        if what:
            message = f"{place} while the {what} {other} is not ordered before it: {missing}"
        elif ins.opcode == "mbarrier":
            message = f"signals the mbarrier at {offset:#x}{S.shared_name(offset)} without a fence.mbarrier_init after the write {other}"
        else:
            message = f"{place} through the async proxy without a fence.proxy.async after the write {other}"
        raise Fault("race", message, np.array([lane]), positions)

    def finish(self) -> None:
        """The batch is done; what it read of global memory may be looked at later, what it did in shared memory not."""
        self.writes, self.reads, self.readers = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.updates = self.readers
        self.noted.clear()
