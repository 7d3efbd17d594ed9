"""Measures time on the host: how often each operator ran, how long, and how long without the operators inside it."""

from __future__ import annotations

from typing import Any

from verl_profiler_conf.tools.trace.events import Event
from verl_profiler_conf.tools.trace.names import Names

_Open = list[Any]
"""An operator that may hold others: its end, the number of its name, its children, and the time of one of its name."""

MAX_THREADS = 20_000
"""Threads that have a stack of their own. Further threads share one, and own times are then not exact."""

_REST = ("", "the rest")


class OperatorTimes:
    """Adds up operators as they come.

    Kineto writes the operators of a thread in the order in which they began, so one stack a thread is all that has to
    be remembered. Where a file has them in another order, `is_ordered` turns false and own times are not exact.

    As in torch's key_averages, an operator whose only child has its own name counts as one call with it.

    Attributes:
        last_us: when the last ended.
        calls: by the number of the name.
        total_us: by the number of the name.
        self_us: by the number of the name.
        is_ordered: whether own times are exact.
    """

    def __init__(self, names: Names) -> None:
        self.calls: list[int] = []
        self.total_us: list[float] = []
        self.self_us: list[float] = []
        self.is_ordered = True
        self.last_us = float("-inf")
        self._names = names
        self._threads: dict[tuple[object, object], _Thread] = {}

    def add(self, events: list[Event], numbers: list[int]) -> None:
        """Take operators, each with the number of its name."""
        self._grow()
        calls, total, own, threads = self.calls, self.total_us, self.self_us, self._threads
        key: tuple[object, object] | None = None
        thread = _Thread(0.0)
        stack = thread.stack
        last = self.last_us
        for event, number in zip(events, numbers, strict=True):
            at = (event.pid, event.tid)
            if at != key:
                key = at
                thread = threads.get(at) or self._new_thread(at, event.ts)
                stack = thread.stack
            begin, dur = event.ts, event.dur
            if begin < thread.latest_us:
                self._disorder(thread, begin)
            thread.latest_us = begin
            calls[number] += 1
            total[number] += dur
            own[number] += dur
            while stack and stack[-1][0] <= begin:
                if (inner := stack.pop())[2] == 1:
                    self._close(inner)
            end = begin + dur
            if stack:
                outer = stack[-1]
                outer[2] += 1
                if outer[1] == number:
                    outer[3] = dur
                own[outer[1]] -= dur if end <= outer[0] else outer[0] - begin
            stack.append([end, number, 0, None])
            if end > last:
                last = end
        self.last_us = last

    @property
    def first_us(self) -> float:
        """When the first began; infinite before there is one."""
        return min((thread.first_us for thread in self._threads.values()), default=float("inf"))

    def finish(self) -> None:
        """All operators have been taken."""
        for thread in self._threads.values():
            while thread.stack:
                self._close(thread.stack.pop())

    def _close(self, operator: _Open) -> None:
        _, number, children, twin_us = operator
        if children == 1 and twin_us is not None:
            self.calls[number] -= 1
            self.total_us[number] -= twin_us

    def _disorder(self, thread: _Thread, begin: float) -> None:
        self.is_ordered = False
        thread.first_us = min(thread.first_us, begin)
        while thread.stack:
            self._close(thread.stack.pop())

    def _new_thread(self, key: tuple[object, object], begin: float) -> _Thread:
        if len(self._threads) >= MAX_THREADS:
            self.is_ordered = False
            key = _REST
            if key in self._threads:
                return self._threads[key]
        thread = self._threads[key] = _Thread(begin)
        return thread

    def _grow(self) -> None:
        room = len(self._names.texts) - len(self.calls)
        if room:
            self.calls += [0] * room
            self.total_us += [0.0] * room
            self.self_us += [0.0] * room


class _Thread:
    __slots__ = ("first_us", "latest_us", "stack")

    def __init__(self, begin: float) -> None:
        self.stack: list[_Open] = []
        self.first_us = self.latest_us = begin
