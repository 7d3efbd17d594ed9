"""Categories of events, as torch's profiler writes them: those of today, of older releases, and of other vendors."""

from __future__ import annotations

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "mtia_ccp_events"})
LAUNCHES = frozenset(
    {
        "cuda_runtime",
        "cuda_driver",
        "hip_runtime",
        "hip_driver",
        "xpu_runtime",
        "mtia_runtime",
        "privateuse1_runtime",
        "privateuse1_driver",
        "Runtime",
    }
)
OPERATORS = frozenset({"cpu_op", "Operator", "operator"})
ANNOTATIONS = frozenset({"user_annotation"})
IGNORED = frozenset({"ac2g", "fwdbwd", "python_function", "gpu_user_annotation", "cuda_sync", "overhead", "Trace"})
