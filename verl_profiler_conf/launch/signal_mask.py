"""Signals stay with the job's own threads."""

from __future__ import annotations

import signal

_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
"""A thread's own faults: blocked, they would end the process without the job's fault handler."""


def leave_signals_to_the_job() -> None:
    """No signal of the process is delivered to the calling thread, which lives as long as the job.

    A job that blocks a signal and waits for it (`sigwait`) would lose it to a thread that it does not know of.
    """
    if hasattr(signal, "pthread_sigmask"):
        faults = {getattr(signal, name) for name in _FAULTS if hasattr(signal, name)}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
