"""The device profilers, and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler_conf.capture.backends.base import DeviceProfiler, Recording, Written
from verl_profiler_conf.capture.backends.detect import detect_device, has_xpu
from verl_profiler_conf.core.errors import UnavailableError

if TYPE_CHECKING:
    from verl_profiler_conf.core.settings import Settings

__all__ = ["DeviceProfiler", "Recording", "UnavailableError", "Written", "detect_device", "make_profiler"]


def make_profiler(settings: Settings, device: str) -> DeviceProfiler:
    """Make the device profiler for the option and the device. Imports torch.

    Args:
        settings: the validated settings. Their `option` chooses the kind of profiler.
        device: `cuda`, `npu` or `cpu`, as `detect_device` found it.

    Raises:
        UnavailableError: the option cannot work on this device. The message is one line and says what to do.
    """
    if settings.option == "torch_memory":
        from verl_profiler_conf.capture.backends.memory import MemoryProfiler

        return MemoryProfiler(device)
    if settings.option == "nsys_window":
        from verl_profiler_conf.capture.backends.cudart import CudartProfiler

        return CudartProfiler(device)
    if device == "npu":
        from verl_profiler_conf.capture.backends.ascend import AscendProfiler

        return AscendProfiler(
            contents=settings.contents,
            level=settings.level,
            analysis=settings.analysis,
            save_path=settings.save_path,
        )
    if settings.option == "npu_window":
        raise UnavailableError(
            f"profiler=npu_window needs an Ascend NPU and torch_npu, and this process has neither (device: {device}); "
            "use profiler=torch_window, which records any device"
        )
    from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler

    if device == "cpu" and settings.device == "auto" and has_xpu():
        device = "xpu"
    return TorchProfiler(device, contents=settings.contents, save_path=settings.save_path)
