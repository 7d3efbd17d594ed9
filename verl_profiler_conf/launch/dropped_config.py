"""A launch whose own config Hydra has dropped, and what to write instead.

Hydra, 1.3 and 1.4 alike, adds `_self_` to a defaults list that does not have it, but not where the list holds nothing
but `override` entries. What is appended on the command line then takes the place of the whole primary config: RLinf's
configs have such lists.
"""

from __future__ import annotations

from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from verl_profiler_conf.schema.nodes import find_windows

INSTEAD = "hydra/callbacks=profiler"
"""Selects an option without appending to the app's own defaults list."""


def dropped_config(config: DictConfig) -> str | None:
    """One line where Hydra has dropped the primary config of a launch; None where it has not, or no launch runs.

    Args:
        config: as composed, with the `hydra` node.
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
    held = [str(key) for key in loaded.config if key != "hydra"]
    if not held or any(key in config for key in held):
        return None
    some = ", ".join(held[:5] + ["..."] * (len(held) > 5))
    return (
        f"{window.path}={window.option}: Hydra has dropped all that {name}.yaml holds ({some}), as it does when a group"
        f" is appended to a defaults list with nothing but overrides; write `{INSTEAD} profiler={window.option}`"
        f" instead of `+profiler={window.option}`, or add `- _self_` to that list"
    )
