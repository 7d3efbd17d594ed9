"""The resolver behind each of verl's keys that a preset sets."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.schema.query import in_one_line
from verl_profiler_conf.schema.register import VERL, register_resolver
from verl_profiler_conf.verl.preset.keys import key_table
from verl_profiler_conf.verl.preset.launch_config import TOOLS, find_preset, plain, read_facts

log = logging.getLogger(__name__)


@in_one_line
def resolve_verl(name: str, *, _root_: DictConfig) -> Any:
    """Value of one of verl's keys.

    Code may cut a part out of verl's config and use it alone. The preset cannot be found from there: the key then has
    verl's default, so that nothing is profiled and the job goes on.

    Raises:
        ConfigError: the preset's node is not valid.
    """
    node = find_preset(_root_)
    if node is None:
        _warn_cut_off(name)
        value = key_table("npu", None)[name].default
    else:
        key = key_table(TOOLS[node.option], None)[name]
        facts = read_facts(_root_, node)
        enabled = facts.settings.enable
        value = key.value(facts) if enabled else key.verl_default(lambda path: plain(_root_, path))
    # OmegaConf.resolve, which verl calls in its Ray actors, cannot place a plain list
    return OmegaConf.create(value) if isinstance(value, list) else value


@cache
def _warn_cut_off(name: str) -> None:
    log.warning("part of a config with the verl preset is used without its profiler node: %s is verl's default", name)


register_resolver(VERL, resolve_verl)
