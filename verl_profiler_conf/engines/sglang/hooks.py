"""The hooks in SGLang's scheduler: what each is wrapped around, and when it goes in.

- `Scheduler.run_batch` runs an iteration. Where sampling comes later, `launch_batch_sample_if_needed` ends it.
- `on_idle` tells that nothing is left to run.
- start_profile and stop_profile reach a scheduler through a method that differs between releases.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.engines.hooking import published_settings, raises_errors, takes_profile_calls, when_imported
from verl_profiler_conf.engines.sglang.release import CLOSE, sglang_version
from verl_profiler_conf.engines.sglang.worker import SchedulerHook
from verl_profiler_conf.engines.swapping import SwappedMethod

log = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler"

PROFILE_METHODS = (
    ("sglang.srt.managers.scheduler_profiler_mixin", "SchedulerProfilerMixin", "profile"),
    ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager", "_profile"),
)
"""Where a ProfileReq arrives: up to 0.5.12, and from 0.5.13 on."""

ANSWERS = "sglang.srt.managers.io_struct"
"""Has the class that answers a ProfileReq, `ProfileReqOutput`."""

_STATE = "_verl_profiler_conf"


def install() -> None:
    """Hook the scheduler, and what start_profile reaches in its process, as soon as SGLang imports them. Repeatable."""
    when_imported(SCHEDULER, _hook_scheduler)
    for module, owner, method in PROFILE_METHODS:
        when_imported(module, _hook_profile(owner, method))


_in_every_iteration: list[SwappedMethod] = []


_samplings: list[SwappedMethod] = []
"""Those of them that end an iteration. A skipped iteration need not be ended."""


def _end_iteration(hook: SchedulerHook) -> None:
    hook.end()
    if hook.left:
        for method in _samplings:
            method.take_out()


def _hook_sampling() -> None:
    for method in _samplings:
        method.put_in()


def put_in() -> None:
    """Hook the iterations."""
    for method in _in_every_iteration:
        method.put_in()


def take_out() -> None:
    """Leave the iterations alone from here on, unless the scheduler of this process wants them."""
    if _hook_of_process is None or not _hook_of_process.wants_iterations:
        for method in _in_every_iteration:
            method.take_out()


# -- one scheduler ---------------------------------------------------------------------------------------------------

_hook_of_process: SchedulerHook | None = None
"""SGLang runs one scheduler in a process. Its profiler manager does not know it."""


def attach(scheduler: Any) -> None:
    """Give a scheduler its hook, kept on the scheduler itself so that both go together."""
    global _hook_of_process
    try:
        _hook_of_process = scheduler.__dict__[_STATE] = SchedulerHook(scheduler)
    except Exception as error:
        if raises_errors("SGLang"):
            raise
        warn_once(log, f"SGLang runs without the window: {type(error).__name__}: {error}")
    put_in()


# -- the wrappers ----------------------------------------------------------------------------------------------------


def _around_init(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    attach(scheduler)


def _around_run(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
        if hook is None or hook.inside:
            return plain(scheduler, batch, *args, **kwargs)
        try:
            # nearly every iteration of a rollout is far from a window and like the one before: it is only counted
            usual, reqs = hook.usual, batch.reqs
            if hook.left and (
                (
                    batch.forward_mode is usual.mode
                    and (
                        (lead := usual.lead) is None
                        or (usual.row < len(reqs) and reqs[usual.row] is lead and lead.finished_reason is None)
                    )
                )
                or hook.may_skip(batch)
            ):
                hook.left -= 1
            else:
                _hook_sampling()
                hook.begin(batch)
                if not hook.inside:
                    take_out()
        except Exception as error:
            hook.give_up(error)
        try:
            result = plain(scheduler, batch, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # the scheduler's error comes before any of ours
                hook.fail_iteration()
                hook.close("error")  # the scheduler does not survive this
            raise
        if hook.inside and getattr(result, "delay_sample_func", None) is None:
            _end_iteration(hook)
        return result

    return run_batch


def _around_sample(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def launch_batch_sample_if_needed(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(scheduler, *args, **kwargs)
        hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
        if hook is not None and hook.inside:
            _end_iteration(hook)
        return result

    return launch_batch_sample_if_needed


def _around_idle(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def on_idle(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
        if hook is not None and hook.session is not None:
            try:
                hook.idle()
            except Exception as error:
                hook.give_up(error)
        return plain(scheduler, *args, **kwargs)

    return on_idle


def _close_scheduler(scheduler: Any) -> None:
    hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
    if hook is not None:
        hook.close()


_IN_EVERY_ITERATION = {
    "run_batch": _around_run,
    "launch_batch_sample_if_needed": _around_sample,
    "on_idle": _around_idle,
}


def _hook_scheduler(module: Any) -> None:
    scheduler = module.Scheduler
    missing = [name for name in _IN_EVERY_ITERATION if not hasattr(scheduler, name)]
    if missing:
        log.warning(
            "SGLang %s cannot be windowed by tokens (its scheduler has no %s): no capture; "
            "mapping: iterations uses the engine's own counters",
            sglang_version(),
            ", ".join(missing),
        )
        return
    wrapt.wrap_function_wrapper(scheduler, "__init__", _around_init)
    for name, around in _IN_EVERY_ITERATION.items():
        method = SwappedMethod(_definer(scheduler, name), name, around)
        _in_every_iteration.append(method)
        if name == "launch_batch_sample_if_needed":
            _samplings.append(method)
    put_in()
    setattr(scheduler, CLOSE, _close_scheduler)


def _definer(scheduler: type, method: str) -> type:
    """The class that defines a method of the scheduler: it may be one of its parts."""
    return next(kind for kind in scheduler.__mro__ if method in vars(kind))


def _hook_profile(owner: str, method: str) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        if hasattr(getattr(module, owner, None), method):
            wrapt.wrap_function_wrapper(module, f"{owner}.{method}", _around_profile)
        elif takes_profile_calls(published_settings("SGLang")):
            warn_once(
                log,
                f"no capture: SGLang {sglang_version()} has no {owner}.{method}, through which start_profile reaches a "
                "scheduler; use arm: job",
            )

    return hook


def _around_profile(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    hook = _hook_of_process
    if hook is None:
        return wrapped(*args, **kwargs)
    try:
        request = args[0] if args else kwargs["recv_req"]
        kind = getattr(request, "req_type", None) or request.type
        starts = kind.name == "START_PROFILE"
        label = getattr(request, "profile_prefix", None) or None
        answer = importlib.import_module(ANSWERS).ProfileReqOutput
    except Exception as error:
        warn_once(log, f"start_profile goes to SGLang's own profiler: {type(error).__name__}: {error}; use arm: job")
        return wrapped(*args, **kwargs)
    try:
        if not hook.profile(starts, label):
            return wrapped(*args, **kwargs)
    except Exception as error:
        hook.give_up(error)
        return answer(success=True, message="No profiler window is armed; the scheduler's log says why.")
    put_in()
    return answer(success=True, message="The profiler window is armed." if starts else "Disarmed.")
