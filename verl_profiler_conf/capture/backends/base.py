"""What every device profiler is to a session: five verbs, and what they leave behind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Written:
    """What a recording left on disk.

    Attributes:
        path: the trace, a file or (Ascend) a directory; None where the trace is not ours to write (nsys).
        bytes: its size; of a directory, the sum over its files.
        device_events: kernels and copies of the accelerator in it; None where there is no accelerator to record, or
            where they cannot be counted without parsing.
        note: a sentence for log and manifest, when there is something to say (no device events, and why).
    """

    path: Path | None
    bytes: int
    device_events: int | None = None
    note: str | None = None


class Recording(Protocol):
    """A capture that has ended and is not on disk yet."""

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        """Write it, on any thread, once. Whole or not at all, and never over an older file.

        Args:
            path: the trace without its suffix; the folder exists.
            renames: range names that turned out different (speculation made fewer tokens than its upper bound) -> what
                they are to read in the trace.

        Raises:
            FileExistsError: something of that name is there already.
            OSError: the disk refused.
        """
        ...


class DeviceProfiler(Protocol):
    """Records what a device does between `start` and `stop`, again and again, one capture at a time."""

    @property
    def name(self) -> str:
        """`torch`, `ascend`, `memory` or `cudart`."""
        ...

    @property
    def suffix(self) -> str:
        """Ending of a trace's name: `.pt.trace.json.gz`, `.pickle`, `_ascend_pt` (a directory); empty for nsys."""
        ...

    def busy(self) -> str | None:
        """Why a capture cannot start now (another profiler runs in this process), or None. Cheap."""
        ...

    def start(self) -> None:
        """Record from here on, on the calling thread. Work already queued on the device is waited for first, so that
        no neighbour's kernels leak in."""
        ...

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """A named range on the calling thread. Costs nothing when not recording."""
        ...

    def stop(self) -> Recording:
        """End the recording, once the device's queue is drained. Nothing is written: this is the stall of a capture."""
        ...

    def discard(self) -> None:
        """End the recording, keep nothing. Harmless when not recording."""
        ...
