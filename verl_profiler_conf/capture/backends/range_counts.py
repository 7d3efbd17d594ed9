"""Finds the iteration of each operator and of each device event, and adds them up.

A kernel belongs to the iteration whose range was open when the kernel was launched. The launch and the kernel share a
correlation id. All kernels of one CUDA graph replay share the id of the replay's launch.

Nearly always all events of a piece of the trace belong to one iteration, so they are counted together.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress, repeat

from verl_profiler_conf.capture.backends.base import IterationCounts

_NOWHERE = -1
"""The position of what lies in no range."""


class Operators:
    """When the operators of a piece began, as texts of the trace. Reading numbers takes most of the time, so only the
    first and the last are read where all operators lie in one range."""

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


class Ranges:
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

    def count_operators(self, operators: Operators) -> None:
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


class DeviceWork:
    """Finds the range of each device event by the call that launched it. Calls are added before events.

    Attributes:
        events: device events.
        outside: those that do not lie within the time of the recording.
        launches: kernel launches within the ranges.
        without_kernel: correlation ids of those that have no device event so far.
    """

    def __init__(self, ranges: Ranges, first_us: float, last_us: float) -> None:
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
        """Add calls of the device's runtime: when they began, their correlation ids, and which of them are launches."""
        positions = self._ranges.of_all(begins)
        within = [position != _NOWHERE for position in positions] if _NOWHERE in positions else repeat(True)
        self._range_of.update(compress(zip(ids, positions, strict=True), within))
        launched = list(compress(ids, map(operator.and_, launches, within)))
        self.launches += len(launched)
        self.without_kernel.update(launched)

    def add_events(
        self, begins: Sequence[float], durations: Sequence[float], ids: Sequence[int], *, are_kernels: bool
    ) -> None:
        """Add device events of one kind, with the correlation ids of the calls that launched them."""
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
