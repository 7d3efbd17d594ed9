"""OmegaConf resolvers: the window in an engine's own counters, as fields of the config.

Reading such a field validates the whole window first, so `--cfg job --resolve` and `OmegaConf.resolve` refuse what a
job would refuse, in the same words. Nothing here needs a Hydra run: a config that was pickled and sent to another
process resolves there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import omegaconf
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.callback import LOADED, resolve_loaded
from verl_profiler_conf.nodes import WindowNode
from verl_profiler_conf.settings import Settings
from verl_profiler_conf.verl_schema import VERL, resolve_verl

if TYPE_CHECKING:
    from verl_profiler_conf.iterations import CounterPlan
    from verl_profiler_conf.iterations.result import Counters

OMEGACONF = tuple(int(part) for part in omegaconf.__version__.split(".")[:2])

ITERATIONS = "verl_profiler_conf.iterations"
"""`${verl_profiler_conf.iterations:<engine>,<counter>}`, two levels below a window node."""


def register_resolvers() -> None:
    """Repeatable: Hydra runs plugins again."""
    # 2.4 gave register_new_resolver this name and warns of the old one, in every app; before 2.4 the name is that of
    # another function
    register: Any = OmegaConf.register_resolver if OMEGACONF >= (2, 4) else OmegaConf.register_new_resolver
    register(ITERATIONS, resolve_iterations, replace=True)
    register(VERL, resolve_verl, replace=True)
    register(LOADED, resolve_loaded, replace=True)


def resolve_iterations(engine: str, counter: str, *, _parent_: DictConfig) -> int | None:
    """Value of `counter` for `engine`; null where an engine's counters cannot hold the window.

    Raises:
        ConfigError: the window node is not valid.
    """
    node: Any = _parent_
    for _ in range(2):  # <window node>.iterations.<engine>
        node = node._get_parent()
    option = getattr(OmegaConf.get_type(node), "profiler_option", "torch_window")
    return counters(engine, WindowNode(str(node._get_full_key(None)), option, node).settings()).get(counter)


def counters(engine: str, settings: Settings) -> Counters:
    """The window in the counters of `engine`; empty where they cannot hold it, because there are several windows."""
    if len(settings.windows) != 1:
        return {}
    return counter_plan(engine, settings).values


def counter_plan(engine: str, settings: Settings) -> CounterPlan:
    """The first window in the counters of `engine`, with what is known of the engine: its version is the one in the
    settings, where that is about this engine, else the installed one."""
    from verl_profiler_conf.engines.counters import counter_plan as plan_of  # here: every Hydra app imports this module

    return plan_of(settings, engine)
