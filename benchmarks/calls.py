"""Times calls inside a running engine, where other work has emptied the CPU's caches since the call before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any


class ClassTimer:
    """Durations of the calls of a method, in nanoseconds: of the function that a class has now, whatever is put around
    it later."""

    def __init__(self, owner: type, name: str) -> None:
        self.took: list[int] = []
        plain = vars(owner)[name]

        def timed(instance: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return plain.__get__(instance, owner)(*args, **kwargs)
            finally:
                self.took.append(time.perf_counter_ns() - began)

        setattr(owner, name, timed)


class CallTimer:
    """Durations of the calls of a method of one object, in nanoseconds: of whatever its class has when it is called."""

    def __init__(self, instance: Any, name: str) -> None:
        self.took: list[int] = []
        below = vars(instance).get(name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return (
                    below(*args, **kwargs)
                    if below is not None
                    else getattr(type(instance), name)(instance, *args, **kwargs)
                )
            finally:
                self.took.append(time.perf_counter_ns() - began)

        setattr(instance, name, timed)


class Nested:
    """A method timed three times: as the engine has it, with what a class puts around it, and with one timer more.

    What the class puts around it takes the second less the first, and what timing takes is the third less the second.
    """

    def __init__(self, owner: type, name: str) -> None:
        self._name = name
        self.within = ClassTimer(owner, name)
        self.around: CallTimer | None = None
        self.outermost: CallTimer | None = None

    def around_calls_of(self, instance: Any) -> None:
        """Time the calls of one object from here on."""
        self.around = CallTimer(instance, self._name)
        self.outermost = CallTimer(instance, self._name)

    @property
    def timers(self) -> tuple[ClassTimer | CallTimer, ...]:
        assert self.around is not None
        assert self.outermost is not None
        return self.within, self.around, self.outermost

    def clear(self) -> None:
        for timer in self.timers:
            timer.took.clear()

    def overhead(self) -> list[int]:
        """Nanoseconds of each call that the engine's own function did not take, less what the timing took."""
        within, around, outermost = (timer.took for timer in self.timers)
        return [2 * a - w - o for w, a, o in zip(within, around, outermost, strict=True)]


def per_iteration(methods: Sequence[Nested]) -> list[int]:
    """The methods of one iteration added up. One that the last iteration does not call is shorter by one."""
    return [sum(calls) for calls in zip(*(method.overhead() for method in methods), strict=False)]


def typical_us(nanoseconds: Sequence[int]) -> float:
    """Median, in microseconds."""
    return statistics.median(nanoseconds) / 1e3


def with_spread(values: Sequence[float]) -> str:
    """`median (smallest to largest)` over rounds."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
