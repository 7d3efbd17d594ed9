"""Counts what each captured iteration did on the host and on the device, while its trace is packed.

A kernel belongs to the iteration whose range was open when the kernel was launched. The launch and the kernel share a
correlation id. All kernels of one CUDA graph replay share the id of the replay's launch.

This must cost little beside the compression. A pattern runs only over pieces that hold its kind of event, and yields
whole columns. Nearly always all events of a piece belong to one iteration, so they are counted together.
"""

from __future__ import annotations

import math
import operator
import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat

from verl_profiler_conf.capture.backends.base import IterationCounts
from verl_profiler_conf.capture.ranges import RANGE

_ROUNDING_US = 1.0
"""Times in a trace are decimal texts of microseconds. A device event may touch the edge of the recording by this."""

_NOWHERE = -1
"""The position of what lies in no range."""

_TEXT = rb'[^"\\]*(?:\\.[^"\\]*)*'
_THREAD = rb'\s+"pid": [^,]+,\s+"tid": [^,]+,\s+'
_BEGIN = rb'"ts": ([^,]+)'

# Up to the begin of an event: whole lines as Kineto writes them now, which is twice as fast, or any other layout.
_NAME_AND_THREAD = rb'",(?:\n.*\n.*\n.*\n *|\s+"name": "' + _TEXT + rb'",' + _THREAD + rb")"

# Up to the correlation id: as CUDA's kernels have it, as most events do, or (ROCm) after texts with braces in them.
_ARGUMENTS = rb',\s+"args": \{(?:'
_MOST = rb'[^}]*|[^"{}]*(?:"(?!correlation")' + _TEXT + rb'"[^"{}]*)*)"correlation": (\d+)'
_DURATION_AND_CORRELATION = rb',\s+"dur": ([^,]+)' + _ARGUMENTS + rb'\n.*\n *"stream": \d+, |' + _MOST

# Each begins with letters that are rare in a trace, because the search looks for the first one at every byte.
_OPERATOR = re.compile(rb"cpu_op" + _NAME_AND_THREAD + _BEGIN)
_CALL = re.compile(
    rb'_(?:runtime|driver)",\s+"name": "([^"]*)",(?:\n.*\n.*\n *|' + _THREAD + rb")" + _BEGIN
    + rb',\s+"dur": [^,]+' + _ARGUMENTS + _MOST
)  # fmt: skip
_KERNEL = re.compile(rb"kernel" + _NAME_AND_THREAD + _BEGIN + _DURATION_AND_CORRELATION)
_COPY = re.compile(rb"_mem(?:cpy|set)" + _NAME_AND_THREAD + _BEGIN + _DURATION_AND_CORRELATION)
_RANGE = re.compile(
    rb'user_annotation",\s+"name": "(response_tokens\[' + _TEXT + rb')",' + _THREAD + _BEGIN + rb',\s+"dur": ([^,\n}]+)'
)

_FIRST = re.compile(rb'"name": "process_name",\s+(?:"ph": "M",\s+)?"ts": ([\d.]+)')
_LAST = re.compile(rb'"name": "Record Window End",[^}]*"ts": ([\d.]+)')
_LOGGED_DROPS = re.compile(rb"Dropped (\d+) activity records|(?:CUPTI|GPU) stopped early\? = (1)")


@dataclass
class TraceCounts:
    """What a whole trace holds.

    Attributes:
        iterations: index of the iteration -> its counts. Empty when the trace holds no range of an iteration.
        device_events: kernels, copies and memsets.
        outside: device events that do not lie within the time of the recording. Their timestamps are wrong.
        launches: kernel launches within the ranges.
        launches_without_kernel: those of which the trace holds no device event.
        dropped: records that the driver dropped, as far as Kineto logged it.
        stopped_early: the device's buffer was full before the recording ended, as far as Kineto logged it.
    """

    iterations: Mapping[int, IterationCounts] = field(default_factory=dict)
    device_events: int = 0
    outside: int = 0
    launches: int = 0
    launches_without_kernel: int = 0
    dropped: int = 0
    stopped_early: bool = False


class EventCounter:
    """Takes in a trace piece by piece. Each event must lie whole in one piece.

    Args:
        records_device: whether to look for events of a device.
    """

    def __init__(self, *, records_device: bool = True) -> None:
        self._records_device = records_device
        self._first_us = float("-inf")
        self._last_us = float("inf")
        self._operators: list[_Operators] = []
        """Those of each piece."""
        self._calls: list[tuple[array[float], array[int], bytes]] = []
        """Of each piece: begins, correlation ids, which are kernel launches."""
        self._device_events: list[tuple[bool, array[float], array[float], array[int]]] = []
        """Of each piece: whether they are kernels, begins, durations, correlation ids."""
        self._ranges: list[tuple[float, float, int]] = []
        self._dropped = 0
        self._stopped_early = False

    def feed(self, text: bytes, *, has_ranges: bool = True, closes: bool = False) -> None:
        """Take in the events of one piece of the raw trace.

        Args:
            text: the piece.
            has_ranges: it may hold ranges.
            closes: it is the last one, with the last event and what Kineto writes after the events.
        """
        if b'"cat": "cpu_op"' in text and (begins := _OPERATOR.findall(text)):
            self._operators.append(_Operators(begins))
        if self._records_device and b'"correlation": ' in text:
            if calls := _CALL.findall(text):
                names, call_begins, ids = zip(*calls, strict=True)
                launches = bytes(b"Launch" in name for name in names)
                self._calls.append((_floats(call_begins), _integers(ids), launches))
            for kind, pattern in ((b'"cat": "kernel"', _KERNEL), (b'"cat": "gpu_mem', _COPY)):
                if kind in text and (events := pattern.findall(text)):
                    event_begins, durations, ids = zip(*events, strict=True)
                    self._device_events.append(
                        (pattern is _KERNEL, _floats(event_begins), _floats(durations), _integers(ids))
                    )
        if has_ranges:
            for name, begin, duration in _RANGE.findall(text):
                if match := RANGE.match(name.decode("ascii", "replace")):
                    self._ranges.append((float(begin), float(begin) + float(duration), int(match[3])))
        if self._first_us < 0 and b'"process_name"' in text and (first := _FIRST.search(text)):
            self._first_us = float(first[1])
        if closes:
            self._read_ending(text)

    def result(self) -> TraceCounts:
        """Count, once the whole trace has been taken in."""
        ranges = _Ranges(self._ranges)
        for operators in self._operators if ranges else ():
            ranges.count_operators(operators)
            _let_others_run()
        device = _DeviceWork(ranges, self._first_us - _ROUNDING_US, self._last_us + _ROUNDING_US)
        for call_begins, ids, launches in self._calls if ranges else ():
            device.add_calls(call_begins, ids, launches)
            _let_others_run()
        for are_kernels, event_begins, durations, ids in self._device_events:
            device.add_events(event_begins, durations, ids, are_kernels=are_kernels)
            _let_others_run()
        return TraceCounts(
            ranges.by_iteration(),
            device.events,
            device.outside,
            device.launches,
            len(device.without_kernel),
            self._dropped,
            self._stopped_early,
        )

    def _read_ending(self, text: bytes) -> None:
        """Read when the recording ended, and what Kineto's own log says of lost records."""
        if last := _LAST.search(text):
            self._last_us = float(last[1])
        for dropped, stopped in _LOGGED_DROPS.findall(text):
            self._dropped += int(dropped or 0)
            self._stopped_early = self._stopped_early or bool(stopped)


class _Operators:
    """Begins of operators, as the trace writes them. Where all lie in one range, only the first and the last are read:
    most of the time would go into reading numbers."""

    def __init__(self, begins: list[bytes]) -> None:
        begins.sort()
        self._texts = b",".join(begins)
        self.number = len(begins)
        if not self._have_equal_forms(begins[0]):  # else texts are in the order of their numbers
            begins.sort(key=float)
        self.first_us, self.last_us = float(begins[0]), float(begins[-1])

    def _have_equal_forms(self, one: bytes) -> bool:
        """Whether all texts are as long as this one, and have the point where it has it."""
        texts, every, point = self._texts, len(one) + 1, one.find(b".")
        if len(texts) != self.number * every - 1 or texts[every - 1 :: every] != b"," * (self.number - 1):
            return False
        return texts[point::every] == b"." * self.number if point >= 0 else b"." not in texts

    def begins_us(self) -> list[float]:
        """All of them, sorted."""
        return sorted(map(float, self._texts.split(b",")))


class _Ranges:
    """The ranges in order of their begins, and what was counted in each. At any moment at most one counts: the last
    that has begun, until its end."""

    def __init__(self, ranges: Iterable[tuple[float, float, int]]) -> None:
        self._ranges = sorted(ranges)
        self._begins = [begin for begin, _, _ in self._ranges]
        self._operators = [0] * len(self._ranges)
        self.kernels = [0] * len(self._ranges)
        self.device_us = [0.0] * len(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def at(self, moment_us: float) -> int:
        """The position of the range that counts at a moment, or `_NOWHERE`."""
        position = bisect_right(self._begins, moment_us) - 1
        return position if position >= 0 and moment_us <= self._ranges[position][1] else _NOWHERE

    def of_all(self, moments_us: Sequence[float]) -> list[int]:
        """The position for each of some moments, which are mostly close to each other."""
        position = self.at(min(moments_us))
        if position != _NOWHERE and position == self.at(max(moments_us)):
            return [position] * len(moments_us)
        return [self.at(moment) for moment in moments_us]

    def count_operators(self, operators: _Operators) -> None:
        """Add the operators of one piece to the ranges in which they began."""
        position = self.at(operators.first_us)
        if position != _NOWHERE and position == self.at(operators.last_us):
            self._operators[position] += operators.number
            return
        position = max(0, bisect_right(self._begins, operators.first_us) - 1)
        last = bisect_right(self._begins, operators.last_us)
        begins_us = operators.begins_us() if position < last else []
        while position < last:
            begin, end, _ = self._ranges[position]
            stop = bisect_right(begins_us, end)
            if position + 1 < len(self._begins):
                stop = min(stop, bisect_left(begins_us, self._begins[position + 1]))
            self._operators[position] += max(0, stop - bisect_left(begins_us, begin))
            position += 1

    def by_iteration(self) -> dict[int, IterationCounts]:
        """Index of the iteration -> its counts. An iteration that another loop interrupted has several ranges."""
        found: dict[int, IterationCounts] = {}
        for position, (_, _, index) in enumerate(self._ranges):
            before = found.get(index, IterationCounts())
            found[index] = IterationCounts(
                before.operators + self._operators[position],
                before.kernels + self.kernels[position],
                before.device_ns + round(self.device_us[position] * 1e3),
            )
        return found


class _DeviceWork:
    """Finds the range of each device event by the call that launched it. Calls are added before events.

    Attributes:
        events: device events.
        outside: those that do not lie within the time of the recording.
        launches: kernel launches within the ranges.
        without_kernel: correlation ids of those that have no device event so far.
    """

    def __init__(self, ranges: _Ranges, first_us: float, last_us: float) -> None:
        self._ranges = ranges
        self._first_us = first_us
        self._last_us = last_us
        self._range_of: dict[int, int] = {}
        """Correlation id -> position of the range in which the call was made."""
        self.events = 0
        self.outside = 0
        self.launches = 0
        self.without_kernel: set[int] = set()

    def add_calls(self, begins: Sequence[float], ids: Sequence[int], launches: bytes) -> None:
        positions = self._ranges.of_all(begins)
        within = [position != _NOWHERE for position in positions] if _NOWHERE in positions else repeat(True)
        self._range_of.update(compress(zip(ids, positions, strict=True), within))
        launched = list(compress(ids, map(operator.and_, launches, within)))
        self.launches += len(launched)
        self.without_kernel.update(launched)

    def add_events(
        self, begins: Sequence[float], durations: Sequence[float], ids: Sequence[int], *, are_kernels: bool
    ) -> None:
        self.events += len(ids)
        if min(begins) < self._first_us or max(map(operator.add, begins, durations)) > self._last_us:
            times = zip(begins, durations, strict=True)
            self.outside += sum(begin < self._first_us or begin + long > self._last_us for begin, long in times)
        self.without_kernel.difference_update(ids)
        positions = list(map(self._range_of.get, ids))
        for position in set(positions):
            if position is None:
                continue
            number, here = positions.count(position), durations
            if number < len(positions):
                here = [long for long, found in zip(durations, positions, strict=True) if found == position]
            self._ranges.kernels[position] += number * are_kernels
            self._ranges.device_us[position] += math.fsum(here)


def _floats(column: Iterable[bytes]) -> array[float]:
    return array("d", map(float, column))


def _integers(column: Iterable[bytes]) -> array[int]:
    return array("q", map(int, column))


def _let_others_run() -> None:
    """Give Python's lock to a thread that waits for it, after each piece: well under a millisecond."""
    time.sleep(0)
