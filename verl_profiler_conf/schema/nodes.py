"""Window nodes in a config: find them by their type, wherever they are, and read them into plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import START_KEY, WINDOWS_KEY

COMPUTED = "iterations"
"""Sub-node that is computed from the other fields. It is not a setting."""

NONE = "none"


@dataclass(frozen=True)
class WindowNode:
    """One `profiler` node of a config.

    Attributes:
        path: of the node in its config, for example `train.prof`; empty when the config is the node itself.
        option: name in the config group.
        node: the node, still part of its config.
    """

    path: str
    option: str
    node: DictConfig

    @property
    def prefix(self) -> str:
        """The path with a dot at its end, to put before a key in a message."""
        return f"{self.path}." if self.path else ""

    def settings(self) -> Settings:
        """Resolve and validate the node.

        Raises:
            ConfigError: one line with the full key, the value and what is allowed.
        """
        raw = dict(_plain(self.node, self.prefix))
        if WINDOWS_KEY in raw:
            raw[WINDOWS_KEY] = _integers(raw[WINDOWS_KEY])
        kind = OmegaConf.get_type(self.node)
        option = "torch_window" if self.option == NONE else getattr(kind, "generic_option", self.option)
        for key in getattr(kind, "preset_fields", ()):
            raw.pop(key, None)
        if self.option == NONE:  # It accepts the fields of every option and uses none of them.
            for key in ("contents", "level", "analysis"):
                raw.pop(key, None)
        return Settings.from_mapping({**raw, "profiler": option}, prefix=self.prefix)

    def check_place(self) -> None:
        """Refuse a node that was merged over keys which stood there before: the option's defaults have taken the place
        of their values. A merge puts new keys after the ones that are there, so that those come before their turn.

        Raises:
            ConfigError: names the keys, and what to do.
        """
        schema = [field.name for field in fields(OmegaConf.get_type(self.node))]  # type: ignore[arg-type]
        keys = [str(key) for key in self.node]
        before, own = 0, schema
        while keys[before : before + len(own)] != own:
            before += 1
            own = [key for key in schema if key not in keys[:before]]
        if before:
            raise ConfigError(
                self.path,
                keys[:before],
                "these keys were there before the option, which is merged over them; if they are the app's own, put the"
                f" window elsewhere (+profiler@window={self.option} window.{START_KEY}=...); if they are meant for it,"
                " list the option before _self_",
            )

    def plain(self, name: str) -> Any:
        """One field, resolved, as a plain value.

        Raises:
            ConfigError: the field cannot be resolved.
        """
        return _plain_field(self.node, name, self.prefix)


def find_windows(config: DictConfig | ListConfig, path: str = "") -> Iterator[WindowNode]:
    """The window nodes of a config, the config itself included.

    Nothing is resolved, so an interpolation of a node (`${profiler}`) does not count as a second node.

    Args:
        path: of `config` in the config that it is part of. The paths of the nodes start with it.
    """
    return _walk(config, path)


def _walk(config: DictConfig | ListConfig, path: str) -> Iterator[WindowNode]:
    option = getattr(OmegaConf.get_type(config), "profiler_option", None)
    if option is not None and isinstance(config, DictConfig):
        yield WindowNode(path, option, config)
        return
    if config._is_none() or config._is_missing() or config._is_interpolation():
        return
    keys = range(len(config)) if isinstance(config, ListConfig) else list(config)
    for key in keys:
        child = config._get_node(key)
        if isinstance(child, (DictConfig, ListConfig)):
            below = f"[{key}]" if isinstance(config, ListConfig) else f".{key}" if path else str(key)
            yield from _walk(child, path + below)


def _integers(windows: Any) -> Any:
    """OmegaConf 2.3 does not convert what a reference in an inner list resolves to: an integer in text stays text."""
    if isinstance(windows, list):
        return [_integers(item) for item in windows]
    if isinstance(windows, str):
        with contextlib.suppress(ValueError):
            return int(windows)
    return windows


def _plain(node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in node:
        name = str(key)
        if name != COMPUTED:
            yield name, _plain_field(node, name, prefix)


def _plain_field(node: DictConfig, name: str, prefix: str) -> Any:
    try:
        value = node[name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        written: Any = OmegaConf.to_container(node, resolve=False)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(prefix + name, written[name], f"cannot be resolved: {reason}") from error
    return value
