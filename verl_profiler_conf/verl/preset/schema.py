"""The presets for verl: their own fields, and verl's keys as a config.

A preset is a generic option plus verl's keys. The node of the option can be anywhere, and verl's keys are where verl
has them. Each key holds `${verl_profiler_conf.verl:<name>}`. When a key is read, its resolver finds the preset's node
by its type. So overrides on the command line count, also in the Ray actors that get verl's pickled config.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_profiler_conf.schema.options import NpuWindow, TorchWindow
from verl_profiler_conf.schema.register import VERL
from verl_profiler_conf.verl.preset import resolver as _resolver  # noqa: F401 - its import registers the resolver
from verl_profiler_conf.verl.preset.facts import parse_version
from verl_profiler_conf.verl.preset.keys import key_table


@dataclass
class VerlFields:
    """What a preset has besides the fields of its generic option."""

    generic_option: ClassVar[str]
    preset_fields: ClassVar[tuple[str, ...]] = ("steps", "roles")

    # When the window is armed: request (in each RL step that verl profiles), job (once, when the engine starts).
    arm: str = "request"
    # RL steps to profile; verl's first is 1. The second is warm.
    steps: list[int] = field(default_factory=lambda: [2])
    # What to profile: rollout, and with verl's own profiler, whole stages, actor, ref, critic.
    roles: list[str] = field(default_factory=lambda: ["rollout"])


@dataclass
class VerlTorchWindow(VerlFields, TorchWindow):
    """torch_window for verl's RL trainers: sets verl's own profiler keys as well, and captures in chosen RL steps."""

    profiler_option: ClassVar[str] = "verl_torch_window"
    generic_option: ClassVar[str] = "torch_window"

    option: str = "verl_torch_window"


@dataclass
class VerlNpuWindow(VerlFields, NpuWindow):
    """npu_window for verl's RL trainers: sets verl's own profiler keys as well, and captures in chosen RL steps."""

    profiler_option: ClassVar[str] = "verl_npu_window"
    generic_option: ClassVar[str] = "npu_window"

    option: str = "verl_npu_window"


def verl_keys(tool: str, version: str | None) -> dict[str, Any]:
    """verl's keys as a nested config, for a version of verl (None: the newest known)."""
    config: dict[str, Any] = {}
    for name, key in key_table(tool, parse_version(version)).items():
        if not key.sets:
            continue
        *above, last = key.path.split(".")
        node = config
        for part in above:
            node = node.setdefault(part, {})
        node[last] = f"${{{VERL}:{name}}}"
    return config
