"""The interface between a session and a device profiler."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class IterationCounts:
    """What the trace holds of one captured iteration.

    Attributes:
        operators: host operators that began while the iteration's range was open, on any recorded thread. Nested
            operators count too.
        kernels: kernels launched while the range was open.
        device_ns: sum of the durations of these kernels and of the copies and memsets launched then, in nanoseconds.
            Work that runs side by side on several streams counts several times.
    """

    operators: int = 0
    kernels: int = 0
    device_ns: int = 0


@dataclass(frozen=True)
class Written:
    """What a recording has become on disk.

    Attributes:
        path: the trace, a file or (on Ascend) a directory. None where another program writes the trace (nsys).
        bytes: size of the trace. For a directory, the sum of its files.
        device_events: number of kernels and copies of the accelerator in the trace. None without an accelerator, or
            where counting would need a parser.
        note: what a reader should know, for the log and the manifest. For example: no device events, and why.
        iterations: index of a captured iteration -> what the trace holds of it. Empty where the trace is not read.
    """

    path: Path | None
    bytes: int
    device_events: int | None = None
    note: str | None = None
    iterations: Mapping[int, IterationCounts] = field(default_factory=dict)


class Recording(Protocol):
    """A capture that has ended and is not on disk yet."""

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        """Write the trace, whole or not at all. Any thread may call this, once.

        Args:
            path: the trace without its suffix. The folder exists.
            renames: name of a range in the recording -> name that the trace should have. Speculative decoding can make
                fewer tokens than the range was named for.

        Raises:
            FileExistsError: a file of that name exists. It is left as it is.
            OSError: the file could not be written.
        """
        ...


class DeviceProfiler(Protocol):
    """Records what a device does between `start` and `stop`. It can do so many times, one capture at a time."""

    @property
    def name(self) -> str:
        """`torch`, `ascend`, `memory` or `cudart`."""
        ...

    @property
    def suffix(self) -> str:
        """Ending of the trace's name: `.pt.trace.json.gz`, `.pickle`, `_ascend_pt` (a directory), or empty (nsys)."""
        ...

    def busy(self) -> str | None:
        """Why a capture cannot start now, for example because another profiler runs. None when it can. Cheap."""
        ...

    def prepare(self) -> None:
        """Get ready to record a few iterations ahead, so that the first recorded ones are not disturbed by it.

        Costs the rollout little and records nothing. `start` follows, or `discard`. Does nothing where there is
        nothing to prepare, and when it was called already.
        """
        ...

    def start(self) -> None:
        """Start recording on the calling thread.

        Waits first for the work that is already queued on the device, so that kernels of earlier iterations stay out.
        """
        ...

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """A named range on the calling thread. Free of cost while nothing records."""
        ...

    def stop(self) -> Recording:
        """Wait for the device, then end the recording. Writes no file. The rollout stands still during this call."""
        ...

    def discard(self) -> None:
        """End the recording, or what `prepare` began, and keep nothing of it. Does nothing when there is neither."""
        ...
