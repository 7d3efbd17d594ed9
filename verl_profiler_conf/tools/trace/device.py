"""Measures device time: which iteration launched what, when the device was busy, and with what."""

from __future__ import annotations

from typing import Any

from verl_profiler_conf.tools.trace.arrays import np
from verl_profiler_conf.tools.trace.collect import NONE, Collected
from verl_profiler_conf.tools.trace.figures import DeviceTime
from verl_profiler_conf.tools.trace.names import KINDS, kind_of
from verl_profiler_conf.tools.trace.spool import KEEP_ROWS, Spool

PROMPT_NS = 10_000
"""Work that begins at most so long after its launch call returned found the device waiting for it."""

TIMELINE_ROW = [
    ("start", "i8"),
    ("dur", "i8"),
    ("queued", "i8"),
    ("iteration", "i4"),
    ("name", "i4"),
    ("stream", "i4"),
]
EXTERNAL_ROW = [("external", "i8"), ("dur", "i8")]


class Timeline:
    """All device work in the order in which it began, each piece with the iteration that launched it.

    Args:
        collected: a finished reading.
        begins: of the iterations, nanoseconds after the origin, ascending.
        ends: of the iterations.

    Attributes:
        rows: `TIMELINE_ROW`s; `iteration` is -1 outside of all iterations, `queued` is `NONE` where no launch is known.
        by_launch: work counts for the iteration that launched it; False: for the one during which it began.
    """

    def __init__(self, collected: Collected, begins: Any, ends: Any, keep: int = KEEP_ROWS) -> None:
        self.rows = Spool(TIMELINE_ROW, "start", keep)
        self.by_launch = collected.launches.rows > 0 and collected.is_joined
        self._collected = collected
        self._begins, self._ends = begins, ends
        self._externals = Spool(EXTERNAL_ROW, "external", keep)
        for block in collected.device.sorted_blocks():
            self._join(block)

    def _join(self, block: Any) -> None:
        rows = np.empty(len(block), self.rows.dtype)
        for field in ("start", "dur", "name", "stream"):
            rows[field] = block[field]
        launches = self._collected.launches.between(int(block["join"][0]), int(block["join"][-1]) + 1)
        rows["queued"] = NONE
        if len(launches):
            found = np.minimum(np.searchsorted(launches["join"], block["join"]), len(launches) - 1)
            is_found = (launches["join"][found] == block["join"]) & (block["join"] != NONE)
            rows["queued"][is_found] = block["start"][is_found] - launches["end"][found[is_found]]
            launched = np.where(is_found, launches["begin"][found], NONE)
        else:
            launched = np.full(len(block), NONE)
        rows["iteration"] = self._iteration_at(launched if self.by_launch else block["start"])
        self.rows.add(rows)
        known = block["external"] != NONE
        external = np.empty(int(known.sum()), self._externals.dtype)
        external["external"], external["dur"] = block["external"][known], block["dur"][known]
        self._externals.add(external)

    def _iteration_at(self, times: Any) -> Any:
        if not len(self._begins):
            return np.full(len(times), -1)
        at = np.searchsorted(self._begins, times, "right") - 1
        return np.where((at >= 0) & (times < self._ends[np.maximum(at, 0)]), at, -1)

    def by_operator(self) -> Any:
        """Nanoseconds of device work by the number of the operator's name."""
        total = np.zeros(len(self._collected.names.texts))
        for block in self._externals.sorted_blocks():
            known = self._collected.externals.between(int(block["external"][0]), int(block["external"][-1]) + 1)
            if len(known):
                found = np.minimum(np.searchsorted(known["external"], block["external"]), len(known) - 1)
                is_found = known["external"][found] == block["external"]
                total += np.bincount(known["name"][found[is_found]], block["dur"][is_found], len(total))
        return total


class Measures:
    """Adds up a timeline: for each iteration, for what lies outside of all, and by name.

    Row 0 of the tables is what lies outside, row i + 1 iteration i.
    """

    def __init__(self, timeline: Timeline, names: list[str], iterations: int, zero_us: float = 0.0) -> None:
        self._zero_us = zero_us
        size = iterations + 1
        self._kinds = np.array([KINDS.index(kind_of(name)) for name in names], "i1")
        sums = "kernels copies work busy compute communication either copy idle launch_wait gaps queued launched"
        self._sums = {name: np.zeros(size) for name in sums.split()}
        self._longest = np.zeros(size, "i8")
        self._first = np.full(size, 2**62, "i8")
        self._last = np.full(size, -(2**62), "i8")
        self.calls = np.zeros(len(names), "i8")
        self.total = np.zeros(len(names))
        self.smallest = np.full(len(names), 2**62, "i8")
        self.largest = np.zeros(len(names), "i8")
        self._covers = {name: _Cover() for name in ("busy", "compute", "communication", "either", "copy")}
        for block in timeline.rows.sorted_blocks():
            self._add(block)

    def _add(self, rows: Any) -> None:
        at = rows["iteration"] + 1
        kind = self._kinds[rows["name"]]
        covered, gap = self._covers["busy"].add(rows["start"], rows["dur"])
        self._sum("busy", at, covered)
        self._sum("idle", at, gap)
        self._sum("gaps", at, gap > 0)
        np.maximum.at(self._longest, at, gap)
        is_known = rows["queued"] != NONE
        self._sum("launch_wait", at, np.where(is_known & (rows["queued"] < PROMPT_NS), gap, 0))
        self._sum("launched", at, is_known)
        self._sum("queued", at, np.where(is_known, np.maximum(rows["queued"], 0), 0))
        self._sum("work", at, rows["dur"])
        self._sum("copies", at, kind == 2)
        self._sum("kernels", at, kind != 2)
        for name, chosen in (
            ("compute", kind == 0),
            ("communication", kind == 1),
            ("either", kind != 2),
            ("copy", kind == 2),
        ):
            part = rows[chosen]
            if len(part):
                self._sum(name, at[chosen], self._covers[name].add(part["start"], part["dur"])[0])
        np.minimum.at(self._first, at, rows["start"])
        np.maximum.at(self._last, at, rows["start"] + rows["dur"])
        self.calls += np.bincount(rows["name"], minlength=len(self.calls))
        self.total += np.bincount(rows["name"], rows["dur"], len(self.total))
        np.minimum.at(self.smallest, rows["name"], rows["dur"])
        np.maximum.at(self.largest, rows["name"], rows["dur"])

    def _sum(self, name: str, at: Any, values: Any) -> None:
        self._sums[name] += np.bincount(at, values, len(self._sums[name]))

    def all(self) -> DeviceTime:
        """The whole timeline."""
        return self._time(slice(None))

    def row(self, number: int) -> DeviceTime:
        """Row 0: what lies outside of all iterations; row i + 1: iteration i."""
        return self._time(slice(number, number + 1))

    def _time(self, rows: slice) -> DeviceTime:
        total = {name: float(values[rows].sum()) for name, values in self._sums.items()}
        count = int(total["kernels"] + total["copies"])
        return DeviceTime(
            kernels=int(total["kernels"]),
            copies=int(total["copies"]),
            work_us=total["work"] / 1e3,
            busy_us=total["busy"] / 1e3,
            compute_us=total["compute"] / 1e3,
            communication_us=total["communication"] / 1e3,
            exposed_us=(total["either"] - total["compute"]) / 1e3,
            copy_us=total["copy"] / 1e3,
            idle_us=total["idle"] / 1e3,
            launch_wait_us=total["launch_wait"] / 1e3,
            gaps=int(total["gaps"]),
            longest_gap_us=float(self._longest[rows].max()) / 1e3,
            queued_us=total["queued"] / total["launched"] / 1e3 if total["launched"] else None,
            first_us=float(self._first[rows].min()) / 1e3 - self._zero_us if count else None,
            last_us=float(self._last[rows].max()) / 1e3 - self._zero_us if count else None,
        )


class _Cover:
    """How much time is covered by intervals. They come in blocks, in the order in which they begin."""

    def __init__(self) -> None:
        self._until: int | None = None

    def add(self, starts: Any, durations: Any) -> tuple[Any, Any]:
        """For each interval: the time that it covers and no earlier one does, and the uncovered time before it."""
        ends = starts + durations
        first = int(starts[0]) if self._until is None else self._until
        until = np.maximum.accumulate(np.concatenate((np.array([first], "i8"), ends)))
        before = until[:-1]
        self._until = int(until[-1])
        return np.maximum(0, ends - np.maximum(starts, before)), np.maximum(0, starts - before)
