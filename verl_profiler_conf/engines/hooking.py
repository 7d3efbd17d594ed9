"""What the plugins of all engines need: the published window, hooks on modules, and warnings that come once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.core.errors import UnavailableError
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.engines.in_process import current_settings

log = logging.getLogger(__name__)

_hooked: set[tuple[str, str]] = set()


def published_settings(engine: str) -> Settings | None:
    """What is to be captured in this process. None where nothing is, or where it cannot be read, which is said once."""
    try:
        return current_settings()
    except Exception as error:
        say_once(f"{engine} runs without the window: {error}")
        return None


def takes_profile_calls(settings: Settings | None) -> bool:
    """Whether start_profile and stop_profile are for the session, not for the engine's own profiler."""
    return settings is not None and settings.enable and settings.mapping == "tokens" and settings.arm == "request"


def raises_errors(engine: str) -> bool:
    """Whether the user wants a failure of this package to be raised: `on_error: raise`."""
    settings = published_settings(engine)
    return settings is not None and settings.on_error == "raise"


def check_shape(session: Session, engine: str, version: str, lacks: str | None) -> None:
    """Refuse, in one line, to window a release that lacks something which is read of its objects.

    Raises:
        UnavailableError: under `on_error: raise`.
    """
    if lacks is not None:
        session.fail(
            UnavailableError(
                f"{engine} {version} is newer than this package knows, and has no {lacks}; "
                "mapping: iterations uses the engine's own counters"
            )
        )


def refuse_unknown(engine: str, version: str, what: str | None) -> None:
    """Refuse what a scheduler said, where it has another form than any release that is known.

    Raises:
        UnavailableError: one line that says what is different.
    """
    if what is not None:
        raise UnavailableError(
            f"what the scheduler of {engine} {version} says is not understood ({what}); "
            "mapping: iterations uses the engine's own counters"
        )


def when_imported(module: str, hook: Callable[[Any], None]) -> None:
    """Run `hook` on a module once, now or when it is imported. If the hook fails, the engine runs without it."""
    key = (module, hook.__qualname__)
    if key in _hooked:
        return
    _hooked.add(key)

    def guarded(found: Any) -> None:
        try:
            hook(found)
        except Exception as error:
            log.warning("%s runs without the window: %s: %s", module, type(error).__name__, error)

    wrapt.register_post_import_hook(guarded, module)


def say_once(text: str) -> None:
    """Warn, unless the same was said before: most of it would come with every iteration."""
    warn_once(log, text)
