"""What a job with several engines is asked to capture, where a framework's preset knows it before the job starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_profiler_conf.core.window import TokenWindow


@dataclass(frozen=True)
class AskedCapture:
    """One capture that was asked for.

    Attributes:
        step: of the job; None: whatever the step.
        rank: global rank that captures.
        window: response tokens.
    """

    step: int | None
    rank: int
    window: TokenWindow


@dataclass(frozen=True)
class Asked:
    """In each step, on each rank, each window.

    Attributes:
        steps: of the job, ascending; empty: once, whatever the step.
        replicas: global rank that captures -> the replica that owns it.
        windows: response tokens.
    """

    steps: tuple[int, ...]
    replicas: Mapping[int, int]
    windows: tuple[TokenWindow, ...]

    def captures(self) -> Iterator[AskedCapture]:
        """One by one: by step, then by window, then by rank."""
        for step in self.steps or (None,):
            for window in self.windows:
                for rank in sorted(self.replicas):
                    yield AskedCapture(step, rank, window)
