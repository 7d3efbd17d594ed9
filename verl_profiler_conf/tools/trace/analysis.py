"""From a trace file to its figures, in one reading.

    from verl_profiler_conf.tools.trace.analysis import analyse

    analysis = analyse(Path("vllm_tokens20-80_rank0_pid17_1.pt.trace.json.gz"))
    analysis.device.busy_share, analysis.wall(analysis.phase("decode")), analysis.kernels[:10]

Needs numpy (the extra `report`). Without it `count` of `tools/trace/counts.py` still says what a trace holds.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from verl_profiler_conf.tools.trace.arrays import np
from verl_profiler_conf.tools.trace.ascend import kernel_details, read_kernel_details, trace_file
from verl_profiler_conf.tools.trace.collect import Collected
from verl_profiler_conf.tools.trace.device import Measures, Timeline
from verl_profiler_conf.tools.trace.errors import MERGED, TraceError, printable
from verl_profiler_conf.tools.trace.figures import (
    Analysis,
    Iteration,
    KernelTime,
    OperatorTime,
    RuntimeTime,
    WorkPiece,
)
from verl_profiler_conf.tools.trace.iterations import MAX_RANGES, IterationRange, Source, choose
from verl_profiler_conf.tools.trace.names import OTHER, kind_of
from verl_profiler_conf.tools.trace.reader import TraceReader
from verl_profiler_conf.tools.trace.source import Progress
from verl_profiler_conf.tools.trace.spool import KEEP_ROWS

TOP = 200
"""Names that a list holds."""

TRACKED_KERNELS = 10
"""Kernels followed from iteration to iteration."""

STRIP_PIECES = 5_000
"""The most pieces of device work in a strip."""


def analyse(
    path: Path,
    *,
    source: Source | None = None,
    top: int = TOP,
    progress: Progress | None = None,
    keep_rows: int = KEEP_ROWS,
) -> Analysis:
    """All figures of one trace.

    Args:
        path: a `.json` or `.json.gz`, or a directory that torch_npu left.
        source: which ranges are the iterations; None: the first of `iterations.PREFERENCE` that the trace has.
        top: names to list of kernels, of operators and of runtime calls.
        progress: called with how far the reading is.
        keep_rows: pieces of device work kept in memory; more go through a temporary file.

    Raises:
        TraceError: the file cannot be read, or is no trace; one line.
    """
    path = trace_file(path)
    reader = TraceReader(path, progress=progress)
    collected = Collected(keep_rows)
    was_enabled = gc.isenabled()
    gc.disable()  # a piece has no cycles: looking for them would cost a fifth of the time
    try:
        for events in reader.events():
            collected.add(events)
    finally:
        if was_enabled:
            gc.enable()
    table = kernel_details(path)
    if table is not None and not collected.has_device_work:
        collected.add_kernels(read_kernel_details(table))
    collected.finish()
    if MERGED in reader.members:
        raise TraceError(f"{printable(path)}: several ranks in one trace: give the traces of the ranks")
    return figures(collected, reader, choose(collected.ranges, source), top=top, keep_rows=keep_rows)


def figures(
    collected: Collected, reader: TraceReader, ranges: list[IterationRange], *, top: int, keep_rows: int
) -> Analysis:
    """The figures of a finished reading."""
    origin = collected.origin_us or 0.0
    zero_us = origin + min(collected.first_ns / 1e3, collected.operators.first_us - origin)
    begins = np.array([round((r.begin_us - origin) * 1e3) for r in ranges], "i8")
    ends = np.array([round((r.end_us - origin) * 1e3) for r in ranges], "i8")
    names = collected.names.texts
    timeline = Timeline(collected, begins, ends, keep_rows)
    has_device = timeline.rows.rows > 0
    measures = Measures(timeline, names, len(ranges), zero_us - origin) if has_device else None
    iterations = _iterations(ranges, zero_us, measures)
    kernels = _kernels(names, measures)
    by_operator = timeline.by_operator()
    distributed = reader.member("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    strip_iteration = _typical(iterations) if has_device else None
    return Analysis(
        path=str(reader.path),
        events=collected.events,
        operators_count=sum(n for i, n in enumerate(collected.operators.calls) if i not in collected.annotations),
        kernels_count=measures.all().kernels if measures else 0,
        copies_count=measures.all().copies if measures else 0,
        origin_us=zero_us,
        base_ns=_integer(reader.member("baseTimeNanoseconds")) or 0,
        span_us=_span_us(collected, origin),
        rank=_integer(distributed.get("rank")),
        world_size=_integer(distributed.get("world_size")),
        backend=str(distributed["backend"]) if "backend" in distributed else None,
        devices=_devices(reader),
        source=ranges[0].name.source if ranges else None,
        attribution=("launch" if timeline.by_launch else "time") if ranges and has_device else None,
        iterations=iterations,
        device=measures.all() if measures else None,
        outside=measures.row(0) if measures and ranges else None,
        kernels=tuple(kernels[:top]),
        kernel_names=len(kernels),
        operators=tuple(_operators(collected, by_operator)[:top]),
        runtime=tuple(_runtime(collected)[:top]),
        operators_ordered=collected.operators.is_ordered,
        by_iteration=_by_iteration(timeline, collected, kernels[:TRACKED_KERNELS], len(ranges)) if ranges else {},
        strip=_strip(timeline, collected, strip_iteration, zero_us - origin),
        strip_iteration=strip_iteration,
        notes=tuple(_notes(collected, reader, timeline)),
    )


def _iterations(ranges: list[IterationRange], origin: float, measures: Measures | None) -> tuple[Iteration, ...]:
    made = []
    for position, found in enumerate(ranges):
        name = found.name
        following = ranges[position + 1] if position + 1 < len(ranges) else None
        is_next = following is not None and (
            name.number is None or following.name.number is None or following.name.number == name.number + 1
        )
        made.append(
            Iteration(
                position=position,
                number=position if name.number is None else name.number,
                lo=name.lo,
                hi=name.hi,
                requests=name.requests,
                prefills=name.prefills,
                decodes=name.decodes,
                phase=name.phase,
                begin_us=found.begin_us - origin,
                wall_us=found.end_us - found.begin_us,
                period_us=following.begin_us - found.begin_us if following is not None and is_next else None,
                device=measures.row(position + 1) if measures else None,
            )
        )
    return tuple(made)


def _kernels(names: list[str], measures: Measures | None) -> list[KernelTime]:
    if measures is None:
        return []
    whole = float(measures.total.sum()) or 1.0
    used = np.flatnonzero(measures.calls)
    used = used[np.argsort(-measures.total[used], kind="stable")]
    return [
        KernelTime(
            name=names[number],
            kind=kind_of(names[number]),
            calls=int(measures.calls[number]),
            total_us=float(measures.total[number]) / 1e3,
            smallest_us=float(measures.smallest[number]) / 1e3,
            largest_us=float(measures.largest[number]) / 1e3,
            share=float(measures.total[number]) / whole,
        )
        for number in used.tolist()
    ]


def _operators(collected: Collected, device_ns: Any) -> list[OperatorTime]:
    times = collected.operators
    found = [
        OperatorTime(
            name=collected.names.texts[number],
            is_annotation=number in collected.annotations,
            calls=calls,
            total_us=times.total_us[number],
            self_us=times.self_us[number],
            device_us=float(device_ns[number]) / 1e3,
        )
        for number, calls in enumerate(times.calls)
        if calls
    ]
    return sorted(found, key=lambda operator: -operator.self_us)


def _runtime(collected: Collected) -> list[RuntimeTime]:
    texts = collected.names.texts
    found = [RuntimeTime(texts[number], int(calls), total) for number, (calls, total) in collected.runtime.items()]
    return sorted(found, key=lambda call: -call.total_us)


def _by_iteration(
    timeline: Timeline, collected: Collected, kernels: list[KernelTime], count: int
) -> dict[str, tuple[float, ...]]:
    numbers = [collected.names.number(kernel.name) for kernel in kernels]
    place = np.full(len(collected.names.texts), -1)
    place[numbers] = np.arange(len(numbers))
    table = np.zeros((len(numbers), count))
    for rows in timeline.rows.sorted_blocks():
        at = place[rows["name"]]
        chosen = (at >= 0) & (rows["iteration"] >= 0)
        np.add.at(table, (at[chosen], rows["iteration"][chosen]), rows["dur"][chosen] / 1e3)
    return {kernel.name: tuple(times) for kernel, times in zip(kernels, table.tolist(), strict=True)}


def _typical(iterations: tuple[Iteration, ...]) -> int | None:
    """The iteration whose device time is the median of the decoding ones, or of all where none decodes."""
    candidates = [i for i in iterations if i.phase == "decode"] or list(iterations)
    candidates = [i for i in candidates if i.device is not None and i.device.busy_us]
    candidates.sort(key=lambda i: i.device.busy_us if i.device else 0.0)
    return candidates[len(candidates) // 2].position if candidates else None


def _strip(timeline: Timeline, collected: Collected, iteration: int | None, zero_us: float) -> tuple[WorkPiece, ...]:
    if iteration is None:
        return ()
    lanes = list(collected.streams)
    texts = collected.names.texts
    pieces: list[WorkPiece] = []
    for rows in timeline.rows.sorted_blocks():
        for row in rows[rows["iteration"] == iteration][: STRIP_PIECES - len(pieces)]:
            device, stream = lanes[row["stream"]]
            name = texts[row["name"]]
            begin, dur = float(row["start"]) / 1e3 - zero_us, float(row["dur"]) / 1e3
            pieces.append(WorkPiece(name, kind_of(name), str(device), str(stream), begin, dur))
    return tuple(pieces)


def _notes(collected: Collected, reader: TraceReader, timeline: Timeline) -> list[str]:
    notes = []
    if collected.counts["cuda_profiler_range"]:
        notes.append("It holds counters of kernels (cuda_profiler_range) and no kernel times.")
    if not collected.operators.is_ordered:
        notes.append("Operators are in no order in the file: their own times are not exact.")
    if timeline.rows.rows and not timeline.by_launch and collected.ranges:
        notes.append("It holds no launches: device work counts to the iteration in which it began.")
    if len(collected.ranges) >= MAX_RANGES:
        notes.append(f"It holds more than {MAX_RANGES} ranges that may be iterations: the rest are left out.")
    if OTHER in collected.names.numbers:
        notes.append(f"It holds more names than are kept apart: the rest count as {OTHER}.")
    notes += [f"{name} is longer than what is kept of a trace's metadata." for name in reader.omitted]
    return notes


def _span_us(collected: Collected, origin: float) -> float:
    times = collected.operators
    first = min(times.first_us, origin + collected.first_ns / 1e3)
    last = max(times.last_us, origin + collected.last_ns / 1e3)
    return max(0.0, last - first)


def _devices(reader: TraceReader) -> tuple[str, ...]:
    listed = reader.member("deviceProperties")
    if not isinstance(listed, list):
        return ()
    return tuple(str(device.get("name", "")) for device in listed[:64] if isinstance(device, dict))


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None
