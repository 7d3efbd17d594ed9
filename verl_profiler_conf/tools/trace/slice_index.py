"""The first reading for a slice: the iterations, launches and arrows, and where they lie in the file."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, cast

from verl_profiler_conf.tools.trace.arrays import np
from verl_profiler_conf.tools.trace.categories import ANNOTATIONS, DEVICE, LAUNCHES
from verl_profiler_conf.tools.trace.events import Event
from verl_profiler_conf.tools.trace.iterations import MAX_RANGES, RANGE_PREFIXES, IterationRange, parse_range
from verl_profiler_conf.tools.trace.spool import Spool

DEVICE_FLOWS = frozenset({"ac2g", "HostToDevice", "async_npu", "async_acl_npu"})
"""Categories of arrows from a launch on the host to what it started. Their heads may lie outside of a span of time."""

TO_DEVICE = 4
"""Added to the end of an arrow that is one of these."""

WAITS = frozenset({"cuda_sync"})
"""Categories of events on the device's timeline that are joined to a call of the host, but are no work."""

_ENDS = {"s": 0, "f": 1, "t": 2}
_DEVICE_ENDS = {phase: end + TO_DEVICE for phase, end in _ENDS.items()}
_FLUSH = 1 << 16
_MAX_KEY = 2**62
_LOW, _HIGH = -(2**63), 2**63 - 1


@dataclass(slots=True)
class Place:
    """A piece of the file, and what is in it.

    Attributes:
        at: where its events begin in the uncompressed file.
        size: their bytes.
        first_us: when the first began of the events that time alone decides about.
        last_us: when the last began.
        low: the smallest correlation of device work, and of arrows that go by it.
        high: the largest.
        always: it holds what can belong to any slice: metadata, or other arrows.
    """

    at: int
    size: int
    first_us: float
    last_us: float
    low: int
    high: int
    always: bool


class SliceIndex:
    """What the first reading has found.

    Args:
        keep: launches and arrows kept in memory.

    Attributes:
        ranges: all that may be iterations.
        first_us: when the first event of the host began; infinite before there is one.
        events: how many there are.
        places: the pieces of the file.
        launches: when which correlation was launched.
        arrows: ends of arrows, with the key that joins them.
        externals: external ids of annotations, each with its time.
    """

    def __init__(self, keep: int) -> None:
        self.ranges: list[IterationRange] = []
        self.first_us = float("inf")
        self.events = 0
        self.places: list[Place] = []
        self.launches = Spool([("at", "i8"), ("join", "i8")], "at", keep)
        self.arrows = Spool([("key", "i8"), ("at", "i8"), ("end", "i1")], "key", keep)
        self.externals: list[tuple[float, int]] = []
        self._launches: tuple[Any, Any] = (array("d"), array("q"))
        self._arrows: tuple[Any, Any, Any] = (array("q"), array("d"), array("b"))

    def add(self, events: list[Event], at: int, size: int) -> None:
        """Take a piece that begins at byte `at` and has `size` bytes."""
        self.events += len(events)
        times: list[float] = []
        joins: list[int] = []
        launches: list[Event] = []
        others: list[Event] = []
        arrows: list[Event] = []
        to_device: list[Event] = []
        for event in events:
            category = event.cat
            if category == "cpu_op":
                times.append(event.ts)
                if event.name.startswith(RANGE_PREFIXES):
                    self._add_range(event)
            elif category == "ac2g":
                to_device.append(event)
            elif category in LAUNCHES:
                launches.append(event)
            elif category in DEVICE or category in WAITS:
                args = event.args
                if args is not None and args.correlation is not None:
                    joins.append(args.correlation)
                else:
                    times.append(event.ts)
            elif event.id is not None and event.ph in _ENDS:
                arrows.append(event)
            else:
                others.append(event)
        always = self._add_others(others, times, joins)
        always |= self._add_to_device(to_device, joins)
        always |= self._add_arrows(arrows)
        self._add_launches(launches, times)
        first, last = (min(times), max(times)) if times else (float("inf"), float("-inf"))
        low, high = (min(joins), max(joins)) if joins else (_HIGH, _LOW)
        self.first_us = min(self.first_us, first)
        self.places.append(Place(at, size, first, last, low, high, always))
        if len(self._launches[0]) > _FLUSH or len(self._arrows[0]) > _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Move what was taken into the spools."""
        at, join = self._launches
        rows = np.empty(len(at), self.launches.dtype)
        rows["at"], rows["join"] = nanoseconds(at), join
        self.launches.add(rows)
        keys, ats, ends = self._arrows
        rows = np.empty(len(keys), self.arrows.dtype)
        rows["key"], rows["at"], rows["end"] = keys, nanoseconds(ats), ends
        self.arrows.add(rows)
        for column in (*self._launches, *self._arrows):
            del column[:]

    def _add_launches(self, events: list[Event], times: list[float]) -> None:
        times += [event.ts for event in events]
        joined = [e for e in events if e.args is not None and e.args.correlation is not None]
        at, join = self._launches
        at.extend([event.ts for event in joined])
        join.extend([event.args.correlation for event in joined if event.args is not None])

    def _add_to_device(self, events: list[Event], joins: list[int]) -> bool:
        """Kineto's arrows, of which there are as many as launches: their ids are correlations."""
        try:
            ids = array("q", cast("list[int]", [event.id for event in events]))
        except (TypeError, OverflowError):  # text, or nothing, or far too large
            return self._add_arrows(events)
        if ids and not -_MAX_KEY < min(ids) <= max(ids) < _MAX_KEY:
            return self._add_arrows(events)
        keys, ats, ends = self._arrows
        keys.extend(ids)
        ats.extend([event.ts for event in events])
        ends.extend([_DEVICE_ENDS.get(event.ph, 2 + TO_DEVICE) for event in events])
        joins += ids
        return False

    def _add_arrows(self, events: list[Event]) -> bool:
        keys, ats, ends = self._arrows
        for event in events:
            keys.append(arrow_key(event))
            ats.append(event.ts)
            ends.append(_ENDS.get(event.ph, 2) + (TO_DEVICE if event.cat in DEVICE_FLOWS else 0))
        return bool(events)

    def _add_others(self, events: list[Event], times: list[float], joins: list[int]) -> bool:
        always = False
        for event in events:
            args = event.args
            if event.cat in ANNOTATIONS:
                times.append(event.ts)
                self._add_range(event)
                if args is not None and args.external is not None and len(self.externals) < MAX_RANGES:
                    self.externals.append((event.ts, args.external))
            elif event.ph == "M" or event.cat == "gpu_user_annotation":
                always = True
            elif is_ascend_work(event):
                joins.append(args.connection)  # type: ignore[arg-type, union-attr]
            elif event.ph == "X" and event.cat != "Trace":
                times.append(event.ts)
                if args is not None and args.connection is not None:
                    self._launches[0].append(event.ts)
                    self._launches[1].append(args.connection)
                self._add_range(event)
            else:
                always = True
        return always

    def _add_range(self, event: Event) -> None:
        found = parse_range(event.name)
        if found is not None and event.ph == "X" and len(self.ranges) < MAX_RANGES:
            self.ranges.append(IterationRange(found, event.ts, event.ts + event.dur, (event.pid, event.tid)))


def is_ascend_work(event: Event) -> bool:
    """Device work as Ascend writes it, without a category, joined to the call that launched it."""
    args = event.args
    if event.cat or args is None or args.connection is None:
        return False
    return args.task_type is not None or event.name.startswith("hcom_")


def arrow_key(event: Event) -> int:
    """One number for both ends of an arrow: viewers join them by category, name and id."""
    if event.cat == "ac2g" and type(event.id) is int and -_MAX_KEY < event.id < _MAX_KEY:
        return event.id
    return hash((event.cat, event.name, event.id))


def nanoseconds(times_us: Any) -> Any:
    """Times of the trace's clock as integers."""
    return np.rint(np.asarray(times_us, "f8") * 1e3).astype("i8")
