"""Time on the host: for each operator how often it ran, how long, and how long without the operators inside it."""

from __future__ import annotations

from verl_profiler_conf.tools.trace.events import Event
from verl_profiler_conf.tools.trace.names import Names


class OperatorTimes:
    """Adds up operators as they come.

    Kineto writes the operators of a thread in the order in which they began, so one stack a thread is all that has to
    be remembered. Where a file has them in another order, `is_ordered` turns false and own times are not exact.

    Attributes:
        first_us: when the first began; infinite before there is one.
        last_us: when the last ended.
        calls: by the number of the name.
        total_us: by the number of the name; an operator inside one of its own name counts twice, as torch counts.
        self_us: by the number of the name.
        is_ordered: whether own times are exact.
    """

    def __init__(self, names: Names) -> None:
        self.calls: list[int] = []
        self.total_us: list[float] = []
        self.self_us: list[float] = []
        self.is_ordered = True
        self.first_us = float("inf")
        self.last_us = float("-inf")
        self._names = names
        self._stacks: dict[tuple[object, object], list[tuple[float, int]]] = {}
        self._latest: dict[tuple[object, object], float] = {}

    def add(self, events: list[Event], numbers: list[int]) -> None:
        """Take operators, each with the number of its name."""
        room = len(self._names.texts) - len(self.calls)
        if room:
            self.calls += [0] * room
            self.total_us += [0.0] * room
            self.self_us += [0.0] * room
        calls, total, own = self.calls, self.total_us, self.self_us
        key: tuple[object, object] | None = None
        stack: list[tuple[float, int]] = []
        latest = 0.0
        first, last = self.first_us, self.last_us
        for event, number in zip(events, numbers, strict=True):
            at = (event.pid, event.tid)
            if at != key:
                if key is not None:
                    self._latest[key] = latest
                key = at
                stack = self._stacks.setdefault(at, [])
                latest = self._latest.get(at, float("-inf"))
            begin, dur = event.ts, event.dur
            if begin < latest:
                self.is_ordered = False
                stack.clear()
            latest = begin
            calls[number] += 1
            total[number] += dur
            own[number] += dur
            while stack and stack[-1][0] <= begin:
                stack.pop()
            end = begin + dur
            if stack:
                outer_end, outer = stack[-1]
                own[outer] -= dur if end <= outer_end else outer_end - begin
            stack.append((end, number))
            if end > last:
                last = end
            if begin < first:
                first = begin
        self.first_us, self.last_us = first, last
        if key is not None:
            self._latest[key] = latest
