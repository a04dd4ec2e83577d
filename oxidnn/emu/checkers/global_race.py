"""Data races in global memory: between the warps of a CTA, its copies, and the CTAs of a launch, which count as concurrent.

Order is that of `SharedRace`, whose clocks a batch keeps: per granule stand the last write and the last read (cluster,
agent, time, pc), and an access races with an earlier one of an agent of its cluster whose time it does not know. What one
cluster knows of another goes through atomics alone: each release by an atomic of GPU scope makes a new `version` of what
clusters have published, a row of times each, and an acquire learns the version last released where it reads. A write is
known where its time was published by the version known.

Most allocations are only read. Their reads are noted, and looked at when somebody writes to the allocation.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import Access
from oxidnn.emu.checkers.race import BETWEEN_LANES, LANE_SHIFT, NO_LANE, granule_of, lane_name
from oxidnn.emu.memory import Allocation, Array, Fault

if TYPE_CHECKING:
    from oxidnn.emu.bulk import Issue
    from oxidnn.emu.checkers.race import SharedRace
    from oxidnn.emu.machine import Launch, State

AGENT_BITS = 11
NEVER = np.iinfo(np.int64).max
Span = tuple[int, int]  # bytes of an allocation, from the first touched to behind the last
NOWHERE: Span = (NEVER, 0)
NOTED_LANES = 1 << 22  # reads noted per allocation before they are looked at
TIME = (1 << LANE_SHIFT) - 1
SHARED_ROWS = 1 << 19  # granules per allocation whose several readers are kept apart
VERBS = {"read": "reads", "write": "writes", "atomic": "updates"}


@dataclass
class Side:
    """The accessing side: per cell its agent, where the clock row of what it knows begins, its time; `kind` 0 plain, 1 an atomic of
    cluster scope at most, 2 of GPU scope."""

    race: SharedRace
    verb: str
    kind: int
    cluster: Array  # of the grid
    agent: Array
    row: Array
    now: Array
    pc: int
    per: int  # cells of an executing lane
    positions: Array | None
    proxied: bool = False
    by: Any = NO_LANE  # the lane

    @property
    def who(self) -> Array:
        return (self.cluster << AGENT_BITS | self.agent) + 1

    @property
    def stamp(self) -> Array:
        return np.int64(self.pc << 34 | self.kind << 32) | np.asarray(self.by, np.int64) << LANE_SHIFT | self.now


@dataclass
class Table:
    """What is known of one allocation. A reader below zero is a row of `several`."""

    allocation: Allocation
    noted: list[tuple[Any, ...]] = field(default_factory=list)
    noted_lanes: int = 0
    tracked: bool = False
    writer: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # cluster << 11 | agent, plus 1; 0: none
    written: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # pc << 34 | kind << 32 | lane << 26 | time
    reader: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    read: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    several: Array = field(default_factory=lambda: np.zeros((1, 0), np.int32))  # time of every agent's read
    several_of: Array = field(default_factory=lambda: np.full(1, -1, np.int64))  # the cluster they belong to, -1: several clusters
    several_pc: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    rows: int = 1  # row 0: not kept apart
    released: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # the version that a release here has made
    updates: list[tuple[Array, ...]] = field(default_factory=list)  # cells, who, stamp of atomics; the first entry is sorted by cell
    is_sorted: bool = True

    def updates_of(self, cells: Array) -> tuple[Array, Array, Array]:
        """(position among `cells`, who, stamp) of every atomic on these cells, of each agent the last."""
        if not self.is_sorted:
            where, who, stamp = (np.concatenate(parts) for parts in zip(*self.updates, strict=True))
            order = np.lexsort((stamp & TIME, who, where))
            where, who, stamp = where[order], who[order], stamp[order]
            last = np.r_[(where[1:] != where[:-1]) | (who[1:] != who[:-1]), True]
            self.updates = [(where[last], who[last], stamp[last])]
            self.is_sorted = True
        where, who, stamp = self.updates[0]
        first, end = np.searchsorted(where, cells), np.searchsorted(where, cells, "right")
        count = end - first
        position = np.repeat(np.arange(len(cells)), count)
        entry = np.repeat(first, count) + np.arange(len(position)) - np.repeat(np.cumsum(count) - count, count)
        return position, who[entry], stamp[entry]


def _join(a: Span, b: Span) -> Span:
    return min(a[0], b[0]), max(a[1], b[1])


class GlobalRace:
    def __init__(self, launch: Launch) -> None:
        self.granule = granule_of([op.info["access"].width for op in launch.program.ops if "access" in op.info])
        self.tables: dict[int, Table] = {}
        # what launches still under way touch, and what of it they write; None: unknown
        self.before: dict[Allocation, tuple[Span, Span]] | None = launch.memory.touched if launch.follows else {}
        self.touched: dict[Allocation, tuple[Span, Span]] = dict(self.before or {})
        self.own: dict[Allocation, tuple[Span, Span]] = {}  # what this launch touches
        self.follows = launch.follows
        self.lets_start_early = False  # the launch behind may start before those before this one have ended
        launch.memory.touched = self.touched if self.before is not None else None
        self.version = 0
        self.published: dict[int, tuple[list[int], list[Array]]] = {}  # by cluster: versions, and the times published by then

    # -- order between clusters

    def publish(self, clusters: Array, rows: Array) -> None:
        """Agents of these clusters (of the grid) make the times they know known to all."""
        self.version += 1
        for cluster in np.unique(clusters).tolist():
            times = rows[clusters == cluster].max(axis=0)
            versions, known = self.published.setdefault(cluster, ([], []))
            if known:
                before = np.zeros_like(times)
                before[: len(known[-1])] = known[-1]
                times = np.maximum(times, before)
                if (times == before).all():
                    continue
            versions.append(self.version)
            known.append(times)

    def since(self, cluster: Array, agent: Array, time: Array) -> Array:
        """The version from which on the time of an agent of a cluster is known to all; NEVER if none."""
        keys = np.stack((cluster, agent, time))
        distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
        found = []
        for c, a, t in distinct.T.tolist():
            versions, known = self.published.get(c, ((), ()))
            at = bisect_left(known, t, key=lambda row, a=a: row[a] if a < len(row) else 0)
            found.append(versions[at] if at < len(versions) else NEVER)
        return np.array(found, np.int64)[inverse.reshape(-1)]

    # -- accesses

    def access(self, S: State, allocation: Allocation, index: Array, access: Access, idx: Array | None) -> None:
        race = S.race
        assert race is not None
        if not allocation.writable:
            return
        self._after_the_launch_before(S, allocation, S.slot if idx is None else S.slot.take(idx), access.kind, idx, index, access.width)
        table = self.tables.get(id(allocation))
        if table is None:
            table = self.tables[id(allocation)] = Table(allocation)
        if access.sync:
            self._synchronise(race, table, index * access.width // self.granule, access, idx)
        is_read = access.kind == "read"
        if is_read and not table.tracked:
            if not access.sync:
                self._note(S, table, index, access.width, idx)
            return
        if not table.tracked:
            self._track(S, table)
        cluster, agent, row = race.lanes(idx)
        now = race.clock.reshape(-1).take(row + agent)
        kind = (1 + ("gpu" in access.order)) if access.sync or access.kind == "atomic" else 0
        if access.is_read_only:
            self._read_only(S, table, index, access.width, idx)
        by = S.lane if idx is None else S.lane.take(idx)
        self._lanes(S, table, index, access.width, Side(
            race, access.kind, kind, cluster + race.first_cluster, agent, row, now, S.pc, 1, idx, False, by))

    def _after_the_launch_before(self, S: State, allocation: Allocation, slots: Array, kind: str, idx: Array | None, index: Array,
                                 width: int) -> None:
        """A launch that may overlap the one before it touches what that writes, and writes what that touches, only once the thread has
        waited."""
        # Where a launch that nothing overlaps reaches is not looked at: everywhere.
        span = (int(index.min()) * width, (int(index.max()) + 1) * width) if self.follows and index.size else (0, NEVER)
        for reach in (self.touched, self.own):
            touched, written = reach.get(allocation, (NOWHERE, NOWHERE))
            reach[allocation] = _join(touched, span), written if kind == "read" else _join(written, span)
        if S.waited is None:
            return
        if self.before is not None:
            touched, written = self.before.get(allocation, (NOWHERE, NOWHERE))
            begin, end = written if kind == "read" else touched
            if span[0] >= end or span[1] <= begin:
                return
        early = np.flatnonzero(~S.waited.take(slots))
        if len(early):
            raise Fault("race", f"a {kind} of global memory before griddepcontrol.wait, while the launch before may still write",
                        early[:1], idx)  # fmt: skip

    def _read_only(self, S: State, table: Table, index: Array, width: int, idx: Array | None) -> None:
        """ld.global.nc: in whatever order, it may miss what this kernel has written."""
        cells = index * width // self.granule
        written = np.flatnonzero(table.writer.take(cells))
        if len(written):
            cell = int(cells[written[0]])
            ins, address = S.program.ops[int(table.written[cell]) >> 34].ins, table.allocation.origin + cell * self.granule
            place = f"{address:#x} ({S.memory.describe(address)})"
            raise Fault("race", f"reads {place} as read-only memory (.nc) though the kernel writes it at {S.program.where(ins.line)} "
                                f"({ins.text})", written[:1], idx)  # fmt: skip

    def _synchronise(self, race: SharedRace, table: Table, cells: Array, access: Access, idx: Array | None) -> None:
        """Lanes take turns: what one of them releases, the others see."""
        wide = "gpu" in access.order
        if access.kind != "read" and race.release(access, idx, wide):
            if not len(table.released):
                table.released = np.zeros(len(table.allocation.views[1]) // self.granule + 1, np.int64)
            table.released[cells] = self.version
        if access.kind != "write":
            race.acquire(access, idx, table.released.take(cells) if wide and len(table.released) else None)

    def copy(self, issue: Issue, allocation: Allocation, starts: Array, count: int, kind: str, by_thread: bool) -> None:
        """`count` bytes from each of the offsets `starts` from the allocation's origin are read, written, or updated ("atomic"): by the
        thread itself, or by its bulk or tensor copy."""
        if not allocation.writable:
            return
        race = issue.S.race
        assert race is not None
        position = np.array([issue.position])
        reach = np.array([starts.min(), starts.max() + count - 1]) if len(starts) else starts
        self._after_the_launch_before(issue.S, allocation, np.array([issue.slot]), kind, position, reach, 1)
        size = self.granule
        if count % size or np.count_nonzero(starts % size):
            cells = np.unique((starts[:, None] + np.arange(count)) // size)
        else:
            cells = (starts[:, None] // size + np.arange(count // size)).reshape(-1)
        position = np.full(len(cells), issue.position)
        table = self.tables.get(id(allocation))
        if table is None:
            table = self.tables[id(allocation)] = Table(allocation)
        if kind == "read" and not table.tracked:
            self._note(issue.S, table, cells, size, position)
            return
        if not table.tracked:
            self._track(issue.S, table)
        if kind == "read" or by_thread:
            cluster, agent, row = race.lanes(position[:1])
            now = race.clock.reshape(-1).take(row + agent)
        else:
            cluster, agent, row, now = (np.array([x]) for x in race.into_global(issue))
        n = cells.shape
        self._apply(issue.S, table, cells, Side(
            race, "write" if by_thread and kind != "read" else kind, 2 if kind == "atomic" and not by_thread else 0,
            np.broadcast_to(cluster + race.first_cluster, n), np.broadcast_to(agent, n), np.broadcast_to(row, n), np.broadcast_to(now, n),
            issue.S.pc, len(cells), position[:1], proxied=not by_thread))

    def _note(self, S: State, table: Table, index: Array, width: int, idx: Array | None) -> None:
        race = S.race
        assert race is not None
        warps = race.warps * race.size
        times = np.ascontiguousarray(race.clock[:, :warps, :warps].diagonal(axis1=1, axis2=2))
        race.lanes(None)
        table.noted.append((race, race.by_lane, times, index, width, idx, S.pc))
        table.noted_lanes += len(index)
        if table.noted_lanes > NOTED_LANES:
            self._track(S, table)

    def _track(self, S: State, table: Table) -> None:
        """From now on every access of the allocation is looked at, and those noted so far are."""
        table.tracked = True
        n = len(table.allocation.views[1]) // self.granule + 1
        table.writer, table.written, table.reader, table.read = (np.zeros(n, np.int64) for _ in range(4))
        noted, table.noted = table.noted, []
        for race, by_lane, times, index, width, idx, pc in noted:
            _, cluster, agent, row = by_lane if idx is None else (None, *(x.take(idx) for x in by_lane[1:]))
            self._lanes(S, table, index, width, Side(
                race, "read", 0, cluster + race.first_cluster, agent, row, times[cluster, agent], pc, 1, idx))

    def _lanes(self, S: State, table: Table, index: Array, width: int, side: Side) -> None:
        """An access of every lane to `width` bytes at the elements `index`."""
        n = len(side.agent)
        if len(index) != n:
            index = np.broadcast_to(index, (n,))
        size = self.granule
        per = side.per = max(1, width // size)
        if per > 1:
            cells = (index[:, None] * per + np.arange(per)).reshape(-1)
            side.cluster, side.agent, side.row, side.now = (np.repeat(x, per) for x in (side.cluster, side.agent, side.row, side.now))
            side.by = side.by if isinstance(side.by, int) else np.repeat(side.by, per)
        else:
            cells = index * width // size if width < size else index
        self._apply(S, table, cells, side)

    def _apply(self, S: State, table: Table, cells: Array, side: Side) -> None:
        """Check and record an access."""
        who = side.who
        writers = table.writer.take(cells)
        if np.count_nonzero(writers):
            at = np.flatnonzero((writers != 0) & (writers != who))
            if len(at):
                self._against(S, table, cells, side, at, writers[at], table.written.take(cells[at]), "write")
            if not isinstance(side.by, int):
                self._between_lanes(S, table, cells, side, np.flatnonzero(writers == who))
            if table.updates and not side.kind:  # the last of the atomics hides those before it
                at = np.flatnonzero((writers != 0) & (table.written.take(cells) >> 32 & 3 > 0))
                if len(at):
                    position, others, stamps = table.updates_of(cells[at])
                    at = at[position]
                    foreign = others != who[at]
                    if np.count_nonzero(foreign):
                        self._against(S, table, cells, side, at[foreign], others[foreign], stamps[foreign], "write")
        readers = table.reader.take(cells)
        if side.verb == "read":
            if not side.kind:
                self._read(table, cells, side, who, readers)
            return
        if np.count_nonzero(readers):
            at = np.flatnonzero((readers > 0) & (readers != who))
            if len(at):
                self._against(S, table, cells, side, at, readers[at], table.read.take(cells[at]), "read")
            at = np.flatnonzero(readers < 0)
            if len(at):
                self._against_several(S, table, cells, side, at, -readers[at] - 1)
            table.reader[cells] = 0
        table.writer[cells] = who
        table.written[cells] = side.stamp
        if side.kind:
            table.updates.append((cells, who, side.stamp))
            table.is_sorted = False
        if side.kind < 2:
            last = table.writer.take(cells)
            lost = np.flatnonzero(last != who if not side.kind else (last - 1 >> AGENT_BITS) != side.cluster)
            if len(lost):
                first = int(lost[0])
                self._report(S, table, cells, side, first, int(last[first]) - 1, side.pc, "write")

    def _read(self, table: Table, cells: Array, side: Side, who: Array, readers: Array) -> None:
        """A read takes the place of the last one that it knows of; else both are kept."""
        others = np.flatnonzero((readers > 0) & (readers != who))
        keep = np.zeros(len(cells), np.bool_)  # cells with an earlier reader that is not known
        if len(others):
            keep[others] = self._late(side, others, readers[others], table.read.take(cells[others]))
        keep |= readers < 0
        alone = ~keep
        table.reader[cells[alone]] = who[alone]
        table.read[cells[alone]] = side.stamp[alone]
        # lanes of several warps may have met at one granule in this very instruction
        now = table.reader.take(cells)
        keep = now != who
        if not np.count_nonzero(keep):
            return
        fresh = np.unique(cells[keep & (now > 0)])
        if len(fresh):
            self._share(table, fresh)
        now = table.reader.take(cells)
        at = np.flatnonzero(now < 0)
        rows = -now[at] - 1
        if side.race.agents > table.several.shape[1]:
            table.several = np.pad(table.several, ((0, 0), (0, side.race.agents - table.several.shape[1])))
        table.several[rows, side.agent[at]] = side.now[at]
        table.several_pc[rows] = side.pc
        table.several_of[rows[table.several_of[rows] != side.cluster[at]]] = -1

    def _share(self, table: Table, cells: Array) -> None:
        """Give these cells, which have one reader, rows for several."""
        if table.rows + len(cells) > SHARED_ROWS:
            table.reader[cells] = -1
            return
        first, table.rows = table.rows, table.rows + len(cells)
        if table.rows > len(table.several):
            more = 2 * table.rows - len(table.several)
            table.several = np.pad(table.several, ((0, more), (0, 0)))
            table.several_of = np.pad(table.several_of, (0, more))
            table.several_pc = np.pad(table.several_pc, (0, more))
        rows = first + np.arange(len(cells))
        one, when = table.reader[cells] - 1, table.read[cells]
        agent = one & (1 << AGENT_BITS) - 1
        widest = int(agent.max()) + 1
        if widest > table.several.shape[1]:
            table.several = np.pad(table.several, ((0, 0), (0, widest - table.several.shape[1])))
        table.several[rows, agent] = when & TIME
        table.several_of[rows], table.several_pc[rows] = one >> AGENT_BITS, when >> 34
        table.reader[cells] = -rows - 1

    def _late(self, side: Side, at: Array, other: Array, stamps: Array) -> Array:
        """Which of the accesses `stamps` of `other` are not ordered before this side's at `at`."""
        clock = side.race.clock.reshape(-1)
        cluster, agent = other - 1 >> AGENT_BITS, other - 1 & (1 << AGENT_BITS) - 1
        kind = stamps >> 32 & 3
        time = np.maximum((stamps & TIME) - (kind > 0), 1)  # an atomic belongs to the fence before it
        row = side.row[at]
        own = cluster == side.cluster[at]
        late = time > clock.take(row + np.where(own, agent, 0))
        foreign = np.flatnonzero(~own)
        if len(foreign):
            version = clock.take(row[foreign] + side.race.row - 1)
            late[foreign] = self.since(cluster[foreign], agent[foreign], time[foreign]) > version
        if side.kind:
            late &= (kind == 0) | (~own & ((kind < 2) | (side.kind < 2)))
        return late

    def _against(self, S: State, table: Table, cells: Array, side: Side, at: Array, other: Array, stamps: Array, what: str) -> None:
        late = self._late(side, at, other, stamps)
        if np.count_nonzero(late):
            k = int(np.flatnonzero(late)[0])
            self._report(S, table, cells, side, int(at[k]), int(other[k]) - 1, int(stamps[k]) >> 34, what)
        if side.proxied and what == "write" and side.race.is_proxied:
            race = side.race
            cluster, agent = other - 1 >> AGENT_BITS, other - 1 & (1 << AGENT_BITS) - 1
            generic = (cluster == side.cluster[at]) & (agent < race.generic)
            known = race.clock.reshape(-1).take(side.row[at] + race.agents + np.where(generic, agent, 0))
            unfenced = np.flatnonzero(generic & ((stamps & TIME) > known))
            if len(unfenced):
                k = int(unfenced[0])
                self._report(S, table, cells, side, int(at[k]), int(other[k]) - 1, int(stamps[k]) >> 34, "")

    def _between_lanes(self, S: State, table: Table, cells: Array, side: Side, at: Array) -> None:
        """Cells that this agent has written: by another lane since its time last advanced?"""
        stamps = table.written.take(cells[at])
        lanes = stamps >> LANE_SHIFT & 63
        alien = (stamps & TIME == side.now[at]) & (lanes != side.by[at]) & (lanes != NO_LANE)
        if side.kind:
            alien &= stamps >> 32 & 3 == 0
        if np.count_nonzero(alien):
            k = int(np.flatnonzero(alien)[0])
            self._report(S, table, cells, side, int(at[k]), -1 - int(lanes[k]), int(stamps[k]) >> 34, "write")

    def _against_several(self, S: State, table: Table, cells: Array, side: Side, at: Array, rows: Array) -> None:
        clock = side.race.clock.reshape(-1)
        own = table.several_of[rows] == side.cluster[at]
        mine = np.flatnonzero(own)
        if len(mine):
            agents = np.arange(min(table.several.shape[1], side.race.agents))
            times = table.several[rows[mine]][:, : len(agents)]
            late = (times > clock.take(side.row[at[mine], None] + agents)) & (agents != side.agent[at[mine], None])
            if np.count_nonzero(late):
                k, agent = (int(x[0]) for x in np.nonzero(late))
                cell, pc = int(at[mine[k]]), int(table.several_pc[rows[mine[k]]])
                self._report(S, table, cells, side, cell, int(side.cluster[cell]) << AGENT_BITS | agent, pc, "read")
        others = np.flatnonzero(~own)
        if len(others):  # several clusters: whoever has learnt nothing of any cannot know of these
            unknown = np.flatnonzero(clock.take(side.row[at[others]] + side.race.row - 1) == 0)
            unknown = unknown[rows[others[unknown]] > 0]
            if len(unknown):
                k = others[unknown[0]]
                self._report(S, table, cells, side, int(at[k]), None, int(table.several_pc[rows[k]]), "read")

    # -- reports

    def _report(self, S: State, table: Table, cells: Array, side: Side, at: int, other: int | None, pc: int, what: str) -> None:
        """`other`: cluster << 11 | agent of the other side; -1 - lane: a lane of the same warp; None: several CTAs. `what`: its "read" or
        "write"; "": its write lacks a proxy fence."""
        race, address = side.race, table.allocation.origin + int(cells[at]) * self.granule
        ins = S.program.ops[pc].ins
        cluster = int(side.cluster[at])
        if other is None:
            who, missing = "several CTAs", BETWEEN_CTAS
        elif other < 0:
            who, missing = lane_name(-1 - other), BETWEEN_LANES
        else:
            its, agent = other >> AGENT_BITS, other & (1 << AGENT_BITS) - 1
            rank = agent % race.size
            cta = S.launch.cta_name(its * race.size + rank)
            who = f"{race.name(agent, False)} of CTA {cta}"
            missing = race.missing(agent, int(side.agent[at])) if its == cluster else BETWEEN_CTAS
        place = f"{VERBS[side.verb]} {address:#x} ({S.memory.describe(address)})"
        by = f"by {who} at {S.program.where(ins.line)} ({ins.text})"
        if what:
            message = f"{place} while the {what} {by} is not ordered before it: {missing}"
        else:
            message = f"{place} through the async proxy without a fence.proxy.async after the write {by}"
        raise Fault("race", message, np.array([at // side.per]), side.positions)


BETWEEN_CTAS = ("missing is a release (fence.acq_rel.gpu, then an atomic) by that CTA, and an acquire (an atomic, then the fence) "
                "by this one")
