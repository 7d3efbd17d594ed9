"""Hooks, a folder per engine: they translate what an engine is about to run for the session, and decide nothing.

`vllm` and `sglang` are loaded by those engines' own plugin mechanisms, in whatever process they run. What runs inside
the job's own process (transformers, hand-written decode loops) is switched on and off here, by the job.
"""

from __future__ import annotations

import sys

from verl_profiler_conf.core.settings import Settings


def install_in_process_hooks(settings: Settings) -> None:
    """Window what runs in this process from here on. Repeatable; imports no engine."""
    from verl_profiler_conf.engines.in_process import put_in_force
    from verl_profiler_conf.engines.sglang import client
    from verl_profiler_conf.engines.transformers import plugin

    put_in_force(settings)
    plugin.install()
    client.install()


def remove_in_process_hooks() -> None:
    """Back to how the process was. What has been wrapped stays wrapped, and passes everything through; engines that
    live on in processes of their own are asked to finish their captures first."""
    from verl_profiler_conf.engines.in_process import put_in_force

    put_in_force(None)
    client = sys.modules.get("verl_profiler_conf.engines.sglang.client")
    if client is not None:
        client.settle_all()
