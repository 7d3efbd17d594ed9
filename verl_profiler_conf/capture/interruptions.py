"""What can come between the begin and the end of a recording: signals, and forks of the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Let Python's handlers of SIGINT and SIGTERM run after the body, so that they do not interrupt it.

    A second signal of a kind is handled at once: a user who presses Ctrl-C twice wants the job to end. A signal without
    a handler in Python keeps its effect. Python runs handlers on the main thread only, so other threads need no
    protection.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    arrived: dict[int, FrameType | None] = {}

    def hold_back(number: int, frame: FrameType | None) -> None:
        again = number in arrived
        arrived[number] = frame
        if again:
            handlers[number](number, frame)

    for held in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(held)
        if callable(handler):
            handlers[held] = handler
            signal.signal(held, hold_back)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # The handlers are called. Raising the signal again would tell an event loop of it twice.
        for number, frame in arrived.items():
            handlers[number](number, frame)


_in_child: list[Callable[[], None]] = []


def call_in_child(forget: Callable[[], None]) -> None:
    """Have `forget` called in each process that is forked from this one, where the system has forks."""
    if not _in_child and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_call_all)
    _in_child.append(forget)


def _call_all() -> None:
    for forget in _in_child:
        forget()


def end_without_exit_handlers() -> None:
    """Have this process end without the exit handlers of C libraries. Python's own end stays the ordinary one.

    Kineto starts a thread with the first recording. A forked child does not have that thread, but Kineto's exit handler
    waits for it: `sys.exit` in the child would hang or abort. In another case a thread never comes back from Kineto,
    and goes on to use what the exit handlers destroy. The output of C libraries is flushed.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)
