"""A device profiler with Kineto's rules: one recording a process, begun and ended on one thread, which it records.

Every breach of a rule is kept in `breaches`; on a real Kineto it would cost a trace or the process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends import Written


@dataclass
class Recorded:
    """One recording: the operators of its thread, by range."""

    thread: int
    ranges: list[tuple[str, list[str]]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    open_ranges: list[int] = field(default_factory=list)
    renames: dict[str, str] = field(default_factory=dict)


class StrictKineto:
    """What all profilers of a test's process share."""

    def __init__(self) -> None:
        self.running: Recorded | None = None
        self.written: list[Recorded] = []
        self.breaches: list[str] = []
        self.other_runs = False
        """A profiler of the job itself runs."""

    def operator(self, name: str) -> None:
        """An operator runs on the calling thread."""
        running = self.running
        if running is not None and running.thread == threading.get_ident():
            target = running.ranges[running.open_ranges[-1]][1] if running.open_ranges else running.outside
            target.append(name)


class StrictProfiler:
    """One device profiler of it."""

    name = "strict"
    suffix = ".strict"

    def __init__(self, kineto: StrictKineto) -> None:
        self._kineto = kineto

    def busy(self) -> str | None:
        return "the job's own profiler runs" if self._kineto.other_runs else None

    def prepare(self) -> None:
        if self._kineto.running is not None or self._kineto.other_runs:
            self._kineto.breaches.append("prepared while a profiler runs")

    def start(self) -> None:
        if self._kineto.running is not None:
            self._kineto.breaches.append("started twice")
        self._kineto.running = Recorded(threading.get_ident())

    @contextlib.contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        running = self._recording("annotate")
        if running is None:
            yield
            return
        if running.open_ranges:
            self._kineto.breaches.append("a range within a range")
        running.open_ranges.append(len(running.ranges))
        running.ranges.append((name, []))
        try:
            yield
        finally:
            if threading.get_ident() != running.thread:
                self._kineto.breaches.append("a range ended on another thread")
            running.open_ranges.pop()

    def stop(self) -> StrictRecording:
        running = self._recording("stop")
        self._kineto.running = None
        if running is not None and running.open_ranges:
            self._kineto.breaches.append("stopped within a range")
        return StrictRecording(self._kineto, running or Recorded(0))

    def discard(self) -> None:
        if self._kineto.running is not None:
            self.stop()

    def _recording(self, call: str) -> Recorded | None:
        running = self._kineto.running
        if running is None:
            self._kineto.breaches.append(f"{call} without a recording")
        elif running.thread != threading.get_ident():
            self._kineto.breaches.append(f"{call} on another thread")
        return running


class StrictRecording:
    """Writes nothing but its own name."""

    def __init__(self, kineto: StrictKineto, recorded: Recorded) -> None:
        self._kineto = kineto
        self._recorded = recorded

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        self._recorded.renames = dict(renames)
        self._kineto.written.append(self._recorded)
        return Written(path.with_name(path.name + ".strict"), 1)


class Turns:
    """Real threads that run one call after the other, in the order a test says."""

    def __init__(self, count: int) -> None:
        self._threads = [_Turn(number) for number in range(count)]

    def run(self, thread: int, call: Any) -> Any:
        """Run `call` on a thread, and wait for it."""
        return self._threads[thread].run(call)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


class _Turn:
    def __init__(self, number: int) -> None:
        self._call: Any = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name=f"turn-{number}", daemon=True)
        self._thread.start()

    def run(self, call: Any) -> Any:
        self._call, self._error = call, None
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._result

    def close(self) -> None:
        self._call = None
        self._go.release()
        self._thread.join(30)

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._call is None:
                return
            try:
                self._result = self._call()
            except BaseException as error:
                self._error = error
            self._call = None
            self._done.release()
