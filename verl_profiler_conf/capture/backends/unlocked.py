"""Saves Kineto's trace without holding Python's lock (the GIL).

torch's `_ProfilerResult.save` holds the lock while it writes: a quarter of a second for 30 iterations of a 24-layer
model. No other thread of the process runs Python meanwhile, and the rollout stands still. The C++ method below it needs
no Python. This module calls that method through ctypes, which releases the lock.

This is done only for releases of torch that this module was run with (`RELEASES`), and each step is verified.
pybind11's exchange protocol gives the address, after it has checked the compiler's ABI and the type. The symbol is
found by its full mangled name, which fixes its signature. When a step fails, `NativeResult.of` returns None, and the
caller saves through torch. The environment variable `VERL_PROFILER_CONF_LOCKED_EXPORT` has the same effect, in case
this module crashes a process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

LOCKED_EXPORT = "VERL_PROFILER_CONF_LOCKED_EXPORT"
"""Environment variable. Any value asks for torch's own export."""

RELEASES = frozenset({"2.13.0", "2.14.1"})
"""Releases of torch that this module was run with. `make test-torch TORCH=<release>` runs its tests on another one. On
a release that is not named here torch's own export is used, once the engine is idle or has been waited for."""

_CLASS = "N5torch8autograd8profiler14ProfilerResult"
_TYPE_INFO = f"_ZTI{_CLASS}E"
_SAVE = f"_Z{_CLASS}4saveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_CONSTRUCT = f"_Z{_CLASS}C1Ev"
_DESTROY = f"_Z{_CLASS}D1Ev"
_PLATFORM_ABI = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"
"""pybind11's name for Linux and libstdc++ with C++11 strings. A torch with another ABI returns None for it."""


class _String(ctypes.Structure):
    """The layout of libstdc++'s std::string: address, length, and 16 bytes that only its owner reads."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("rest", ctypes.c_char * 16)]


class _Symbols:
    def __init__(self) -> None:
        import torch

        libraries = Path(torch.__file__).parent / "lib"
        mode = os.RTLD_NOW | os.RTLD_NOLOAD  # find only libraries that are loaded already
        native = ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=mode)
        binding = ctypes.CDLL(str(libraries / "libtorch_python.so"), mode=mode)
        self.type_info = ctypes.addressof(ctypes.c_char.in_dll(binding, _TYPE_INFO))
        self.save = native[_SAVE]
        self.save.argtypes, self.save.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        self.construct, self.destroy = native[_CONSTRUCT], native[_DESTROY]
        for function in (self.construct, self.destroy):
            function.argtypes, function.restype = [ctypes.c_void_p], None


@lru_cache(maxsize=1)
def _symbols() -> _Symbols | None:
    import torch

    if not sys.platform.startswith("linux") or not torch.profiler.kineto_available():
        return None  # without Kineto the method throws, and nothing can catch that here
    try:
        return _Symbols()
    except (OSError, AttributeError, ValueError):  # a library or a symbol is missing
        return None


def _torch_release() -> str:
    import torch

    return str(torch.__version__).partition("+")[0]


class NativeResult:
    """The C++ object of one `_ProfilerResult`. It keeps the Python object alive."""

    def __init__(self, result: Any, address: int, symbols: _Symbols) -> None:
        self._result = result
        self._address = address
        self._symbols = symbols
        self._saved = False

    @classmethod
    def of(cls, result: Any) -> NativeResult | None:
        """Find the C++ object of `result`. None when this torch does not give its address."""
        if os.environ.get(LOCKED_EXPORT) or _torch_release() not in RELEASES:
            return None
        exchange = getattr(result, "_pybind11_conduit_v1_", None)
        symbols = _symbols()
        if exchange is None or symbols is None:
            return None
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        try:
            # the protocol wants typeid(std::type_info).name() as the capsule's name
            capsule = exchange(_PLATFORM_ABI, new(symbols.type_info, b"St9type_info", None), b"raw_pointer_ephemeral")
        except (TypeError, RuntimeError):  # a protocol of another version
            return None
        if capsule is None:
            return None
        name_of = ctypes.pythonapi.PyCapsule_GetName
        name_of.argtypes, name_of.restype = [ctypes.py_object], ctypes.c_char_p
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.argtypes, pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        address = pointer_of(capsule, name_of(capsule))
        return cls(result, address, symbols) if address else None

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON. A failure to write is not reported: the caller checks the file.

        Raises:
            RuntimeError: the trace was saved before. The C++ method would throw, and nothing could catch that.
        """
        if self._saved:
            raise RuntimeError("a trace can be saved once")
        self._saved = True
        encoded = os.fsencode(path)
        buffer = ctypes.create_string_buffer(encoded)
        text = _String(ctypes.addressof(buffer), len(encoded), b"")
        self._symbols.save(self._address, ctypes.addressof(text))

    def clear(self) -> None:
        """Free the memory of the trace without holding the lock. It takes half a microsecond an event.

        An empty result takes its place, so the Python object stays valid. Call this only for results without an event
        tree (`trace_only`), because a tree can hold Python objects.
        """
        self._symbols.destroy(self._address)
        self._symbols.construct(self._address)
