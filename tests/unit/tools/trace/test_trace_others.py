"""Held against HolisticTraceAnalysis, and slices and merged traces opened in it and in TensorBoard's plugin.

They need packages that this project's environment does without: OTHERS_PYTHON is the interpreter of an environment with
HolisticTraceAnalysis and torch-tb-profiler. `make test-main` makes one and sets it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trace_files import load, real_trace

from verl_profiler_conf.tools.trace.analysis import analyse
from verl_profiler_conf.tools.trace.select import Selection
from verl_profiler_conf.tools.trace.slicing import slice_trace

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "reading.py"
WITH_KERNELS = (
    "cuda_alexnet_training",
    "cuda_event_sync_two_streams",
    "cuda_nccl_sampled_rank0",
    "cuda_nccl_sampled_rank1",
    "cuda_nccl_with_config",
    "cuda_simple_add",
    "cuda_triton",
    "rocm_mi250_training",
)
TENSORBOARD = """
import json, sys
from torch_tb_profiler.profiler.data import RunProfileData
data = RunProfileData.parse("worker", None, sys.argv[1], sys.argv[2])
data.process()
print(json.dumps([len(data.events), len(data.op_list_groupby_name), sum(data.kernel_stat["count"])]))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def others() -> str:
    python = os.environ.get("OTHERS_PYTHON")
    if not python:
        pytest.skip("OTHERS_PYTHON is not set: nothing to hold the figures against")
    return python


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("reading_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(python: str, *arguments: str) -> Any:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernel_time_busy_share_and_kernels_are_those_of_hta(name: str, others: str, benchmark: Any) -> None:
    path = real_trace(name)
    theirs = ask(others, str(BENCHMARK), "--run", "hta", str(path))["found"]
    ours = benchmark.by_analysis(path)
    assert benchmark.differences(ours, theirs) == []
    assert len(theirs["kernels"]) > 0


@pytest.mark.parametrize("name", ["cuda_nccl_with_config", "rocm_mi250_training", "cuda_nccl_sampled_rank0"])
def test_a_slice_opens_in_hta_with_the_same_figures(name: str, others: str, benchmark: Any, tmp_path: Path) -> None:
    out = tmp_path / "slice.json.gz"
    slice_trace(real_trace(name), out, Selection(start=0, end=1))
    theirs = ask(others, str(BENCHMARK), "--run", "hta", str(out))["found"]
    assert benchmark.differences(benchmark.by_analysis(out), theirs) == []


@pytest.mark.parametrize("name", ["cuda_nccl_with_config", "rocm_mi250_training"])
def test_a_slice_opens_in_tensorboards_plugin(name: str, others: str, tmp_path: Path) -> None:
    out = tmp_path / "slice.pt.trace.json"
    slice_trace(real_trace(name), out, Selection(start=0, end=1))
    events, operators, kernels = ask(others, "-c", TENSORBOARD, str(out), str(tmp_path))
    found = analyse(out)
    assert 0 < events <= len(load(out)["traceEvents"])
    assert operators > 0
    assert kernels == found.kernels_count
