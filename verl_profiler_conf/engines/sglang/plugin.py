"""SGLang: the plugin that its `sglang.srt.plugins` mechanism loads in every process of an engine (0.5.11 or newer).

- `hooks` says what is hooked in a scheduler, and `worker` what the hook keeps for it;
- `requests` follows its requests, `members` says which are in the batch, `request` reads one of them, and `batch` says
  which tokens an iteration makes;
- `client` is for the process that clients call, and `release` says what differs between releases.
"""

from __future__ import annotations

import logging
import os

from verl_profiler_conf.core.settings import ENV_NAME

log = logging.getLogger(__name__)


def register() -> None:
    """Entry point: hook the scheduler as soon as SGLang imports it. Repeatable, never raises, and does nothing at all
    unless a window has been published in the environment."""
    if not os.environ.get(ENV_NAME):
        return
    try:
        from verl_profiler_conf.engines.sglang import client, hooks, release

        if release.is_too_old():
            return
        hooks.install()
        client.install()
    except Exception as error:
        log.warning("SGLang runs without the window: %s: %s", type(error).__name__, error)
