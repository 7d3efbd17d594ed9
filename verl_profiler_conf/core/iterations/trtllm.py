"""TensorRT-LLM: `TLLM_PROFILE_START_STOP=A-B`, iterations of the executor's loop since it started, warm-up apart.

One environment variable per process, read once: there is no start call to count from. Up to 1.3.0rc14 a local counter
is compared, the end before and the start after it advances, so that `[A, B]` is recorded; since then `iter_counter`
(forwards that really ran) is compared for both, and `[A, B)` is (_torch/pyexecutor/py_executor.py, `_profiler`). This
was read, not run.
"""

from __future__ import annotations

import sys

from packaging.version import Version

from verl_profiler_conf.core.iterations.result import Counters, EngineFit, IterationSpan
from verl_profiler_conf.core.iterations.versions import since
from verl_profiler_conf.core.window import MAX_TOKEN

START = "start"
STOP = "stop"
OLDEST = "0.17.0"
NEWEST = "1.4.0"
WORKER_KINDS = ("gpu",)

# the release that first has the change was not found: it was proposed two days before 1.3.0rc14 came out
_INCLUDES_STOP: tuple[tuple[str, bool], ...] = ((OLDEST, True), ("1.3.0rc15", False))


def counters(span: IterationSpan, version: Version, worker: str | None, forward_count: int | None) -> EngineFit:  # noqa: ARG001
    inclusive = since(_INCLUDES_STOP, version)
    before = forward_count or 0
    stop = MAX_TOKEN if span.stop is None else before + span.stop - inclusive
    return EngineFit(
        {START: before + span.first, STOP: stop},
        f"iterations count from the start of the executor, and TensorRT-LLM {version} "
        + ("records the last one named too" if inclusive else "stops before the last one named"),
        ("no iteration has run before the request (forward_count unknown)",) if forward_count is None else (),
    )


def iterations(values: Counters, version: Version, worker: str | None, forward_count: int) -> range:  # noqa: ARG001
    """Iterations after the first `forward_count` that are recorded; `stop` is `sys.maxsize` when there is no end."""
    start, stop = values.get(START), values.get(STOP)
    if start is None or stop is None:
        return range(0)
    first = max(start - forward_count, 0)
    if stop == MAX_TOKEN:
        return range(first, sys.maxsize)
    return range(first, max(stop - forward_count + since(_INCLUDES_STOP, version), first))


def start_stop_text(values: Counters) -> str:
    """The text of `TLLM_PROFILE_START_STOP`. A torch trace is only written if `TLLM_TORCH_PROFILE_TRACE` is set too."""
    return f"{values[START]}-{values[STOP]}"
