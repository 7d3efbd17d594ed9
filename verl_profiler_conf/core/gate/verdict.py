"""The input and the answer of a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from verl_profiler_conf.core.window import TokenWindow

Batch = Mapping[str, range]
"""Request id -> the response token indices it is about to make, in scheduling order."""

Finished = Mapping[str, "int | None"]
"""Request id -> its final number of response tokens; None where the engine does not tell."""

CloseReason = Literal[
    "window",
    "request_end",
    "stop_profile",
    "max_iterations",
    "part",
    "gap",
    "other_profiler",
    "thread",
    "job_end",
    "error",
]
"""`part`, `gap`, `other_profiler` and `thread` end a part, not the capture.

- `part`: it has as many iterations as `part_iterations` allows. The next one begins with the next iteration.
- `gap`: the lead made no token for too long.
- `other_profiler`: other code prepared a profiler in the process.
- `thread`: the loop changes its thread, and a recording ends on the thread it began on.
"""


@dataclass(frozen=True)
class Opening:
    """A capture begins with this iteration."""

    window: TokenWindow
    part: int = 1
    """2 and more: the rest of a window, after a pause of the lead that was too long to stay open."""


@dataclass(frozen=True)
class RecordedIteration:
    """One captured iteration. The tracked request makes tokens `[lo, hi)` in it.

    Under speculation `hi` is an upper bound until `Verdict.settled` tells the real one.
    """

    lo: int
    hi: int
    request: str
    gap: bool = False
    """The tracked request makes no token in it, because it is preempted or the pipeline has a bubble."""


@dataclass(frozen=True)
class Verdict:
    """What to do around one iteration, in the order of the fields."""

    settled: int | None = None
    """The real `hi` of the last recorded iteration that was no gap."""
    discard: bool = False
    """Throw the open capture away, because it holds no token of the window."""
    close: CloseReason | None = None
    """Close the open capture, before the iteration."""
    open: Opening | None = None
    """Then open a capture, before the iteration."""
    iteration: RecordedIteration | None = None
    """Record the iteration."""
    close_after: CloseReason | None = None
    """Close the capture directly after the iteration, because it completes the window."""
    prepare: bool = False
    """A capture is a few iterations away: get the device profiler ready. The capture may still not come."""


NO_ACTION = Verdict()
"""Nothing to do. One shared object, because nearly every iteration of a rollout is answered with it."""

PREPARE = Verdict(prepare=True)
"""Nothing to do but to get ready."""

NONE_FINISHED: Finished = {}
"""No request has ended since the last iteration. One shared object, for the same reason."""
