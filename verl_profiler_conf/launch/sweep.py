"""Sweeps over options: `-m experiment=other,with_profiler`, `-m +profiler=none,torch_window`.

Hydra makes its callbacks once, before it applies sweep values. So the callback of an option that is swept over comes
too late. But Hydra composes each job before it runs it, also in a worker of a launcher. When it does, the callback is
added to those of the sweep.
"""

from __future__ import annotations

import gc
import importlib
import logging
from typing import Any

from verl_profiler_conf.launch.callback import ProfilerCallback

log = logging.getLogger(__name__)

PLACE = "hydra._internal.callbacks"
"""Where Hydra keeps the class that holds a run's callbacks."""


def join_running_sweep() -> None:
    """Add the callback where Hydra has made its callbacks already, and this one is not among them.

    Nothing is done where Hydra keeps its callbacks in another way. Then the resolver `verl_profiler_conf.loaded` stops
    the job with a line that says so.
    """
    try:
        kind: Any = importlib.import_module(PLACE).Callbacks
    except (ImportError, AttributeError):
        return
    for made in _instances(kind):
        held = getattr(made, "callbacks", None)
        if isinstance(held, list) and not any(isinstance(each, ProfilerCallback) for each in held):
            held.append(ProfilerCallback())
            log.debug("an option that is swept over: its callback has joined those of the sweep")


def _instances(kind: type) -> list[Any]:
    """All objects of this type. Hydra passes its callbacks from function to function, and stores them nowhere."""
    return [each for each in gc.get_objects() if type(each) is kind]
