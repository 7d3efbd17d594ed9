"""Finds the accelerator that this process can use. It makes no CUDA context, and does not import torch.

A CUDA context in the launching process would cost GPU memory and break every later fork. So this module reads device
nodes, NVML, the environment, and the version file of the installed torch.
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
_BUILDS = ("cuda", "hip", "xpu")


def detect_device(asked: str = "auto", *, environ: Mapping[str, str] | None = None, dev: Path = _DEV) -> str:
    """Return `cuda`, `npu` or `cpu`.

    Args:
        asked: the `device` setting. A value other than `auto` is returned as it is: the launching process often has no
            device where its workers have one.
        environ: the environment. None means that of this process.
        dev: folder with the device nodes.
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
    """Whether this process can use an Ascend NPU: the device is visible and torch_npu is installed."""
    if _hides_all(environ, "ASCEND_RT_VISIBLE_DEVICES"):
        return False
    return any(_numbered_nodes(dev, "davinci")) and _installed("torch_npu")


def has_cuda(environ: Mapping[str, str], dev: Path = _DEV) -> bool:
    """Whether this process can use a GPU: it is visible and torch was built for it. ROCm's torch also says `cuda`."""
    built_for = torch_built_for()
    if built_for == "cuda":
        return not _hides_all(environ, "CUDA_VISIBLE_DEVICES") and _nvidia_gpus(dev)
    if built_for == "hip":
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return not any(_hides_all(environ, name) for name in names) and (dev / "kfd").exists()
    return False


def has_xpu(dev: Path = _DEV) -> bool:
    """Whether this process can use an Intel GPU: there is a render node and torch was built for it."""
    return torch_built_for() == "xpu" and any((dev / "dri").glob("renderD*"))


def torch_built_for() -> str | None:
    """Return `cuda`, `hip` or `xpu`. None means that torch is missing or was built for the CPU only."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is not None:
        return next((name for name in _BUILDS if getattr(version, name, None)), None)
    spec = _spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for name in _BUILDS:
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, re.MULTILINE):  # a text is assigned, not None
            return name
    return None


def _nvidia_gpus(dev: Path) -> bool:
    if any(_numbered_nodes(dev, "nvidia")):
        return True
    if not (dev / "nvidiactl").exists() and not (dev / "dxg").exists():
        return False
    # MIG and WSL name their nodes differently. NVML counts them and makes no context.
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            count = ctypes.c_uint(0)
            status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
            return bool(status == 0 and count.value > 0)
    return False


def _hides_all(environ: Mapping[str, str], name: str) -> bool:
    """Whether the variable hides every device.

    Drivers read the list up to the first entry that they do not know. So `-1` hides all, and so does a list that begins
    with it. An unset variable hides nothing.
    """
    value = environ.get(name)
    if value is None:
        return False
    first = value.split(",")[0].strip()
    return not first or first.startswith("-") or first.lower() in ("none", "void", "nodevfiles")


def _numbered_nodes(dev: Path, name: str) -> list[Path]:
    return [path for path in dev.glob(f"{name}*") if re.fullmatch(rf"{name}\d+", path.name)]


def _installed(name: str) -> bool:
    return sys.modules.get(name) is not None or _spec(name) is not None


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a package that is half installed, or a stand-in without a spec
        return None
