"""vLLM, captured in three ways, for the fidelity benchmark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import vllm_spy
from oracle import Run
from vllm_driver import Driver, generate, options
from workloads import Build, Workload


class Plain(Driver):
    """vLLM's own profiler with `delay = start, max = end - start`."""

    def llm(self, build: Build) -> Any:
        raise NotImplementedError("the counters belong to the engine: see `run`")

    def run(self, workload: Workload, folder: Path) -> Run:
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        self.close()
        start, end = workload.settings["profile_token_start"], workload.settings["profile_token_end"]
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(folder / "profile"),
            "delay_iterations": start,
            "max_iterations": end - start,
            "ignore_frontend": True,
        }
        os.environ[vllm_spy.ENV] = str(folder / "spy.jsonl")
        self._llm = LLM(**options(workload.build, self._models), profiler_config=profiler)
        try:
            self._llm.start_profile()
            lengths = generate(self._llm.llm_engine, workload, "round0")
            self._llm.stop_profile()
        finally:
            del os.environ[vllm_spy.ENV]
        return Run([vllm_spy.read_log(folder / "spy.jsonl")], folder / "profile", lengths)


def drivers(models: Path) -> dict[str, Any]:
    """Way -> a function that makes its driver."""
    return {"plain": lambda: Plain(models), "lead": lambda: Driver(models), "any": lambda: Driver(models)}
