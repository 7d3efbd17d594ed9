"""What is refused and what is warned of, from plain values: no config is composed here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version

from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.verl.preset.checks import launch_warnings, refusals
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
        has_rollout=True,
        values={**agreed, **(values or {})},
        own_values=None,
    )
    return replace(made, **fields)


def test_what_agrees_is_neither_refused_nor_warned_of() -> None:
    assert [*refusals(launch()), *launch_warnings(launch())] == []


def test_the_checks_import_no_omegaconf_and_no_hydra() -> None:
    code = "import sys, verl_profiler_conf.verl.preset.checks; print({'omegaconf', 'hydra', 'verl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_ray_that_loses_the_window_is_told_before_the_job() -> None:
    (line,) = launch_warnings(launch(ray_reads_window=False))
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" in line
    assert ENV_NAME in line


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 4}, "ranks: [9] do not exist: the rollout has 4 GPUs"),
        # trainers that give the rollout resources of its own
        (
            {
                "trainer.nnodes": 4,
                "trainer.n_gpus_per_node": 4,
                "rollout.nnodes": 1,
                "rollout.n_gpus_per_node": 8,
                "async_training": {},
            },
            "ranks: [9] do not exist: the rollout has 8 GPUs",
        ),
    ],
)
def test_the_rollouts_own_gpus_are_counted(values: dict[str, Any], said: str) -> None:
    settings = Settings(windows=(TokenWindow(20, 30),), arm="request", ranks=(9,))
    (line,) = launch_warnings(launch(facts={"settings": settings}, values=values))
    assert said in line


def test_nothing_is_refused_of_keys_that_the_files_leave_alone() -> None:
    plain = launch()
    defaults = {key.path: key.default for key in key_table("torch", Version("0.9.1")).values()}
    inherited = {key.inherits: None for key in key_table("torch", Version("0.9.1")).values() if key.inherits}
    own = {**inherited, **defaults}
    assert list(refusals(replace(plain, own_values=own))) == []
    (error,) = refusals(replace(plain, own_values={**own, "global_profiler.steps": [5]}))
    assert str(error).startswith("global_profiler.steps=[5]: contradicts profiler.steps")
