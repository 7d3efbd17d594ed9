"""A verl launch as it would be without the preset: what its own config files say for the keys that the preset sets.

`+profiler=...` is appended after the launch's primary config, so the preset's values take the place of those in it, and
only what is set on the command line can still be seen in the composed config.
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

log = logging.getLogger(__name__)


def own_config(config: DictConfig, prefix: str, presets: Collection[str]) -> DictConfig | None:
    """The running launch, composed once more with `none` in the preset's place; None where no launch runs.

    Args:
        config: as composed, with the `hydra` node.
        prefix: of the preset's node, whose overrides are left out.
        presets: options that are replaced.
    """
    name = OmegaConf.select(config, "hydra.job.config_name", throw_on_missing=False)
    if name is None or not GlobalHydra.instance().is_initialized():
        return None
    given = config.hydra.overrides
    try:
        overrides = _without(presets, prefix, [*given.hydra, *given.task], config.hydra.runtime.choices)
        loader: Any = GlobalHydra.instance().config_loader()
        composed: DictConfig = loader.load_configuration(name, overrides, run_mode=RunMode.RUN)
    except Exception:  # an override of a key that only the preset has; what is on the command line is checked anyway
        log.debug("the launch does not compose without its preset", exc_info=True)
        return None
    return composed


def _without(presets: Collection[str], prefix: str, overrides: list[str], choices: DictConfig) -> list[str]:
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
