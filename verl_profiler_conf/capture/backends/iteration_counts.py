"""Counts what each captured iteration did on the host and on the device, while its trace is packed.

A kernel belongs to the iteration whose range was open when the kernel was launched. The launch and the kernel share a
correlation id. All kernels of one CUDA graph replay share the id of the replay's launch.
"""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from verl_profiler_conf.capture.backends.base import IterationCounts
from verl_profiler_conf.capture.ranges import RANGE

_Column = Iterable[bytes]

_BATCH = 1000
"""Events counted between two moments in which other threads may take Python's lock: well under a millisecond."""

_ROUNDING_US = 1.0
"""Times in a trace are decimal texts of microseconds. A device event may touch the edge of the recording by this."""

_TEXT = rb'[^"\\]*(?:\\.[^"\\]*)*'
_BEGIN = rb'",\s+"pid": [^,]+,\s+"tid": [^,]+,\s+"ts": ([^,]+),\s+"dur": '
_DURATION = rb"([^,\n}]+)"


def _events(up_to_correlation: bytes) -> re.Pattern[bytes]:
    correlation = rb'\s*,\s+"args": \{' + up_to_correlation + rb'"correlation": (\d+)'
    return re.compile(
        rb'"cat": "(?:cpu_op",\s+"name": "' + _TEXT + _BEGIN
        # a call of the runtime or the driver: its name, begin, correlation id
        + rb'|(?:cuda|xpu)_(?:runtime|driver)",\s+"name": "(' + _TEXT + rb")" + _BEGIN + rb"[^,\n}]+" + correlation
        # a kernel, then a copy or a memset: begin, duration, correlation id
        + rb'|kernel",\s+"name": "' + _TEXT + _BEGIN + _DURATION + correlation
        + rb'|gpu_mem(?:cpy|set)",\s+"name": "' + _TEXT + _BEGIN + _DURATION + correlation
        # the range of an iteration: its name, begin, duration
        + rb'|user_annotation",\s+"name": "(response_tokens\[' + _TEXT + rb")" + _BEGIN + _DURATION
        + rb")"
    )  # fmt: skip


_EVENT = _events(rb"[^}]*")
_ROCM_EVENT = _events(rb"[^}]*?(?:\}[^}\n]*?)*?")
"""ROCm writes the kernel's name, with braces in it, before the id. This pattern takes three times as long."""

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


class _DeviceEvents:
    """Kernels, or copies and memsets: begin, duration (both in microseconds) and correlation id of each."""

    def __init__(self) -> None:
        self.begin_us = array("d")
        self.duration_us = array("d")
        self.correlation = array("q")

    def extend(self, begins: _Column, durations: _Column, correlations: _Column) -> None:
        """Add the events of one piece. Rows of other kinds of events are empty."""
        self.begin_us.extend(map(float, filter(None, begins)))
        self.duration_us.extend(map(float, filter(None, durations)))
        self.correlation.extend(map(int, filter(None, correlations)))


class EventCounter:
    """Takes in a trace piece by piece. Each event must lie whole in one piece."""

    def __init__(self) -> None:
        self._first_us = float("-inf")
        self._last_us = float("inf")
        self._operator_us = array("d")
        self._launch_us = array("d")
        self._launch_id = array("q")
        self._is_kernel_launch = bytearray()
        self._kernels = _DeviceEvents()
        self._copies = _DeviceEvents()
        self._ranges: list[tuple[float, float, int]] = []
        self._dropped = 0
        self._stopped_early = False

    def feed(self, text: bytes, *, closes: bool = False) -> None:
        """Take in the events of one piece of the raw trace.

        Args:
            text: the piece.
            closes: it is the last one, with the last event and what Kineto writes after the events.
        """
        found = (_ROCM_EVENT if b'"hip' in text else _EVENT).findall(text)
        if found:
            # Each event fills the columns of its kind. Whole columns are read at once, since a loop would take twice
            # the time.
            operators, calls, call_us, call_ids, *device, names, range_us, range_durations = zip(*found, strict=True)
            self._operator_us.extend(map(float, filter(None, operators)))
            self._launch_us.extend(map(float, filter(None, call_us)))
            self._launch_id.extend(map(int, filter(None, call_ids)))
            self._is_kernel_launch.extend(b"Launch" in call for call in calls if call)
            self._kernels.extend(*device[:3])
            self._copies.extend(*device[3:])
            for name, begin, duration in zip(names, range_us, range_durations, strict=True):
                if name and (match := RANGE.match(name.decode("ascii", "replace"))):
                    self._ranges.append((float(begin), float(begin) + float(duration), int(match[3])))
        if self._first_us < 0 and (first := _FIRST.search(text)):
            self._first_us = float(first[1])
        if closes:
            self._read_ending(text)

    def result(self) -> TraceCounts:
        """Count, once the whole trace has been taken in."""
        ranges = sorted(self._ranges)
        begins, ends = [begin for begin, _, _ in ranges], [end for _, end, _ in ranges]

        def range_at(moment_us: float) -> int:
            position = bisect_right(begins, moment_us) - 1
            return position if position >= 0 and moment_us <= ends[position] else -1

        operators, kernels, device_us = [0] * len(ranges), [0] * len(ranges), [0.0] * len(ranges)
        if ranges:
            for number in _in_batches(len(self._operator_us)):
                position = range_at(self._operator_us[number])
                if position >= 0:
                    operators[position] += 1
        launched: dict[int, tuple[int, int]] = {}  # correlation id -> position of its range, number of the launch
        missing = bytearray(len(self._launch_us))
        for number in _in_batches(len(self._launch_us) if ranges else 0):
            position = range_at(self._launch_us[number])
            if position >= 0:
                launched[self._launch_id[number]] = position, number
                missing[number] = self._is_kernel_launch[number]
        launches = sum(missing)
        outside = 0
        for events, weight in ((self._kernels, 1), (self._copies, 0)):
            for number in _in_batches(len(events.begin_us)):
                begin, duration = events.begin_us[number], events.duration_us[number]
                outside += begin < self._first_us - _ROUNDING_US or begin + duration > self._last_us + _ROUNDING_US
                launch = launched.get(events.correlation[number])
                if launch is not None:
                    position, call = launch
                    missing[call] = 0
                    kernels[position] += weight
                    device_us[position] += duration
        iterations: dict[int, IterationCounts] = {}
        for position, (_, _, index) in enumerate(ranges):  # an iteration that another loop interrupted has several
            before = iterations.get(index, IterationCounts())
            iterations[index] = IterationCounts(
                before.operators + operators[position],
                before.kernels + kernels[position],
                before.device_ns + round(device_us[position] * 1e3),
            )
        return TraceCounts(
            iterations,
            len(self._kernels.begin_us) + len(self._copies.begin_us),
            outside,
            launches,
            sum(missing),
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


def _in_batches(count: int) -> Iterator[int]:
    """The numbers below `count`. Lets other threads run after each batch."""
    for begin in range(0, count, _BATCH):
        yield from range(begin, min(begin + _BATCH, count))
        time.sleep(0)
