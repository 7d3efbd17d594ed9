"""What a trace holds, counted with nothing but the standard library where nothing else is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.tools.trace.ascend import WORK
from verl_profiler_conf.tools.trace.events import Event
from verl_profiler_conf.tools.trace.iterations import MAX_RANGES, IterationRange, parse_range
from verl_profiler_conf.tools.trace.reader import TraceReader
from verl_profiler_conf.tools.trace.source import Progress


@dataclass(frozen=True)
class Counts:
    """What one trace holds.

    Attributes:
        path: the file.
        events: all of them.
        operators: that the host ran.
        kernels: kernels, copies and fills that an accelerator ran.
        ranges: all that may be iterations, in the order of the file; `iterations.choose` picks among them.
    """

    path: Path
    events: int
    operators: int
    kernels: int
    ranges: tuple[IterationRange, ...]


def _is_ascend_work(event: Event) -> bool:
    args = event.args
    return args is not None and args.task_type is not None and args.task_type.startswith(WORK)


_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def count(path: Path, *, progress: Progress | None = None) -> Counts:
    """Read a trace once and count.

    Raises:
        TraceError: the file cannot be read, or is no trace; one line.
    """
    total = operators = kernels = 0
    ranges: list[IterationRange] = []
    for events in TraceReader(path, progress=progress).events():
        total += len(events)
        for event in events:
            category = event.cat
            if category == "cpu_op":
                operators += 1
            elif category in _DEVICE or _is_ascend_work(event):
                kernels += 1
            elif category != "gpu_user_annotation" and event.ph == "X" and len(ranges) < MAX_RANGES:
                # an accelerator's timeline repeats the range: the host's is the one that brackets
                found = parse_range(event.name)
                if found is not None:
                    end = event.ts + event.dur
                    ranges.append(IterationRange(found, event.ts, end, (event.pid, event.tid)))
    return Counts(path, total, operators, kernels, tuple(ranges))
