"""A launch of verl, read out of its composed config: which preset it holds, and the values that the checks look at."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, FOLDER, Settings
from verl_profiler_conf.counters.plan import counter_values
from verl_profiler_conf.schema.nodes import WindowNode, as_written, find_windows
from verl_profiler_conf.verl.preset.facts import (
    ENGINE_KEY,
    ENGINES,
    LOOKED_AT,
    ROLLOUT_KEY,
    Facts,
    VerlLaunch,
    parse_roles,
    parse_steps,
    parse_version,
)
from verl_profiler_conf.verl.preset.keys import key_table
from verl_profiler_conf.verl.preset.own_config import compose_without_preset
from verl_profiler_conf.verl.ray_env import job_config_is_read

log = logging.getLogger(__name__)

TOOLS = {"verl_torch_window": "torch", "verl_npu_window": "npu"}
"""Preset -> verl's name of the profiler."""

HINTS = {"torch_window": "verl_torch_window", "npu_window": "verl_npu_window"}
"""Generic option -> the preset that verl's users want."""

DEGREES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
"""Keys of the rollout whose product is the number of GPUs of a replica."""


@cache
def installed_verl() -> str | None:
    """The version of verl, read from a file of its package; None: verl is not installed. Importing it takes seconds."""
    try:
        spec = find_spec("verl")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations if spec else None) or ():
        file = Path(location, "version", "version")
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    return None


def find_preset(root: DictConfig) -> WindowNode | None:
    """The node of the config's preset; None where it has none."""
    usual = as_written(root, "profiler") if isinstance(root, DictConfig) and "profiler" in root else None
    places = [find_windows(usual, "profiler")] if isinstance(usual, DictConfig) else []  # verl reads its keys often
    return next((node for node in chain(*places, find_windows(root)) if node.option in TOOLS), None)


def read_launch(config: DictConfig, node: WindowNode) -> VerlLaunch:
    """Everything that is checked of a launch.

    Args:
        config: as composed.
        node: the preset's, in `config`.

    Raises:
        ConfigError: one of the preset's fields cannot be used; one line.
    """
    facts = read_facts(config, node)
    table = key_table(facts.tool, facts.version).values()
    paths = [key.path for key in table]
    inherited = [key.inherits for key in table if key.inherits]
    own = compose_without_preset(config, node.prefix, TOOLS)
    written: Any = OmegaConf.to_container(node.node, resolve=False)
    return VerlLaunch(
        option=node.option,
        path=node.path,
        written=written,
        facts=facts,
        installed=installed_verl(),
        ray_reads_window=job_config_is_read(),
        values={path: plain(config, path) for path in (*LOOKED_AT, *paths)},
        own_values=None if own is None else {path: plain(own, path) for path in (*paths, *inherited)},
    )


def read_facts(root: DictConfig, node: WindowNode) -> Facts:
    """What verl's keys are made from.

    Raises:
        ConfigError: one of the preset's fields cannot be used; one line.
    """
    settings = node.settings()
    steps, roles = (node.plain(name) for name in ("steps", "roles"))
    engine = plain(root, ENGINE_KEY)
    return Facts(
        settings=settings,
        tool=TOOLS[node.option],
        version=parse_version(installed_verl()),
        steps=parse_steps(steps, f"{node.prefix}steps"),
        roles=parse_roles(roles, f"{node.prefix}roles"),
        save_path=_published_save_path() or settings.save_path or _run_folder(),
        replica_size=_replica_size(root),
        counters=dict(counter_values(settings, engine)) if engine in ENGINES else {},
    )


def plain(root: DictConfig, path: str) -> Any:
    """One value, resolved and without OmegaConf's types; None: not there, or `???`."""
    try:
        value = OmegaConf.select(root, path, throw_on_missing=False)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return None


def _replica_size(root: DictConfig) -> int:
    size = 1
    for key in DEGREES:
        degree = plain(root, f"{ROLLOUT_KEY}.{key}")
        size *= degree if isinstance(degree, int) and degree > 0 else 1
    return size


def _published_save_path() -> str | None:
    """The absolute folder of the job that runs. The job makes it after the config is composed, from a relative or
    missing path."""
    try:
        return Settings.from_json(os.environ[ENV_NAME]).save_path
    except (KeyError, ConfigError):
        return None


def _run_folder() -> str | None:
    """Where captures go below Hydra's run directory; None where no run of Hydra's is under way, as in an actor."""
    if not HydraConfig.initialized():
        return None
    for key in ("hydra.runtime.output_dir", "hydra.run.dir"):  # the former when the job starts, the latter for `--cfg`
        folder = plain(HydraConfig.instance().cfg, key)  # type: ignore[arg-type]
        if folder:
            return str(Path(str(folder), FOLDER))
    return None


def check_trainer(config: DictConfig, node: WindowNode) -> None:
    """Refuse a preset in an app without a rollout. This is the first check. In an app with a rollout, warn of a generic
    option, and name the preset.

    Raises:
        ConfigError: nothing in this app makes responses.
    """
    rollout = OmegaConf.select(config, ROLLOUT_KEY)
    has_rollout = isinstance(rollout, DictConfig) and "name" in rollout.keys()  # noqa: SIM118 - `in` skips `???`
    if node.option in TOOLS and not has_rollout:
        raise ConfigError(
            node.path,
            node.option,
            f"is for verl's RL trainers: this config has no {ENGINE_KEY}, so that nothing responds in it",
        )
    if node.option in HINTS and has_rollout and "global_profiler" in config and node.plain("enable") is True:
        log.warning(
            "%s=%s captures the first responses of this trainer, which may be those of a validation;"
            " +profiler=%s captures in chosen RL steps, and names them",
            node.path,
            node.option,
            HINTS[node.option],
        )
