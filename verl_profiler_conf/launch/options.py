"""Every option of the config group `profiler`, and their registration with Hydra: the one place that knows them all.

Hydra imports this module in every app of the environment, and again for each run: it stays light, and registering
twice does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.launch.callback import LOADED, ProfilerCallback
from verl_profiler_conf.schema.options import NpuWindow, NsysWindow, TorchMemory, TorchWindow, Window
from verl_profiler_conf.verl.preset.launch_config import TOOLS, installed_verl
from verl_profiler_conf.verl.preset.schema import VerlFields, VerlNpuWindow, VerlTorchWindow, verl_keys

PARTS = "verl_profiler_conf"
"""Config group of what the options are put together from: their schemas, and the callback."""


@dataclass
class NoWindow(VerlFields, NpuWindow):
    """Takes the settings of every option, and does nothing with them."""

    profiler_option: ClassVar[str] = "none"

    # The option none stays off.
    enable: Any = False
    # When to wait for the window: job (from the engine's start), request (from the engine's start_profile call on).
    arm: Any = "job"


_KINDS = (TorchWindow, NpuWindow, TorchMemory, NsysWindow, VerlTorchWindow, VerlNpuWindow, NoWindow)

SCHEMAS: dict[str, type[Window]] = {kind.profiler_option: kind for kind in _KINDS}
"""Name in the config group -> schema."""


def register() -> None:
    """Make the schemas, the callback and the resolvers known to Hydra. Repeatable."""
    for name, kind in SCHEMAS.items():
        _store(name, kind)
    callback = {
        "callbacks": {PARTS: ProfilerCallback},
        "job": {"env_set": {"VERL_PROFILER_CONF_CALLBACK": f"${{{LOADED}:}}"}},
    }
    _store("callback", {"hydra": callback})
    for tool in TOOLS.values():
        _store(f"verl_{tool}_keys", verl_keys(tool, installed_verl()))


class _Stored(ConfigNode):
    """What is stored, made into a config when it is asked for. `ConfigStore.store` does so at once: 60 ms for all of
    them, in every Hydra app of the environment."""

    def __init__(self, name: str, content: Any) -> None:
        super().__init__(name=f"{name}.yaml", node=content, group=PARTS, package=None, provider=PARTS)

    @property
    def node(self) -> DictConfig:
        if not isinstance(self._node, DictConfig):
            self._node: Any = OmegaConf.structured(self._node)
        return self._node

    @node.setter
    def node(self, node: Any) -> None:
        self._node = node


def _store(name: str, content: Any) -> None:
    stored = _Stored(name, content)
    ConfigStore.instance().repo.setdefault(PARTS, {})[stored.name] = stored


register()
