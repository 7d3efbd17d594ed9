"""Window nodes in a config: find them by their type, wherever they are, and read them into plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import START_KEY, WINDOWS_KEY
from verl_profiler_conf.schema.register import OPTIONS

COMPUTED = "iterations"
"""Sub-node that is computed from the other fields. It is not a setting."""

OPTION = "option"
"""Field with the option's name. It shows what a node is when the node has lost its type. It cannot be set."""

NONE = "none"

KINDS: dict[str, type] = {}
"""Option -> its schema. Each schema is added where it is defined."""


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

    @property
    def kind(self) -> type:
        """The schema of the option."""
        found = OmegaConf.get_type(self.node)
        return found if hasattr(found, "profiler_option") else KINDS[self.option]  # type: ignore[return-value]

    def settings(self) -> Settings:
        """Resolve and validate the node.

        Raises:
            ConfigError: one line with the full key, the value and what is allowed.
        """
        raw = dict(_plain(self.node, self.prefix))
        self._check_name(raw.pop(OPTION, self.option))
        if WINDOWS_KEY in raw:
            raw[WINDOWS_KEY] = _integers(raw[WINDOWS_KEY])
        option = "torch_window" if self.option == NONE else getattr(self.kind, "generic_option", self.option)
        for key in getattr(self.kind, "preset_fields", ()):
            raw.pop(key, None)
        if self.option == NONE:  # It accepts the fields of every option and uses none of them.
            for key in ("contents", "level", "analysis"):
                raw.pop(key, None)
        return Settings.from_mapping({**raw, "profiler": option}, prefix=self.prefix)

    def _check_name(self, name: Any) -> None:
        if name != self.option:
            group = "" if self.path == "profiler" else f"@{self.path}"
            other = name if isinstance(name, str) and name.isidentifier() else "OPTION"
            raise ConfigError(
                self.prefix + OPTION, name, f"cannot be set; to use another option, select profiler{group}={other}"
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


def window_at(config: DictConfig | ListConfig, path: str) -> WindowNode | None:
    """The config as a window node, if it is one."""
    if not isinstance(config, DictConfig):
        return None
    option = getattr(OmegaConf.get_type(config), "profiler_option", None) or _saved_option(config)
    return None if option is None else WindowNode(path, option, config)


def _walk(config: DictConfig | ListConfig, path: str) -> Iterator[WindowNode]:
    if not len(config):  # also of a config that is null, missing or a reference
        return
    window = window_at(config, path)
    if window is not None:
        yield window
        return
    keys = range(len(config)) if isinstance(config, ListConfig) else list(config)
    for key in keys:
        child = as_written(config, key)
        if isinstance(child, (DictConfig, ListConfig)):
            below = f"[{key}]" if isinstance(config, ListConfig) else f".{key}" if path else str(key)
            yield from _walk(child, path + below)


def as_written(config: DictConfig | ListConfig, key: Any) -> Any:
    """The value at a key that is there; None where it is missing or a reference, which is not followed."""
    if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
        return None
    return config[key]


def _saved_option(config: DictConfig) -> str | None:
    """The option of a node that has lost its type: it was saved to YAML, or made a plain container, and read again."""
    if not {OPTION, START_KEY, COMPUTED} <= set(config.keys()):
        return None
    name = as_written(config, OPTION)
    return name if isinstance(name, str) and name in OPTIONS else None


def _integers(windows: Any) -> Any:
    """Convert integers in text: OmegaConf 2.3 does not convert what a reference in an inner list resolves to."""
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
