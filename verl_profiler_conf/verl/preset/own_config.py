"""A verl launch as it would be without the preset: the values that its own config files give to the preset's keys.

`+profiler=...` is appended after the launch's primary config, so the preset's values replace those in it. Only what is
set on the command line can still be seen in the composed config. Hydra keeps neither the files that it has read nor the
values that a merge has replaced. So the launch is composed once more.

Hydra itself composes a launch twice, once to learn whether it is a sweep and once to run it. This third time costs as
much as each of those: 0.29 s of the 1.2 s of processor time until a verl job begins, without verl's imports.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.schema.nodes import NONE
from verl_profiler_conf.schema.overrides import written_overrides

log = logging.getLogger(__name__)


def compose_without_preset(config: DictConfig, prefix: str, presets: Collection[str]) -> DictConfig | None:
    """The running launch, composed once more with `none` in the preset's place.

    Args:
        config: as composed, with the `hydra` node.
        prefix: of the preset's node, whose overrides are left out.
        presets: options that are replaced.

    Returns:
        None where no launch of Hydra's runs, or where the launch does not compose without the preset. The latter is
        logged.
    """
    name = OmegaConf.select(config, "hydra.job.config_name", throw_on_missing=False)
    if name is None or not GlobalHydra.instance().is_initialized():
        return None
    given = [*(written_overrides(config, "hydra") or ()), *(written_overrides(config, "task") or ())]
    try:
        overrides = _without_preset(presets, prefix, given, config.hydra.runtime.choices)
        loader: Any = GlobalHydra.instance().config_loader()
        composed: DictConfig = loader.load_configuration(name, overrides, run_mode=RunMode.RUN)
    except Exception as error:  # whatever Hydra raises: this is a check, and the launch itself has composed
        log.warning(
            "%s.yaml does not compose without the preset (%s: %s): of the keys that the preset sets, values in config"
            " files of your own are replaced unchecked; the command line is checked",
            name,
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )
        log.debug("where it comes from", exc_info=True)
        return None
    return composed


def _without_preset(presets: Collection[str], prefix: str, overrides: list[str], choices: DictConfig) -> list[str]:
    """The launch's overrides with `none` in the preset's place, and without those of the preset's own fields."""
    kept: list[str] = []
    replaced = False
    for line, override in zip(overrides, OverridesParser.create().parse_overrides(overrides), strict=True):
        value = override.value()
        if isinstance(value, str) and value in presets:
            kept.append(line.partition("=")[0] + f"={NONE}")
            replaced = True
        elif not line.startswith(prefix):
            kept.append(line)
    if not replaced:  # the preset stands in a defaults list
        kept += [f"{group!s}={NONE}" for group, choice in choices.items() if choice in presets]
    return kept
