"""What a gate is told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from verl_profiler_conf.core.window import TokenWindow

Batch = Mapping[str, range]
"""Request id -> the response token indices it is about to make, in scheduling order."""

Finished = Mapping[str, "int | None"]
"""Request id -> its final number of response tokens, None where the engine does not tell."""

CloseReason = Literal["window", "request_end", "stop_profile", "max_iterations", "gap", "part", "job_end", "error"]
"""`gap`: the lead made no token for too long; the rest of its window is the next part. `part`: the part is as long as
`part_iterations` allows; the next one begins with the next iteration."""


@dataclass(frozen=True)
class Opening:
    """A capture that begins with this iteration."""

    window: TokenWindow
    part: int = 1
    """1, or more for the rest of a window whose lead paused longer than a capture waits."""


@dataclass(frozen=True)
class RecordedIteration:
    """One captured iteration: the tracked request makes tokens `[lo, hi)`.

    Under speculation `hi` is an upper bound until `Verdict.settled` gives the truth.
    """

    lo: int
    hi: int
    request: str
    gap: bool = False
    """The tracked request makes no token in it: preempted, or a pipeline bubble."""


@dataclass(frozen=True)
class Verdict:
    """What to do around one iteration, in the order of the fields."""

    settled: int | None = None
    """The token that the last captured iteration without a gap really reached (its true `hi`)."""
    discard: bool = False
    """Throw the open capture away: it turned out to hold no token of the window."""
    close: CloseReason | None = None
    """Close the open capture before the iteration."""
    open: Opening | None = None
    """Then open a capture, still before the iteration."""
    iteration: RecordedIteration | None = None
    """The iteration is captured."""
    close_after: CloseReason | None = None
    """Close the capture directly after the iteration: it completes the window, and nothing more need run first."""
    prepare: bool = False
    """A capture is a few iterations away: get the device profiler ready. It may still not come."""


NO_ACTION = Verdict()
"""Nothing to do; one shared object, since this is the answer of nearly every iteration of a rollout."""

PREPARE = Verdict(prepare=True)
"""Nothing to do but to get ready."""

NONE_FINISHED: Finished = {}
"""No request has ended since the iteration before; one shared object, for the same reason."""
