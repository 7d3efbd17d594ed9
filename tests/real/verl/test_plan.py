"""`verl-profiler plan` on the real trainer's entry point: it ends before Ray starts, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clone import CLONE
from real_trainer import cluster

from verl_profiler_conf.tools.ray_checks import ray_findings

pytestmark = pytest.mark.engine_verl


def plan(folder: Path, start: int, *more: str) -> tuple[int, dict[str, Any], list[str]]:
    trainer = (sys.executable, "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.name=vllm")
    window = (f"profiler.profile_token_start={start}", f"profiler.profile_token_end={start + 10}")
    options = ("+profiler=verl_torch_window", *window, "data.max_response_length=40", "profiler.steps=[1,3]")
    done = subprocess.run(
        [sys.executable, "-m", "verl_profiler_conf.tools.cli", "plan", "--json", "--", *trainer, *options, *more],
        cwd=folder,
        env={**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": str(CLONE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, json.loads(done.stdout), sorted(path.name for path in folder.iterdir())


def test_a_launch(tmp_path: Path) -> None:
    code, report, left = plan(tmp_path, 20)
    assert (code, left) == (0, [])
    (job,) = report["jobs"]
    assert job["verl_save_path"] == job["save_path"]
    assert job["files"] == [
        f"vllm_tokens20-30_rank0_pid<pid>_step{step}_replica0_<n>.pt.trace.json.gz" for step in (1, 3)
    ]
    assert {engine["engine"]: engine["how"] for engine in job["engines"]}["vllm"] == "hook"


def test_a_window_beyond_the_response(tmp_path: Path) -> None:
    code, report, left = plan(tmp_path, 50)
    assert (code, left) == (1, [])
    assert "response_length=40 the last response token is 39" in report["jobs"][0]["problems"][0]


def test_keys_that_contradict_the_preset(tmp_path: Path) -> None:
    """All of them, and those that only this launch sets: they would stop it when its job starts."""
    code, report, left = plan(tmp_path, 20, "global_profiler.tool=nsys", "global_profiler.steps=[4]")
    assert (code, left) == (1, [])
    (problem,) = report["jobs"][0]["problems"]
    first, *lines = problem.splitlines()
    assert first == "2 keys contradict the preset:"
    keys = [line.split(":")[0].strip() for line in lines]
    assert keys == ["global_profiler.tool='nsys'", "global_profiler.steps=[4]"]
    assert lines[1].endswith("write profiler.steps=[4] instead")


def test_each_node_of_a_cluster_is_asked_for_the_package() -> None:
    with cluster({}) as address:
        (found,) = list(ray_findings(address))
    assert (found.state, found.about.startswith("Ray node ")) == ("ok", True), found
