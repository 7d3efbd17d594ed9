"""The hooks in vLLM's workers: what each is wrapped around, and when it goes in and out.

- `execute_model` and `sample_tokens`: every worker runs an iteration through them, and it ends with its sampling. They
  are hooked in the classes that define them, and taken out again while no worker of the process wants iterations.
- `profile`: start_profile and stop_profile reach a worker through it.
- `compile_or_warm_up_model` and `shutdown`.
- `InprocClient.add_request`: an engine that runs in the job's own process may be told of another window.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.hooking import raises_errors, when_imported
from verl_profiler_conf.engines.swapping import Around, SwappedMethod
from verl_profiler_conf.engines.vllm import client, shutdown
from verl_profiler_conf.engines.vllm.release import CLOSE, OLDEST, vllm_version
from verl_profiler_conf.engines.vllm.worker import STATE, WorkerHook, all_skip, hook_of, wants_iterations

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


IN_PROCESS_CLIENT = ("vllm.v1.engine.core_client", "InprocClient", "add_request")
"""Drives an engine in the job's own process, the only kind whose process can be told of another window."""

_in_every_iteration: list[SwappedMethod] = []

_samplings: list[SwappedMethod] = []
"""Those of them that end an iteration. A skipped iteration need not be ended."""

_come_back = True
"""Hooks that are taken out will be put in again when another window is published in this process."""


def install() -> None:
    """Hook the workers, and what clients call, as soon as vLLM imports them. Repeatable."""
    for module, name in WORKER_CLASSES.items():
        when_imported(module, _hook_worker(name))
    when_imported(RAY_WORKER[0], _hook_ray)
    when_imported(IN_PROCESS_CLIENT[0], _hook_in_process_client)
    client.install()
    shutdown.install()
    put_in()


def put_in() -> None:
    """Hook the iterations."""
    for method in _in_every_iteration:
        method.put_in()


def take_out() -> None:
    """Leave the iterations alone from here on, unless a worker of this process wants them."""
    if _come_back and not wants_iterations():
        for method in _in_every_iteration:
            method.take_out()


def _end_iteration(hook: WorkerHook, result: Any) -> None:
    hook.end(result)
    if hook.left and not hook.keeps_skipped and all_skip():
        for method in _samplings:
            method.take_out()


def _hook_sampling() -> None:
    for method in _samplings:
        method.put_in()


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
        setattr(worker, CLOSE, _close_worker)
        # what is inherited is hooked where it is defined
        for method, around in (("execute_model", _around_execute(worker)), ("sample_tokens", _around_sample)):
            if method in worker.__dict__:
                _in_every_iteration.append(SwappedMethod(worker, method, around))
        if "sample_tokens" in worker.__dict__:
            _samplings.append(_in_every_iteration[-1])
        for method, wrapper in _WRAPPERS.items():
            if method in worker.__dict__:
                wrapt.wrap_function_wrapper(worker, method, wrapper)
        put_in()

    return hook


def _hook_ray(module: Any) -> None:
    worker = getattr(module, RAY_WORKER[1], None)
    if worker is not None and hasattr(worker, RAY_WORKER[2]):
        wrapt.wrap_function_wrapper(worker, RAY_WORKER[2], _around_ray)


def _hook_in_process_client(module: Any) -> None:
    global _come_back
    client = getattr(module, IN_PROCESS_CLIENT[1], None)
    if client is None or not hasattr(client, IN_PROCESS_CLIENT[2]):
        _come_back = False
        return
    wrapt.wrap_function_wrapper(client, IN_PROCESS_CLIENT[2], _around_add_request)


def _guarded_hook(worker: Any) -> WorkerHook | None:
    try:
        return hook_of(worker)
    except Exception as error:
        if raises_errors("vLLM"):
            raise
        warn_once(log, f"vLLM runs without the window: {type(error).__name__}: {error}")
        return None


def _around_execute(owner: type) -> Around:
    """`execute_model` of a class, with the hook."""

    def around(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def execute_model(worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            hook = worker._verl_profiler_conf or _guarded_hook(worker)
            if hook is None or (hook.owner is not owner and not hook.claim(owner)):
                return plain(worker, scheduler_output, *args, **kwargs)
            try:
                # nearly every iteration of a rollout is far from a window, and has the same requests as the one before:
                # it is only counted
                if hook.left and (
                    (
                        not scheduler_output.scheduled_new_reqs
                        and not scheduler_output.finished_req_ids
                        and scheduler_output.total_num_scheduled_tokens
                    )
                    or hook.skips_change(scheduler_output)
                ):
                    hook.left -= 1
                    if hook.keeps_skipped:
                        hook.keep_skipped(scheduler_output)
                else:
                    _hook_sampling()
                    hook.begin(scheduler_output)
                    if not hook.inside:
                        take_out()
            except Exception as error:
                hook.give_up(error)
                take_out()
            if not hook.inside:
                return plain(worker, scheduler_output, *args, **kwargs)
            try:
                result = plain(worker, scheduler_output, *args, **kwargs)
            except BaseException:
                _fail_iteration(hook)
                raise
            if result is not None:  # None: its sampling follows
                _end_iteration(hook, result)
            return result

        return execute_model

    return around


def _around_sample(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def sample_tokens(worker: Any, *args: Any, **kwargs: Any) -> Any:
        hook = worker._verl_profiler_conf
        if hook is None or not hook.inside:
            return plain(worker, *args, **kwargs)
        try:
            result = plain(worker, *args, **kwargs)
        except BaseException:
            _fail_iteration(hook)
            raise
        _end_iteration(hook, result)
        return result

    return sample_tokens


def _around_ray(wrapped: Callable[..., Any], wrapper: Any, args: Any, kwargs: Any) -> Any:
    worker = getattr(wrapper, "worker", None)
    if worker is None:
        warn_once(log, f"{type(wrapper).__name__} of vLLM {vllm_version()} has no worker: no capture under Ray")
    hook = _guarded_hook(worker) if worker is not None else None
    if hook is None:
        return wrapped(*args, **kwargs)
    try:
        hook.begin(args[0][0])
    except Exception as error:
        hook.give_up(error)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException:
        _fail_iteration(hook)
        raise
    hook.end(result)
    return result


def _fail_iteration(hook: WorkerHook) -> None:
    """An iteration has raised. Its error is the engine's, and comes before any of ours."""
    with contextlib.suppress(Exception):
        hook.fail_iteration()


def _around_profile(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    hook = _guarded_hook(worker)
    if hook is None:
        return wrapped(*args, **kwargs)
    starts = args[0] if args else kwargs.get("is_start", True)
    prefix = args[1] if len(args) > 1 else kwargs.get("profile_prefix")
    try:
        if hook.profile(bool(starts), prefix):
            put_in()
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
        put_in()


def _around_add_request(wrapped: Callable[..., Any], client: Any, args: Any, kwargs: Any) -> Any:
    """A request for an engine in this process: is it a new engine, or has another window been published?"""
    published = os.environ.get(ENV_NAME)
    if vars(client).get(STATE) != published:
        setattr(client, STATE, published)
        put_in()
    return wrapped(*args, **kwargs)


def _close_worker(worker: Any) -> None:
    hook: WorkerHook | None = getattr(worker, STATE, None)
    if hook is not None:
        hook.close()


def _around_shutdown(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    _close_worker(worker)
    return wrapped(*args, **kwargs)


_WRAPPERS = {
    "profile": _around_profile,
    "compile_or_warm_up_model": _around_warm_up,
    "shutdown": _around_shutdown,
}
