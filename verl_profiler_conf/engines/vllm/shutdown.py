"""vLLM ends with its captures on disk, although it kills its processes seconds after it has asked them to end.

A front end gives its EngineCore 5 s, and an EngineCore gives its workers about as long. Writing a trace can take
longer. So an EngineCore has its workers finish their captures before it ends them, and a front end gives it the time,
as long as a process of its engine has a trace to write.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import wrapt

from verl_profiler_conf.capture.claims import claims
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.hooking import when_imported
from verl_profiler_conf.engines.in_process import current_settings
from verl_profiler_conf.engines.vllm.release import CLOSE, CLOSE_SECONDS

log = logging.getLogger(__name__)

FRONT_END = ("vllm.v1.engine.utils", "shutdown")
"""The function by which a front end ends its EngineCores."""

ENGINE_CORE = ("vllm.v1.engine.core", "EngineCore", "shutdown")

OWN_GRACE_S = 5.0
"""What vLLM itself gives an EngineCore."""

POLL_S = 0.2

_folders: set[Path] = set()
"""Where captures of this process's engines go: a job may have ended, and its engine not."""


def install() -> None:
    """Hook both sides as soon as they are imported. Repeatable."""
    settings = None
    with contextlib.suppress(Exception):  # a mistake in the settings is logged where iterations run
        settings = current_settings()
    if settings is not None and settings.enable and settings.mapping == "tokens":
        _folders.add(Path(settings.save_path or "profile").absolute())
    when_imported(FRONT_END[0], _hook_front_end)
    when_imported(ENGINE_CORE[0], _hook_engine_core)


def _hook_front_end(module: Any) -> None:
    if hasattr(module, FRONT_END[1]):
        wrapt.wrap_function_wrapper(module, FRONT_END[1], _around_front_end)
    else:
        _warn_of_early_end(f"it has no {'.'.join(FRONT_END)}")


def _hook_engine_core(module: Any) -> None:
    core = getattr(module, ENGINE_CORE[1], None)
    if core is not None and hasattr(core, ENGINE_CORE[2]):
        wrapt.wrap_function_wrapper(core, ENGINE_CORE[2], _around_engine_core)
    else:
        _warn_of_early_end(f"it has no {'.'.join(ENGINE_CORE)}")


def _warn_of_early_end(reason: str) -> None:
    if _folders:  # else nothing is captured
        warn_once(log, f"vLLM may end before its captures are finished: {reason}")


# -- the front end -----------------------------------------------------------------------------------------------------


def _around_front_end(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    try:
        processes = args[0] if args else kwargs["procs"]
        if _folders and processes:
            end_with_traces(processes, _folders)
    except Exception as error:
        _warn_of_early_end(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        log.warning("Ctrl-C: vLLM ends now, and the traces that it has not written are given up")
        wrapped(*args, **kwargs)
        raise
    return wrapped(*args, **kwargs)


def end_with_traces(processes: Sequence[Any], folders: Iterable[Path]) -> None:
    """Ask processes to end, and wait until they have, as long as one of them or of their children writes a trace.

    It waits as long as vLLM would in any case, and `CLOSE_SECONDS` at most.
    """
    for process in processes:
        if process.is_alive():
            process.terminate()
    began = time.monotonic()
    while alive := [process for process in processes if process.is_alive()]:
        waited = time.monotonic() - began
        if waited > CLOSE_SECONDS:
            log.warning("vLLM did not finish its captures within %.0f s of the shutdown", CLOSE_SECONDS)
            return
        if waited > OWN_GRACE_S and not _writing(alive, folders):
            return
        connection.wait([process.sentinel for process in alive], POLL_S)


def _writing(processes: Iterable[Any], folders: Iterable[Path]) -> bool:
    """Whether one of these processes, or of their children, has claimed the name of a trace that is not there yet."""
    psutil = importlib.import_module("psutil")  # vLLM's, not ours
    pids = set()
    for process in processes:
        try:
            root = psutil.Process(process.pid)
            pids |= {root.pid, *(child.pid for child in root.children(recursive=True))}
        except psutil.Error:
            continue
    return any(claim.is_here and claim.pid in pids for folder in folders for claim in claims(folder))


# -- the EngineCore ----------------------------------------------------------------------------------------------------


def _around_engine_core(wrapped: Callable[..., Any], core: Any, args: Any, kwargs: Any) -> Any:
    if os.environ.get(ENV_NAME):
        _finish_captures(core)
    return wrapped(*args, **kwargs)


def _finish_captures(core: Any) -> None:
    try:
        if core.model_executor is None:
            return
        call_workers = core.model_executor.collective_rpc
    except AttributeError as error:
        _warn_of_early_end(f"AttributeError: {error}")
        return
    try:
        call_workers(CLOSE, timeout=CLOSE_SECONDS)
    except Exception as error:
        log.debug("the workers could not be asked to finish their captures", exc_info=error)
