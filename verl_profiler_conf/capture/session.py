"""Drives the device profiler by the tokens that one loop is about to make. An engine file calls nothing else.

It calls `begin` before each iteration and `end` after it. Opening and closing the device profiler, naming the ranges,
writing traces and manifests follow from that. No method raises into the engine, unless `on_error: raise`.
The rules for several loops in one process stand in `recorder`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace

from verl_profiler_conf.capture import live
from verl_profiler_conf.capture.arming import Arming
from verl_profiler_conf.capture.backends import DeviceProfiler
from verl_profiler_conf.capture.backends.engine_idle import engine_is_idle
from verl_profiler_conf.capture.capturer import Capturer
from verl_profiler_conf.capture.ending import CaptureEnding
from verl_profiler_conf.capture.form import Source
from verl_profiler_conf.capture.guard import guarded
from verl_profiler_conf.capture.live import PATIENCE_S, close_all
from verl_profiler_conf.capture.loop_placeholders import LoopPlaceholders
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.recorder import recorder
from verl_profiler_conf.capture.writer import Writer
from verl_profiler_conf.core.errors import UnavailableError, why_no_capture
from verl_profiler_conf.core.gate import NO_ACTION, NONE_FINISHED, PREPARE, Batch, CloseReason, Finished
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow

__all__ = ["Session", "close_all"]

log = logging.getLogger(__name__)


class Session:
    """Drives the device profiler of one loop: of an engine process, or (`LoopSession`) in the job's own process.

    Args:
        settings: validated; `save_path` should be absolute.
        engine: `vllm`, `sglang`, `transformers`, or a name of the caller's own; goes into file names.
        version: of the engine.
        rank: of this process within the engine (or of torch.distributed).
        profiler: the device profiler; None: made from the settings when the first window is reached.
        writer: writes the traces; None: the one of this process.
        arming: shared with other loops; None: one of its own.
    """

    thread: threading.Thread | None = None
    """The thread of the last iteration, of a loop in the job's own process."""
    is_loop = False
    """Whether it reports its iterations to the recorder. An engine worker only counts them, which costs less."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: str,
        version: str,
        rank: int = 0,
        profiler: DeviceProfiler | None = None,
        writer: Writer | None = None,
        arming: Arming | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.rank = rank
        self.by_request = settings.arm == "request"
        """Whether the engine's own start_profile and stop_profile drive this session."""
        self.arming = arming or Arming(settings, Source(engine, version, rank), profiler=profiler, writer=writer)
        self.gate = self.arming.new_gate()
        self.gate.may_record = self._may_record
        self.iteration = self.arming.iterations - 1
        """0-based index of the iteration that runs, counted over the loops of the arming that ended before this one."""
        self.catch_up: Callable[[], None] = _nothing_skipped
        """Called before the end: an engine file that skips iterations reports them here."""
        self.recording: OpenCapture | None = None
        """What is being recorded; None: nothing. The capturer sets it. It is kept here because `end` reads it often."""
        self._capturer = Capturer(self.arming, self, self.gate)
        self._ending = CaptureEnding(self.arming, self.gate, self._capturer)
        self._placeholders = LoopPlaceholders(
            self.arming, self.gate, self._capturer, is_armed=not self.by_request, next_iteration=self.iteration + 1
        )
        self._dead = False
        self._reports_first_batch = not self.by_request and not self.is_loop
        """Whether the first batch since arming leaves a placeholder. The job's own process needs none: it has a log."""
        self._pid = os.getpid()
        live.register(self)
        if not self.is_loop:
            live.add(self)

    # -- the iterations -----------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, finished: Finished = NONE_FINISHED) -> None:
        """Before an iteration.

        Args:
            batch: request id -> response tokens that it is about to make.
            finished: requests that have ended since the last iteration.
        """
        self.iteration += 1
        try:
            if self._reports_first_batch and batch:
                self._reports_first_batch = False
                self.arming.placeholders.report_waiting()
            verdict = self.gate.step(batch, finished)
            if verdict is not NO_ACTION:
                with self._capturer.lock:
                    self._capturer.before_iteration(verdict, batch, self.iteration)
        except Exception as error:  # inline rather than `guarded`: this is the one call of the rollout's hot path
            self.fail(error)
        except BaseException:
            self.end_after_interrupt()
            raise

    def end(self) -> None:
        """After the iteration, its sampling included."""
        if self.recording is not None:
            self._end()

    @guarded
    def _end(self) -> None:
        with self._capturer.lock:
            self._capturer.after_iteration()

    @guarded
    def idle(self, finished: Finished = NONE_FINISHED, reason: CloseReason | None = None) -> None:
        """The engine has nothing left to run. Closes what only another iteration would have closed.

        Leaves a placeholder manifest for each window that was not reached, because the process may be killed before the
        job ends.

        Args:
            finished: as for `begin`.
            reason: why a capture closes here, where the engine knows better. `error`: the iteration that was begun last
                has raised, and made no token; it is not ended.
        """
        with self._capturer.lock:
            if reason == "error":
                self._capturer.fail_iteration()
            verdict = self.gate.idle(finished)
            if verdict.close is not None and reason is not None:
                verdict = replace(verdict, close=reason)
            self._capturer.before_iteration(verdict, {}, self.iteration)
            self._capturer.unprepare()
            self._leave_placeholders()
        engine_is_idle()

    def skip(self, batch: Batch, iterations: int) -> None:
        """Take in iterations that ran without `begin`, which an engine may leave out as long as `headroom` allows.

        Args:
            batch: the last of them, as `begin` would have got it.
            iterations: how many there were.
        """
        self.iteration += iterations
        verdict = self.gate.step(batch)
        if verdict is PREPARE:
            self._capturer.before_iteration(verdict, batch, self.iteration)
        elif verdict is not NO_ACTION:
            self.fail(RuntimeError("iterations of a window were left out"))

    @property
    def is_waiting(self) -> bool:
        """Whether any iteration may still be captured under the arming in force."""
        return self.gate.armed

    @property
    def headroom(self) -> int:
        """Tokens that each request can still make before a capture could begin.

        0 where that is not known, and then every iteration has to go through `begin`. It stays valid when requests
        come or end, with two exceptions: a request that comes and has tokens already, and the end of a request that was
        asked about in the last `begin`.
        """
        return self.gate.headroom

    def _may_record(self, window: TokenWindow) -> bool:
        """Asked by the gate before a window opens: whether this loop gets the recorder."""
        if self.arming.is_dead:
            return False
        if not recorder.lease(self):
            self.arming.placeholders.note_missed(window, "another loop of this process was being recorded")
            return False
        return True

    # -- arming -------------------------------------------------------------------------------------------------------

    @guarded
    def start(self, label: str | None = None) -> None:
        """`start_profile` under `arm: request`: wait for all windows again. `label` goes into the file names."""
        if not self.by_request or self._dead:
            return
        with self._capturer.lock:
            if self.gate.is_capturing:
                log.warning("start_profile while a capture is open: it goes on, the call is ignored")
                return
            self.arming.form.label = str(label) if label else self.settings.label
            self._placeholders.arm(self.iteration + 1)
            self._reports_first_batch = True
            self.gate.arm()

    @guarded
    def stop(self) -> None:
        """`stop_profile` under `arm: request`: close what is open, disarm. Harmless at any time, however often."""
        if self.by_request:
            self._leave_placeholders()
            self._ending.finish("stop_profile", elsewhere=self._is_elsewhere())
            self.await_close(PATIENCE_S)

    @guarded
    def close(self, reason: CloseReason = "job_end", patience_s: float = PATIENCE_S) -> None:
        """The process or the job ends. Idempotent.

        Args:
            reason: goes into the manifest of a capture that is open.
            patience_s: seconds to wait where the capture is open in another thread and has to end there.
        """
        self.begin_close(reason)
        self.await_close(patience_s)

    @guarded
    def begin_close(self, reason: CloseReason) -> None:
        """The first half of `close`, which does not wait for another thread."""
        live.remove(self)
        if os.getpid() != self._pid:
            return  # a fork of the session's process: the capture belongs to the parent
        self.catch_up()
        self._leave_placeholders()
        self._ending.finish(reason, elsewhere=self._is_elsewhere())
        engine_is_idle()

    @guarded
    def await_close(self, patience_s: float) -> None:
        """The second half of `close`: wait so many seconds at most where the capture has to end in another thread."""
        self._ending.wait(patience_s)

    def _is_elsewhere(self) -> bool:
        """Whether the loop runs on another thread than the calling one. An engine worker never does."""
        return False

    def _leave_placeholders(self) -> None:
        if not self._dead:
            self._placeholders.leave(self.iteration + 1)

    # -- failures, interrupts, other profilers, forks -----------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether a failure has ended this session."""
        return self._dead

    def fail(self, error: Exception) -> None:
        """Leave the job alone from here on. An engine file calls this too, when it reads what it does not know.

        Raises:
            Exception: `error` itself, under `on_error: raise`.
        """
        self._dead = self.arming.is_dead = True
        self.gate.disarm("error")
        self._capturer.save_after_failure(error)
        if self.settings.on_error == "raise":
            raise error
        reason = why_no_capture(error)
        if isinstance(error, UnavailableError):
            warn_once(log, f"{reason}; the job goes on", reason=reason)
        else:
            text = f"profiling of {self.engine} stops here, the job goes on ({type(error).__name__}: {error})"
            warn_once(log, f"{text}; set on_error: raise to see where it comes from", reason=reason)
        log.debug("the failure that ended the session", exc_info=error)

    def end_after_interrupt(self) -> None:
        """Ctrl-C came while a recording began or ended: nothing stays on, and what was recorded is written."""
        try:
            self._ending.finish_here("error")
        except Exception:
            log.debug("the capture could not be closed after the interrupt", exc_info=True)

    def step_aside(self) -> None:
        """Another profiler is about to be prepared in this process: end the recording first."""
        self._ending.step_aside()

    def end_in_child(self) -> bool:
        """This process is a fork of the session's: capture nothing here. Returns whether the session was recording."""
        recording = self._capturer.capture is not None
        self._capturer.lock = threading.RLock()  # another thread may have held it
        self._dead = True
        self.gate.armed = self.gate.is_open = False
        self._capturer.capture = None
        return recording


def _nothing_skipped() -> None:
    """For an engine file that calls `begin` for each iteration."""
