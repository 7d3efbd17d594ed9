"""OmegaConf resolvers that show the window in an engine's own counters, as fields of the config.

A resolver validates the whole window first. `--cfg job --resolve` and `OmegaConf.resolve` therefore refuse what a job
would refuse, in the same words. The resolvers need no Hydra run: a config that is pickled and sent to another process
resolves there.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.counters.plan import counter_values
from verl_profiler_conf.schema.nodes import WindowNode
from verl_profiler_conf.schema.register import ITERATIONS, register_resolver


def resolve_iterations(engine: str, counter: str, *, _parent_: DictConfig) -> int | None:
    """Value of a counter of an engine; None where the engine's counters cannot express the window.

    Raises:
        ConfigError: a setting of the window node is wrong.
    """
    node: Any = _parent_
    for _ in range(2):  # <window node>.iterations.<engine>
        node = node._get_parent()
    option = getattr(OmegaConf.get_type(node), "profiler_option", "torch_window")
    return counter_values(WindowNode(str(node._get_full_key(None)), option, node).settings(), engine).get(counter)


register_resolver(ITERATIONS, resolve_iterations)
