"""Merges the ranks of a capture into one trace: aligns their clocks, and names and sorts their processes by rank."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.tools.trace.align import Process, RankTrace, align, check_one_capture
from verl_profiler_conf.tools.trace.capture import RankFile, capture_files, rank_files
from verl_profiler_conf.tools.trace.errors import MERGED, TraceError, printable
from verl_profiler_conf.tools.trace.iterations import MAX_RANGES, IterationRange, choose, parse_range
from verl_profiler_conf.tools.trace.reader import TraceReader
from verl_profiler_conf.tools.trace.rewrite import Rewriter
from verl_profiler_conf.tools.trace.source import Progress
from verl_profiler_conf.tools.trace.writing import TraceWriter

_KEPT = ("schemaVersion", "deviceProperties", "displayTimeUnit", "record_shapes")
_ROOM = 1000
"""Sort indices that a rank has for its processes."""

_MAX_PROCESSES = 10_000


@dataclass(frozen=True)
class MergedRank:
    """One rank of a merged trace: its clock was moved by `shift_us`, as `aligned_by` shows."""

    rank: int
    path: Path
    shift_us: float
    aligned_by: str


@dataclass(frozen=True)
class Merged:
    """What was written."""

    path: Path
    events: int
    ranks: tuple[MergedRank, ...]


def merge_folder(folder: Path, out: Path, *, replace: bool = False, progress: Progress | None = None) -> Merged:
    """All ranks of the one capture that a folder holds, in one trace. Arguments and errors as of `merge_traces`."""
    files = [file for file in capture_files(folder) if not out.exists() or not file.path.samefile(out)]
    return _merge(files, out, replace=replace, progress=progress)


def merge_traces(
    paths: Sequence[Path], out: Path, *, replace: bool = False, progress: Progress | None = None
) -> Merged:
    """Several ranks in one trace, whole or not at all.

    Args:
        paths: a trace of each rank; manifests beside them are read.
        out: where to; compressed where the name ends with `.gz`.
        replace: write over a file that is there.
        progress: called with how far the reading of each file is; each is read twice.

    Raises:
        TraceError: a trace cannot be read, or they are not of one capture; one line.
        FileExistsError: `out` exists and `replace` is false.
        OSError: `out` cannot be written.
    """
    return _merge(rank_files(paths), out, replace=replace, progress=progress)


def _merge(files: Sequence[RankFile], out: Path, *, replace: bool, progress: Progress | None) -> Merged:
    if out.exists() and not replace:
        raise FileExistsError(f"{out} exists already")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ranks = [_look(file, progress) for file in files]
        check_one_capture(ranks)
        ranks.sort(key=lambda trace: trace.rank or 0)
        alignments = align(ranks)
        merged = [
            MergedRank(trace.rank or 0, trace.path, alignment.shift_ns / 1e3, alignment.by)
            for trace, alignment in zip(ranks, alignments, strict=True)
        ]
        members = {name: ranks[0].members[name] for name in _KEPT if name in ranks[0].members}
        added: dict[str, Any] = {
            MERGED: [
                {"rank": m.rank, "file": m.path.name, "shift_us": m.shift_us, "aligned_by": m.aligned_by}
                for m in merged
            ]
        }
        if all(trace.base_ns for trace in ranks):
            added["baseTimeNanoseconds"] = min(trace.base_ns for trace in ranks)
        with TraceWriter(out, members, added, replace=replace) as writer:
            numbers = iter(range(1, 1 + sum(len(trace.processes) for trace in ranks)))
            for place, (trace, alignment) in enumerate(zip(ranks, alignments, strict=True)):
                pids = {pid: next(numbers) for pid in _in_order(trace)}
                writer.write(_names(trace, pids, place))
                rewriter = Rewriter(place, pids, alignment.shift_ns)
                for texts in TraceReader(trace.path, progress=progress).pieces(rewriter):
                    writer.write(texts)
        return Merged(out, writer.events, tuple(merged))
    finally:
        if was_enabled:
            gc.enable()


def _look(file: RankFile, progress: Progress | None) -> RankTrace:
    """Read a trace for the first time: its rank, its clock, its iterations and its processes."""
    reader = TraceReader(file.path, progress=progress)
    trace = RankTrace(file)
    ranges: list[IterationRange] = []
    processes: dict[object, Process] = {}
    for events in reader.events():
        for event in events:
            if event.ph == "M":
                _note(processes, event)
                continue
            if event.pid not in trace.processes:
                if len(trace.processes) >= _MAX_PROCESSES:
                    raise TraceError(f"{printable(file.path)}: more than {_MAX_PROCESSES} processes in it")
                trace.processes[event.pid] = Process()
            if event.ph != "X" or event.cat == "Trace":
                continue
            begin = event.ts
            if begin < trace.first_us:
                trace.first_us = begin
            if begin + event.dur > trace.last_us:
                trace.last_us = begin + event.dur
            if event.cat not in _NEVER_RANGES and len(ranges) < MAX_RANGES:
                found = parse_range(event.name)
                if found is not None:
                    ranges.append(IterationRange(found, begin, begin + event.dur, (event.pid, event.tid)))
    for pid in trace.processes:
        trace.processes[pid] = processes.get(pid, Process())
    trace.iterations = choose(ranges)
    trace.members = reader.members
    trace.is_merged = MERGED in reader.members
    distributed = reader.member("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    base = reader.member("baseTimeNanoseconds")
    trace.base_ns = base if type(base) is int and 0 <= base < 2**62 else 0
    trace.rank = _first_integer(file.manifest.rank if file.manifest else None, distributed.get("rank"), file.rank)
    trace.world_size = _first_integer(distributed.get("world_size"))
    return trace


_NEVER_RANGES = frozenset({"gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"})


def _note(processes: dict[object, Process], event: Any) -> None:
    if event.args is None or len(processes) >= _MAX_PROCESSES:
        return
    process = processes.setdefault(event.pid, Process())
    if event.name == "process_name" and isinstance(event.args.name, str):
        process.name = event.args.name
    elif event.name == "process_labels" and isinstance(event.args.labels, str):
        process.labels = event.args.labels
    elif event.name == "process_sort_index" and isinstance(event.args.sort_index, (int, float)):
        process.sort_index = float(event.args.sort_index)


def _in_order(trace: RankTrace) -> list[object]:
    """The processes of a rank as its own trace sorts them."""
    return sorted(trace.processes, key=lambda pid: (trace.processes[pid].sort_index, str(pid)))


def _names(trace: RankTrace, pids: dict[object, int], place: int) -> list[bytes]:
    """Metadata events that name and sort the processes of a rank."""
    events: list[dict[str, Any]] = []
    for order, (pid, number) in enumerate(pids.items()):
        process = trace.processes[pid]
        name = f"rank {trace.rank}: {process.name or pid}"
        name += f" {process.labels}" if process.labels not in ("", "CPU") else f" ({pid})" if process.name else ""
        index = place * _ROOM + min(order, _ROOM - 1)
        for what, args in (
            ("process_name", {"name": name}),
            ("process_labels", {"labels": process.labels} if process.labels else None),
            ("process_sort_index", {"sort_index": index}),
        ):
            if args is not None:
                events.append({"name": what, "ph": "M", "ts": 0, "pid": number, "tid": 0, "args": args})
    return [json.dumps(event).encode() for event in events]


def _first_integer(*values: object) -> int | None:
    return next((value for value in values if type(value) is int), None)
