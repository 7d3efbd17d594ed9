"""The sessions of this process, and what ends them all: the end of the job, and a fork."""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from verl_profiler_conf.capture import torch_state
from verl_profiler_conf.capture.arming import Arming, end_armings_in_child, forget_armings
from verl_profiler_conf.capture.interruptions import call_in_child, end_without_exit_handlers
from verl_profiler_conf.capture.recorder import Loop, recorder
from verl_profiler_conf.capture.writer import default_writer
from verl_profiler_conf.core.gate import CloseReason
from verl_profiler_conf.core.logs import forget_logged_texts

PATIENCE_S = 10.0
"""Seconds that a thread waits at most for the loop of another thread to end its capture."""


class LiveSession(Loop, Protocol):
    """A session, as far as its process knows it."""

    arming: Arming
    is_loop: bool

    def begin_close(self, reason: CloseReason) -> None:
        """The process or the job ends. Does not wait for another thread."""
        ...

    def await_close(self, patience_s: float) -> None:
        """Wait so many seconds at most for a capture that has to end in another thread."""
        ...

    def end_in_child(self) -> bool:
        """This process is a fork of the session's. Returns whether the session was recording."""
        ...


_live: list[LiveSession] = []
"""Sessions that may capture."""
_existing: weakref.WeakSet[LiveSession] = weakref.WeakSet()
"""Sessions that exist. A fork has to end them all."""


def register(session: LiveSession) -> None:
    """The session exists. A fork has to end it."""
    _existing.add(session)
    _prepare_for_the_end()


def add(session: LiveSession) -> None:
    """The session may capture from here on. `close_all` closes it."""
    _live.append(session)


def remove(session: LiveSession) -> None:
    """The session is closed. Harmless when it was removed before."""
    if session in _live:
        _live.remove(session)


def live_sessions() -> tuple[LiveSession, ...]:
    """The sessions that may capture."""
    return tuple(_live)


def workers() -> tuple[LiveSession, ...]:
    """The live sessions of engine workers, which count their iterations themselves."""
    return tuple(session for session in _live if not session.is_loop)


def close_all(reason: CloseReason = "job_end") -> None:
    """Close every session of this process and wait until their traces are on disk.

    Raises:
        Exception: the first failure, under `on_error: raise`, after all sessions have been closed.
    """
    failure: Exception | None = None
    sessions = live_sessions()
    end = time.monotonic() + PATIENCE_S
    steps: list[Callable[[], None]] = [functools.partial(session.begin_close, reason) for session in sessions]
    steps.append(forget_armings)
    steps += [functools.partial(_await_close, session, end) for session in sessions]
    for step in steps:
        try:
            step()
        except Exception as error:  # the other sessions have captures too
            failure = failure or error
    default_writer().finish_or_give_up()
    forget_logged_texts()  # the next job of this process reports for itself
    if failure is not None:
        raise failure


def _await_close(session: LiveSession, end: float) -> None:
    session.await_close(max(0.0, end - time.monotonic()))


def _end_in_child() -> None:
    """In a forked child: capture nothing that the parent captures, and record nothing."""
    recording = [session for session in _existing if session.end_in_child()]
    _live.clear()
    end_armings_in_child()
    recorder.reset()
    for session in recording:
        torch_state.turn_off_in_child(session.arming.form.device)
    if recorder.has_recorded:
        end_without_exit_handlers()


@functools.lru_cache(maxsize=1)
def _prepare_for_the_end() -> None:
    # The job's callback does not run in engine processes. An engine that is killed has left placeholders before.
    atexit.register(close_all, "job_end")
    call_in_child(_end_in_child)
    recorder.workers = workers
