"""Records with torch.profiler (Kineto) on CPU and CUDA, and costs the rollout as little as possible."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends.base import Written
from verl_profiler_conf.capture.backends.tracefile import pack
from verl_profiler_conf.capture.backends.unlocked import NativeResult
from verl_profiler_conf.capture.files import temporary_name
from verl_profiler_conf.core.errors import UnavailableError

SUFFIX = ".pt.trace.json.gz"
_NO_RANGE: AbstractContextManager[None] = contextlib.nullcontext()


class TorchProfiler:
    """Records with torch.profiler.

    Args:
        device: `cuda` or `cpu`.
        contents: of `cpu`, `cuda`, `memory`, `shapes`, `stack`, `module`. Without `cpu` and `cuda`, both are recorded.

    Raises:
        UnavailableError: torch sees no GPU, or this device can record nothing of `contents`.
    """

    name = "torch"
    suffix = SUFFIX

    def __init__(self, device: str, contents: Sequence[str] = ()) -> None:
        import torch

        self.device = device
        if device == "cuda" and not torch.cuda.is_available():
            raise UnavailableError(
                "device: cuda, but torch sees no GPU (CUDA_VISIBLE_DEVICES, or a torch built for the CPU only); "
                "use device: auto or cpu"
            )
        chosen = {"cpu", "cuda"} & set(contents) or {"cpu", "cuda"}
        if device != "cuda":
            chosen -= {"cuda"}
        if not chosen:
            raise UnavailableError("contents: [cuda] leaves nothing to record, because there is no GPU here; add cpu")
        self.records_host = "cpu" in chosen
        self.records_device = "cuda" in chosen
        self._options: dict[str, Any] = {
            "activities": [getattr(torch.profiler.ProfilerActivity, name.upper()) for name in sorted(chosen)],
            "record_shapes": "shapes" in contents,
            "profile_memory": "memory" in contents,
            "with_stack": "stack" in contents,
            "with_modules": "module" in contents,
        }
        self._trace_only = not self._options["with_stack"] and _ask_for_trace_only(self._options)
        self._running: Any = None
        self._thread = 0

    def busy(self) -> str | None:
        return running_profiler()

    def start(self) -> None:
        import torch

        self._synchronize()
        profiler = torch.profiler.profile(**self._options)
        profiler.start()
        self._running, self._thread = profiler, threading.get_ident()

    def annotate(self, name: str) -> AbstractContextManager[None]:
        if self._running is None:
            return _NO_RANGE
        from torch.profiler import record_function

        return record_function(name)

    def stop(self) -> TorchRecording:
        if self._running is None:
            raise RuntimeError("no recording to stop")
        if threading.get_ident() != self._thread:
            # torch would warn, return an empty trace and leave its callbacks on the thread that began
            raise RuntimeError("a recording must be ended by the thread that began it: torch records per thread")
        profiler, self._running = self._running, None
        try:
            self._synchronize()
        finally:  # a failed kernel raises here, and must not leave the recording on for the rest of the job
            profiler.stop()
        recording = TorchRecording(profiler, self, self._trace_only)
        if recording.is_empty:
            raise RuntimeError("another profiler in this process ended this recording, and nothing of it is left")
        return recording

    def discard(self) -> None:
        if self._running is not None:
            with contextlib.suppress(RuntimeError):  # a recording of which nothing is left needs no discarding
                self.stop().drop()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            import torch

            cuda: Any = torch.cuda
            if cuda.is_initialized():
                cuda.synchronize()


class TorchRecording:
    """A finished recording in the memory of this process."""

    def __init__(self, profiler: Any, owner: TorchProfiler, trace_only: bool) -> None:
        self._profiler = profiler
        self._records_host = owner.records_host
        self._records_device = owner.records_device
        self._trace_only = trace_only

    @property
    def is_empty(self) -> bool:
        """Whether torch holds no trace for this result. Saving such a result crashes the process (torch 2.13)."""
        result = self._result()
        begun = getattr(result, "trace_start_ns", None)
        return result is None or (begun is not None and begun() == 0)

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        target = path.with_name(path.name + SUFFIX)
        if target.exists():
            raise FileExistsError(f"{target} exists already")
        with temporary_name(target) as raw:
            self._save(raw)
            events = pack(raw, target, renames)
        return Written(target, target.stat().st_size, events if self._records_device else None, self._note(events))

    def drop(self) -> None:
        """Free the memory of the recording without writing it."""
        result = self._result()
        native = NativeResult.of(result) if self._trace_only and result is not None else None
        if native is not None:
            native.clear()
        self._profiler = None

    def _result(self) -> Any:
        return getattr(getattr(self._profiler, "profiler", None), "kineto_results", None)

    def _save(self, raw: Path) -> None:
        result = self._result()
        native = NativeResult.of(result) if result is not None else None
        try:
            if native is None:
                self._profiler.export_chrome_trace(str(raw))
            else:
                native.save(raw)
        finally:
            # Kineto writes under this name first. On a full disk the file stays and takes up the room that is left.
            with contextlib.suppress(OSError):
                raw.with_name(f"{raw.name}.tmp").unlink(missing_ok=True)
        self.drop()

    def _note(self, events: int) -> str | None:
        notes = []
        if not self._records_host:
            notes.append("contents has no cpu, so the ranges that name the iterations are not in the trace")
        if self._records_device and not events:
            notes.append(no_device_events())
        return "; ".join(notes) or None


def no_device_events() -> str:
    """Say why a capture on a GPU can be without a kernel, as far as this process can tell."""
    import torch

    causes = []
    injected = os.environ.get("NVTX_INJECTION64_PATH")
    if injected:
        causes.append(f"NVTX_INJECTION64_PATH={injected} is set, which keeps Kineto from using CUPTI; unset it")
    if not torch.profiler.kineto_available():
        causes.append("this torch was built without Kineto; install a build that has it")
    if not causes:
        causes.append(
            "another user of CUPTI in this process or on this GPU (nsys, ncu, DCGM profiling, another profiler), "
            "NVTX_INJECTION64_PATH set, a torch without Kineto, or a driver that does not let this user profile"
        )
    return "no device event was recorded; known causes: " + "; ".join(causes)


def running_profiler() -> str | None:
    """Say which profiler already runs in this process, or None. Imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    autograd = getattr(getattr(torch, "_C", None), "_autograd", None)
    runs_on_this_thread = getattr(autograd, "_profiler_enabled", None)
    module = getattr(getattr(torch, "autograd", None), "profiler", None)
    runs_in_python = getattr(module, "_is_profiler_enabled", False)  # by torch's Python API, on any thread
    if runs_in_python or (runs_on_this_thread is not None and runs_on_this_thread()):
        return "another torch profiler already runs in this process (torch.profiler, emit_nvtx or the engine's)"
    return None


def _ask_for_trace_only(options: dict[str, Any]) -> bool:
    """Let torch skip the events that only its tables need. The recording then ends a third sooner.

    Returns:
        Whether this torch can do so (from 2.13 on).
    """
    try:
        from torch._C._profiler import _ExperimentalConfig

        options["experimental_config"] = _ExperimentalConfig(trace_only=True)
    except (ImportError, TypeError):
        return False
    return True
