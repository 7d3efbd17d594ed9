"""Checks the config of a job before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.launch.provenance import check_place
from verl_profiler_conf.schema.nodes import COMPUTED, NONE, WindowNode, find_windows
from verl_profiler_conf.verl.preset.asked import asked_captures
from verl_profiler_conf.verl.preset.checks import check_launch
from verl_profiler_conf.verl.preset.launch_config import TOOLS, check_trainer, read_launch
from verl_profiler_conf.verl.preset.schema import VerlFields as _VerlFields  # noqa: F401 - makes the presets known


@dataclass(frozen=True)
class Checked:
    """What the checks of a config found.

    Attributes:
        settings: of its window; None: no option is selected.
        asked: the captures that the job is asked for, where a preset knows them.
        prefix: path of the node with a dot at its end, to put before a key in a message.
        is_switched_off: there are window nodes, but none of them is enabled.
    """

    settings: Settings | None
    asked: Asked | None = None
    prefix: str = ""
    is_switched_off: bool = False


def validate(config: DictConfig) -> Settings | None:
    """The resolved and checked settings of a config's window; None when no option is selected.

    Every window node is checked, also those with `enable: false`. At most one may be enabled.

    Raises:
        ConfigError: one line with the full key, the value and what is allowed.
    """
    return check_config(config).settings


def check_config(config: DictConfig) -> Checked:
    """Check every window of a config, and what surrounds it.

    Raises:
        ConfigError: one line with the full key, the value and what is allowed.
    """
    found: dict[str, Settings] = {}
    asked = None
    has_none = False
    for node in find_windows(config):
        if node.option == NONE:
            has_none = True
            continue
        check_trainer(config, node)
        check_place(config, node)
        settings = node.settings()
        _check_computed(node, settings)
        if node.option in TOOLS:
            launch = read_launch(config, node)
            settings, asked = check_launch(launch), asked_captures(launch)
        found[node.path] = settings
    enabled = [path for path, settings in found.items() if settings.enable]
    if len(enabled) > 1:
        first, second = enabled[:2]
        raise ConfigError(
            f"{second}.enable", True, f"a job has one window, and {first} is another; set enable=false in one of them"
        )
    path = next(iter([*enabled, *found]), None)
    if path is None:
        return Checked(None, is_switched_off=has_none)
    return Checked(found[path], asked, f"{path}." if path else "", is_switched_off=not enabled)


def _check_computed(node: WindowNode, settings: Settings) -> None:
    """Refuse counters that the user has set: they are computed, and a value of the user's would have no effect."""
    from verl_profiler_conf.counters.plan import counter_values
    from verl_profiler_conf.schema.register import ITERATIONS

    computed: Any = OmegaConf.to_container(node.node, resolve=False)
    for engine, fields in (computed.get(COMPUTED) or {}).items():
        for counter, value in fields.items():
            is_computed = isinstance(value, str) and value.startswith(f"${{{ITERATIONS}:")
            if not is_computed and value != counter_values(settings, engine).get(counter):
                key = f"{node.prefix}{COMPUTED}.{engine}.{counter}"
                raise ConfigError(key, value, "is computed from the window and cannot be set")
