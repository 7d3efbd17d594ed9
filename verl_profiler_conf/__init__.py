"""Profiler traces that hold exactly the response tokens asked for, on any Hydra launch.

    python train.py +profiler=torch_window profiler.profile_token_start=20 profiler.profile_token_end=80

What stands in `__all__` is the public API; each name is imported when it is first used, so that importing the package
(Hydra does it in every app) costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_profiler_conf.core.errors import ConfigError
    from verl_profiler_conf.core.settings import Settings as Settings
    from verl_profiler_conf.core.window import TokenWindow as TokenWindow
    from verl_profiler_conf.counters.profiler_args import build_sglang_profiler_args as build_sglang_profiler_args
    from verl_profiler_conf.counters.profiler_args import build_vllm_profiler_args as build_vllm_profiler_args
    from verl_profiler_conf.engines.loop import decode_loop as decode_loop
    from verl_profiler_conf.launch.checking import validate as validate
    from verl_profiler_conf.launch.job import Job as Job
    from verl_profiler_conf.launch.job import activate as activate

    __version__: str

_HOME = {
    "ConfigError": "core.errors",
    "Job": "launch.job",
    "Settings": "core.settings",
    "TokenWindow": "core.window",
    "activate": "launch.job",
    "build_sglang_profiler_args": "counters.profiler_args",
    "build_vllm_profiler_args": "counters.profiler_args",
    "decode_loop": "engines.loop",
    "validate": "launch.checking",
}
"""Public name -> the module of this package that defines it."""

__all__ = [
    "ConfigError",
    "Job",
    "Settings",
    "TokenWindow",
    "__version__",
    "activate",
    "build_sglang_profiler_args",
    "build_vllm_profiler_args",
    "decode_loop",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("verl-profiler-conf")
    elif name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
