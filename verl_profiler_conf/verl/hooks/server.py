"""verl's rollout servers: start_profile passes the RL step on to the engine, as the profile prefix.

The trainer does not say which step it profiles. A server knows the version of its weights: verl has made it the number
of the last step that was trained, so the step that is being rolled out is the next one (`set_global_steps`, called by
`update_weights` of every trainer of 0.9.1, the fully asynchronous one included).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from verl_profiler_conf.engines.hooking import published_settings, say_once, takes_profile_calls, when_imported

log = logging.getLogger(__name__)

SERVERS = {
    "verl.workers.rollout.vllm_rollout.vllm_async_server": ("vLLMHttpServer", "engine"),
    "verl.workers.rollout.sglang_rollout.async_sglang_server": ("SGLangHttpServer", "tokenizer_manager"),
}
"""Module -> the class that Ray makes an actor of, and its attribute whose start_profile it calls."""

PREFIX = "profile_prefix"


def register() -> None:
    """Hook the servers as soon as they are imported: Ray looks at their methods once."""
    for module, (name, engine) in SERVERS.items():
        when_imported(module, _hook_server(name, engine))


def _hook_server(name: str, engine: str) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        server: Any = getattr(module, name)
        start = server.__dict__.get("start_profile")
        if inspect.iscoroutinefunction(start):
            # a plain function: Ray pickles the class by its parts, which a proxy refuses
            server.start_profile = _naming_the_step(start, engine)

    return hook


def _naming_the_step(start: Callable[..., Any], engine: str) -> Callable[..., Any]:
    @functools.wraps(start)
    async def start_profile(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("global_step", None)  # of a trainer that says it; the engines do not know the word
        try:
            label = _label(self, given) if takes_profile_calls(published_settings("verl")) else None
            target = getattr(self, engine, None) if label else None
        except Exception as error:
            say_once(f"traces do not bear the RL step: {type(error).__name__}: {error}")
            label = target = None
        if label is None or target is None or not _takes_prefix(target.start_profile):
            return await start(self, *args, **kwargs)
        if engine == "engine":
            return await start(self, *args, **{PREFIX: label, **kwargs})
        with _prefixed(target, label):
            return await start(self, *args, **kwargs)

    return start_profile


def _label(server: Any, given: object) -> str | None:
    """`step3_replica0`; None where the step is not known."""
    version = getattr(server, "global_steps", None)
    step = given if isinstance(given, int) else version + 1 if isinstance(version, int) else None
    return None if step is None else f"step{step}_replica{server.replica_rank}"


def _takes_prefix(start: Callable[..., Any]) -> bool:
    return PREFIX in inspect.signature(start).parameters


class _prefixed:  # noqa: N801 - a context manager
    """verl's SGLang server passes nothing on: for the one call, its manager's start_profile gets the prefix."""

    def __init__(self, manager: Any, label: str) -> None:
        self._manager = manager
        self._label = label

    def __enter__(self) -> None:
        self._manager.start_profile = functools.partial(self._manager.start_profile, **{PREFIX: self._label})

    def __exit__(self, *_: object) -> None:
        del self._manager.start_profile  # the class has it
