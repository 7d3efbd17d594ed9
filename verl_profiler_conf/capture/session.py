"""One gate, one device profiler and one shelf of manifests, in one process: what an engine file drives.

An engine file calls `begin` before each iteration and `end` after it; everything that follows (opening and closing the
device profiler, naming the ranges, writing traces and manifests) happens here. No method raises into the engine unless
`on_error: raise`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from verl_profiler_conf.capture.backends import DeviceProfiler, detect_device, make_profiler
from verl_profiler_conf.capture.backends.engine_idle import engine_is_idle, engine_runs
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.outputs import CaptureOutputs, Source
from verl_profiler_conf.capture.writer import Writer, default_writer
from verl_profiler_conf.core.gate import (
    NO_ACTION,
    NONE_FINISHED,
    PREPARE,
    Batch,
    CloseReason,
    Finished,
    Opening,
    Verdict,
    make_gate,
)
from verl_profiler_conf.core.settings import Settings

log = logging.getLogger(__name__)

_live: list[Session] = []
os.register_at_fork(after_in_child=_live.clear)  # they are the parent's, and so are their captures
_F = TypeVar("_F", bound=Callable[..., Any])


def open_session(settings: Settings, *, engine: str, version: str, rank: int = 0) -> Session | None:
    """The session of one engine process, or None where nothing is to be captured in it: disabled, counters only
    (`mapping: iterations`), or a rank that was not asked for."""
    if not settings.enable or settings.mapping != "tokens":
        return None
    if not settings.all_ranks and rank not in settings.ranks:
        log.debug("rank %d of %s is not asked for (ranks=%s): no capture here", rank, engine, list(settings.ranks))
        return None
    return Session(settings, engine=engine, version=version, rank=rank)


def live_sessions() -> tuple[Session, ...]:
    """The sessions of this process that have not been closed."""
    return tuple(_live)


def close_all(reason: CloseReason = "job_end") -> None:
    """Close every session of this process and wait until their traces are on disk."""
    failure: Exception | None = None
    for session in live_sessions():
        try:
            session.close(reason)
        except Exception as error:  # on_error: raise; the other sessions have captures too
            failure = failure or error
    default_writer().drain()
    if failure is not None:
        raise failure


def _guarded(method: _F) -> _F:
    """Never harm the job: a failure ends the session, is said once, and is raised only where the user asked for it."""

    @functools.wraps(method)
    def run(self: Session, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None

    return cast(_F, run)


class Session:
    """Drives the device profiler of one engine process by the tokens its requests are about to make.

    Args:
        settings: validated; `save_path` should be absolute.
        engine: `vllm`, `sglang`, `transformers`, or a name of the caller's own; goes into file names.
        version: of the engine.
        rank: of this process within the engine (or of torch.distributed).
        profiler: the device profiler; None: made from the settings when the first window is reached, so that a
            session which captures nothing imports nothing.
        writer: exports the traces; None: the process's own.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        engine: str,
        version: str,
        rank: int = 0,
        profiler: DeviceProfiler | None = None,
        writer: Writer | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.rank = rank
        self.by_request = settings.arm == "request"
        """Whether the engine's own start_profile and stop_profile drive this session."""
        self.gate = make_gate(
            settings.windows,
            track=settings.track,
            max_iterations=settings.max_iterations,
            max_captures=settings.max_captures,
            armed=not self.by_request,
        )
        self.iteration = -1
        """0-based index of the iteration that runs, counted from the session's start."""
        self.catch_up: Callable[[], None] = _nothing_left_out
        """Called before the end: an engine file that passes iterations by tells of them here."""
        self.calls = 0
        """Generations begun, for engines that number them."""
        self._profiler = profiler
        self._outputs = CaptureOutputs(settings, Source(engine, version, rank), writer or default_writer())
        self._capture: OpenCapture | None = None
        self._parts = 0
        """Parts of the window under way that were opened so far."""
        self._close_after: CloseReason | None = None
        self._dead = False
        self._waited = not self.by_request
        """Whether the windows have been waited for at any time: from the start, or since the first start_profile."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        _live.append(self)
        _close_at_exit()

    # -- the iterations ------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, finished: Finished = NONE_FINISHED) -> None:
        """Before an iteration: request id -> response tokens it is about to make; who ended since the last one."""
        self.iteration += 1
        try:
            verdict = self.gate.step(batch, finished)
            if verdict is not NO_ACTION:
                with self._lock:
                    self._act(verdict, batch)
        except Exception as error:  # inline rather than `_guarded`: this is the one call of the rollout's hot path
            self.fail(error)

    def end(self) -> None:
        """After the iteration, its sampling included."""
        if self._capture is not None:
            self._end()

    @_guarded
    def _end(self) -> None:
        with self._lock:
            if self._capture is None:
                return
            self._capture.leave()
            if self._close_after is not None:
                reason, self._close_after = self._close_after, None
                self._close_capture(reason)

    @_guarded
    def idle(self, finished: Finished = NONE_FINISHED, reason: CloseReason | None = None) -> None:
        """The engine has nothing left to run. Closes what only another iteration would have closed, and leaves word
        of a window that was not reached so far: the process may be killed before the job's end.

        Args:
            finished: as for `begin`.
            reason: why a capture closes here, where the engine knows better (`error`).
        """
        with self._lock:
            verdict = self.gate.idle(finished)
            if verdict.close is not None and reason is not None:
                verdict = replace(verdict, close=reason)
            self._act(verdict, {})
            self._unprepare()
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
            self._act(verdict, batch)
        elif verdict is not NO_ACTION:
            self.fail(RuntimeError("iterations of a window were left out"))

    @property
    def is_waiting(self) -> bool:
        """Whether any iteration may still be captured under the arming in force."""
        return self.gate.armed

    @property
    def headroom(self) -> int:
        """Tokens that each request can still make before a capture could begin, while no request comes or goes; 0 when
        that is not known, and then every iteration has to go through `begin`."""
        return self.gate.headroom

    # -- arming --------------------------------------------------------------------------------------------------

    @_guarded
    def start(self, label: str | None = None) -> None:
        """`start_profile` under `arm: request`: wait for the windows anew. `label` goes into the file names."""
        if not self.by_request or self._dead:
            return
        with self._lock:
            if self.gate.is_open:
                log.warning("start_profile while a capture is open: it goes on, the call is ignored")
                return
            self._outputs.label = label or self.settings.label
            if self._waited:  # else the only word there is says that nothing was waited for, and no longer holds
                self._outputs.new_arming()
            self._waited = True
            self.gate.arm()

    @_guarded
    def stop(self) -> None:
        """`stop_profile` under `arm: request`: close what is open, disarm. Harmless at any time, however often."""
        if not self.by_request:
            return
        with self._lock:
            self._leave_placeholders()
            self._act(self.gate.disarm("stop_profile"), {})
            self._unprepare()

    @_guarded
    def close(self, reason: CloseReason = "job_end") -> None:
        """The process or the job ends. Idempotent."""
        if self in _live:
            _live.remove(self)
        if os.getpid() != self._pid:
            return  # a fork of the session's process: the capture belongs to the parent
        self.catch_up()
        with self._lock:
            if self._close_after is not None:
                reason, self._close_after = self._close_after, None
            self._leave_placeholders()
            self._act(self.gate.disarm(reason), {})
            if self._capture is not None:
                self._close_capture(reason)
            self._unprepare()
        engine_is_idle()

    # -- what a verdict asks for ---------------------------------------------------------------------------------

    def _act(self, verdict: Verdict, batch: Batch) -> None:
        capture = self._capture
        if capture is not None:
            if self._close_after is not None:  # the engine went on without `end`: it failed inside the iteration
                reason, self._close_after = self._close_after, None
                self._close_capture(reason)
            elif verdict is not NO_ACTION:
                capture.leave()
                if verdict.settled is not None:
                    capture.settle(verdict.settled)
                if verdict.discard:
                    self._capture = None
                    capture.discard()
                elif verdict.close is not None:
                    self._close_capture(verdict.close)
        if verdict.prepare:
            self._ready_profiler().prepare()
        if verdict.open is not None:
            self._parts = 0 if verdict.open.part == 1 else self._parts
            self._open_capture(verdict.open)
        if verdict.iteration is not None:
            self._begin_next_part()
            if self._capture is not None:
                self._capture.enter(verdict.iteration, self.iteration, batch)
                self._close_after = verdict.close_after

    def _open_capture(self, opening: Opening) -> None:
        started = time.perf_counter_ns()
        profiler = self._ready_profiler()
        busy = profiler.busy()
        if busy is not None:
            self._outputs.missed(opening, busy, furthest=self.gate.furthest)
            return
        engine_runs()
        profiler.start()
        self._parts += 1
        self._capture = OpenCapture(replace(opening, part=self._parts), profiler)
        self._capture.opening_stall_ns = time.perf_counter_ns() - started

    def _begin_next_part(self) -> None:
        """Between two iterations: a part that is as long as it may be ends, and the next one begins."""
        capture = self._capture
        if capture is not None and len(capture.rows) >= self.settings.part_iterations:
            self._close_capture("part")
            self._open_capture(Opening(capture.window))

    def _unprepare(self) -> None:
        """The capture that the device profiler was prepared for does not come for now."""
        if self._capture is None and self._profiler is not None:
            self._profiler.discard()

    def _close_capture(self, reason: CloseReason) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            return
        capture.leave()
        started = time.perf_counter_ns()
        recording = capture.profiler.stop()
        capture.stall_ns = time.perf_counter_ns() - started
        self._outputs.put(capture, recording, reason, furthest=self.gate.furthest)

    def _leave_placeholders(self) -> None:
        if self.iteration < 0 or self._dead:
            return
        if not self._waited:
            self._outputs.never_armed()
        elif self.gate.armed:
            for window in self.gate.unreached:
                self._outputs.unreached(window, furthest=self.gate.furthest, iterations=self.iteration + 1)

    def _ready_profiler(self) -> DeviceProfiler:
        if self._profiler is None:
            self._outputs.device = detect_device(self.settings.device)
            self._profiler = make_profiler(self.settings, self._outputs.device)
        return self._profiler

    @property
    def failed(self) -> bool:
        """Whether a failure has ended this session."""
        return self._dead

    def fail(self, error: Exception) -> None:
        """Leave the job alone from here on. For engine files too, when what they read is not what they know.

        Raises:
            Exception: `error` itself, under `on_error: raise`.
        """
        self._dead = True
        self.gate.disarm("error")
        capture, self._capture, self._close_after = self._capture, None, None
        if capture is not None:
            try:
                capture.leave()
                self._outputs.put(capture, capture.profiler.stop(), "error", furthest=self.gate.furthest, error=error)
            except Exception:
                log.debug("the capture could not be saved after the failure", exc_info=True)
        try:
            self._outputs.failed(error, furthest=self.gate.furthest)
        except Exception:
            log.debug("no word of the failure could be left", exc_info=True)
        if self.settings.on_error == "raise":
            raise error
        log.warning(
            "profiling of %s stops here, the job goes on (%s: %s); set on_error: raise to see where it comes from",
            self.engine,
            type(error).__name__,
            error,
        )
        log.debug("the failure that ended the session", exc_info=error)


def _nothing_left_out() -> None:
    """Of an engine file that calls `begin` for each iteration."""


@functools.lru_cache(maxsize=1)
def _close_at_exit() -> None:
    # engine processes end without the job's callback; those that are killed have left word at their last idle moment
    atexit.register(close_all, "job_end")
