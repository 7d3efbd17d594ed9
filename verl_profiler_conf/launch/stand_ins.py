"""Light stand-ins for the schemas and the resolvers. Every Hydra app of the environment loads them.

Hydra imports this module in every app, and again for each run. A stand-in imports the real schema or resolver when it
is used for the first time. An app that does not profile never uses one. Registering twice does no harm.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from verl_profiler_conf.schema.register import ITERATIONS, LOADED, OPTIONS, PARTS, VERL, register_resolver

NAMES = (*OPTIONS, "callback", "callback_where_inherited", "verl_torch_keys", "verl_npu_keys")
"""Entries of the config group `verl_profiler_conf`. `options.make_part` makes the config of each."""


class StandIn(ConfigNode):
    """An entry of ConfigStore whose config is made when Hydra loads it."""

    def __init__(self, name: str) -> None:
        not_made_yet: Any = None
        super().__init__(name=f"{name}.yaml", node=not_made_yet, group=PARTS, package=None, provider=PARTS)

    @property
    def node(self) -> Any:
        made = self.__dict__["node"]  # Hydra copies an entry, and sets the copy's node.
        return _make(self.name.removesuffix(".yaml")) if made is None else made

    @node.setter
    def node(self, node: Any) -> None:
        self.__dict__["node"] = node


def _make(name: str) -> DictConfig:
    try:
        from verl_profiler_conf.launch.options import make_part

        return make_part(name)
    except Exception as error:  # Hydra prints errors of this class in one line, and any other one with its traceback.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigCompositionException(f"the profiler options cannot be used: {reason}") from error


def register() -> None:
    """Register the stand-ins of the schemas, the callback and the resolvers. Can be called again."""
    group = ConfigStore.instance().repo.setdefault(PARTS, {})
    for name in NAMES:
        entry = StandIn(name)
        group[entry.name] = entry
    register_resolver(ITERATIONS, _iterations)
    register_resolver(VERL, _verl)
    register_resolver(LOADED, _loaded)


def _iterations(engine: str, counter: str, *, _parent_: DictConfig) -> Any:
    from verl_profiler_conf.launch import options as _options  # noqa: F401 - makes all schemas known
    from verl_profiler_conf.schema.resolvers import resolve_iterations

    return resolve_iterations(engine, counter, _parent_=_parent_)


def _verl(name: str, *, _root_: DictConfig) -> Any:
    from verl_profiler_conf.launch import options as _options  # noqa: F401 - makes all schemas known
    from verl_profiler_conf.verl.preset.resolver import resolve_verl

    return resolve_verl(name, _root_=_root_)


def _loaded() -> str:
    from verl_profiler_conf.launch.callback import resolve_loaded

    return resolve_loaded()
