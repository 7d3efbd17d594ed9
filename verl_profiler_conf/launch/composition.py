"""Finds what Hydra's composition has lost, the app's own config or the option, and says what to write instead.

Hydra 1.3 and 1.4 add `_self_` to a defaults list that lacks it, except when the list has only `override` entries. A
group that is appended on the command line then replaces the whole primary config. RLinf's configs have such lists.
"""

from __future__ import annotations

from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.schema.nodes import find_windows
from verl_profiler_conf.schema.register import OPTIONS

INSTEAD = "hydra/callbacks=profiler"
"""Selects an option without appending to the app's defaults list."""


def composition_loss(config: DictConfig) -> str | None:
    """One line that says what is lost and what to write, if something is lost; else None.

    Args:
        config: the composed config with its `hydra` node, of a launch that has selected an option.
    """
    return _lost_option(config) or _dropped_config(config)


def _lost_option(config: DictConfig) -> str | None:
    """An option that is selected without appending comes before the app's config. A null there replaces it."""
    if next(find_windows(config), None) is not None:
        return None
    for group, choice in config.hydra.runtime.choices.items():
        name, _, path = str(group).partition("@")
        if name == "profiler" and choice in OPTIONS:
            path = path.removeprefix("_global_.") or "profiler"
            value = OmegaConf.select(config, path, throw_on_missing=False, throw_on_resolution_failure=False)
            at = "" if path == "profiler" else f"@{path}"
            return (
                f"{path}={value!r}: an option is selected, and the app's own config has set its node to this value;"
                f" the app has a place for the option: write +profiler{at}={choice}"
            )
    return None


def _dropped_config(config: DictConfig) -> str | None:
    name = config.hydra.job.config_name
    window = next(find_windows(config), None)
    if name is None or window is None or not GlobalHydra.instance().is_initialized():
        return None
    loader: Any = GlobalHydra.instance().config_loader()
    loaded = loader.repository.load_config(name)
    if loaded is None or not isinstance(loaded.config, DictConfig):
        return None
    entries = loaded.defaults_list or []
    if not entries or not all(entry.is_override() for entry in entries):
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
