"""Find out that Hydra has dropped the app's own config, and say what to write instead.

Hydra 1.3 and 1.4 add `_self_` to a defaults list that lacks it, except when the list has only `override` entries. A
group that is appended on the command line then replaces the whole primary config. RLinf's configs have such lists.
"""

from __future__ import annotations

from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from verl_profiler_conf.schema.nodes import find_windows

INSTEAD = "hydra/callbacks=profiler"
"""Selects an option without appending to the app's defaults list."""


def dropped_config(config: DictConfig) -> str | None:
    """One line that says what to write, if Hydra has dropped the primary config of the running launch; else None.

    Args:
        config: the composed config with its `hydra` node.
    """
    name = config.hydra.job.config_name
    window = next(find_windows(config), None)
    if name is None or window is None or not GlobalHydra.instance().is_initialized():
        return None
    loader: Any = GlobalHydra.instance().config_loader()
    loaded = loader.repository.load_config(name)
    entries = loaded.defaults_list or []
    if not isinstance(loaded.config, DictConfig) or not entries or not all(entry.is_override() for entry in entries):
        return None
    lost = [str(key) for key in loaded.config if key != "hydra"]
    if not lost or any(key in config for key in lost):
        return None
    some = ", ".join(lost[:5] + ["..."] * (len(lost) > 5))
    return (
        f"{window.path}={window.option}: Hydra has dropped everything in {name}.yaml ({some}), because its"
        f" defaults list has only overrides and a group was appended to it; write `{INSTEAD} profiler={window.option}`"
        f" instead of `+profiler={window.option}`, or add `- _self_` to that list"
    )
