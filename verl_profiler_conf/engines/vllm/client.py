"""vLLM's front end under `arm: request`: start_profile and stop_profile always arrive at the workers.

An engine that was started without a profiler config has these calls, but its workers refuse them (`hooks` lets them
through), and its server has no routes for them. From 0.32 on the front end refuses a second start. Where the calls are
for the session, none of this is a mistake of the user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.engines.hooking import published_settings, takes_profile_calls, when_imported

log = logging.getLogger(__name__)

FRONT_ENDS = {"vllm.v1.engine.llm_engine": "LLMEngine", "vllm.v1.engine.async_llm": "AsyncLLM"}
SESSION_FLAG = "_profile_session_active"
"""The first start sets it, and the next one looks at it (0.32 and newer)."""

ROUTER = "vllm.entrypoints.serve.profile.api_router"
"""Holds `/start_profile` and `/stop_profile` since 0.13. vLLM attaches it when a profiler is configured."""


def install() -> None:
    """Hook the front ends as soon as they are imported. Repeatable."""
    for module, name in FRONT_ENDS.items():
        when_imported(module, _hook_front_end(name))
    when_imported(ROUTER, _hook_router)


def _hook_front_end(name: str) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        front_end = getattr(module, name, None)
        if front_end is not None and "start_profile" in front_end.__dict__:
            wrapt.wrap_function_wrapper(front_end, "start_profile", _around_start)

    return hook


def _hook_router(module: Any) -> None:
    if hasattr(module, "attach_router") and hasattr(module, "router"):
        wrapt.wrap_function_wrapper(module, "attach_router", _attach_always(module.router))


def _calls_are_ours() -> bool:
    return takes_profile_calls(published_settings("vLLM"))


def _around_start(wrapped: Callable[..., Any], front_end: Any, args: Any, kwargs: Any) -> Any:
    if _calls_are_ours() and getattr(front_end, SESSION_FLAG, False):
        setattr(front_end, SESSION_FLAG, False)
    return wrapped(*args, **kwargs)


def _attach_always(router: Any) -> Callable[..., Any]:
    def attach(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if _calls_are_ours():
            try:
                _add_routes(args[0] if args else kwargs["app"], router)
            except Exception as error:
                text = f"this vLLM server has no /start_profile, which arm: request waits for: {type(error).__name__}"
                warn_once(log, f"{text}: {error}")
        return result

    return attach


def _add_routes(app: Any, router: Any) -> None:
    """Add the routes, unless vLLM has attached them."""
    if not any(getattr(route, "path", None) == "/start_profile" for route in app.routes):
        app.include_router(router)
        log.info("/start_profile and /stop_profile drive the profiler window (arm: request)")
