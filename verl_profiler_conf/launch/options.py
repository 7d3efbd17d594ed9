"""All options of the config group `profiler`, and their registration with Hydra.

Hydra imports this module in every app of the environment, and again for each run. It must be cheap, and registering
twice must do no harm.
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
"""Config group of the parts of the options: their schemas, verl's keys, and the callback."""


@dataclass
class NoWindow(VerlFields, NpuWindow):
    """Accepts the fields of every option and profiles nothing."""

    profiler_option: ClassVar[str] = "none"

    # Always false: this option profiles nothing.
    enable: Any = False
    # When the window is armed: job (when the engine starts), request (by the engine's start_profile call).
    arm: Any = "job"


_KINDS = (TorchWindow, NpuWindow, TorchMemory, NsysWindow, VerlTorchWindow, VerlNpuWindow, NoWindow)

SCHEMAS: dict[str, type[Window]] = {kind.profiler_option: kind for kind in _KINDS}
"""Name in the config group -> schema."""


def register() -> None:
    """Register the schemas, the callback and the resolvers. Can be called again."""
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
    """An entry that becomes a config when it is loaded. `ConfigStore.store` would make all of them at once, which costs
    60 ms in every Hydra app of the environment."""

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
