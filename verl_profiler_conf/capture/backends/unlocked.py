"""Kineto's export without Python's lock.

torch binds `_ProfilerResult.save` so that it holds the GIL for as long as it writes: a quarter of a second for 30
iterations of a 24-layer model, in which no other thread of the process runs Python, the rollout's neither. The C++
method underneath needs no Python. It is called here through ctypes, which lets go of the lock for the call.

That is done only where each step can be verified: the address comes from pybind11's own exchange protocol, which checks
the compiler's ABI and the type; the symbol is looked up by its full mangled name, which fixes the signature. Anything
missing (an older torch, another platform) and `Unlocked.of` answers None: the caller then saves the ordinary way. So it
does where `VERL_PROFILER_CONF_LOCKED_EXPORT` is set: a way out, should this one end a process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

LOCKED_EXPORT = "VERL_PROFILER_CONF_LOCKED_EXPORT"
"""Environment variable; anything in it asks for torch's own export."""

_CLASS = "N5torch8autograd8profiler14ProfilerResult"
_TYPE_INFO = f"_ZTI{_CLASS}E"
_SAVE = f"_Z{_CLASS}4saveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_CONSTRUCT = f"_Z{_CLASS}C1Ev"
_DESTROY = f"_Z{_CLASS}D1Ev"
_PLATFORM_ABI = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"
"""pybind11's name for Linux, libstdc++ with C++11 strings. A torch of another ABI answers None to it."""


class _String(ctypes.Structure):
    """libstdc++'s std::string as a reader sees it: where, how long, and 16 bytes that only an owner looks at."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("rest", ctypes.c_char * 16)]


class _Symbols:
    def __init__(self) -> None:
        import torch

        libraries = Path(torch.__file__).parent / "lib"
        mode = os.RTLD_NOW | os.RTLD_NOLOAD  # already loaded, or not at all
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
        return None  # without Kineto the method throws, and nothing could catch it
    try:
        return _Symbols()
    except (OSError, AttributeError, ValueError):  # no such library, no such symbol
        return None


class Unlocked:
    """The C++ object behind one `_ProfilerResult`, which lives as long as this does."""

    def __init__(self, result: Any, address: int, symbols: _Symbols) -> None:
        self._result = result
        self._address = address
        self._symbols = symbols
        self._saved = False

    @classmethod
    def of(cls, result: Any) -> Unlocked | None:
        """The object behind `result`, or None where this torch does not say where it is."""
        if os.environ.get(LOCKED_EXPORT):
            return None
        exchange = getattr(result, "_pybind11_conduit_v1_", None)
        symbols = _symbols()
        if exchange is None or symbols is None:
            return None
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        try:
            # the capsule's name is typeid(std::type_info).name(), by the protocol
            capsule = exchange(_PLATFORM_ABI, new(symbols.type_info, b"St9type_info", None), b"raw_pointer_ephemeral")
        except (TypeError, RuntimeError):  # a protocol of another kind
            return None
        if capsule is None:
            return None
        name_of = ctypes.pythonapi.PyCapsule_GetName
        name_of.argtypes, name_of.restype = [ctypes.py_object], ctypes.c_char_p
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.argtypes, pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        address = pointer_of(capsule, name_of(capsule))
        return cls(result, address, symbols) if address else None

    def save(self, path: Path) -> None:
        """Write the trace as JSON. A file that could not be opened is not reported: look whether it is there.

        Raises:
            RuntimeError: saved before. The C++ method throws then, and nothing could catch it.
        """
        if self._saved:
            raise RuntimeError("a trace can be saved once")
        self._saved = True
        encoded = os.fsencode(path)
        buffer = ctypes.create_string_buffer(encoded)
        text = _String(ctypes.addressof(buffer), len(encoded), b"")
        self._symbols.save(self._address, ctypes.addressof(text))

    def clear(self) -> None:
        """Free what the trace holds, again without the lock: half a microsecond an event, which Python's own
        deallocation would spend holding it. An empty result takes its place, so the Python object stays whole.

        Only for results without an event tree (`trace_only`): a tree may hold Python objects.
        """
        self._symbols.destroy(self._address)
        self._symbols.construct(self._address)
