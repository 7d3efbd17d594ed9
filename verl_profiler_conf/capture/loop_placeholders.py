"""Says what one loop has not captured so far, in placeholder manifests: its process may be killed at any time."""

from __future__ import annotations

from verl_profiler_conf.capture.arming import Arming
from verl_profiler_conf.capture.capturer import Capturer
from verl_profiler_conf.core.gate import Gate


class LoopPlaceholders:
    """The placeholders of one loop.

    Args:
        arming: what the loop shares with others.
        gate: of the loop.
        capturer: of the loop.
        is_armed: the windows are waited for from the start.
        next_iteration: index of the loop's first iteration.
    """

    def __init__(self, arming: Arming, gate: Gate, capturer: Capturer, *, is_armed: bool, next_iteration: int) -> None:
        self._arming = arming
        self._gate = gate
        self._capturer = capturer
        self._was_armed = is_armed
        """Whether the windows were waited for at any time."""
        self._armed_at = next_iteration
        """Index of the first iteration since arming."""

    def arm(self, next_iteration: int) -> None:
        """The windows are waited for again from here on. What was left before stays as it is."""
        if self._was_armed:  # else the only placeholder says "never armed", and is written over
            self._arming.placeholders.new_arming()
        self._was_armed = True
        self._armed_at = next_iteration

    def iterations_before(self, next_iteration: int) -> int:
        """How many iterations of the loop ran since arming."""
        return next_iteration - self._armed_at

    def leave(self, next_iteration: int) -> None:
        """Say for each window without a capture how far the responses came. Nothing where no iteration ran."""
        if next_iteration < 1 or self._arming.is_dead:
            return
        if not self._was_armed:
            self._arming.placeholders.report_never_armed()
        elif self._gate.armed:
            for window in self._gate.unreached:
                self._arming.placeholders.report_unreached(
                    window,
                    furthest=self._capturer.furthest,
                    iterations=self._arming.iterations + self.iterations_before(next_iteration),
                    why=self._gate.why_unreached(window),
                )
