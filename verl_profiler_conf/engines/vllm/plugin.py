"""vLLM: the plugin that its `vllm.general_plugins` mechanism loads in every process of an engine.

`vllm_hooks` says what is hooked, `vllm_worker` what is kept per worker, `vllm_batch` how a scheduler output becomes
tokens, `vllm_ended` how many a request got in the end, `vllm_tokens` where the results of an iteration are read,
`client` how start_profile and stop_profile get through. They are imported only where a window is in force.
"""

from __future__ import annotations

import logging
import os

from verl_profiler_conf.core.settings import ENV_NAME


def register() -> None:
    """Entry point: hook what runs iterations. Repeatable, never raises, and does nothing at all unless a window has
    been published in the environment."""
    if not os.environ.get(ENV_NAME):
        return
    try:
        from verl_profiler_conf.engines.vllm import hooks as vllm_hooks

        vllm_hooks.install()
    except Exception as error:
        logging.getLogger(__name__).warning("vLLM runs without the window: %s: %s", type(error).__name__, error)
