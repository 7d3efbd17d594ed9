"""SGLang's front end, in the process that clients call.

Its engines end with their captures on disk. Requests that a server sends itself to warm up are marked, so that no
window opens for them.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.hooking import when_imported
from verl_profiler_conf.engines.sglang.release import CLOSE, CLOSE_SECONDS, is_too_old
from verl_profiler_conf.engines.sglang.request import WARM_UP

log = logging.getLogger(__name__)

ENGINE = "sglang.srt.entrypoints.engine"
SERVER = "sglang.srt.entrypoints.http_server"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"

POLL_MS = 200

_windowed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Engine of this process -> whether its schedulers may have captures to finish.

They may if a window was published when they started, until they were asked to finish. An engine that is not in the
table counts as one with captures: it was being made while it loaded this plugin, which it does only under a window.
"""

_warming = False
"""A server of this process is warming up."""


def install() -> None:
    """Hook the modules when they are imported.

    Also for the job's process, before it makes an engine: the engine then ends with its captures on disk, or the log
    says that this SGLang will never load the plugin.
    """
    when_imported(ENGINE, _hook_engine)
    when_imported(SERVER, _hook_server)
    when_imported(TOKENIZER, _hook_tokenizer)


# -- the end of an engine --------------------------------------------------------------------------------------------


def settle(engine: Any) -> None:
    """Have the engine's schedulers finish their captures before it kills them. Bounded, and silent where there is
    nothing to do."""
    if not _windowed.get(engine, True):
        return
    _windowed[engine] = False
    socket = getattr(engine, "send_to_rpc", None)
    if socket is None:  # another node asks the schedulers of this one
        return
    from sglang.srt.managers import io_struct

    replicas = max(int(getattr(engine.server_args, "dp_size", 1) or 1), 1)
    for _ in range(replicas):  # the socket gives one to each
        request = io_struct.RpcReqInput(method=CLOSE, parameters={})
        send = getattr(io_struct, "sock_send", None)
        if send is not None:
            send(socket, request)
        else:  # before 0.5.13
            socket.send_pyobj(request)
    end = time.monotonic() + CLOSE_SECONDS
    while replicas and _schedulers_live():
        if socket.poll(POLL_MS):
            socket.recv()
            replicas -= 1
        elif time.monotonic() > end:
            log.warning("SGLang did not finish its captures within %.0f s of the shutdown", CLOSE_SECONDS)
            return


def settle_all() -> None:
    """The job ends, its engines perhaps not: have everything on disk all the same."""
    for engine in list(_windowed):
        settle(engine)


def _schedulers_live() -> bool:
    """Whether a scheduler is left to answer. SGLang names its processes `sglang::scheduler...`."""
    psutil = importlib.import_module("psutil")  # SGLang's, not ours
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and any("scheduler" in part for part in child.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


def _around_start(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> None:
    windowed = bool(os.environ.get(ENV_NAME))
    wrapped(*args, **kwargs)
    _windowed[engine] = windowed


def _around_shutdown(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    try:
        settle(engine)
    except Exception as error:
        log.warning("SGLang ends before its captures are finished: %s: %s", type(error).__name__, error)
    except KeyboardInterrupt:
        log.warning("Ctrl-C: SGLang ends now, and the traces that it has not written are given up")
        wrapped(*args, **kwargs)
        raise
    return wrapped(*args, **kwargs)


def _hook_engine(module: Any) -> None:
    if is_too_old():
        return
    wrapt.wrap_function_wrapper(module, "Engine.__init__", _around_start)
    wrapt.wrap_function_wrapper(module, "Engine.shutdown", _around_shutdown)


# -- a server's own requests -----------------------------------------------------------------------------------------


def _around_warm_up(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    global _warming
    _warming = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        _warming = False


def _around_request(wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    """Until the server says that it is up, a request without an id is its own: its warm-up."""
    if _warming:
        try:
            _mark_warm_up(manager, args[0] if args else kwargs["obj"])
        except Exception as error:
            text = "SGLang's own requests are not known by name, so a window may open for its warm-up"
            warn_once(log, f"{text}: {type(error).__name__}: {error}")
    return wrapped(*args, **kwargs)


def _mark_warm_up(manager: Any, request: Any) -> None:
    if manager.server_status.name == "Starting" and getattr(request, "rid", "") is None:
        request.rid = WARM_UP + uuid.uuid4().hex


def _hook_server(module: Any) -> None:
    if hasattr(module, "_wait_and_warmup"):
        wrapt.wrap_function_wrapper(module, "_wait_and_warmup", _around_warm_up)
    if hasattr(module, "execute_warmups"):
        wrapt.wrap_function_wrapper(module, "execute_warmups", _around_named_warm_ups)


async def _around_named_warm_ups(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    global _warming
    _warming = True
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _warming = False


def _hook_tokenizer(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, "TokenizerManager.generate_request", _around_request)
