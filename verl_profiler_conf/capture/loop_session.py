"""The session of one loop in the job's own process: a `generate` call, or a decode loop."""

from __future__ import annotations

import threading

from verl_profiler_conf.capture import live
from verl_profiler_conf.capture.arming import Arming
from verl_profiler_conf.capture.recorder import recorder
from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.core.gate import NONE_FINISHED, Batch, CloseReason, Finished


class LoopSession(Session):
    """A session that ends with its loop, and tells the recorder of each iteration.

    Args:
        arming: shared with the other loops of the engine.
    """

    is_loop = True

    def __init__(self, arming: Arming) -> None:
        source = arming.source
        super().__init__(arming.settings, engine=source.engine, version=source.version, rank=source.rank, arming=arming)
        self._is_over = False

    def begin(self, batch: Batch, finished: Finished = NONE_FINISHED) -> None:
        """Before an iteration, as of `Session`."""
        thread = threading.current_thread()
        if thread is not self.thread:
            if self.thread is None:
                live.add(self)
            else:
                self._capturer.one_part_an_iteration = True
            self.thread = thread
        recorder.iteration_begins(self)
        super().begin(batch, finished)

    def end(self) -> None:
        """After the iteration."""
        super().end()
        recorder.iteration_ends(self)

    @property
    def is_waiting(self) -> bool:
        """Whether any iteration may still be captured."""
        return self.gate.armed and self.arming.is_waiting

    def _is_elsewhere(self) -> bool:
        return self.thread is not None and self.thread is not threading.current_thread()

    def finish(self, finished: Finished = NONE_FINISHED, reason: CloseReason | None = None) -> None:
        """The loop is over. Repeatable.

        Args:
            finished: as for `begin`.
            reason: why a capture closes here, where the loop knows better (`error`).
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            if reason == "error":
                self._capturer.fail_iteration()  # before it is ended as one that made its tokens
            self.end()
            self.idle(finished, reason)
        finally:
            self.arming.add_loop(self._placeholders.iterations_before(self.iteration + 1), self.gate.furthest)
            live.remove(self)
