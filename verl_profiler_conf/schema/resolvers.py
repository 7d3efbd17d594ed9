"""OmegaConf resolvers that show the window in an engine's own counters, as fields of the config.

A resolver validates the whole window first. `--cfg job --resolve` and `OmegaConf.resolve` therefore refuse what a job
would refuse, in the same words. The resolvers need no Hydra run: a config that is pickled and sent to another process
resolves there.
"""

from __future__ import annotations

import logging
from typing import Any

import omegaconf
from omegaconf import DictConfig

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.counters.plan import counter_values
from verl_profiler_conf.schema.nodes import window_at
from verl_profiler_conf.schema.query import in_one_line
from verl_profiler_conf.schema.register import ITERATIONS, register_resolver

log = logging.getLogger(__name__)


@in_one_line
def resolve_iterations(engine: str, counter: str, *, _parent_: DictConfig) -> int | None:
    """Value of a counter of an engine; None where the engine's counters cannot express the window.

    Raises:
        ConfigError: a setting of the window node is wrong, or the counter is not below a window node.
    """
    try:
        place = str(_parent_._get_full_key(None))
        node: Any = _parent_
        for _ in range(2):  # <window node>.iterations.<engine>
            node = None if node is None else node._get_parent()
        path = "" if node is None else str(node._get_full_key(None))
    except (AttributeError, TypeError) as error:
        unknown = f"OmegaConf {omegaconf.__version__} is not known: {error}"
        warn_once(log, f"the config does not show the window in the engines' own counters ({unknown})")
        return None
    window = None if node is None else window_at(node, path)
    if window is None:
        raise ConfigError(
            f"{place}.{counter}",
            f"${{{ITERATIONS}:{engine},{counter}}}",
            "is computed from a profiler node, and is outside of one here",
        )
    return counter_values(window.settings(), engine).get(counter)


register_resolver(ITERATIONS, resolve_iterations)
