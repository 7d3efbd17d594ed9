"""SGLang: the plugin that its `sglang.srt.plugins` mechanism loads in every process of an engine (0.5.11 or newer).

Hooked is what a scheduler runs an iteration through, `Scheduler.run_batch` (and `launch_batch_sample_if_needed`, where
sampling comes later); `on_idle`, which tells that nothing is left to run; and the method by which start_profile and
stop_profile reach a scheduler. What a batch is about to make is worked out in `sglang_batch`; what has to be done in
the process that clients call is in `sglang_client`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import wrapt
from packaging.version import InvalidVersion, Version

from verl_profiler_conf.engines.hooking import published_settings, say_once, takes_profile_calls, when_imported
from verl_profiler_conf.engines.sglang_batch import Tracker
from verl_profiler_conf.session import Session, open_session
from verl_profiler_conf.settings import ENV_NAME

log = logging.getLogger(__name__)

OLDEST = "0.5.11"
"""The first release that loads plugins, hooks of which run in the scheduler's process."""

SCHEDULER = "sglang.srt.managers.scheduler"

PROFILE_METHODS = (
    ("sglang.srt.managers.scheduler_profiler_mixin", "SchedulerProfilerMixin", "profile"),
    ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager", "_profile"),
)
"""Where a ProfileReq arrives: up to 0.5.12, and from 0.5.13 on."""

CLOSE = "verl_profiler_conf_close"
"""The scheduler's method by which an engine that shuts down has captures finished (`Engine.collective_rpc`)."""

CLOSE_SECONDS = 60.0
"""How long an engine's shutdown may wait for that."""

_STATE = "_verl_profiler_conf"


def register() -> None:
    """Entry point: hook the scheduler as soon as SGLang imports it. Repeatable, never raises, and does nothing at all
    unless a window has been published in the environment."""
    if not os.environ.get(ENV_NAME):
        return
    try:
        from verl_profiler_conf.engines import sglang_client

        if is_too_old():
            return
        when_imported(SCHEDULER, _hook_scheduler)
        for module, owner, method in PROFILE_METHODS:
            when_imported(module, _hook_profile(owner, method))
        sglang_client.register()
    except Exception as error:
        log.warning("SGLang runs without the window: %s: %s", type(error).__name__, error)


def watch() -> None:
    """For the job's process: say so when an SGLang is imported there that will never load the plugin."""
    when_imported(SCHEDULER, _check_age)


def sglang_version() -> str:
    """Of the running engine."""
    found = getattr(sys.modules.get("sglang"), "__version__", None)
    return found if isinstance(found, str) else "unknown"


def is_too_old() -> bool:
    """Whether this SGLang does not load plugins; said once, with what to do."""
    try:
        if Version(sglang_version()) >= Version(OLDEST):
            return False
    except InvalidVersion:  # a build from a fork: what it has is looked at when it is hooked
        return False
    say_once(
        f"SGLang {sglang_version()} cannot be windowed by tokens (it loads no plugins; {OLDEST} or newer does): "
        "no capture; mapping: iterations uses the engine's own counters"
    )
    return True


def _check_age(_: Any) -> None:
    is_too_old()


# -- one scheduler ---------------------------------------------------------------------------------------------------


class SchedulerHook:
    """What the hook keeps for one scheduler: its session, None where nothing is to be captured, and its requests."""

    def __init__(self, scheduler: Any) -> None:
        self.session: Session | None = None
        self.tracker: Tracker | None = None
        self.inside = False
        """An iteration is under way."""
        self.settings = published_settings("SGLang")
        self._scheduler = scheduler
        self._ran = False
        """Something ran since the scheduler was idle."""
        if self.settings is None or not scheduler.is_generation:
            return
        if getattr(scheduler, "enable_pdmux", False):
            say_once("SGLang with PD multiplexing runs two batches at once and cannot be windowed: no capture")
            return
        self.session = open_session(
            self.settings, engine="sglang", version=sglang_version(), rank=global_rank(scheduler)
        )
        if self.session is not None:
            self.tracker = make_tracker(scheduler, self.session)

    def begin(self, batch: Any) -> None:
        """Before `run_batch`."""
        session, tracker = self.session, self.tracker
        if session is None or tracker is None or not (session.gate.armed or session.by_request):
            return
        if not batch.reqs:  # data-parallel attention: other ranks have work, this one has not
            self.idle()
            return
        if batch.forward_mode.is_prebuilt():  # disaggregation: tokens that another engine made, and no forward
            return
        running, finished = tracker.advance(batch)
        if running is not None:
            self.inside = self._ran = True
            session.begin(running, finished)

    def end(self) -> None:
        """After it, its sampling included."""
        if self.inside:
            self.inside = False
            if self.session is not None:
                self.session.end()

    def idle(self) -> None:
        """A pass of the scheduler's loop had nothing to run; there are thousands of those."""
        if self._ran and self.session is not None and self.tracker is not None and self._scheduler.is_fully_idle():
            self._ran = False
            self.session.idle(self.tracker.rest())

    def profile(self, starts: bool, label: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None:
            if starts:
                self.session.start(label)
            else:
                self.session.stop()
        return True

    def close(self, reason: Any = "job_end") -> None:
        """The scheduler ends, and its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.writer import default_writer

            self.session.close(reason)
            default_writer().flush(CLOSE_SECONDS)

    def give_up(self, error: Exception) -> None:
        """The translation failed: leave this scheduler alone from here on, unless the user asked for the error."""
        session, self.session, self.tracker = self.session, None, None
        self.inside = False
        if session is not None:
            session.close("error")
            if session.settings.on_error == "raise":
                raise error
        say_once(
            f"SGLang's batch was not understood, profiling stops here, the job goes on: {type(error).__name__}: {error}"
        )


_hook_of_process: SchedulerHook | None = None
"""SGLang runs one scheduler in a process; its profiler manager does not know which."""


def attach(scheduler: Any) -> None:
    """Give a scheduler its hook, kept on the scheduler itself so that both go together."""
    global _hook_of_process
    try:
        _hook_of_process = scheduler.__dict__[_STATE] = SchedulerHook(scheduler)
    except Exception as error:
        say_once(f"SGLang runs without the window: {type(error).__name__}: {error}")


def make_tracker(scheduler: Any, session: Session) -> Tracker:
    """For the requests that this scheduler runs."""
    speculative = not scheduler.spec_algorithm.is_none()
    drafts = getattr(scheduler.server_args, "speculative_num_draft_tokens", None) if speculative else None
    return Tracker(
        session.settings.windows,
        speculative=speculative,
        widest=max(int(drafts or 1), 1),
        follow_all=session.settings.track != "lead",
        in_flight=lambda: getattr(scheduler, "result_queue", ()),
    )


def global_rank(scheduler: Any) -> int:
    """Rank over all pipeline stages and data-parallel replicas of the engine."""
    place = scheduler if hasattr(scheduler, "tp_rank") else _parallel(scheduler)
    rank = int(place.pp_rank) * int(place.tp_size) + int(place.tp_rank)
    if getattr(scheduler.server_args, "enable_dp_attention", False):
        return rank  # its replicas share one group of ranks
    return rank + int(place.dp_rank or 0) * int(place.tp_size) * int(place.pp_size)


def _parallel(scheduler: Any) -> Any:
    place = getattr(scheduler, "ps", None)  # 0.5.13 and newer, until it became the process's own
    if place is None:
        from sglang.srt.runtime_context import get_parallel

        place = get_parallel()
    return place


# -- the wrappers ----------------------------------------------------------------------------------------------------


def _around_init(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    attach(scheduler)


def _around_run(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
    if hook is None or hook.session is None or hook.inside:
        return wrapped(*args, **kwargs)
    try:
        hook.begin(args[0] if args else kwargs["batch"])
    except Exception as error:
        hook.give_up(error)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException:
        hook.end()
        hook.close("error")  # the scheduler does not survive this
        raise
    if getattr(result, "delay_sample_func", None) is None:
        hook.end()
    return result


def _around_sample(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
    if hook is not None:
        hook.end()
    return result


def _around_idle(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
    if hook is not None and hook.session is not None:
        try:
            hook.idle()
        except Exception as error:
            hook.give_up(error)
    return wrapped(*args, **kwargs)


def _close_scheduler(scheduler: Any) -> None:
    hook: SchedulerHook | None = scheduler.__dict__.get(_STATE)
    if hook is not None:
        hook.close()


_WRAPPERS = {
    "__init__": _around_init,
    "run_batch": _around_run,
    "launch_batch_sample_if_needed": _around_sample,
    "on_idle": _around_idle,
}


def _hook_scheduler(module: Any) -> None:
    scheduler = module.Scheduler
    missing = [name for name in _WRAPPERS if not hasattr(scheduler, name)]
    if missing:
        log.warning(
            "SGLang %s cannot be windowed by tokens (its scheduler has no %s): no capture; "
            "mapping: iterations uses the engine's own counters",
            sglang_version(),
            ", ".join(missing),
        )
        return
    for name, wrapper in _WRAPPERS.items():
        wrapt.wrap_function_wrapper(scheduler, name, wrapper)
    setattr(scheduler, CLOSE, _close_scheduler)


def _hook_profile(owner: str, method: str) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, f"{owner}.{method}", _around_profile)

    return hook


def _around_profile(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    hook = _hook_of_process
    if hook is None:
        return wrapped(*args, **kwargs)
    request = args[0] if args else kwargs["recv_req"]
    kind = getattr(request, "req_type", None) or request.type
    starts = kind.name == "START_PROFILE"
    label = getattr(request, "profile_prefix", None) or None
    if not hook.profile(starts, label):
        return wrapped(*args, **kwargs)
    from sglang.srt.managers.io_struct import ProfileReqOutput

    return ProfileReqOutput(success=True, message="The profiler window is armed." if starts else "Disarmed.")
