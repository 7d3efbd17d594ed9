"""transformers' continuous batching (`generate_batch`): one loop in a background thread, with named requests.

Two methods of its processor are hooked, and both run once in each iteration. `prepare_next_batch` chooses the batch,
and returns false when nothing is left to run. `_generation_step` runs the batch. The loop itself,
`_run_generation_loop` of the manager, is hooked too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import wrapt

from verl_profiler_conf.capture.loop_session import LoopSession
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.engines.in_process import iteration_owner, open_loop
from verl_profiler_conf.engines.transformers.hooks import note_loop

log = logging.getLogger(__name__)

MODULE = "transformers.generation.continuous_batching.continuous_api"

STATE = "_verl_profiler_conf"
"""Attribute of a processor that holds its loop."""

_STEP, _PREPARE, _RUN = "_generation_step", "prepare_next_batch", "_run_generation_loop"


class ContinuousLoop:
    """The requests of one processor, and the session that they drive."""

    def __init__(self, session: LoopSession) -> None:
        self.session = session
        self._made: dict[str, int] = {}
        """Request -> response tokens that it has made. A step that still runs counts."""
        self._requests: dict[str, Any] = {}

    def begin(self, processor: Any) -> None:
        """Before a step of the processor."""
        batch: dict[str, range] = {}
        for scheduled in _scheduled(processor.inputs_and_outputs):
            request = scheduled.state
            name = request.request_id
            made = self._made.get(name)
            if made is None:
                made = _tokens_made(request)
                self._requests[name] = request
            batch[name] = range(made, made + bool(scheduled.has_new_token))
            self._made[name] = batch[name].stop
        held = processor.scheduler.active_requests.keys() | processor.scheduler.waiting_requests.keys()
        self.session.begin(batch, self._take_finished(self._made.keys() - held))

    def idle(self) -> None:
        """Nothing is left to run."""
        if self._made and not self.session.failed:
            self.session.idle(self._take_finished(set(self._made)))

    def _take_finished(self, names: set[str]) -> dict[str, int | None]:
        """Forget these requests. Returns the tokens that each one kept: a step that still runs may make one more."""
        for name in names:
            del self._made[name]
        return {name: _tokens_made(self._requests.pop(name)) for name in names}


def _scheduled(inputs: Any) -> Any:
    """The requests of the batch that is about to run. Asynchronous batching keeps two batches; this is the next one."""
    pairs = getattr(inputs, "io_pairs", None)
    if pairs is not None:
        inputs = pairs[inputs.current_pair].host_io
    return inputs.requests_in_batch


def _tokens_made(request: Any) -> int:
    """Response tokens that a request has made. When a request is moved out of the cache, they become part of its new
    prompt."""
    moved = len(request.initial_tokens) - request._true_initial_tokens if request._true_initial_tokens else 0
    return moved + len(request.generated_tokens)


def hook_continuous(module: Any) -> None:
    """Hook `transformers.generation.continuous_batching.continuous_api`."""
    processor, manager = getattr(module, "ContinuousBatchProcessor", None), module.ContinuousBatchingManager
    if not all(hasattr(processor, name) for name in (_STEP, _PREPARE)) or not hasattr(manager, _RUN):
        wrapt.wrap_function_wrapper(manager, "start", _around_unknown_start)
        return
    wrapt.wrap_function_wrapper(module.ContinuousMixin, "generate_batch", _around_generate_batch)
    wrapt.wrap_function_wrapper(processor, _STEP, _around_step)
    wrapt.wrap_function_wrapper(processor, _PREPARE, _around_prepare)
    wrapt.wrap_function_wrapper(manager, _RUN, _around_run)


def _around_unknown_start(wrapped: Callable[..., Any], _manager: Any, args: Any, kwargs: Any) -> Any:
    _refuse("its scheduler does not tell which tokens a step makes")
    return wrapped(*args, **kwargs)


def _refuse(reason: str) -> None:
    text = f"no capture of continuous batching in transformers {version('transformers')}: {reason}"
    try:
        session = open_loop("transformers", version("transformers"))
    except Exception as error:
        text, session = f"{text}; {type(error).__name__}: {error}", None
    if session is not None:
        session.arming.placeholders.report_unavailable(text)
    warn_once(log, text, reason=text)


def _around_generate_batch(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    note_loop()  # `generate` calls it under cache_implementation="paged"
    return wrapped(*args, **kwargs)


def _around_step(wrapped: Callable[..., Any], processor: Any, args: Any, kwargs: Any) -> Any:
    loop = _loop_of(processor)
    if loop is None or not loop.session.is_waiting:
        return wrapped(*args, **kwargs)
    with _guard(loop.session):
        loop.begin(processor)
    try:
        return wrapped(*args, **kwargs)
    finally:
        loop.session.end()


@contextlib.contextmanager
def _guard(session: LoopSession) -> Iterator[None]:
    """A release whose objects are not understood ends the session, not the job."""
    try:
        yield
    except Exception as error:
        if session.failed:  # the session has failed before, and it raises only under `on_error: raise`
            raise
        session.fail(error)


def _loop_of(processor: Any) -> ContinuousLoop | None:
    """The loop of a processor. None where nothing is captured, or nothing more."""
    loop: ContinuousLoop | None = getattr(processor, STATE, None)
    if loop is None and iteration_owner() is None:
        try:
            session = open_loop("transformers", version("transformers"))
        except Exception as error:
            warn_once(log, f"generate_batch cannot be windowed: {type(error).__name__}: {error}")
            session = None
        if session is not None:
            loop = ContinuousLoop(session)
            setattr(processor, STATE, loop)
    return loop


def _around_prepare(wrapped: Callable[..., Any], processor: Any, args: Any, kwargs: Any) -> Any:
    has_work = wrapped(*args, **kwargs)
    loop: ContinuousLoop | None = getattr(processor, STATE, None)
    if not has_work and loop is not None:
        with _guard(loop.session):
            loop.idle()
    return has_work


def _around_run(wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        processor = getattr(manager, "batch_processor", None)
        loop: ContinuousLoop | None = getattr(processor, STATE, None)
        if loop is not None:
            setattr(processor, STATE, None)
            with _guard(loop.session):
                loop.idle()
            loop.session.finish()
