"""A CPU platform for verl, chosen by VERL_PLATFORM=cpu. For tests only.

verl trains and rolls out for real on it: its FSDP2 actor over gloo, its vLLM servers on vLLM's CPU build.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class CpuModule:
    """`torch.cpu`, with what verl asks of `torch.cuda` besides."""

    def __getattr__(self, name: str) -> Any:
        if name in MEMORY_FIGURES:
            return lambda *_: 0
        if name in NOTHING_TO_DO:
            return lambda *_: None
        return getattr(torch.cpu, name)

    def current_device(self) -> Any:
        return torch.device("cpu")

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def get_device_properties(self, *_: object) -> Any:
        return SimpleNamespace(name="cpu", total_memory=1 << 30)

    def get_device_name(self, *_: object) -> str:
        return "cpu"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)


MEMORY_FIGURES = {"memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"}
NOTHING_TO_DO = {"set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "synchronize"}


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    device_name = vendor_name = property(lambda _: "cpu")
    device_module = property(lambda _: CpuModule())

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_: object) -> None:
        """There is no accelerator that it could be done to."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
