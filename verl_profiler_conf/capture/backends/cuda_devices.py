"""The GPUs that this process works on. Nothing here makes a CUDA context that is not there already."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

_WARM_UP_KERNELS = 8
_WARM_UP_ELEMENTS = 1024


def devices_in_use() -> list[int]:
    """Indices of the GPUs on which this process has a context.

    The current device of a thread is not enough: Ray's compiled graphs run iterations on a thread that has not chosen
    its device yet, and would then synchronise GPU 0 in place of the worker's own.
    """
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return []
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [cuda.current_device()]
    return [index for index in range(cuda.device_count()) if has_context(index)]


def synchronize() -> None:
    """Wait until every GPU of this process has finished what was queued."""
    import torch

    cuda: Any = torch.cuda
    for index in devices_in_use():
        cuda.synchronize(index)


def warm_up() -> None:
    """Launch a few small kernels and wait for them, so that a profiler which has just been attached is ready.

    Its first records are late or skewed otherwise. A failure is logged only: without the warm-up a capture is less
    exact, and still a capture.
    """
    import torch

    try:
        for index in devices_in_use():
            values = torch.zeros(_WARM_UP_ELEMENTS, device=f"cuda:{index}")
            for _ in range(_WARM_UP_KERNELS):
                values.add_(1)
        synchronize()
    except Exception:
        log.debug("the profiler was not warmed up", exc_info=True)
