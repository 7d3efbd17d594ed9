"""Collects, in one reading of a trace, the numbers of each event that the figures need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from verl_profiler_conf.tools.trace.arrays import np
from verl_profiler_conf.tools.trace.ascend import WORK, AscendKernel
from verl_profiler_conf.tools.trace.categories import ANNOTATIONS, DEVICE, IGNORED, LAUNCHES, OPERATORS
from verl_profiler_conf.tools.trace.columns import Columns
from verl_profiler_conf.tools.trace.events import Event
from verl_profiler_conf.tools.trace.iterations import MAX_RANGES, RANGE_PREFIXES, IterationRange, parse_range
from verl_profiler_conf.tools.trace.names import Names
from verl_profiler_conf.tools.trace.operators import OperatorTimes
from verl_profiler_conf.tools.trace.spool import KEEP_ROWS, Spool

NONE = -(2**63)
"""Stands for a correlation that an event does not have."""

DEVICE_ROW = [("join", "i8"), ("start", "i8"), ("dur", "i8"), ("external", "i8"), ("name", "i4"), ("stream", "i4")]
LAUNCH_ROW = [("join", "i8"), ("begin", "i8"), ("end", "i8")]
OPERATOR_ROW = [("external", "i8"), ("name", "i4")]

_FLUSH = 1 << 16
_MAX_STREAMS = 20_000
_MAX_PROCESSES = 10_000


class Collected:
    """What a reading of a trace leaves. Times in the spools are nanoseconds after `origin_us`.

    Attributes:
        origin_us: the first time seen, on the trace's clock.
        names: of operators, launches and device work.
        operators: times of the host's operators.
        runtime: calls and time of launches and other calls of the device's runtime, by the number of the name.
        device: rows of device work.
        launches: rows of calls that may have started device work.
        externals: rows that join an operator's external id to its name.
        streams: (device, stream), numbered as in the device rows.
        ranges: all ranges that may be iterations.
        annotations: numbers of names that are annotations, not operators.
        processes: names by process, as metadata events give them.
        labels: of processes.
        counts: of events by category.
        is_joined: some device work says which launch started it.
        first_ns: the begin of the device work and launches that began first; 0 without any.
        last_ns: the end of what ended last.
    """

    def __init__(self, keep: int = KEEP_ROWS) -> None:
        self.origin_us: float | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.names = Names()
        self.operators = OperatorTimes(self.names)
        self.runtime: dict[int, list[float]] = {}
        self.device = Spool(DEVICE_ROW, "join", keep)
        self.launches = Spool(LAUNCH_ROW, "join", keep)
        self.externals = Spool(OPERATOR_ROW, "external", keep)
        self.streams: dict[tuple[object, object], int] = {}
        self.ranges: list[IterationRange] = []
        self.annotations: set[int] = set()
        self.processes: dict[object, str] = {}
        self.labels: dict[object, str] = {}
        self.counts: Counter[str] = Counter()
        self.events = 0
        self.is_joined = False
        self._device = Columns(("d", "d", "q", "q", "i", "i"))
        self._launches = Columns(("d", "d", "q"))
        self._externals = Columns(("q", "i"))

    def add(self, events: list[Event]) -> None:
        """Take a piece of the trace."""
        self.events += len(events)
        operators: list[Event] = []
        device: list[Event] = []
        launches: list[Event] = []
        others: list[Event] = []
        for event in events:
            category = event.cat
            if category == "cpu_op":
                operators.append(event)
            elif category in IGNORED:
                continue
            elif category in LAUNCHES:
                launches.append(event)
            elif category in DEVICE:
                device.append(event)
            elif category in OPERATORS or category in ANNOTATIONS:
                operators.append(event)
            else:
                others.append(event)
        if self.origin_us is None and events:
            self.origin_us = next((e.ts for e in events if e.ph == "X"), None)
        if others:
            self._add_others(others, device, launches)
        if operators:
            self._add_operators(operators)
        if launches:
            self._add_launches(launches)
        if device:
            self._add_device(device)

    @property
    def has_device_work(self) -> bool:
        """Whether the trace has held any device work so far."""
        return self.device.rows > 0 or len(self._device.columns[0]) > 0

    def add_kernels(self, kernels: Iterable[AscendKernel]) -> None:
        """Take device work from a table instead of the trace; it has no launches."""
        for kernel in kernels:
            row = (kernel.start_us, kernel.dur_us, NONE, NONE, self.names.number(kernel.name))
            lane = self.streams.setdefault(("npu", kernel.stream), len(self.streams))
            for column, value in zip(self._device.columns, (*row, lane), strict=True):
                column.append(value)
            if self.origin_us is None:
                self.origin_us = kernel.start_us
            if len(self._device.columns[0]) >= _FLUSH:
                self._flush_device()

    def finish(self) -> None:
        """Tell that all pieces have been taken."""
        self.operators.finish()
        self._flush_device()
        self._flush_launches()
        self._flush_externals()

    def _add_operators(self, events: list[Event]) -> None:
        known = self.names.numbers.get
        external, name_of = self._externals.columns
        numbers: list[int] = []
        complete: list[Event] = []
        for event in events:
            if event.ph != "X":
                continue
            number = known(event.name)
            if number is None:
                number = self._new_operator(event)
            complete.append(event)
            numbers.append(number)
            args = event.args
            if args is not None and args.external is not None:
                external.append(args.external)
                name_of.append(number)
        self.operators.add(complete, numbers)
        if len(external) >= _FLUSH:
            self._flush_externals()

    def _new_operator(self, event: Event) -> int:
        """The number of a name that has none yet. Ranges of iterations of one kind share a number."""
        if event.cat not in ANNOTATIONS and not event.name.startswith(RANGE_PREFIXES):
            return self.names.number(event.name)
        number = self.names.number(self._add_range(event))  # Ascend has no category for annotations
        self.annotations.add(number)
        return number

    def _add_range(self, event: Event) -> str:
        """Keep the event if it is an iteration, and give the name under which its time is added up."""
        found = parse_range(event.name)
        if found is None:
            return event.name
        if len(self.ranges) < MAX_RANGES:
            thread = (event.pid, event.tid)
            self.ranges.append(IterationRange(found, event.ts, event.ts + event.dur, thread))
        return _RANGE_LABELS[found.source]

    def _add_launches(self, events: list[Event]) -> None:
        known = self.names.numbers.get
        runtime = self.runtime
        begin, dur, join = self._launches.columns
        for event in events:
            if event.ph != "X":
                continue
            index = known(event.name)
            if index is None:
                index = self.names.number(event.name)
            times = runtime.get(index)
            if times is None:
                runtime[index] = [1, event.dur]
            else:
                times[0] += 1
                times[1] += event.dur
            args = event.args
            if args is None:
                continue
            joins = args.correlation if args.correlation is not None else args.connection
            if joins is not None:
                begin.append(event.ts)
                dur.append(event.dur)
                join.append(joins)
        if len(begin) >= _FLUSH:
            self._flush_launches()

    def _add_device(self, events: list[Event]) -> None:
        known = self.names.numbers.get
        start, dur, join, external, name, stream = self._device.columns
        streams = self.streams
        for event in events:
            if event.ph != "X":
                continue
            args = event.args
            start.append(event.ts)
            dur.append(event.dur)
            index = known(event.name)
            name.append(self.names.number(event.name) if index is None else index)
            lane = streams.get((event.pid, event.tid))
            stream.append(self._new_stream(event) if lane is None else lane)
            if args is None:
                join.append(NONE)
                external.append(NONE)
                continue
            joins = args.correlation if args.correlation is not None else args.connection
            join.append(NONE if joins is None else joins)
            external.append(NONE if args.external is None else args.external)
        if len(start) >= _FLUSH:
            self._flush_device()

    def _new_stream(self, event: Event) -> int:
        if len(self.streams) >= _MAX_STREAMS:
            return _MAX_STREAMS - 1
        return self.streams.setdefault((event.pid, event.tid), len(self.streams))

    def _add_others(self, events: list[Event], device: list[Event], launches: list[Event]) -> None:
        """Metadata, and Ascend's events, which have no categories and are recognised by their arguments."""
        for event in events:
            if event.ph == "M":
                self._add_metadata(event)
            elif event.ph == "X":
                args = event.args
                if args is not None and args.task_type is not None:
                    if args.task_type.startswith(WORK):
                        device.append(event)
                elif event.name.startswith("hcom_"):
                    device.append(event)
                elif args is not None and args.connection is not None:
                    launches.append(event)
                elif parse_range(event.name) is not None:
                    self._add_range(event)
                self.counts[event.cat or "uncategorised"] += 1

    def _add_metadata(self, event: Event) -> None:
        args = event.args
        if args is None or len(self.processes) >= _MAX_PROCESSES:
            return
        if event.name == "process_name" and isinstance(args.name, str):
            self.processes[event.pid] = args.name
        elif event.name == "process_labels" and isinstance(args.labels, str):
            self.labels[event.pid] = args.labels

    def _flush_device(self) -> None:
        start, dur, join, external, name, stream = self._device.take()
        rows = np.empty(len(start), self.device.dtype)
        rows["start"] = self._ns(start)
        rows["dur"] = np.maximum(np.rint(dur * 1000.0), 0.0)
        rows["join"], rows["external"], rows["name"], rows["stream"] = join, external, name, stream
        self._see(rows["start"], rows["start"] + rows["dur"])
        self.is_joined |= bool((rows["join"] != NONE).any())
        self.device.add(rows)

    def _flush_launches(self) -> None:
        begin, dur, join = self._launches.take()
        rows = np.empty(len(begin), self.launches.dtype)
        rows["begin"] = self._ns(begin)
        rows["end"] = rows["begin"] + np.maximum(np.rint(dur * 1000.0), 0.0).astype("i8")
        rows["join"] = join
        self._see(rows["begin"], rows["end"])
        self.launches.add(rows)

    def _flush_externals(self) -> None:
        external, name = self._externals.take()
        rows = np.empty(len(external), self.externals.dtype)
        rows["external"], rows["name"] = external, name
        self.externals.add(rows)

    def _see(self, begins: Any, ends: Any) -> None:
        if len(begins):
            self.first_ns = min(self.first_ns, int(begins.min()))
            self.last_ns = max(self.last_ns, int(ends.max()))

    def _ns(self, times_us: Any) -> Any:
        return np.rint((times_us - (self.origin_us or 0.0)) * 1000.0).astype("i8")


_RANGE_LABELS = {
    "response_tokens": "response_tokens[...]",
    "vllm": "execute_context_..._generation_...",
    "sglang": "step[...]",
    "profiler_step": "ProfilerStep#...",
}
