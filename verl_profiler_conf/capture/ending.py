"""Ends the capture of a loop for good, whichever thread asks for it."""

from __future__ import annotations

import logging

from verl_profiler_conf.capture.arming import Arming
from verl_profiler_conf.capture.capturer import Capturer
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.core.gate import CloseReason, Gate

log = logging.getLogger(__name__)

STEP_ASIDE_S = 2.0
"""Seconds that another profiler waits at most for a capture in another thread to end."""


class CaptureEnding:
    """The end of what one loop captures.

    Args:
        arming: what the loop shares with others.
        gate: of the loop.
        capturer: of the loop.
    """

    def __init__(self, arming: Arming, gate: Gate, capturer: Capturer) -> None:
        self._arming = arming
        self._gate = gate
        self._capturer = capturer
        self._awaited: OpenCapture | None = None
        """The capture that another thread was asked to end."""

    def finish(self, reason: CloseReason, *, elsewhere: bool) -> None:
        """Disarm, and end the capture: at once on its own thread, from another thread at its next begin or end.

        Args:
            reason: why an open capture ends, unless it is complete.
            elsewhere: the loop runs on another thread than the calling one.
        """
        with self._capturer.lock:
            capture = self._capturer.capture
            if capture is None and elsewhere:
                self._capturer.finish_from_elsewhere()
            elif capture is None or capture.is_on_this_thread or not capture.thread.is_alive():
                self.finish_here(reason)
            else:
                self._capturer.request.ask(lambda: self.finish_here(reason))
                self._awaited = capture

    def finish_here(self, reason: CloseReason) -> None:
        """Disarm, and end the capture, on the loop's own thread."""
        with self._capturer.lock:
            self._gate.disarm(reason)
            self._capturer.leave_old_thread()
            self._capturer.finish(reason)

    def wait(self, patience_s: float) -> None:
        """Wait so many seconds at most until another thread has ended the capture, if it was asked to. Report a capture
        that is still open then."""
        capture, self._awaited = self._awaited, None
        if capture is None or self._capturer.request.wait(patience_s):
            return
        log.warning(
            "tokens %s: the loop of thread %s did not begin or end an iteration within %.0f s, so its capture is not "
            "finished; its trace is written only if the iteration still ends while the process lives",
            capture.window,
            capture.thread.name,
            patience_s,
        )
        self._arming.placeholders.report_unfinished(capture, furthest=self._capturer.furthest)

    def step_aside(self) -> None:
        """Another profiler is about to be prepared in this process: end the recording, and go on after it."""
        with self._capturer.lock:
            capture = self._capturer.capture
            if capture is None or capture.is_on_this_thread:
                self._capturer.step_aside()
                return
            self._capturer.request.ask(self._capturer.step_aside)
        if not self._capturer.request.wait(STEP_ASIDE_S):
            log.warning("tokens %s: the loop did not end its capture in time; both traces may be wrong", capture.window)
