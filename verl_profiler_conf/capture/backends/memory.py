"""Records the allocator's history in the window, as a snapshot for pytorch.org/memory_viz."""

from __future__ import annotations

import contextlib
import os
import pickle  # torch's own format for snapshots. This module only writes it.
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends.base import Written
from verl_profiler_conf.capture.files import publish, temporary_name
from verl_profiler_conf.core.errors import UnavailableError

SUFFIX = ".pickle"

PICKLE_PROTOCOL = 4
"""The newest that pytorch.org/memory_viz reads: it refuses 5, which is Python's default from 3.14 on."""


class MemoryProfiler:
    """Records with torch's `_record_memory_history` while the window is open.

    Args:
        device: `cuda`, or `npu`, whose allocator has the same functions.

    Raises:
        UnavailableError: the allocator of this device cannot record its history.
    """

    name = "memory"
    suffix = SUFFIX

    def __init__(self, device: str) -> None:
        if device == "cpu":
            raise UnavailableError(
                "profiler=torch_memory records the allocator of an accelerator, and this process has none "
                "(device: cpu); for the CPU use profiler=torch_window with contents: [memory]"
            )
        import torch

        self._device: Any = getattr(torch, device, None)
        if self._device is None or not self._device.is_available():
            raise UnavailableError(f"profiler=torch_memory: torch sees no {device} device in this process")
        if device == "cuda" and torch.version.hip is not None:
            raise UnavailableError(
                "profiler=torch_memory is not supported on ROCm: its allocator history was never checked there; use "
                "profiler=torch_window with contents: [memory]"
            )
        self._memory: Any = self._device.memory
        if not all(hasattr(self._memory, name) for name in ("_record_memory_history", "_snapshot")):
            raise UnavailableError(
                f"profiler=torch_memory: the allocator of {device} cannot record its history in this torch"
            )
        self._can_name = all(hasattr(self._memory, name) for name in ("_get_memory_metadata", "_set_memory_metadata"))
        self._recording = False

    def busy(self) -> str | None:
        import torch

        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if not self._recording and enabled is not None and enabled():
            return "the allocator's history is already being recorded in this process (_record_memory_history)"
        return None

    def prepare(self) -> None:
        """Nothing to prepare."""

    def start(self) -> None:
        self._device.synchronize()
        # Record Python stacks only. Naming the frames of C++ stacks takes minutes when the snapshot is made.
        self._memory._record_memory_history(enabled="all", context="all", stacks="python")
        self._recording = True

    def annotate(self, name: str) -> AbstractContextManager[None]:
        if not self._recording or not self._can_name:
            return contextlib.nullcontext()
        return self._named(name)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let allocations carry `name`, then give back the text that the job itself had set."""
        before = self._memory._get_memory_metadata()
        self._memory._set_memory_metadata(name)
        try:
            yield
        finally:
            self._memory._set_memory_metadata(before)

    def stop(self) -> MemoryRecording:
        try:
            self._device.synchronize()
            snapshot = self._memory._snapshot()  # taken first, because ending the history empties it
        finally:
            self._end()
        return MemoryRecording(snapshot, has_names=self._can_name)

    def discard(self) -> None:
        if self._recording:
            self._end()

    def _end(self) -> None:
        self._recording = False
        self._memory._record_memory_history(enabled=None)


class MemoryRecording:
    """A snapshot in memory, as torch made it."""

    def __init__(self, snapshot: dict[str, Any], *, has_names: bool = True) -> None:
        self._snapshot = snapshot
        self._has_names = has_names

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        target = path.with_name(path.name + SUFFIX)
        for entry in (entry for trace in self._snapshot.get("device_traces", ()) for entry in trace):
            name = entry.get("user_metadata")
            if name in renames:
                entry["user_metadata"] = renames[name]
        with temporary_name(target) as temporary:
            with temporary.open("xb") as file:
                pickle.dump(self._snapshot, file, protocol=PICKLE_PROTOCOL)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, target)
        events = sum(len(trace) for trace in self._snapshot.get("device_traces", ()))
        self._snapshot = {}
        notes = [] if events else ["no memory was allocated or freed in the window"]
        if not self._has_names:
            notes.append("this torch cannot name allocations, so the snapshot does not tell iterations apart")
        return Written(target, target.stat().st_size, events, "; ".join(notes) or None)
