"""vLLM: the plugin that its `vllm.general_plugins` mechanism loads in every process of an engine.

- `hooks` says what is hooked, and `worker` what the hook keeps for each worker;
- `requests` follows the requests of a worker, `request` reads one of them, and `batch` says which tokens an iteration
  makes;
- `results` reads what an iteration really made, and `finished` how many tokens a request got in the end;
- `client` lets start_profile and stop_profile through, and `shutdown` gives an engine that ends the time to write;
- `release` says what differs between releases.

They are imported only where a window has been published.
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
        from verl_profiler_conf.engines.vllm import hooks

        hooks.install()
    except Exception as error:
        logging.getLogger(__name__).warning("vLLM runs without the window: %s: %s", type(error).__name__, error)
