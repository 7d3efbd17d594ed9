"""Counts what each captured iteration did on the host and on the device, while its trace is packed.

This must cost little beside the compression. A pattern runs only over pieces that hold its kind of event, and yields
whole columns. `range_counts` finds the iteration of each event.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from verl_profiler_conf.capture.backends.base import IterationCounts
from verl_profiler_conf.capture.backends.range_counts import DeviceWork, Operators, Ranges
from verl_profiler_conf.capture.ranges import RANGE

_ROUNDING_US = 1.0
"""Times in a trace are decimal texts of microseconds. A device event may touch the edge of the recording by this."""

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
        self._operators: list[Operators] = []
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
            self._operators.append(Operators(begins))
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
        ranges = Ranges(self._ranges)
        for operators in self._operators if ranges else ():
            ranges.count_operators(operators)
            _let_others_run()
        device = DeviceWork(ranges, self._first_us - _ROUNDING_US, self._last_us + _ROUNDING_US)
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


def _floats(column: Iterable[bytes]) -> array[float]:
    return array("d", map(float, column))


def _integers(column: Iterable[bytes]) -> array[int]:
    return array("q", map(int, column))


def _let_others_run() -> None:
    """Give Python's lock to a thread that waits for it, after each piece: well under a millisecond."""
    time.sleep(0)
