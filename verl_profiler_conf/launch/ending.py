"""How a job ended, as far as that is known. The summary says so where a window was not captured.

Hydra 1.3 reports a job that returned or raised an `Exception`. After sys.exit and Ctrl-C it reports nothing, and the
job is closed at the exit of the process. By then Python has printed and kept an exception that nobody caught, also
Ctrl-C. It has kept nothing of sys.exit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

MOST_CHARACTERS = 200
"""The part of an exception's text that is kept."""


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
        words: a clause such as `the job failed (LookupError: no such file)`; empty: it returned, or nothing is known.
        is_early: the job certainly did not run to its end, so there is no need to look for another cause.
    """

    words: str = ""
    is_early: bool = False


RETURNED = Ending()
FAILED = Ending("the job failed", is_early=True)
SIGTERM = Ending("SIGTERM ended the job", is_early=True)
LEFT = Ending(
    "the job's function did not return: it left by sys.exit, or by an interrupt that was caught outside of it"
)
"""The ending of a job whose end Hydra 1.3 never reported."""


def by_error(error: BaseException | None) -> Ending:
    """The ending of a job that this exception has left; None: it returned."""
    if error is None:
        return RETURNED
    if isinstance(error, KeyboardInterrupt):
        return Ending("Ctrl-C ended the job", is_early=True)
    if isinstance(error, SystemExit):
        return Ending(f"the job called sys.exit({_short(repr(error.code))})", is_early=error.code not in (None, 0))
    text = _short(str(error))
    return Ending(f"the job failed ({type(error).__name__}{': ' if text else ''}{text})", is_early=True)


def at_exit(before: BaseException | None, *, under_hydra: bool) -> Ending:
    """The ending of a job that is still open when the process exits.

    Args:
        before: what `last_uncaught` said when the job started.
        under_hydra: Hydra runs the job, and would have reported its end if the job's function had returned.
    """
    last = last_uncaught()
    if last is not None and last is not before:
        return by_error(last)
    return LEFT if under_hydra else RETURNED


def last_uncaught() -> BaseException | None:
    """The last exception that nobody caught in this process."""
    return getattr(sys, "last_value", None)


def _short(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."
