"""The plugin that verl's `verl.plugins` mechanism imports in every process of a job (verl 0.9.0 or newer).

The engines have plugins of their own. This one adds what only verl knows. `server` gives start_profile the RL step,
which goes into the names of traces. `client` passes on how many tokens a response has already when a request continues
it.
"""

from __future__ import annotations

import logging
import os

from verl_profiler_conf.core.settings import ENV_NAME


def register() -> None:
    """Hook verl's servers and clients as soon as verl imports them.

    May be called again, and never raises. Does nothing unless a window is published in the environment.
    """
    if not os.environ.get(ENV_NAME):
        return
    try:
        from verl_profiler_conf.verl.hooks import client, server

        server.register()
        client.register()
    except Exception as error:
        logging.getLogger(__name__).warning("verl runs without the preset's hooks: %s: %s", type(error).__name__, error)


register()  # verl only imports an entry point; it calls nothing in it
