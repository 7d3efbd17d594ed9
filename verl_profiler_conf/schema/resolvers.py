"""OmegaConf resolvers: the window in an engine's own counters, as fields of the config.

Reading such a field validates the whole window first, so `--cfg job --resolve` and `OmegaConf.resolve` refuse what a
job would refuse, in the same words. Nothing here needs a Hydra run: a config that was pickled and sent to another
process resolves there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.schema.nodes import WindowNode
from verl_profiler_conf.schema.versions import OMEGACONF

ITERATIONS = "verl_profiler_conf.iterations"
"""`${verl_profiler_conf.iterations:<engine>,<counter>}`, two levels below a window node."""


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Make a resolver known to OmegaConf. Repeatable: Hydra runs plugins again."""
    # 2.4 gave register_new_resolver this name and warns of the old one, in every app; before 2.4 the name is that of
    # another function
    register: Any = OmegaConf.register_resolver if OMEGACONF >= (2, 4) else OmegaConf.register_new_resolver
    register(name, resolver, replace=True)


def resolve_iterations(engine: str, counter: str, *, _parent_: DictConfig) -> int | None:
    """Value of `counter` for `engine`; null where an engine's counters cannot hold the window.

    Raises:
        ConfigError: the window node is not valid.
    """
    node: Any = _parent_
    for _ in range(2):  # <window node>.iterations.<engine>
        node = node._get_parent()
    option = getattr(OmegaConf.get_type(node), "profiler_option", "torch_window")
    from verl_profiler_conf.counters.plan import counter_values  # here: every Hydra app imports this module

    return counter_values(WindowNode(str(node._get_full_key(None)), option, node).settings(), engine).get(counter)


register_resolver(ITERATIONS, resolve_iterations)
