"""Hooks, a file per engine: they translate what an engine is about to run for the session, and decide nothing.

`vllm` and `sglang` are loaded by those engines' own plugin mechanisms, in whatever process they run. What runs inside
the job's own process (transformers, hand-written decode loops) is switched on and off here, by the job.
"""

from __future__ import annotations

import os
import sys

from verl_profiler_conf.settings import ENV_NAME, Settings

_in_process: Settings | None = None


def install_in_process_hooks(settings: Settings) -> None:
    """Window what runs in this process from here on. Repeatable; imports no engine."""
    global _in_process
    _in_process = settings
    from verl_profiler_conf.engines import sglang, transformers

    transformers.install()
    sglang.watch()


def remove_in_process_hooks() -> None:
    """Back to how the process was. What has been wrapped stays wrapped, and passes everything through; engines that
    live on in processes of their own are asked to finish their captures first."""
    global _in_process
    _in_process = None
    client = sys.modules.get("verl_profiler_conf.engines.sglang_client")
    if client is not None:
        client.settle_all()


def current_settings() -> Settings | None:
    """The settings in force in this process: the job's own, else those that a parent process published."""
    if _in_process is not None:
        return _in_process
    published = os.environ.get(ENV_NAME)
    return Settings.from_json(published) if published else None
