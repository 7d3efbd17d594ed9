"""What the captures would take: bytes of traces, memory until a trace is saved, and how long the rollout waits."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.sizes import size_text

EVENTS = 2000
"""Kernels of an iteration, where no earlier run tells: a model of some 30 layers without CUDA graphs."""

TRACE_BYTES = 84
"""Of a compressed trace, for each kernel with its launch; about 900 before compression."""

MEMORY_BYTES = 1000
"""Of host memory, for each kernel until the trace is saved."""

STALL_NS = 8000
"""For each kernel, when a capture is closed."""


@dataclass(frozen=True)
class Cost:
    """Of one iteration. `source` says where the numbers come from."""

    trace_bytes: float
    memory_bytes: float
    stall_ns: float
    source: str


TABLE = Cost(
    EVENTS * TRACE_BYTES,
    EVENTS * MEMORY_BYTES,
    EVENTS * STALL_NS,
    f"table: {EVENTS} kernels an iteration, without shapes and stacks; --like DIR reads an earlier run",
)


def measured(folder: Path) -> Cost | None:
    """The cost of an iteration in an earlier run; None: its folder has no trace of one."""
    found = []
    for path in sorted(folder.rglob(f"*{MANIFEST_SUFFIX}")):
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        if manifest.rows and manifest.trace_bytes:
            found.append(manifest)
    rows = sum(len(manifest.rows) for manifest in found)
    if not rows:
        return None
    size = sum(manifest.trace_bytes for manifest in found)
    return Cost(
        size / rows,
        size / rows * MEMORY_BYTES / TRACE_BYTES,
        sum(manifest.stall_ns for manifest in found) / rows,
        f"measured: {rows} iterations of {len(found)} captures in {folder}",
    )


def add_estimate(job: dict[str, Any], *, like: Path | None = None, max_size: int | None = None) -> None:
    """Add `estimate` to a job's plan, and a problem where the disk or the limit is too small.

    Args:
        job: as `launch.planned.describe` made it.
        like: folder of an earlier run.
        max_size: bytes that the traces may take.
    """
    if not job.get("enable"):
        return
    cost = TABLE
    if like is not None:
        cost = measured(like) or TABLE
        if cost is TABLE:
            job["warnings"].append(f"--like {like}: no manifest with a trace there; the table is used")
    lengths = [None if end is None else end - start for start, end in job["windows"]]
    if job["max_iterations"] is not None:
        lengths = [min(length or job["max_iterations"], job["max_iterations"]) for length in lengths]
    free = _free(Path(job["save_path"]))
    estimate: dict[str, Any] = {"iteration": asdict(cost), "iterations": None, "disk_free": free}
    job["estimate"] = estimate
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return  # a window without an end grows as long as the response does
    part = next((row["value"] for row in job["fields"] if row["key"].endswith("part_iterations")), max(known))
    longest = min(max(known), part if isinstance(part, int) else max(known))
    total = cost.trace_bytes * sum(known) / len(known) * job["captures"]
    estimate |= {
        "iterations": sum(known),
        "trace_bytes": round(total),
        "memory_bytes": round(cost.memory_bytes * longest),
        "closing_stall_s": round(cost.stall_ns * longest / 1e9, 3),
    }
    if free is not None and total > free:
        job["problems"].append(
            f"traces of about {size_text(round(total))}, and {job['save_path']} has {size_text(free)} free: a shorter"
            " window, max_iterations, or another save_path"
        )
    if max_size is not None and total > max_size:
        job["problems"].append(
            f"traces of about {size_text(round(total))} exceed --max-size {size_text(max_size)}: a shorter window or"
            " max_iterations"
        )


def _free(folder: Path) -> int | None:
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return None if there is None else shutil.disk_usage(there).free
