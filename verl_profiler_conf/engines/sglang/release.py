"""What differs between SGLang's releases, and what is fixed for all of them."""

from __future__ import annotations

import sys

from packaging.version import InvalidVersion, Version

from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.engines.hooking import say_once

OLDEST = "0.5.11"
"""The first release that loads plugins, hooks of which run in the scheduler's process."""

CLOSE = "verl_profiler_conf_close"
"""The scheduler's method by which an engine that shuts down has captures finished (`Engine.collective_rpc`)."""

CLOSE_SECONDS = 60.0
"""How long an engine that shuts down may wait for its captures."""


def sglang_version() -> str:
    """Version of the running engine."""
    found = getattr(sys.modules.get("sglang"), "__version__", None)
    return found if isinstance(found, str) else installed_version("sglang") or "unknown"


def is_too_old() -> bool:
    """Whether this SGLang loads no plugins. Said once, with what to do."""
    try:
        if Version(sglang_version()) >= Version(OLDEST):
            return False
    except InvalidVersion:  # a build from a fork: what it has is looked at when it is hooked
        return False
    say_once(
        f"SGLang {sglang_version()} cannot be windowed by tokens (it loads no plugins; {OLDEST} or newer does): "
        "no capture; mapping: iterations uses the engine's own counters"
    )
    return True
