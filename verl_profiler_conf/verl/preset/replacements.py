"""What to write instead of one of verl's keys that a preset sets."""

from __future__ import annotations

from typing import Any

from verl_profiler_conf.core.window import END_KEY, START_KEY
from verl_profiler_conf.verl.preset.facts import GLOBAL_RANKS_SINCE, Facts

REMOVE = "remove it"
PRESETS = {"torch": "verl_torch_window", "npu": "verl_npu_window"}
"""verl's name of the profiler -> preset."""


def replacement(role: str, fields: tuple[str, ...], found: Any, facts: Facts, prefix: str) -> str:
    """The end of a sentence: `write profiler.steps=[1,3] instead`, or `remove it`.

    Args:
        role: that the key belongs to; `rollout` for global keys.
        fields: of the preset, that decide the key's value.
        found: value in the launch.
        facts: of the launch.
        prefix: of the preset's node.
    """
    if not fields:
        preset = PRESETS.get(found) if isinstance(found, str) else None
        return f"write +{prefix[:-1]}={preset} instead" if preset else REMOVE
    field = fields[0]
    if found is None or found == _window_bound(field, facts):
        return REMOVE
    if field == "roles":
        return _roles(role, found, facts, prefix)
    if field == "ranks":
        found = _gpus(role, found, facts)
    return f"write {prefix}{field}={hydra_text(found)} instead"


def hydra_text(value: Any) -> str:
    """A value as it stands on Hydra's command line."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _window_bound(field: str, facts: Facts) -> Any:
    """The preset's own value of a bound of the window. Old overrides of verl's keys may repeat it, although those keys
    hold counters now."""
    windows = facts.settings.windows
    bounds = {START_KEY: windows[0].start, END_KEY: windows[0].end}
    return bounds.get(field) if len(windows) == 1 else None


def _roles(role: str, found: Any, facts: Facts, prefix: str) -> str:
    if role == "rollout":
        return f"write {prefix}enable={hydra_text(found)} instead"
    roles = [*facts.roles, role] if found else [each for each in facts.roles if each != role]
    return f"write {prefix}roles={hydra_text(roles)} instead"


def _gpus(role: str, found: Any, facts: Facts) -> Any:
    """verl's ranks as the preset counts them. Before verl 0.9.1 those of the rollout are replicas. None is rank 0."""
    if role == "rollout" and facts.version < GLOBAL_RANKS_SINCE and isinstance(found, list):
        size = facts.replica_size
        found = [gpu for replica in found for gpu in range(replica * size, (replica + 1) * size)]
    return found or [0]
