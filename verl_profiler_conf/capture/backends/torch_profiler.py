"""Records with torch.profiler (Kineto) on CPU, CUDA and XPU, and costs the rollout as little as possible."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends import cuda_devices, pending
from verl_profiler_conf.capture.backends.torch_recording import SUFFIX, TorchRecording
from verl_profiler_conf.core.errors import UnavailableError

_HOST_ALONE = (
    "contents: [cpu] records no GPU, and with this release of torch (2.13) the first profile of a process that records "
    "none can leave all later ones, the engine's own too, without device events; leave contents empty where they matter"
)
"""pytorch 186970."""

_NO_RANGE: AbstractContextManager[None] = contextlib.nullcontext()


class TorchProfiler:
    """Records with torch.profiler.

    Args:
        device: `cuda`, `xpu` or `cpu`.
        contents: of `cpu`, `cuda`, `memory`, `shapes`, `stack`, `module`. Without `cpu` and `cuda`, the CPU
            and the accelerator are recorded.
        save_path: folder of the traces. A recording that must be exported early goes there under a hidden name. None
            means the working directory.

    Raises:
        UnavailableError: torch sees no GPU, or this device can record nothing of `contents`.
    """

    name = "torch"
    suffix = SUFFIX

    def __init__(self, device: str, contents: Sequence[str] = (), *, save_path: str | None = None) -> None:
        import torch

        self.device = device
        if device == "cuda" and not torch.cuda.is_available():
            raise UnavailableError(
                "device: cuda, but torch sees no GPU (CUDA_VISIBLE_DEVICES, or a torch built for the CPU only); "
                "use device: auto or cpu"
            )
        if not torch.profiler.kineto_available():
            raise UnavailableError(
                "this torch was built without Kineto, which records its traces; install a build that has it"
            )
        chosen = {"cpu", "cuda"} & set(contents) or {"cpu", device}
        chosen &= {"cpu", device}
        if not chosen:
            raise UnavailableError("contents: [cuda] leaves nothing to record, because there is no GPU here; add cpu")
        supported: Any = torch.profiler.supported_activities
        if "xpu" in chosen and "XPU" not in {activity.name for activity in supported()}:
            raise UnavailableError(
                "there is an Intel GPU here, and this torch's profiler cannot record it; install a torch whose "
                "profiler can, or use device: cpu to record the host alone"
            )
        self.records_host = "cpu" in chosen
        self.records_device = device != "cpu" and device in chosen
        is_affected = str(torch.__version__).startswith("2.13.")
        self._note = _HOST_ALONE if device == "cuda" and not self.records_device and is_affected else None
        self._options: dict[str, Any] = {
            "activities": [getattr(torch.profiler.ProfilerActivity, name.upper()) for name in sorted(chosen)],
            "record_shapes": "shapes" in contents,
            "profile_memory": "memory" in contents,
            "with_stack": "stack" in contents,
            "with_modules": "module" in contents,
        }
        self._trace_only = not self._options["with_stack"] and _ask_for_trace_only(self._options)
        self._folder = Path(save_path) if save_path is not None else None
        self._prepared: Any = None
        self._prepared_number = 0
        self._running: Any = None
        self._thread = 0

    def busy(self) -> str | None:
        return running_profiler()

    def prepare(self) -> None:
        if self._prepared is not None or self._running is not None or not pending.watch():
            return
        try:
            self._prepared = self._prepare()
        except BaseException:
            pending.unwatch()
            raise
        self._prepared_number = pending.count_prepared()

    def start(self) -> None:
        profiler = self._take_prepared()
        if profiler is None:
            profiler = self._prepare()
            if self.records_device:
                cuda_devices.warm_up()
        self._synchronize()
        profiler.start_trace()
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
            profiler.stop_trace()
        recording = TorchRecording(
            profiler,
            folder=self._folder,
            trace_only=self._trace_only,
            records_host=self.records_host,
            records_device=self.records_device,
            note=self._note,
        )
        if recording.is_empty:
            raise RuntimeError("another profiler in this process ended this recording, and nothing of it is left")
        pending.add(recording)
        return recording

    def discard(self) -> None:
        prepared = self._take_prepared()
        if prepared is not None and self._running is None:
            prepared.start_trace()  # Kineto has no other way to leave the prepared state
            self._running, self._thread = prepared, threading.get_ident()
        if self._running is not None:
            with contextlib.suppress(RuntimeError):  # a recording of which nothing is left needs no discarding
                self.stop().drop()

    def _prepare(self) -> Any:
        import torch

        pending.export_all()
        profiler = torch.profiler.profile(**self._options)
        profiler.prepare_trace()
        return profiler

    def _take_prepared(self) -> Any:
        """What `prepare` has left; None when it was not called, or when somebody has prepared another profiler since.
        Kineto has one prepared state in a process."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        is_last = pending.count_prepared() == self._prepared_number
        pending.unwatch()
        return prepared if is_last else None

    def _synchronize(self) -> None:
        if self.device == "cuda":
            cuda_devices.synchronize()
        elif self.device == "xpu":
            import torch

            torch.xpu.synchronize()


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
