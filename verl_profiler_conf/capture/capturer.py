"""Opens, continues and closes the captures of one loop, as the verdicts of its gate say."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from verl_profiler_conf.capture import torch_state
from verl_profiler_conf.capture.arming import Arming
from verl_profiler_conf.capture.backends.engine_idle import engine_runs
from verl_profiler_conf.capture.interruptions import signals_held_back
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.preparation import Preparation, busy_with
from verl_profiler_conf.capture.recorder import Loop, recorder
from verl_profiler_conf.capture.thread_request import ThreadRequest
from verl_profiler_conf.core.gate import NO_ACTION, Batch, CloseReason, Gate, RecordedIteration, Verdict
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.window import TokenWindow

log = logging.getLogger(__name__)

_CONTINUED = ("part", "gap", "other_profiler", "thread")
"""Reasons that close a part of a capture, and not the whole capture."""


class RecordingLoop(Loop, Protocol):
    """The loop of a capturer. It keeps its own open capture."""

    @property
    def recording(self) -> OpenCapture | None:
        """What is being recorded of the loop."""
        ...

    @recording.setter
    def recording(self, capture: OpenCapture | None) -> None: ...


class Capturer:
    """The captures of one loop, one after the other.

    Args:
        arming: what the loop shares with others.
        loop: in whose name the recorder is leased.
        gate: of the loop.
    """

    def __init__(self, arming: Arming, loop: RecordingLoop, gate: Gate) -> None:
        self.one_part_an_iteration = False
        """The loop changes its thread, so each iteration is a part: a part has to end on the thread it began on."""
        self._arming = arming
        self._loop = loop
        self._gate = gate
        self._window: TokenWindow | None = None
        """The window that the gate is in. Nothing is recorded of it while another profiler runs."""
        self._parts = 0
        self._missed: list[RecordedIteration] = []
        self._why_missed = ""
        self._preparation = Preparation(arming, loop)
        self._close_after: CloseReason | None = None
        self._is_finished = False
        self.lock = threading.RLock()
        """Held while a capture is opened, continued or closed."""
        self.request = ThreadRequest()
        """What another thread asks of the capture's own."""

    @property
    def capture(self) -> OpenCapture | None:
        """What is being recorded."""
        return self._loop.recording

    @capture.setter
    def capture(self, capture: OpenCapture | None) -> None:
        self._loop.recording = capture

    # -- around an iteration ------------------------------------------------------------------------------------------

    def before_iteration(self, verdict: Verdict, batch: Batch, iteration: int) -> None:
        """Do what a verdict asks for before the iteration. With an empty batch: the engine has nothing left to run."""
        self.answer()
        self.leave_old_thread()
        if self._is_finished:  # by another thread, while the gate worked out its verdict
            self._gate.disarm()
            recorder.give_back(self._loop)
            return
        if self._close_after is not None:  # `end` did not come: the engine failed inside the last iteration
            reason, self._close_after = self._close_after, None
            self.close(reason)
        elif verdict is not NO_ACTION:
            if self.capture is not None:
                self.capture.leave()
                if verdict.settled is not None:
                    self.capture.settle(verdict.settled)
            if verdict.discard:
                self._discard()
            elif verdict.close is not None:
                self.close(verdict.close)
        self._look_ahead(verdict)
        if verdict.iteration is not None:
            self._record(verdict.iteration, batch, iteration)
            self._close_after = verdict.close_after
            if self.capture is None and verdict.close_after is not None:  # nothing is recorded that could still end
                self.close(verdict.close_after)

    def _look_ahead(self, verdict: Verdict) -> None:
        """A window opens with the iteration, or is a few iterations away."""
        if verdict.prepare:
            self._preparation.prepare()
        if verdict.open is not None:
            self._window = verdict.open.window
            if verdict.open.part == 1:
                self._parts, self._missed = 0, []

    def after_iteration(self) -> None:
        """The iteration has ended."""
        if self.capture is not None:
            if not self.capture.is_on_this_thread:
                return
            self.capture.leave()
        self.answer()
        if self._close_after is not None:
            reason, self._close_after = self._close_after, None
            self.close(reason)
        elif self.one_part_an_iteration and self.capture is not None:
            self.close("thread")

    def fail_iteration(self) -> None:
        """The iteration that was begun last has raised: it made no token, and the capture ends by error."""
        if self.capture is not None:
            self.capture.fail_iteration()
        if self._close_after is not None:
            self._close_after = "error"

    def _record(self, row: RecordedIteration, batch: Batch, iteration: int) -> None:
        if self.capture is not None and len(self.capture.rows) >= self._arming.settings.part_iterations:
            self.close("part")
        if self.capture is None:
            self._open_part()
        if self.capture is not None:
            self.capture.enter(row, iteration, batch)
            self.capture.mixed_ranges += recorder.others_on_this_thread(self._loop)
        else:
            self._missed.append(row)

    def _open_part(self) -> None:
        """Record from here on: the window's first part, or its next one. Not while another profiler runs."""
        if self._window is None:
            return
        started_ns = time.perf_counter_ns()
        profiler = self._arming.device_profiler()
        busy = busy_with(profiler)
        if busy is not None:
            self._why_missed = busy
            if not self._parts:  # else it is reported which iterations are missing
                warn_once(log, f"no capture of tokens {self._window}: {busy}; the job goes on")
            return
        self._arming.placeholders.report_opening(self._window, self._parts + 1, profiler.name, furthest=self.furthest)
        torch_state.call_before_other_profilers(step_aside)
        engine_runs()
        with signals_held_back():
            recorder.has_recorded = True
            self.capture = OpenCapture(self._window, self._parts + 1, profiler)
            self._parts += 1
            stall_ns = self._preparation.use()
        recorder.count_others_from_here(self._loop)
        self.capture.opening_stall_ns = stall_ns + time.perf_counter_ns() - started_ns

    def unprepare(self) -> None:
        """The capture that the device profiler was prepared for does not come for now."""
        if self.capture is None:
            self._preparation.undo()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def close(self, reason: CloseReason) -> None:
        """End the capture, and have it written."""
        self._close_after = None
        try:
            with signals_held_back():
                capture, self.capture = self.capture, None
                if capture is not None:
                    self._write(capture, reason)
        finally:
            if reason == "gap":
                recorder.give_back(self._loop)
            elif reason not in _CONTINUED:
                self._end_window(reason)

    def finish(self, reason: CloseReason) -> None:
        """The loop captures nothing more. An open capture ends for this reason, unless it is complete."""
        self.close(self._close_after or reason)
        self.unprepare()

    def finish_from_elsewhere(self) -> None:
        """The loop captures nothing more. Called on another thread, while nothing is recorded."""
        self._is_finished = True
        self._gate.armed = False

    def save_after_failure(self, error: Exception) -> None:
        """Keep what was recorded until the failure, and leave placeholders for what was not."""
        capture, self.capture = self.capture, None
        self._close_after = None
        try:
            if capture is not None and capture.is_on_this_thread:
                self._write(capture, "error", error)
            elif capture is not None:
                recorder.leave_on_thread(
                    capture, lambda: self._write(capture, "error", error), lambda: self._report_lost(capture)
                )
        except Exception:
            log.debug("the capture could not be saved after the failure", exc_info=True)
        try:
            self._arming.placeholders.report_failure(error, furthest=self.furthest)
        except Exception:
            log.debug("the failure could not be written into a placeholder manifest", exc_info=True)
        self._window = None
        recorder.give_back(self._loop)

    def _write(self, capture: OpenCapture, reason: CloseReason, error: Exception | None = None) -> None:
        if not capture.rows:
            self._throw_away(capture)
            return
        capture.other_iterations = recorder.others_until_here()
        recording = capture.end()
        capture.coverage = self._gate.coverage(capture.window)
        self._arming.outputs.write(capture, recording, reason, furthest=self.furthest, error=error)

    def _throw_away(self, capture: OpenCapture) -> None:
        self._arming.placeholders.report_discarded(capture.window, furthest=self.furthest)
        capture.discard()

    def _discard(self) -> None:
        capture, self.capture = self.capture, None
        if capture is not None:
            with signals_held_back():
                self._throw_away(capture)
        self._window = None
        recorder.give_back(self._loop)

    def _end_window(self, reason: CloseReason) -> None:
        window, self._window = self._window, None
        recorder.give_back(self._loop)
        if window is None or not self._missed:
            return
        self._arming.outputs.report_missed(window, self._missed, self._parts, self._why_missed, furthest=self.furthest)
        if not self._parts and reason in ("window", "request_end", "max_iterations"):
            self._gate.wait_again(window)

    @property
    def furthest(self) -> int:
        """Furthest token that any loop of this arming has made."""
        return max(self._arming.furthest, self._gate.furthest)

    # -- other threads ------------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Do what another thread has asked for. Only on the thread of the capture."""
        if self.capture is None or self.capture.is_on_this_thread:
            self.request.answer()

    def leave_old_thread(self) -> None:
        """The loop has changed its thread during a capture: the recording can end on the old thread only."""
        capture = self.capture
        if capture is None or capture.is_on_this_thread:
            return
        self.capture = None
        self.one_part_an_iteration = True
        warn_once(
            log,
            f"tokens {capture.window}: the loop changes its thread between iterations, and torch records one thread; "
            "each iteration becomes a part of its own",
        )
        recorder.leave_on_thread(capture, lambda: self._write(capture, "thread"), lambda: self._report_lost(capture))
        self.answer()  # what was asked of the old thread

    def _report_lost(self, capture: OpenCapture) -> None:
        """The thread of the recording has ended, and the recording with it."""
        torch_state.turn_off()
        rows = [RecordedIteration(row.lo, row.hi, row.request or "", row.gap) for row in capture.rows]
        why = "the thread that recorded them has ended, and torch's recording with it"
        self._arming.outputs.report_missed(capture.window, rows, capture.part, why, furthest=self.furthest)

    def step_aside(self) -> None:
        """Another profiler is about to be prepared in this process: end the recording first."""
        if self.capture is not None:
            warn_once(
                log,
                f"tokens {self.capture.window}: another torch profiler starts in this process inside the window; the "
                "capture ends before it, and the rest becomes a further part once that profiler has ended",
            )
            self.close("other_profiler")


def step_aside() -> None:
    """End what is being recorded in this process, because another profiler is about to be prepared."""
    holder = recorder.holder
    if holder is not None:
        holder.step_aside()
