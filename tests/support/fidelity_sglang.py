"""SGLang, captured in three ways, for the fidelity benchmark."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import sglang_spy
from oracle import Run
from sglang_driver import Driver, generate
from workloads import Workload


class Plain(Driver):
    """SGLang's own profiler with `start_step = start, num_steps = end - start`, in the first generation of a server."""

    def run(self, workload: Workload, folder: Path) -> Run:
        self.close()  # its count of forwards goes on for as long as the server lives
        start, end = workload.settings["profile_token_start"], workload.settings["profile_token_end"]
        engine, spied = self.begin(workload.build, folder, {**workload.settings, "enable": False})
        engine.start_profile(
            output_dir=str(folder / "profile"), start_step=start, num_steps=end - start, activities=["CPU"]
        )
        lengths = generate(engine, workload, 0)
        sglang_spy.wait_until_idle(spied)
        with contextlib.suppress(RuntimeError):  # it has stopped by itself, and says so
            engine.stop_profile()
        return Run([sglang_spy.read_log(spied)], folder / "profile", lengths)


def drivers(models: Path) -> dict[str, Any]:
    """Way -> a function that makes its driver."""
    return {"plain": lambda: Plain(models), "lead": lambda: Driver(models), "any": lambda: Driver(models)}
