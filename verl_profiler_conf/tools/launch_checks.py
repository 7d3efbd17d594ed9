"""Checks of `verl-profiler doctor` beyond this environment: of a launch, and of the device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends.detect import torch_built_for
from verl_profiler_conf.tools.finding import Finding

PROFILERS = {"nsys": "nsys", "nv-hostengine": "DCGM", "ncu": "Nsight Compute", "dcgmi": "DCGM"}
"""Name of a process -> what it belongs to. Each uses the GPU's performance interface."""


def launch_findings(report: dict[str, Any]) -> Iterator[Finding]:
    """What is wrong with a planned launch, and what its processes would find."""
    for line in report["problems"]:
        yield Finding("launch", "error", line)
    for job in report["jobs"]:
        for line in job["problems"]:
            yield Finding("launch", "error", line)
        for line in job.get("warnings", ()):
            yield Finding("launch", "warning", line)
        for engine in job.get("engines", ()):
            if engine["why"]:
                why, _, fix = engine["why"].partition(": ")
                yield Finding(engine["engine"], "error", f"{engine['version']}: {why}", fix)
            else:
                yield Finding(engine["engine"], "ok", f"{engine['version']}: windowed by {engine['how']}")
        if job.get("enable") and not job["problems"]:
            yield Finding("save_path", "ok", f"{job['save_path']} can be written")


def device_findings(dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> Iterator[Finding]:
    """torch against the devices of this machine, CANN, and other users of the GPU's profiling interface."""
    built = torch_built_for()
    if built is None and any(dev.glob("nvidia[0-9]*")):
        yield Finding(
            "torch", "error", "built for the CPU, and this machine has NVIDIA GPUs", "install a CUDA build of torch"
        )
    if any(dev.glob("davinci[0-9]*")):
        home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
        if home is None or not Path(home).is_dir():
            yield Finding(
                "CANN",
                "error",
                "this machine has NPUs, and CANN is not set up",
                "source its set_env.sh before the job",
            )
        else:
            yield Finding("CANN", "ok", home)
    for variable in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        if os.environ.get(variable):
            yield Finding(
                "CUPTI",
                "warning",
                f"{variable} is set: another profiler is loaded into CUDA processes, and traces may lack kernels",
                f"unset {variable} unless you profile with nsys (profiler=nsys_window)",
            )
    for file in proc.glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # a process that has ended
            name = file.read_text().strip()
            if name in PROFILERS:
                yield Finding(
                    "CUPTI",
                    "warning",
                    f"{PROFILERS[name]} runs (process {file.parent.name}, {name})",
                    "end it, or pause it, if traces lack kernels",
                )
