"""vLLM: `delay_iterations` (D) and `max_iterations` (M), counted by each worker's own `WorkerProfiler`.

The worker calls `step()` before the model runs. `start()` records at once when D is 0; else `step()` counts first and
starts when the count equals D, which is before iteration D - 1. It stops before the model too, when more than M
iterations were counted. So, from 0.12.0 to 0.33.0 alike, iterations `[max(D - 1, 0), max(D - 1, 0) + M)` are recorded;
M = 0 means no limit (vllm/profiler/gpu_profiler.py in 0.12, vllm/profiler/wrapper.py since).
"""

from __future__ import annotations

import sys
from typing import Literal

from packaging.version import Version

from verl_profiler_conf.core.iterations.result import Counters, EngineFit, IterationSpan
from verl_profiler_conf.core.iterations.versions import since

DELAY = "delay_iterations"
MAX = "max_iterations"
OLDEST = "0.10.2"
NEWEST = "0.33.0"
WORKER_KINDS = ("gpu", "cpu", "xpu", "npu", "tpu")

BoundsSupport = Literal["absent", "broken", "whole", "env", "config"]
"""`absent`: the worker has no profiler; `broken`: it fails once one is configured; `whole`: it records everything from
start_profile to stop_profile; `env`: VLLM_PROFILER_DELAY_ITERS and _MAX_ITERS; `config`: fields of ProfilerConfig."""

_BOUNDS_SUPPORT: dict[str, tuple[tuple[str, BoundsSupport], ...]] = {
    "gpu": ((OLDEST, "whole"), ("0.12.0", "env"), ("0.13.0", "config")),
    # 0.12.0: the CPU and XPU workers hold a bare torch profiler, and the inherited annotate_profile asks it for a
    # method that only the wrapper has (cpu_worker.py:51, gpu_worker.py:532)
    "cpu": ((OLDEST, "absent"), ("0.11.1", "whole"), ("0.12.0", "broken"), ("0.13.0", "config")),
    "xpu": ((OLDEST, "whole"), ("0.12.0", "broken"), ("0.13.0", "config")),
    # vllm-ascend numbers its releases after the vLLM that they extend, so either package's version finds the row
    "npu": ((OLDEST, "whole"), ("0.20.2rc1", "config")),
    # records a jax trace; left vLLM after 0.13
    "tpu": ((OLDEST, "whole"),),
}

_OBSTACLES: dict[BoundsSupport, str] = {
    "absent": "the {worker} worker of {package} {version} has no profiler",
    "broken": "the {worker} worker of {package} {version} fails in its first iteration once a profiler is set",
    "whole": "{package} {version} has no step window for the {worker} worker: it records from start to stop",
}


def bounds_support(version: Version, worker: str | None) -> BoundsSupport:
    """How a worker of that version takes its bounds. `worker`: one of `WORKER_KINDS`; None is `gpu`."""
    return since(_BOUNDS_SUPPORT[worker or "gpu"], version)


def counters(span: IterationSpan, version: Version, worker: str | None, forward_count: int | None) -> EngineFit:  # noqa: ARG001 - counts from start_profile
    kind = bounds_support(version, worker)
    if kind == "whole" and span.is_whole:
        return EngineFit({DELAY: None, MAX: None}, "everything from start_profile to stop_profile is recorded")
    if kind in _OBSTACLES:
        obstacle = _OBSTACLES[kind].format(
            worker=worker or "gpu", version=version, package="vllm-ascend" if worker == "npu" else "vLLM"
        )
        return EngineFit({DELAY: None, MAX: None}, obstacle, obstacle=obstacle)
    # 0 rather than 1 where both record from the first iteration: it stays right if the count is ever corrected
    delay = span.first + 1 if span.first else 0
    reason = (
        f"vLLM starts one iteration before the delay has run out, so iteration {span.first} takes a delay of {delay}"
        if delay
        else "without a delay vLLM records from the first iteration on"
    )
    return EngineFit({DELAY: delay, MAX: span.length or 0}, reason)


def iterations(values: Counters, version: Version, worker: str | None, forward_count: int) -> range:  # noqa: ARG001
    """Iterations since start_profile that are recorded; `stop` is `sys.maxsize` when there is no end."""
    kind = bounds_support(version, worker)
    if kind in ("absent", "broken"):
        return range(0)
    if kind == "whole":
        return range(sys.maxsize)
    first = max((values.get(DELAY) or 0) - 1, 0)
    length = values.get(MAX) or 0
    return range(first, first + length if length else sys.maxsize)
