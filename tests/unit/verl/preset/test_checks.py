"""What is refused and what is warned of, from plain values: no config is composed here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version
from verl_launches import launch

from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.verl.preset.checks import launch_warnings, refusals
from verl_profiler_conf.verl.preset.keys import key_table


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
    "key", ["global_profiler.finish_hook_cmd", "actor_rollout_ref.rollout.profiler.finish_hook_cmd"]
)
def test_a_command_that_verl_would_not_run_is_told_of(key: str) -> None:
    (line,) = launch_warnings(launch(values={key: "upload $VERL_PROFILE_SAVE_PATH"}))
    assert line.startswith(f"{key}: verl runs it in training workers that are profiled")
    more = launch(facts={"roles": ("rollout", "actor")}, values={key: "upload"})
    assert list(launch_warnings(more)) == []


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


@pytest.mark.parametrize(
    ("version", "arm", "ranks", "said"),
    [
        ("0.8.0", "job", (0, 1), "ranks [0, 1] of each of the 4 replicas capture"),
        ("0.8.0", "request", (0, 3), "ranks [0, 1] of each of the replicas [0, 1] capture"),
        ("0.9.0", "request", (0, 3), "ranks [0, 1] of each of the replicas [0, 1] capture"),
        ("0.9.0", "job", (0, 1), None),
        ("0.9.1", "request", (0, 3), None),
        ("0.9.1", "job", (0, 3), None),
    ],
)
def test_before_servers_narrow_the_ranks_more_of_them_capture(
    version: str, arm: str, ranks: tuple[int, ...], said: str | None
) -> None:
    settings = Settings(windows=(TokenWindow(20, 30),), arm=arm, ranks=ranks)
    gpus = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
    facts = {"settings": settings, "version": Version(version), "replica_size": 2}
    lines = list(launch_warnings(launch(facts=facts, values=gpus)))
    assert [said in line for line in lines if said] == ([True] if said else [])
    assert len(lines) == bool(said)


def test_nothing_is_refused_of_keys_that_the_files_leave_alone() -> None:
    plain = launch()
    defaults = {key.path: key.default for key in key_table("torch", Version("0.9.1")).values()}
    inherited = {key.inherits: None for key in key_table("torch", Version("0.9.1")).values() if key.inherits}
    own = {**inherited, **defaults}
    assert list(refusals(replace(plain, own_values=own))) == []
    (error,) = refusals(replace(plain, own_values={**own, "global_profiler.steps": [5]}))
    assert str(error).startswith("global_profiler.steps=[5]: contradicts profiler.steps")
