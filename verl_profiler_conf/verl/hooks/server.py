"""verl's rollout servers. They publish the place of their engine at its launch, and give start_profile the RL step.

The step becomes the profile prefix. The trainer does not say which step it profiles. But a server knows the version of
its weights, and in verl that is the number of the last step that was trained. So the step whose rollout runs is the
next one. (`update_weights` of every trainer of 0.9.1 calls `set_global_steps`, that of the fully asynchronous one too.)
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.place import label_of
from verl_profiler_conf.engines.hooking import published_settings, takes_profile_calls, when_imported
from verl_profiler_conf.verl.hooks.replica import publish_share

log = logging.getLogger(__name__)

SERVERS = {
    "verl.workers.rollout.vllm_rollout.vllm_async_server": ("vLLMHttpServer", "engine"),
    "verl.workers.rollout.sglang_rollout.async_sglang_server": ("SGLangHttpServer", "tokenizer_manager"),
}
"""Module -> the class of the server, which Ray makes an actor of, and its attribute that has start_profile."""

LAUNCH = "launch_server"
START = "start_profile"
PREFIX = "profile_prefix"
NO_LABEL = "captures do not bear the RL step and the replica"


def register() -> None:
    """Hook the servers as soon as they are imported: Ray looks at their methods once."""
    for module, (name, engine) in SERVERS.items():
        when_imported(module, hook_server(name, engine))


def hook_server(name: str, engine: str) -> Callable[[Any], None]:
    """The hook for a module whose class `name` has the engine in its attribute `engine`."""

    def hook(module: Any) -> None:
        server: Any = getattr(module, name, None)
        methods = getattr(server, "__dict__", {})
        for method, wrap in ((LAUNCH, _publishing_share), (START, functools.partial(_passing_step, engine))):
            plain = methods.get(method)
            if inspect.iscoroutinefunction(plain):
                # replaced by a plain function: Ray pickles the parts of the class, and a proxy cannot be pickled
                setattr(server, method, wrap(plain))
            else:
                warn_once(log, f"{NO_LABEL}: {module.__name__}.{name} has no coroutine {method}")

    return hook


def _publishing_share(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    async def launch_server(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            publish_share(self)
        except Exception as error:
            warn_once(log, f"captures do not bear the replica: {type(error).__name__}: {error}")
        return await launch(self, *args, **kwargs)

    return launch_server


def _passing_step(engine: str, start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    async def start_profile(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainers_step = kwargs.pop("global_step", None)  # some trainers pass it; the engines do not take it
        label = target = None
        try:
            if takes_profile_calls(published_settings("verl")):
                label, target = _label(self, trainers_step), getattr(self, engine, None)
                if target is None:
                    _warn_without_engine(self, engine)
                elif PREFIX not in inspect.signature(target.start_profile).parameters:
                    warn_once(log, f"{NO_LABEL}: start_profile of {type(target).__name__} takes no {PREFIX}")
                    target = None
        except Exception as error:
            warn_once(log, f"{NO_LABEL}: {type(error).__name__}: {error}")
            label = target = None
        if label is None or target is None:
            return await start(self, *args, **kwargs)
        if engine == "engine":
            return await start(self, *args, **{PREFIX: label, **kwargs})
        with _prefixed(target, label):
            return await start(self, *args, **kwargs)

    return start_profile


def _warn_without_engine(server: Any, engine: str) -> None:
    if not getattr(server, "node_rank", 0):  # each further node of a replica has a server too, but no engine to call
        warn_once(log, f"{NO_LABEL}: {type(server).__name__} has no {engine}")


def _label(server: Any, trainers_step: object) -> str | None:
    """`step3_replica0`; None as long as the version of the server's weights is not known."""
    version = server.global_steps
    step = trainers_step if isinstance(trainers_step, int) else version + 1 if isinstance(version, int) else None
    return None if step is None else label_of(step, server.replica_rank)


class _prefixed:  # noqa: N801 - a context manager
    """verl's SGLang server passes nothing on. For this one call its manager's start_profile gets the prefix."""

    def __init__(self, manager: Any, label: str) -> None:
        self._manager = manager
        self._label = label

    def __enter__(self) -> None:
        self._manager.start_profile = functools.partial(self._manager.start_profile, **{PREFIX: self._label})

    def __exit__(self, *_: object) -> None:
        del self._manager.start_profile  # the class has it
