"""All options of the config group `profiler`: their schemas, and the configs that they are composed of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.launch.callback import ProfilerCallback
from verl_profiler_conf.launch.sweep import join_running_sweep
from verl_profiler_conf.schema.options import NpuWindow, NsysWindow, TorchMemory, TorchWindow, Window
from verl_profiler_conf.schema.register import LOADED, PARTS
from verl_profiler_conf.verl.preset.launch_config import TOOLS, installed_verl
from verl_profiler_conf.verl.preset.schema import VerlFields, VerlNpuWindow, VerlTorchWindow, verl_keys


@dataclass
class NoWindow(VerlFields, NpuWindow):
    """Accepts the fields of every option and profiles nothing."""

    profiler_option: ClassVar[str] = "none"

    option: str = "none"
    # Always false: this option profiles nothing.
    enable: bool = False
    # When the window is armed: job (when the engine starts), request (by the engine's start_profile call).
    arm: str = "job"


_KINDS = (TorchWindow, NpuWindow, TorchMemory, NsysWindow, VerlTorchWindow, VerlNpuWindow, NoWindow)

SCHEMAS: dict[str, type[Window]] = {kind.profiler_option: kind for kind in _KINDS}
"""Name in the config group -> schema."""


def make_part(name: str) -> DictConfig:
    """The config of one entry of the group `verl_profiler_conf`; `stand_ins.NAMES` lists the entries."""
    content: Any = SCHEMAS.get(name, {})
    if name == "callback" or (name == "callback_where_inherited" and ENV_NAME in os.environ):
        callback = {
            "callbacks": {PARTS: ProfilerCallback},
            "job": {"env_set": {"VERL_PROFILER_CONF_CALLBACK": f"${{{LOADED}:}}"}},
        }
        content = {"hydra": callback}
        join_running_sweep()
    for tool in TOOLS.values():
        if name == f"verl_{tool}_keys":
            content = verl_keys(tool, installed_verl())
    config: DictConfig = OmegaConf.structured(content)
    return config
