"""Which accelerator this process can use, found without touching it: no CUDA context, no import of torch.

A context made in the launching process would cost GPU memory and break every later fork, so what is there is read from
the machine (device nodes, NVML), the environment and the installed torch's own version file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_DEV = Path("/dev")


def detect_device(asked: str = "auto", *, environ: Mapping[str, str] | None = None, dev: Path = _DEV) -> str:
    """`cuda`, `npu` or `cpu`.

    Args:
        asked: the `device` setting. Anything but `auto` is taken at its word: the launching process may well lack the
            device that its workers have.
        environ: the environment; None: this process's.
        dev: where device nodes are.
    """
    if asked != "auto":
        return asked
    env = os.environ if environ is None else environ
    if has_npu(env, dev):
        return "npu"
    if has_cuda(env, dev):
        return "cuda"
    return "cpu"


def has_npu(environ: Mapping[str, str], dev: Path = _DEV) -> bool:
    """An Ascend NPU that this process may use, and torch_npu to use it with."""
    if _hidden(environ, "ASCEND_RT_VISIBLE_DEVICES"):
        return False
    return any(_numbered(dev, "davinci")) and _installed("torch_npu")


def has_cuda(environ: Mapping[str, str], dev: Path = _DEV) -> bool:
    """A GPU that this process may use, and a torch that was built for it (ROCm's torch answers to `cuda` too)."""
    built_for = torch_built_for()
    if built_for == "cuda":
        return not _hidden(environ, "CUDA_VISIBLE_DEVICES") and _nvidia_gpus(dev)
    if built_for == "hip":
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return not any(_hidden(environ, name) for name in names) and (dev / "kfd").exists()
    return False


def torch_built_for() -> str | None:
    """`cuda`, `hip`, or None for a CPU build or no torch at all."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is not None:
        return "cuda" if getattr(version, "cuda", None) else "hip" if getattr(version, "hip", None) else None
    spec = _spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for name in ("cuda", "hip"):
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, re.MULTILINE):  # an assignment of a string, not of None
            return name
    return None


def _nvidia_gpus(dev: Path) -> bool:
    if any(_numbered(dev, "nvidia")):
        return True
    if not (dev / "nvidiactl").exists() and not (dev / "dxg").exists():
        return False
    # nodes of another naming (MIG, WSL): NVML knows, and it makes no context
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            count = ctypes.c_uint(0)
            status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
            return bool(status == 0 and count.value > 0)
    return False


def _hidden(environ: Mapping[str, str], name: str) -> bool:
    """Whether the variable hides every device. The drivers read the list up to the first entry that is none of theirs,
    so `-1`, and a list that begins with it, hide all; an unset variable hides nothing."""
    value = environ.get(name)
    if value is None:
        return False
    first = value.split(",")[0].strip()
    return not first or first.startswith("-") or first.lower() in ("none", "void", "nodevfiles")


def _numbered(dev: Path, name: str) -> list[Path]:
    return [path for path in dev.glob(f"{name}*") if re.fullmatch(rf"{name}\d+", path.name)]


def _installed(name: str) -> bool:
    return sys.modules.get(name) is not None or _spec(name) is not None


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # half-installed packages and stand-ins without a spec
        return None
