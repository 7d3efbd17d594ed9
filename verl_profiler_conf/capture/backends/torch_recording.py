"""A recording of torch.profiler between its end and its file."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends import pending
from verl_profiler_conf.capture.backends.backlog import backlog
from verl_profiler_conf.capture.backends.base import Written
from verl_profiler_conf.capture.backends.engine_idle import wait_until_idle
from verl_profiler_conf.capture.backends.iteration_counts import TraceCounts
from verl_profiler_conf.capture.backends.raw_trace import (
    RawFile,
    RawInMemory,
    RawTrace,
    check_writable,
    export_name,
    has_room,
    written_first,
)
from verl_profiler_conf.capture.backends.tracefile import pack
from verl_profiler_conf.capture.backends.unlocked import NativeResult

SUFFIX = ".pt.trace.json.gz"

_FULL_BUFFER_EVENTS = 100_000
"""With fewer device events than this, Kineto's device buffer cannot have been full. A kernel and its launch take some
250 bytes of it."""

EXPORT_PATIENCE_S = 60.0
"""Seconds that a thread waits at most for an export that another one has begun. It may be an engine's thread."""

_NAMED = 8
"""Iterations that a note lists by their index."""


class TorchRecording:
    """A finished recording: in the memory of this process, then as raw JSON, then as the final trace.

    Args:
        profiler: torch's, stopped.
        folder: for the raw JSON until the final name is known. None: beside the final trace.
        trace_only: torch made no events for tables, so that no Python object hangs on the recording.
        records_host: whether host operators and ranges were recorded.
        records_device: whether device activity was recorded.
        note: what a reader should know beyond what the trace holds.
    """

    def __init__(
        self,
        profiler: Any,
        *,
        folder: Path | None,
        trace_only: bool,
        records_host: bool,
        records_device: bool,
        note: str | None = None,
    ) -> None:
        self._profiler = profiler
        self._note = note
        self._folder = folder
        self._trace_only = trace_only
        self._records_host = records_host
        self._records_device = records_device
        self._lock = threading.RLock()
        self._raw: RawTrace | None = None

    @property
    def is_empty(self) -> bool:
        """Whether torch holds no trace for this result. Saving such a result crashes the process (torch 2.13)."""
        result = self._result()
        begun = getattr(result, "trace_start_ns", None)
        return result is None or (begun is not None and begun() == 0)

    def save(self) -> None:
        """Export the raw JSON, once. Afterwards another profiler can be prepared.

        Kineto keeps the device's clock ticks and turns them into times when it exports. The next profiler that is
        prepared in this process, whoever prepares it, replaces what the conversion needs. Waits for a while if too much
        raw JSON is there already.

        Raises:
            OSError: the folder cannot be written, and the recording is still in hand; or another thread has begun the
                export and does not come to an end.
        """
        if self._raw is None:
            backlog.wait()  # outside the lock, which the writer needs when it comes to this recording
        self._save(Path.cwd())

    def _save(self, folder: Path) -> None:
        if not self._lock.acquire(timeout=EXPORT_PATIENCE_S):
            raise TimeoutError(f"its export did not come to an end within {EXPORT_PATIENCE_S:.0f} s")
        try:
            if self._raw is None and self._profiler is not None:
                self._raw = self._export(self._folder or folder)
                self._free()
        finally:
            self._lock.release()
        pending.remove(self)

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        target = path.with_name(path.name + SUFFIX)
        if target.exists():
            raise FileExistsError(f"{target} exists already")
        if self._raw is None and self._native() is None:
            wait_until_idle()  # torch's own export stops every other thread of the process for as long as it takes
        self._save(path.parent)
        raw = self._raw
        if raw is None:
            raise RuntimeError("the recording was dropped")
        packed = pack(raw, target, renames, records_device=self._records_device)
        raw.remove()
        events = packed.counts.device_events if self._records_device else None
        notes = _notes(packed.counts, records_host=self._records_host, records_device=self._records_device)
        if self._note is not None:
            notes.append(self._note)
        if packed.flaw is not None:
            notes.append(f"the trace is not valid JSON ({packed.flaw}), so a viewer may refuse it")
        return Written(target, target.stat().st_size, events, "; ".join(notes) or None, packed.counts.iterations)

    def drop(self) -> None:
        """Free the memory of the recording without writing it."""
        with self._lock:
            self._free()
            if self._raw is not None:
                self._raw.remove()
        pending.remove(self)

    def _free(self) -> None:
        native = self._native() if self._trace_only else None
        if native is not None:
            native.clear()
        # torch's profiler lies in a reference cycle. Without these lines its events stay until Python looks for cycles.
        with contextlib.suppress(AttributeError):
            self._profiler.profiler.kineto_results = None
        self._profiler = None

    def _result(self) -> Any:
        return getattr(getattr(self._profiler, "profiler", None), "kineto_results", None)

    def _native(self) -> NativeResult | None:
        result = self._result()
        return NativeResult.of(result) if result is not None else None

    def _export(self, folder: Path) -> RawTrace:
        native = self._native()
        with export_name(folder) as (path, name):
            check_writable(path)
            if native is None:
                raw = RawFile(path, name)
                self._profiler.export_chrome_trace(name)
                raw.count()
                return raw
            if not has_room(folder):
                return _stream(native, path, name)
            raw = RawFile(path, name)
            native.save(name)
            raw.count()
            return raw


def _stream(native: NativeResult, path: Path, name: str) -> RawTrace:
    """Export into a pipe and compress in memory what comes out of it, so that the raw JSON needs no room."""
    pipe = written_first(path)
    os.mkfifo(pipe, 0o600)
    try:
        source = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            saving = threading.Thread(target=native.save, args=(name,), name="verl-profiler-export", daemon=True)
            saving.start()
            compressed, ending = _compress_pipe(source, saving)
            return RawInMemory(compressed, name, ending)
        finally:
            os.close(source)
    finally:
        for left in (pipe, path):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)


def _compress_pipe(source: int, saving: threading.Thread) -> tuple[bytes, bytes]:
    """What came out of the pipe, compressed, and its last bytes."""
    import select

    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    pieces, ending = [], b""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while True:
        finished = not saving.is_alive()  # asked before reading: what was written before the end is still read
        poll.poll(100)
        try:
            data = os.read(source, 1 << 20)
        except BlockingIOError:
            continue
        if data:
            pieces.append(packer.compress(data))
            ending = (ending + data)[-16:]
        elif finished:
            return b"".join([*pieces, packer.flush()]), ending
        else:
            saving.join(0.01)  # Kineto has not opened the pipe yet, or has just closed it


def _notes(counts: TraceCounts, *, records_host: bool, records_device: bool) -> list[str]:
    """Say what a reader of the trace would not expect."""
    notes = []
    if not records_host:
        notes.append("contents has no cpu, so the ranges that name the iterations are not in the trace")
    else:
        empty = [index for index, found in counts.iterations.items() if not found.operators]
        if empty:
            notes.append(
                f"no operator was recorded in {_iterations(empty, len(counts.iterations))}: their forward ran in "
                "another thread or in a CUDA graph, or raised before its first operator"
            )
    if not records_device:
        return notes
    if not counts.device_events:
        return [*notes, no_device_events()]
    idle = [index for index, found in counts.iterations.items() if not found.device_ns]
    if idle:
        note = f"no device work was recorded in {_iterations(idle, len(counts.iterations))}"
        is_tail = idle == list(counts.iterations)[-len(idle) :]
        if is_tail and counts.device_events >= _FULL_BUFFER_EVENTS:
            note += ": Kineto's device buffer (128 MB) was full; set part_iterations lower"
        notes.append(note)
    if counts.outside:
        notes.append(
            f"{counts.outside} of {counts.device_events} device events lie outside the time of the recording: their "
            "times are wrong, because another profiler was prepared before this trace was exported"
        )
    if counts.launches_without_kernel:
        notes.append(
            f"{counts.launches_without_kernel} of {counts.launches} kernel launches have no kernel in the trace: the "
            "profiler lost records, or the launches were captured into a CUDA graph"
        )
    if counts.dropped:
        notes.append(f"CUPTI dropped {counts.dropped} records; set part_iterations lower")
    if counts.stopped_early:
        notes.append("Kineto's device buffer was full before the capture ended; set part_iterations lower")
    return notes


def _iterations(indices: Sequence[int], of: int) -> str:
    listed = ", ".join(map(str, sorted(indices)[:_NAMED])) + (", ..." if len(indices) > _NAMED else "")
    return f"{len(indices)} of {of} iterations ({listed})"


def no_device_events() -> str:
    """Say why a capture on a GPU can be without a kernel, as far as this process can tell."""
    import torch

    causes = []
    injected = os.environ.get("NVTX_INJECTION64_PATH")
    if injected:
        causes.append(f"NVTX_INJECTION64_PATH={injected} is set, which keeps Kineto from using CUPTI; unset it")
    if not torch.profiler.kineto_available():
        causes.append("this torch was built without Kineto; install a build that has it")
    if not causes:
        causes.append(
            "another user of CUPTI in this process or on this GPU (nsys, ncu, another profiler), "
            "NVTX_INJECTION64_PATH set, a driver that does not let this user profile, or a profiler of the CPU alone "
            "that ran first in this process (torch 2.13 then records no device until the process ends)"
        )
    return "no device event was recorded; known causes: " + "; ".join(causes)
