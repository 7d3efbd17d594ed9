"""What the captures would take: bytes of traces, memory until a trace is saved, and how long the rollout waits."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.sizes import size_text

LAYERS = 32
"""Of the model, where nobody says how many: those of an 8-billion-parameter Llama."""

OPERATORS = {"vllm": (121, 210), "transformers": (193, 173)}
"""Engine -> operators of a decode iteration for each layer, and beside the layers. Measured with Llamas of 2, 12 and 28
layers on a CPU, without a compiler: vLLM 0.32.0, transformers 5.24.0. Whichever is larger stands for the others."""

EVENT_BYTES = 23
"""Of a compressed trace for each operator: 22 to 23 in the same runs. NVIDIA's kernels and launches take as much: 26 an
event in public traces of real GPUs."""

MORE_BYTES = {"shapes": 21, "memory": 11, "stack": 33}
"""What each of `contents` adds to it, in the same runs."""

DEVICE_EVENTS = 1.1
"""Launches and kernels for each operator on an accelerator: 0.9 to 1.4 in those public traces. A CUDA graph has fewer
operators, and as many kernels."""

MEMORY_BYTES = 1350
"""Of host memory for each event until the trace is saved: a process with windows of 60 and of 190 iterations differed
by that."""

STALL_NS = 5000
"""For each event when a capture is closed: 2 to 8 microseconds in the same runs, on a busy machine."""


@dataclass(frozen=True)
class Cost:
    """Of one iteration. `source` says where the numbers come from."""

    trace_bytes: float
    memory_bytes: float
    stall_ns: float
    source: str


def assumed(job: dict[str, Any], layers: int | None) -> Cost:
    """The cost of an iteration where no earlier run tells: operators of a model times what one of them costs."""
    running = {each["engine"] for each in job.get("engines", ()) if each["how"] == "hook"}
    named = job.get("rollout") or job.get("engine")
    engines = [each for each in OPERATORS if each == named or (named in (None, "auto") and each in running)]
    count = layers or LAYERS
    counts = {each: OPERATORS[each][0] * count + OPERATORS[each][1] for each in engines or OPERATORS}
    engine = max(counts, key=lambda each: counts[each])
    on_device = job.get("device") != "cpu"
    events = counts[engine] * (1 + DEVICE_EVENTS * on_device)
    contents = [str(each) for each in job.get("contents", ())]
    size = EVENT_BYTES + sum(MORE_BYTES.get(each, 0) for each in contents)
    notes = [f"{counts[engine]} operators an iteration, as of {engine} on a CPU with {count} layers"]
    if layers is None:
        notes.append("a guess: --layers says how many")
    if on_device:
        notes.append(f"with {events - counts[engine]:.0f} launches and kernels, assumed from traces of others")
    notes.append(f"{size} bytes each; --like DIR reads an earlier run instead")
    return Cost(events * size, events * MEMORY_BYTES, events * STALL_NS, "table: " + "; ".join(notes))


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
        size / rows * MEMORY_BYTES / EVENT_BYTES,
        sum(manifest.stall_ns for manifest in found) / rows,
        f"measured: {rows} iterations of {len(found)} captures in {folder}",
    )


def add_estimate(
    job: dict[str, Any], *, like: Path | None = None, max_size: int | None = None, layers: int | None = None
) -> None:
    """Add `estimate` to a job's plan, and a problem where the disk or the limit is too small.

    Args:
        job: as `launch.planned.describe` made it.
        like: folder of an earlier run.
        max_size: bytes that the traces may take.
        layers: of the model.
    """
    if not job.get("enable"):
        return
    cost = assumed(job, layers)
    if like is not None:
        earlier = measured(like)
        if earlier is None:
            job["warnings"].append(f"--like {like}: no manifest with a trace there; the table is used")
        cost = earlier or cost
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
