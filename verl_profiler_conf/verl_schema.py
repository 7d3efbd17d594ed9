"""The verl presets' own fields, verl's keys as a config, and a config as the `Facts` of `verl.py`.

A preset is a generic option (its node, which can be anywhere) plus verl's keys, which stand where verl has them. Each
of those holds `${verl_profiler_conf.verl:<name>}`: it looks the preset's node up by its type when it is read, so that
what is set on a command line later counts, also in the Ray actors that verl pickles its config to.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.version import Version

from verl_profiler_conf.nodes import NONE, WindowNode, find_windows
from verl_profiler_conf.settings import ENV_NAME, Settings
from verl_profiler_conf.verl import (
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
    keys,
    parse_roles,
    parse_steps,
    parse_version,
    warnings,
)
from verl_profiler_conf.verl_own import own_config
from verl_profiler_conf.window import ConfigError

log = logging.getLogger(__name__)

VERL = "verl_profiler_conf.verl"
"""`${verl_profiler_conf.verl:<name>}`: the value of one of verl's keys."""

TOOLS = {"verl_torch_window": "torch", "verl_npu_window": "npu"}
"""Preset -> verl's name of the profiler."""


@dataclass
class VerlFields:
    """What a preset has besides the fields of its generic option."""

    generic_option: ClassVar[str]
    preset_fields: ClassVar[tuple[str, ...]] = ("steps", "roles")

    # When to wait for the window: request (each RL step that verl profiles captures it), job (once, from the start).
    arm: Any = "request"
    # RL steps to profile; verl's first is 1. The second is warm.
    steps: Any = field(default_factory=lambda: [2])
    # What to profile: rollout, and with verl's own profiler, whole stages, actor, ref, critic.
    roles: Any = field(default_factory=lambda: ["rollout"])


def verl_keys(tool: str, version: str | None) -> dict[str, Any]:
    """verl's keys as a nested config, for a version of verl (None: the newest known)."""
    config: dict[str, Any] = {}
    for name, key in keys(tool, parse_version(version)).items():
        if not key.sets:
            continue
        *above, last = key.path.split(".")
        node = config
        for part in above:
            node = node.setdefault(part, {})
        node[last] = f"${{{VERL}:{name}}}"
    return config


@cache
def installed_verl() -> str | None:
    """verl's version as its package says it; None: not there. Nothing is imported: that takes seconds."""
    try:
        spec = find_spec("verl")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations if spec else None) or ():
        file = Path(location, "version", "version")
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    return None


def resolve_verl(name: str, *, _root_: DictConfig) -> Any:
    """Value of one of verl's keys.

    Away from its config the preset cannot be found. verl's own inherited keys become its defaults there, and so do
    these: nothing is profiled, and the job goes on.

    Raises:
        ConfigError: the preset's node is not valid.
    """
    node = _find_preset(_root_)
    if node is None:
        _warn_cut_off(name)
        value = keys("npu", None)[name].default
    else:
        key = keys(TOOLS[node.option], None)[name]
        facts = _facts(_root_, node)
        value = key.value(facts) if facts.settings.enable else _own_default(_root_, key)
    # OmegaConf.resolve, which verl calls in its Ray actors, cannot place a plain list
    return OmegaConf.create(value) if isinstance(value, list) else value


def _find_preset(root: DictConfig) -> WindowNode | None:
    usual = root._get_node("profiler") if isinstance(root, DictConfig) and "profiler" in root else None
    places = [find_windows(usual, "profiler")] if isinstance(usual, DictConfig) else []  # verl reads its keys often
    return next((node for node in chain(*places, find_windows(root)) if node.option in TOOLS), None)


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
    facts = _facts(config, node)
    table = keys(facts.tool, facts.version).values()
    own = own_config(config, node.prefix, TOOLS)
    for key in table:
        _check_own(key, facts, own, config, node)
    if not settings.enable:
        return settings
    _check_app(config, node, version)
    for key in table:
        error = contradiction(key, facts, _plain(config, key.path), node.prefix)
        if error is not None:
            raise error
    if _plain(config, ENV_KEY) is not None:
        raise ConfigError(ENV_KEY, _plain(config, ENV_KEY), f"is set by the preset from {node.path}: remove it")
    total = _plain(config, "trainer.total_training_steps")
    for line in warnings(facts, total if isinstance(total, int) else None, _rollout_gpus(config), node.prefix):
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
    found = _plain(own, key.path)
    if found == _own_default(own, key):
        return
    if facts.settings.enable:
        error = contradiction(key, facts, found, node.prefix)
        if error is not None:
            raise error
        return
    if _plain(config, key.path) == found:
        return  # set on the command line, where it counts
    raise ConfigError(
        key.path, found, f"would be verl's default under {node.prefix}enable=false: write +{node.path}={NONE}"
    )


def _rollout_gpus(config: DictConfig) -> int | None:
    """GPUs of all replicas: the trainer's, except in trainers that have resources of their own for the rollout."""
    for owner in ("rollout", "trainer"):
        nodes, each = (_plain(config, f"{owner}.{name}") for name in ("nnodes", "n_gpus_per_node"))
        if isinstance(nodes, int) and isinstance(each, int):
            return nodes * each
    return None


@cache
def _warn_cut_off(name: str) -> None:
    log.warning("part of a config with the verl preset is used without its profiler node: %s is verl's default", name)


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
    if _plain(config, "rollout.nnodes") is not None:  # resources of its own: a trainer that is no main_ppo
        return "one_step_off_policy" if _plain(config, "async_training") is None else None
    if TOKENS_SINCE <= version < GLOBAL_RANKS_SINCE and _plain(config, "trainer.use_v1") is True:
        return f"verl {version} with trainer.use_v1=True"
    return None


def _has_no_rollout(config: DictConfig) -> bool:
    rollout = OmegaConf.select(config, ENGINE_KEY.rpartition(".")[0])
    return not isinstance(rollout, DictConfig) or "name" not in rollout.keys()  # noqa: SIM118 - `in` skips `???`


def _facts(root: DictConfig, node: WindowNode) -> Facts:
    settings = node.settings()
    fields = {name: node.plain(name) for name in ("steps", "roles")}
    engine = _plain(root, ENGINE_KEY)
    return Facts(
        settings=settings,
        tool=TOOLS[node.option],
        version=parse_version(installed_verl()),
        steps=parse_steps(fields["steps"], f"{node.prefix}steps"),
        roles=parse_roles(fields["roles"], f"{node.prefix}roles"),
        save_path=_published_save_path() or settings.save_path,
        replica_size=_replica_size(root),
        counters=_counters(engine, settings),
    )


def _counters(engine: object, settings: Settings) -> dict[str, int | None]:
    from verl_profiler_conf.resolvers import counters  # which imports this module

    return dict(counters(engine, settings)) if isinstance(engine, str) and engine in ENGINES else {}


def _replica_size(root: DictConfig) -> int:
    size = 1
    for kind in ("tensor", "data", "pipeline"):
        name = "pipeline_model" if kind == "pipeline" else "tensor_model" if kind == "tensor" else kind
        degree = _plain(root, f"actor_rollout_ref.rollout.{name}_parallel_size")
        size *= degree if isinstance(degree, int) and degree > 0 else 1
    return size


def _published_save_path() -> str | None:
    """Of the job that runs: it is what makes a relative or missing path absolute, after the config is composed."""
    try:
        return Settings.from_json(os.environ[ENV_NAME]).save_path
    except (KeyError, ConfigError):
        return None


def _own_default(root: DictConfig, key: Key) -> Any:
    inherited = _plain(root, key.inherits) if key.inherits else None
    return key.default if inherited is None else inherited


def _plain(root: DictConfig, path: str) -> Any:
    """Resolved and without OmegaConf's types; None: not there, or `???`."""
    try:
        value = OmegaConf.select(root, path, throw_on_missing=False)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return None
