"""Keeps the failures of a session out of the engine that calls it: profiling must never harm the job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast


class Guarded(Protocol):
    """A session, as far as the guard knows it."""

    def fail(self, error: Exception) -> None:
        """End the session, and log why. Raises the error only under `on_error: raise`."""
        ...

    def end_after_interrupt(self) -> None:
        """Ctrl-C came: nothing stays on."""
        ...


_Method = TypeVar("_Method", bound=Callable[..., Any])


def guarded(method: _Method) -> _Method:
    """A method of a session: a failure ends the session, and is raised only under `on_error: raise`."""

    @functools.wraps(method)
    def run(session: Guarded, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(session, *args, **kwargs)
        except Exception as error:
            session.fail(error)
            return None
        except BaseException:
            session.end_after_interrupt()
            raise

    return cast(_Method, run)
