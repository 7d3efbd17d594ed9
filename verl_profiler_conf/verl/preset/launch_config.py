"""A launch of verl, read: which preset its config holds, and the facts that the values of verl's keys depend on."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.counters.plan import counter_values
from verl_profiler_conf.schema.nodes import WindowNode, find_windows
from verl_profiler_conf.verl.preset.keys import (
    ENGINE_KEY,
    ENGINES,
    Facts,
    Key,
    parse_roles,
    parse_steps,
    parse_version,
)

TOOLS = {"verl_torch_window": "torch", "verl_npu_window": "npu"}
"""Preset -> verl's name of the profiler."""


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


def find_preset(root: DictConfig) -> WindowNode | None:
    usual = root._get_node("profiler") if isinstance(root, DictConfig) and "profiler" in root else None
    places = [find_windows(usual, "profiler")] if isinstance(usual, DictConfig) else []  # verl reads its keys often
    return next((node for node in chain(*places, find_windows(root)) if node.option in TOOLS), None)


def read_facts(root: DictConfig, node: WindowNode) -> Facts:
    settings = node.settings()
    fields = {name: node.plain(name) for name in ("steps", "roles")}
    engine = plain(root, ENGINE_KEY)
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
    return dict(counter_values(settings, engine)) if isinstance(engine, str) and engine in ENGINES else {}


def _replica_size(root: DictConfig) -> int:
    size = 1
    for kind in ("tensor", "data", "pipeline"):
        name = "pipeline_model" if kind == "pipeline" else "tensor_model" if kind == "tensor" else kind
        degree = plain(root, f"actor_rollout_ref.rollout.{name}_parallel_size")
        size *= degree if isinstance(degree, int) and degree > 0 else 1
    return size


def _published_save_path() -> str | None:
    """Of the job that runs: it is what makes a relative or missing path absolute, after the config is composed."""
    try:
        return Settings.from_json(os.environ[ENV_NAME]).save_path
    except (KeyError, ConfigError):
        return None


def own_default(root: DictConfig, key: Key) -> Any:
    inherited = plain(root, key.inherits) if key.inherits else None
    return key.default if inherited is None else inherited


def plain(root: DictConfig, path: str) -> Any:
    """Resolved and without OmegaConf's types; None: not there, or `???`."""
    try:
        value = OmegaConf.select(root, path, throw_on_missing=False)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return None
