"""The tests on a real GPU, tried without one: their reading of traces, and those of them that can run on the CPU."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clone import CLONE, python_path
from gpu_checks import DRY_RUN, Trace
from made_trace import MadeTrace

pytest.importorskip("torch")


def pytest_on_gpu_tests(**environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", "-q", "-rs"]
    env = {**os.environ, "PYTHONPATH": python_path(CLONE, CLONE / "tests" / "support"), **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CLONE, env=env)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_trace_is_read(tmp_path: Path) -> None:
    made = MadeTrace()
    made.iteration(0, operators=3, kernels=2, copies=1)
    made.launch("cudaLaunchKernel", delay=-1e6, name="void erfinv_kernel<float>()")
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(made.text().encode()))
    trace = Trace(path)
    assert len(trace.device_work) == 4
    assert len(trace.operators) == 3
    assert [event["name"] for event in trace.outside()] == ["void erfinv_kernel<float>()"]
    assert len(trace.named("ERFINV")) == 1
    assert [event["name"] for event in trace.ranges] == ["response_tokens[0:1) iter=0 reqs=8"]


def test_without_a_gpu_they_are_skipped_and_say_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "no CUDA GPU here" in pytest_on_gpu_tests(**{DRY_RUN: ""})


@pytest.mark.slow
def test_those_that_can_run_on_the_cpu_pass_there() -> None:
    printed = pytest_on_gpu_tests(**{DRY_RUN: "1"})
    assert "10 passed" in printed
    assert "a dry run: needs a GPU" in printed
