"""What verl needs to train on a CPU, which it loads through its own plugins. For tests only."""

from __future__ import annotations

import os
from typing import Any


def _one_gloo() -> None:
    """verl asks for a backend for the CPU and one for the accelerator, here the same twice, which torch refuses."""
    import torch.distributed as dist

    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group


if os.environ.get("VERL_PLATFORM") == "cpu":
    import verl_cpu_platform  # noqa: F401 - which registers itself

    _one_gloo()
