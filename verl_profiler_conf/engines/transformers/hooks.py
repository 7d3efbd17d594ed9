"""The hooks in transformers: what each is wrapped around.

Hooked are the two decode loops of `GenerationMixin` whose tokens can be counted, `_sample` (greedy and sampling) and
`_assisted_decoding`, and two calls that both make once per iteration: the stopping criteria at its end, and
`_has_unfinished_sequences` at the top of the next. All rows of a batch advance together, so a row's next token is the
number of columns that were added so far; what has to be learnt is which rows have ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import wrapt

from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.engines.in_process import in_process_session
from verl_profiler_conf.engines.transformers.generation import Generation

log = logging.getLogger(__name__)

_COUNTED = ("_sample", "_assisted_decoding")
_UNCOUNTED = {
    "_beam_search": "beam search moves tokens between rows",
    "_group_beam_search": "beam search moves tokens between rows",
    "_constrained_beam_search": "beam search moves tokens between rows",
    "_contrastive_search": "contrastive search runs several forwards for one token",
    "_dola_decoding": "its decode loop is not hooked",
}
"""Decode loops whose iterations do not map to response tokens. Absent from a release: not hooked there."""

_running = threading.local()


def hook(module: Any) -> None:
    """Hook `transformers.generation.utils`."""
    mixin = module.GenerationMixin
    missing = [name for name in (*_COUNTED, "_has_unfinished_sequences") if not hasattr(mixin, name)]
    if missing:
        log.warning(
            "transformers %s cannot be windowed (no GenerationMixin.%s): no capture; 4.46 or newer is needed",
            version("transformers"),
            missing[0],
        )
        return
    for name in _COUNTED:
        wrapt.wrap_function_wrapper(mixin, name, _around_loop)
    for name in _UNCOUNTED:
        if hasattr(mixin, name):
            wrapt.wrap_function_wrapper(mixin, name, _around_uncounted)
    wrapt.wrap_function_wrapper(mixin, "_has_unfinished_sequences", _around_loop_top)
    if hasattr(mixin, "_get_candidate_generator"):
        wrapt.wrap_function_wrapper(mixin, "_get_candidate_generator", _around_candidates)


def _session() -> Session | None:
    return in_process_session("transformers", version("transformers"))


def _around_loop(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    if getattr(_running, "generation", None) is not None:
        return wrapped(*args, **kwargs)  # an assistant model drafts inside an iteration of the main one
    generation = _begin_generation(args, kwargs)
    if generation is None:
        return wrapped(*args, **kwargs)
    _running.generation = generation
    try:
        if wrapped.__name__ == "_sample":  # its prompt's forward runs before the top of the loop
            generation.begin()
        result = wrapped(*args, **kwargs)
    except BaseException:
        _running.generation = None
        with contextlib.suppress(Exception):  # on_error: raise; the job's own error comes first
            generation.close(failed=True)
        raise
    _running.generation = None
    generation.close(failed=False)
    return result


def _begin_generation(args: Any, kwargs: dict[str, Any]) -> Generation | None:
    """Count this generate call and put our ear to its stopping criteria; None where nothing waits for a window."""
    session = None
    try:
        session = _session()
        if session is None or not session.is_waiting:
            return None
        input_ids = args[0] if args else kwargs["input_ids"]
        criteria = kwargs["stopping_criteria"]
        session.calls += 1
        generation = Generation(
            session,
            number=session.calls,
            width=input_ids.shape[1],
            rows=input_ids.shape[0],
            most=criteria.max_length,
            ends_early=any(type(criterion).__name__ != "MaxLengthCriteria" for criterion in criteria),
        )
        kwargs["stopping_criteria"] = _listening(criteria, generation)
        return generation
    except Exception as error:
        if session is not None and session.settings.on_error == "raise":
            raise
        warn_once(log, f"generate cannot be windowed: {type(error).__name__}: {error}; it runs without a capture")
        return None


def _listening(criteria: Any, generation: Generation) -> Any:
    """The same criteria, telling `generation` what they answered. No operator is added to the iteration."""

    class Listening(type(criteria)):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
            done = super().__call__(input_ids, scores, **more)
            if getattr(_running, "generation", None) is generation:
                generation.end(input_ids, done)
            return done

    return Listening(criteria)


def _around_loop_top(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    goes_on = wrapped(*args, **kwargs)
    generation: Generation | None = getattr(_running, "generation", None)
    if goes_on and generation is not None:
        generation.begin()
    return goes_on


def _around_candidates(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    candidates = wrapped(*args, **kwargs)
    generation: Generation | None = getattr(_running, "generation", None)
    if generation is not None and generation.candidates is None:
        generation.candidates = candidates
    return candidates


def _around_uncounted(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    name = wrapped.__name__
    try:
        session = _session()
        if session is not None and session.is_waiting:
            reason = _UNCOUNTED[name]
            warn_once(log, f"no capture of {name.strip('_')}: {reason}, so its response tokens cannot be counted")
    except Exception as error:
        warn_once(log, f"{name.strip('_')} runs without a capture: {type(error).__name__}: {error}")
    return wrapped(*args, **kwargs)
