"""Finds where the values of a window node come from, so that no value is lost in silence.

An option that is merged over values replaces them with its defaults. The composed config does not show whether there
were any. So Hydra's defaults list is read once more: which of its configs have keys at the node's place, and which of
those come before the option?
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.window import START_KEY
from verl_profiler_conf.schema.nodes import COMPUTED, OPTION, WindowNode
from verl_profiler_conf.schema.overrides import written_overrides
from verl_profiler_conf.schema.register import OPTIONS, PARTS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contribution:
    """What one config of the defaults list has at the place of a window node.

    Attributes:
        config: its path in the search path, for example `train` or `profiler/torch_window`.
        keys: its keys at that place.
        value: what it has there where that is no node, for example `simple`; None: a node, or nothing.
        is_option: whether it is the schema of an option.
    """

    config: str
    keys: tuple[str, ...]
    is_option: bool
    value: Any = None


def check_place(config: DictConfig | ListConfig, node: WindowNode) -> None:
    """Refuse a window node that was merged over values that were there before.

    Args:
        config: as composed, with the `hydra` node. Without it, or where no launch runs, only the order of the node's
            keys is known: a merge puts new keys after those that were there.

    Raises:
        ConfigError: one line that names the keys, the config that they come from, and what to write instead.
    """
    contributions = read_contributions(config, node.path)
    if contributions is None:
        _check_order(node)
        return
    selected = [index for index, each in enumerate(contributions) if each.is_option]
    if not selected:
        return
    lost = [each for each in contributions[: selected[-1]] if not each.is_option]
    if not node.path and (others := [key for each in contributions if not each.is_option for key in each.keys]):
        raise ConfigError(
            "profiler@_global_",
            node.option,
            f"puts the option's fields among the app's own keys ({', '.join(others[:5])}); give it a node of its own,"
            f" as in +profiler={node.option} or +profiler@window={node.option}",
        )
    if lost and lost[-1].value is not None:
        raise ConfigError(
            node.path,
            lost[-1].value,
            f"the config {lost[-1].config!r} has this value, and {node.option} has replaced it; put the window"
            f" elsewhere (+profiler@window={node.option} window.{START_KEY}=...), or make it null there",
        )
    if lost:
        is_twice = any(not each.is_option for each in contributions[selected[0] : selected[-1]])
        raise ConfigError(node.path, list(lost[-1].keys), _advice(node, lost[-1], is_twice=is_twice))


def _advice(node: WindowNode, lost: Contribution, *, is_twice: bool) -> str:
    replaced = f"{node.option} has replaced their values with its defaults"
    argument = f"+profiler{'' if node.path == 'profiler' else f'@{node.path}'}={node.option}"
    if COMPUTED in lost.keys:
        return (
            f"the config {lost.config!r} was saved by a job with an option and has these keys, and {replaced};"
            f" a saved config needs no option: leave out {argument}"
        )
    if is_twice:
        return (
            f"the config {lost.config!r} has these keys for the option that its defaults list selects, and selected a"
            f" second time, {replaced}: leave out {argument}"
        )
    return (
        f"the config {lost.config!r} has these keys, and {replaced}; if they are the app's own, put the window"
        f" elsewhere (+profiler@window={node.option} window.{START_KEY}=...); if they are meant for the option, list it"
        f" before _self_ in the defaults list of {lost.config!r}"
    )


def _check_order(node: WindowNode) -> None:
    if OmegaConf.get_type(node.node) is dict:
        return  # It was read from a file as it is, not composed.
    keys = [str(key) for key in node.node]
    before = keys[: keys.index(OPTION)]
    if before:
        raise ConfigError(
            node.path,
            before,
            f"these keys were there before the option, and {node.option} has replaced their values with its defaults;"
            f" if they are the app's own, put the window elsewhere (+profiler@window={node.option}"
            f" window.{START_KEY}=...); if they are meant for the option, list it before _self_",
        )


def read_contributions(config: DictConfig | ListConfig, path: str) -> list[Contribution] | None:
    """The configs of the running launch that have keys at `path`, in the order in which Hydra merges them.

    None where that cannot be found out: no launch runs, or Hydra's loader is not the one that is known here.
    """
    name = OmegaConf.select(config, "hydra.job.config_name", throw_on_missing=False)
    task, of_hydra = (written_overrides(config, kind) for kind in ("task", "hydra"))
    if task is None or of_hydra is None or not GlobalHydra.instance().is_initialized():
        return None
    given = [*of_hydra, *task]
    loader: Any = GlobalHydra.instance().config_loader()
    try:
        _, repository = loader._parse_overrides_and_create_caching_repo(name, given)
    except (AttributeError, TypeError) as error:
        warn_once(
            log,
            f"it was not checked whether an option replaces keys of a config (Hydra {hydra.__version__} is not known: "
            f"{error}); compare --cfg job with and without the option",
        )
        return None
    defaults = loader.compute_defaults_list(name, given, RunMode.RUN).defaults
    found = []
    for default in defaults:
        keys, value = _content_at(path, default, repository)
        if keys or value is not None:
            group, _, name = default.config_path.rpartition("/")
            is_option = group == PARTS and name in OPTIONS
            found.append(Contribution(default.config_path, keys, is_option, value))
    return found


def _content_at(path: str, default: Any, repository: Any) -> tuple[tuple[str, ...], Any]:
    """Keys that one config of the defaults list has at `path`, or the value that it has there."""
    package = default.package or ""
    if package and path != package and not path.startswith(f"{package}.") and not package.startswith(f"{path}."):
        return (), None
    loaded = repository.load_config(default.config_path)
    if loaded is None or not isinstance(loaded.config, DictConfig):
        return (), None
    if package.startswith(f"{path}."):
        return ((package[len(path) + 1 :].partition(".")[0],) if len(loaded.config) else ()), None
    below = path[len(package) :].lstrip(".")
    node = OmegaConf.to_container(loaded.config, resolve=False)
    for key in below.split(".") if below else ():  # as written: no reference is followed
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        return tuple(str(key) for key in node if str(key) != "hydra" or below), None
    return (), None if node == "???" else node
