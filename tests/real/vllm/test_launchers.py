"""Launchers without Hydra: the environment variable alone, and a script that never imports this package.

What such a script captures is in test_processes.py and ../sglang/test_sglang.py; here is what a mistake in it does.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this environment", allow_module_level=True)

from vllm_async_job import run_script

from verl_profiler_conf.core.settings import ENV_NAME

pytestmark = pytest.mark.engine_vllm


def test_a_mistake_in_the_variable_is_one_line_and_the_engine_goes_on(tmp_path: Path) -> None:
    mistaken = json.dumps({"profile_token_strat": 20, "save_path": str(tmp_path / "profile")})
    done = run_script(tmp_path, ["generate"], {ENV_NAME: mistaken})
    assert json.loads(done.stdout.splitlines()[-1]) == [32] * 4
    told = [line for line in (done.stdout + done.stderr).splitlines() if "without the window" in line]
    assert len(told) == 1, told
    assert "VERL_PROFILER_CONF.profile_token_strat=20: no such setting; there are all_ranks, " in told[0]
    assert not (tmp_path / "profile").exists()
