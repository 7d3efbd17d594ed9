"""Checks of `verl-profiler doctor` beyond this environment: of a launch, of a Ray cluster, and of the device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends.detect import torch_built_for
from verl_profiler_conf.core.install import NAME, pip_install
from verl_profiler_conf.tools.finding import Finding

RAY_SECONDS = 60
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


def ray_findings(address: str) -> Iterator[Finding]:
    """Whether each node of a Ray cluster has this package, in this version: one small task a node."""
    own = _own_version()
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        yield Finding("Ray", "error", "not installed here", "run doctor in the environment of the job")
        return

    def ask(name: str) -> str | None:  # not a function of this module: a node may lack the package
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(name)
        except PackageNotFoundError:
            return None

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        yield Finding("Ray", "error", f"{address}: {lines[0]}", "start the cluster, or name its address")
        return
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(ask)
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                asked[node["NodeManagerAddress"]] = task.options(scheduling_strategy=place).remote(NAME)
        for node_address, reference in asked.items():
            yield _of_node(node_address, own, ray, reference)
    finally:
        ray.shutdown()


def _of_node(address: str, own: str | None, ray: Any, reference: Any) -> Finding:
    about = f"Ray node {address}"
    try:
        found = ray.get(reference, timeout=RAY_SECONDS)
    except Exception as error:
        return Finding(about, "error", f"no answer: {type(error).__name__}", "look at that node: ray status")
    if found is None:
        return Finding(about, "error", f"{NAME} is not installed", f"{pip_install(version=own)} there")
    if found != own:
        fix = f"{pip_install(version=own)} there"
        return Finding(about, "error", f"{NAME} {found}, and {own} here", fix)
    return Finding(about, "ok", f"{NAME} {found}")


def _own_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(NAME)
    except PackageNotFoundError:
        return None
