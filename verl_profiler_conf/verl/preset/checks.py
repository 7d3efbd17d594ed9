"""What is checked before a launch of verl starts: what contradicts a preset is refused, what may surprise is said."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.schema.nodes import NONE, WindowNode
from verl_profiler_conf.verl.preset.keys import (
    ENGINE_KEY,
    ENGINES,
    ENV_KEY,
    GLOBAL_RANKS_SINCE,
    OLDEST,
    TOKENS_SINCE,
    Facts,
    Key,
    contradiction,
    engine_ranks,
    key_table,
    launch_warnings,
    parse_version,
)
from verl_profiler_conf.verl.preset.launch_config import TOOLS, installed_verl, own_default, plain, read_facts
from verl_profiler_conf.verl.preset.own_config import own_config

log = logging.getLogger(__name__)


def check_verl(config: DictConfig, node: WindowNode, settings: Settings) -> Settings:
    """Refuse what contradicts a preset; warn of what may surprise.

    Args:
        node: the preset's, in `config`.
        settings: validated, from that node.

    Returns:
        The settings for engine processes.

    Raises:
        ConfigError: one line that names verl's key and the preset's.
    """
    version = installed_verl()
    _check_resolvable(node)
    facts = read_facts(config, node)
    table = key_table(facts.tool, facts.version).values()
    own = own_config(config, node.prefix, TOOLS)
    for key in table:
        _check_own(key, facts, own, config, node)
    if not settings.enable:
        return settings
    _check_app(config, node, version)
    for key in table:
        error = contradiction(key, facts, plain(config, key.path), node.prefix)
        if error is not None:
            raise error
    if plain(config, ENV_KEY) is not None:
        raise ConfigError(ENV_KEY, plain(config, ENV_KEY), f"is set by the preset from {node.path}: remove it")
    total = plain(config, "trainer.total_training_steps")
    for line in launch_warnings(facts, total if isinstance(total, int) else None, _rollout_gpus(config), node.prefix):
        log.warning("%s", line)
    trainer = _never_starts(config, facts.version)
    if settings.arm == "request" and trainer is not None:
        log.warning(
            "%sarm=request: the trainer of %s never starts the rollout's profiler, so nothing would"
            " be captured; set %sarm=job, which captures the window once, from the start",
            node.prefix,
            trainer,
            node.prefix,
        )
    return replace(settings, ranks=engine_ranks(settings.ranks, facts.replica_size))


def _check_resolvable(node: WindowNode) -> None:
    """verl resolves its config once more, in a Ray actor that has no Hydra."""
    plain: Any = OmegaConf.to_container(node.node, resolve=False)
    for name, value in plain.items():
        for resolver in ("hydra", "now"):
            if isinstance(value, str) and f"${{{resolver}:" in value:
                raise ConfigError(
                    node.prefix + name,
                    value,
                    f"cannot be read in verl's Ray actors, which have no `{resolver}:` resolver: write a plain value"
                    " (a save_path of null is the run's own folder)",
                )


def _check_own(key: Key, facts: Facts, own: DictConfig | None, config: DictConfig, node: WindowNode) -> None:
    """Refuse to replace, without a word, what the launch's own config files say."""
    if own is None or not key.sets:
        return
    found = plain(own, key.path)
    if found == own_default(own, key):
        return
    if facts.settings.enable:
        error = contradiction(key, facts, found, node.prefix)
        if error is not None:
            raise error
        return
    if plain(config, key.path) == found:
        return  # set on the command line, where it counts
    raise ConfigError(
        key.path, found, f"would be verl's default under {node.prefix}enable=false: write +{node.path}={NONE}"
    )


def _rollout_gpus(config: DictConfig) -> int | None:
    """GPUs of all replicas: the trainer's, except in trainers that have resources of their own for the rollout."""
    for owner in ("rollout", "trainer"):
        nodes, each = (plain(config, f"{owner}.{name}") for name in ("nnodes", "n_gpus_per_node"))
        if isinstance(nodes, int) and isinstance(each, int):
            return nodes * each
    return None


def _check_app(config: DictConfig, node: WindowNode, version: str | None) -> None:
    if version is not None and parse_version(version) < OLDEST:
        raise ConfigError(node.path, node.option, f"needs verl {OLDEST} or newer, and {version} is installed")
    engine = OmegaConf.select(config, ENGINE_KEY, throw_on_missing=False, default=None)
    if engine is None and _has_no_rollout(config):
        raise ConfigError(
            node.path,
            node.option,
            f"is for verl's RL trainers: this config has no {ENGINE_KEY}, so that nothing responds",
        )
    if engine is not None and engine not in ENGINES:
        raise ConfigError(
            ENGINE_KEY, engine, f"cannot be windowed by {node.path}={node.option}: {' or '.join(ENGINES)} can"
        )


def _never_starts(config: DictConfig, version: Version) -> str | None:
    """The config's trainer, where it is one that never calls the rollout's start_profile."""
    if plain(config, "rollout.nnodes") is not None:  # resources of its own: a trainer that is no main_ppo
        return "one_step_off_policy" if plain(config, "async_training") is None else None
    if TOKENS_SINCE <= version < GLOBAL_RANKS_SINCE and plain(config, "trainer.use_v1") is True:
        return f"verl {version} with trainer.use_v1=True"
    return None


def _has_no_rollout(config: DictConfig) -> bool:
    rollout = OmegaConf.select(config, ENGINE_KEY.rpartition(".")[0])
    return not isinstance(rollout, DictConfig) or "name" not in rollout.keys()  # noqa: SIM118 - `in` skips `???`
