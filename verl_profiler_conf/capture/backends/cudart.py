"""Calls cudaProfilerStart and cudaProfilerStop around the window, for a job under NVIDIA Nsight Systems (nsys)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends.base import Written
from verl_profiler_conf.core.errors import UnavailableError

COMMAND = (
    "nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat --cuda-graph-trace=node "
    "--trace-fork-before-exec=true"
)
"""By default nsys ends the whole job when the first window closes, shows a CUDA graph as one block, and does not follow
processes that are forked without an exec, as engine cores can be."""


class CudartProfiler:
    """Tells nsys when to record, and names the iterations with NVTX ranges. nsys itself writes the report.

    Args:
        device: must be `cuda`.

    Raises:
        UnavailableError: there is no CUDA device.
    """

    name = "cudart"
    suffix = ""

    def __init__(self, device: str) -> None:
        import torch

        if device != "cuda" or not torch.cuda.is_available():
            raise UnavailableError(
                f"profiler=nsys_window needs an NVIDIA GPU and a torch that sees it (device: {device}); "
                "use profiler=torch_window, which records any device"
            )
        if torch.version.hip is not None:
            raise UnavailableError(
                "profiler=nsys_window drives NVIDIA's nsys, and this torch is built for ROCm; "
                "use profiler=torch_window, or rocprofv3 without a window"
            )
        self._cuda: Any = torch.cuda
        self._recording = False

    def busy(self) -> str | None:
        return None  # the CUDA runtime does not tell whether a tool records

    def prepare(self) -> None:
        """Nothing to prepare."""

    def start(self) -> None:
        self._cuda.synchronize()
        self._cuda.check_error(self._cuda.cudart().cudaProfilerStart())
        self._recording = True

    def annotate(self, name: str) -> AbstractContextManager[None]:
        if not self._recording:
            return contextlib.nullcontext()
        nvtx_range: AbstractContextManager[None] = self._cuda.nvtx.range(name.replace("{", "{{").replace("}", "}}"))
        return nvtx_range

    def stop(self) -> CudartRecording:
        self._end()
        return CudartRecording()

    def discard(self) -> None:
        if self._recording:
            self._end()

    def _end(self) -> None:
        self._recording = False
        try:
            self._cuda.synchronize()
        finally:
            self._cuda.check_error(self._cuda.cudart().cudaProfilerStop())


class CudartRecording:
    """A capture that nsys has recorded. There is nothing to write."""

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:  # noqa: ARG002  (the protocol's)
        note = "the capture is in the report that nsys writes"
        if not any(name.startswith("NSYS_") for name in os.environ):
            note = f"nothing was recorded, because this process does not run under nsys; start it with `{COMMAND}`"
        if renames:
            note += f"; {len(renames)} ranges in it name more tokens than were made: the manifest's rows are right"
        return Written(None, 0, None, note)
