"""The hooks in vLLM's workers: what each is wrapped around, and when it goes in.

- `execute_model` and `sample_tokens`: every worker runs an iteration through them, and it ends with its sampling. They
  are hooked in the classes that define them.
- `profile`: start_profile and stop_profile reach a worker through it.
- `compile_or_warm_up_model` and `shutdown`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler_conf.engines.hooking import say_once, when_imported
from verl_profiler_conf.engines.vllm import client
from verl_profiler_conf.engines.vllm.release import OLDEST, vllm_version
from verl_profiler_conf.engines.vllm.worker import STATE, WorkerHook, hook_of

log = logging.getLogger(__name__)

WORKER_CLASSES = {
    "vllm.v1.worker.gpu_worker": "Worker",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
    "vllm.v1.worker.xpu_worker": "XPUWorker",
    "vllm_ascend.worker.worker": "NPUWorker",
    "vllm_ascend.worker.worker_v1": "NPUWorker",
}
"""Module -> class. CPUWorker and XPUWorker inherit execute_model; before 0.31 they have a `profile` of their own."""

RAY_WORKER = ("vllm.v1.executor.ray_utils", "RayWorkerWrapper", "execute_model_ray")
"""Ray calls the model runner without the worker. This one call runs an iteration, its sampling included."""


def install() -> None:
    """Hook the workers, and what clients call, as soon as vLLM imports them. Repeatable."""
    for module, name in WORKER_CLASSES.items():
        when_imported(module, _hook_worker(name))
    when_imported(RAY_WORKER[0], _hook_ray)
    client.install()


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
                OLDEST,
            )
            return
        if STATE in worker.__dict__:
            return  # known by two names
        setattr(worker, STATE, None)
        for method, around in _EVERY_ITERATION.items():
            if method in worker.__dict__:  # what is inherited is hooked where it is defined
                setattr(worker, method, around(getattr(worker, method)))
        for method, wrapper in _WRAPPERS.items():
            if method in worker.__dict__:
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
        say_once(f"vLLM runs without the window: {type(error).__name__}: {error}")
        return None


def _around_execute(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`execute_model` with the hook.

    A plain function, as is that of `sample_tokens`: they are called in every iteration, with caches that the iteration
    has emptied, and a wrapt wrapper takes three times as long there.
    """

    @functools.wraps(plain)
    def execute_model(worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        hook = worker._verl_profiler_conf or _guarded_hook(worker)
        if hook is None or hook.running:  # a worker class calls the one that it inherits from
            return plain(worker, scheduler_output, *args, **kwargs)
        try:
            # nearly every iteration of a rollout goes this way, so that it is short: far from a window, with the same
            # requests as before
            if (
                hook.skips.left
                and not scheduler_output.scheduled_new_reqs
                and not scheduler_output.finished_req_ids
                and scheduler_output.total_num_scheduled_tokens
            ):
                hook.skips.left -= 1
                hook.inside = hook.needs_results
                hook.skip_output(scheduler_output)
            else:
                hook.begin(scheduler_output)
        except Exception as error:
            hook.give_up(error)
        result = _RAISED
        hook.running = True
        try:
            result = plain(worker, scheduler_output, *args, **kwargs)
        finally:
            hook.running = False
            if hook.inside and result is not None:  # None: its sampling follows
                hook.end(None if result is _RAISED else result)
        return result

    return execute_model


def _around_sample(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def sample_tokens(worker: Any, *args: Any, **kwargs: Any) -> Any:
        hook = worker._verl_profiler_conf
        if hook is None or not hook.inside:
            return plain(worker, *args, **kwargs)
        result = None
        try:
            result = plain(worker, *args, **kwargs)
        finally:
            hook.end(result)
        return result

    return sample_tokens


def _around_ray(wrapped: Callable[..., Any], wrapper: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(wrapper.worker)
    if hook is None:
        return wrapped(*args, **kwargs)
    try:
        hook.begin(args[0][0])
    except Exception as error:
        hook.give_up(error)
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
    try:
        if hook.profile(bool(starts), prefix):
            return None
    except Exception as error:
        hook.give_up(error)
        return None
    return wrapped(*args, **kwargs)


def _around_warm_up(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(worker)
    if hook is None:
        return wrapped(*args, **kwargs)
    hook.warm_up(True)  # Model Runner V2 does it by running requests that it makes up
    try:
        return wrapped(*args, **kwargs)
    finally:
        hook.warm_up(False)


def _around_shutdown(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = getattr(worker, STATE, None)
    if hook is not None:
        hook.close()
    return wrapped(*args, **kwargs)


_EVERY_ITERATION = {"execute_model": _around_execute, "sample_tokens": _around_sample}

_WRAPPERS = {
    "profile": _around_profile,
    "compile_or_warm_up_model": _around_warm_up,
    "shutdown": _around_shutdown,
}

_RAISED: Any = object()
