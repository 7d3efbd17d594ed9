"""verl: the plugin that its `verl.plugins` mechanism imports in every process of a job (0.9.0 or newer).

verl's engines are hooked by their own plugins; what only verl knows is added here: `verl_server` gives start_profile
the RL step, which goes into the names of traces, and `verl_client` tells the engine how many response tokens a
continuation has behind it.
"""

from __future__ import annotations

import logging
import os

from verl_profiler_conf.core.settings import ENV_NAME


def register() -> None:
    """Hook verl's servers and clients as soon as it imports them. Repeatable, never raises, and does nothing at all
    unless a window has been published in the environment."""
    if not os.environ.get(ENV_NAME):
        return
    try:
        from verl_profiler_conf.verl.hooks import client as verl_client
        from verl_profiler_conf.verl.hooks import server as verl_server

        verl_server.register()
        verl_client.register()
    except Exception as error:
        logging.getLogger(__name__).warning("verl runs without the preset's hooks: %s: %s", type(error).__name__, error)


register()  # verl imports an entry point, and calls nothing
