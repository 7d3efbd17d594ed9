"""Launches of verl as plain values, for what is checked of them without a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packaging.version import Version

from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.verl.preset.facts import ENGINE_KEY, LOOKED_AT, Facts, VerlLaunch
from verl_profiler_conf.verl.preset.keys import key_table


def launch(*, facts: dict[str, Any] | None = None, values: dict[str, Any] | None = None, **fields: Any) -> VerlLaunch:
    """A launch that nothing is wrong with, but for what is given."""
    settings = Settings(windows=(TokenWindow(20, 30),), arm="request")
    known = Facts(
        **{
            "settings": settings,
            "tool": "torch",
            "version": Version("0.9.1"),
            "steps": (2,),
            "roles": ("rollout",),
            "save_path": None,
            "replica_size": 1,
            "counters": {},
            **(facts or {}),
        }
    )
    keys = key_table(known.tool, known.version).values()
    agreed = {**dict.fromkeys(LOOKED_AT), ENGINE_KEY: "vllm", **{key.path: key.value(known) for key in keys}}
    made = VerlLaunch(
        option="verl_torch_window",
        path="profiler",
        written={},
        facts=known,
        installed="0.9.1",
        ray_reads_window=True,
        values={**agreed, **(values or {})},
        own_values=None,
    )
    return replace(made, **fields)
