"""The hooks in transformers: what each is wrapped around.

The outermost `generate` of a thread makes the response. What it calls inside (an assistant model, the depth decoder of
a speech model, a helper in a logits processor) is part of its iterations.

These are hooked:

- `generate`;
- the two decode loops of `GenerationMixin` whose tokens can be counted: `_sample` (greedy and sampling) and
  `_assisted_decoding`;
- the two calls that both loops make once in each iteration: the stopping criteria at the end of one, and
  `_has_unfinished_sequences` at the top of the next.

All rows of a batch advance together. The stopping criteria tell which rows have ended. A model class can have a decode
loop of its own. It is hooked when `generate` is first called on that class, if it makes the same two calls.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import wrapt

from verl_profiler_conf.capture.loop_session import LoopSession
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.engines.in_process import current_settings, iteration_owner, open_loop, owned_by
from verl_profiler_conf.engines.transformers.generation import Generation

log = logging.getLogger(__name__)

_LOOP_TOP = "_has_unfinished_sequences"
_SPECULATIVE = "_assisted_decoding"
_COUNTED = ("_sample", _SPECULATIVE)
_UNCOUNTED = {
    "_beam_search": "beam search moves tokens between rows",
    "_group_beam_search": "beam search moves tokens between rows",
    "_constrained_beam_search": "beam search moves tokens between rows",
    "_contrastive_search": "contrastive search runs several forwards for one token",
    "_dola_decoding": "its decode loop is not hooked",
}
"""Decode loop -> why its iterations do not map to response tokens. A release need not have all of them."""


class _Call:
    """One outermost call of `generate`, or of a decode loop that a model calls directly."""

    def __init__(self) -> None:
        self.loops = 0
        """Decode loops begun, counted or not."""
        self.generation: Generation | None = None
        """The decode loop that is windowed right now."""


_NO_RESPONSE = object()
"""The owner of what a `generate` call or an uncounted decode loop calls inside: it makes no response of its own."""

_hooked_classes: set[tuple[type, str]] = set()


def hook(module: Any) -> None:
    """Hook `transformers.generation.utils`."""
    mixin = module.GenerationMixin
    missing = [name for name in (*_COUNTED, _LOOP_TOP) if not hasattr(mixin, name)]
    if missing:
        log.warning(
            "transformers %s cannot be windowed (no GenerationMixin.%s): no capture; 4.46 or newer is needed",
            version("transformers"),
            missing[0],
        )
        return
    wrapt.wrap_function_wrapper(mixin, "generate", _around_generate)
    for name in _COUNTED:
        wrapt.wrap_function_wrapper(mixin, name, _around_loop)
    for name in _UNCOUNTED:
        if hasattr(mixin, name):
            wrapt.wrap_function_wrapper(mixin, name, _around_uncounted)
    wrapt.wrap_function_wrapper(mixin, _LOOP_TOP, _around_loop_top)
    if hasattr(mixin, "_get_candidate_generator"):
        wrapt.wrap_function_wrapper(mixin, "_get_candidate_generator", _around_candidates)


def _around_generate(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    if iteration_owner() is not None:
        with owned_by(_NO_RESPONSE):
            return wrapped(*args, **kwargs)
    if not _is_in_force():
        return wrapped(*args, **kwargs)
    _hook_own_loops(type(model))
    call = _Call()
    with owned_by(call):
        result = wrapped(*args, **kwargs)
    if not call.loops:
        _warn_if_waiting(f"no capture of {type(model).__name__}.generate: the decode loop that it ran is not hooked")
    return result


def _around_loop(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    owner = iteration_owner()
    if owner is None:  # called directly, not by `generate`
        call = _Call()
        with owned_by(call):
            return _run_counted(call, wrapped, args, kwargs)
    if isinstance(owner, _Call) and owner.generation is None:
        return _run_counted(owner, wrapped, args, kwargs)
    return wrapped(*args, **kwargs)


def _run_counted(call: _Call, wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    call.loops += 1
    args = list(args)
    generation = _begin_generation(wrapped, args, kwargs)
    if generation is None:
        return wrapped(*args, **kwargs)
    call.generation = generation
    try:
        if wrapped.__name__ != _SPECULATIVE:  # the prompt's forward may run before the top of the loop
            generation.begin()
        result = wrapped(*args, **kwargs)
    except BaseException:
        call.generation = None
        with contextlib.suppress(Exception):  # on_error: raise; the job's own error comes first
            generation.close(failed=True)
        raise
    call.generation = None
    generation.close(failed=False)
    return result


def note_loop() -> None:
    """The `generate` call under way, if any, runs a decode loop that is hooked elsewhere."""
    owner = iteration_owner()
    if isinstance(owner, _Call):
        owner.loops += 1


def _current_generation() -> Generation | None:
    """The decode loop that the caller belongs to. None for what that loop calls inside."""
    owner = iteration_owner()
    return owner.generation if isinstance(owner, _Call) else None


def _begin_generation(loop: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Generation | None:
    """Count this decode loop and listen to its stopping criteria, which are replaced among the arguments.

    None where nothing is to be captured.
    """
    session: LoopSession | None = None
    try:
        session = open_loop("transformers", version("transformers"))
        if session is None:
            return None
        where, name = _place_of("input_ids", loop, args, kwargs)
        input_ids = where[name]
        where, name = _place_of("stopping_criteria", loop, args, kwargs)
        criteria = where[name]
        generation = Generation(
            session,
            width=input_ids.shape[1],
            rows=input_ids.shape[0],
            max_columns=criteria.max_length,
            is_speculative=loop.__name__ == _SPECULATIVE,
            ends_early=any(type(criterion).__name__ != "MaxLengthCriteria" for criterion in criteria),
        )
        where[name] = _listening(criteria, generation)
        return generation
    except Exception as error:
        if session is not None and session.settings.on_error == "raise":
            raise
        _warn_unusable(error, session)
        return None


def _place_of(name: str, loop: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Where an argument of a call stands: `generate` passes it by name, a decode function of the user's by position."""
    if name in kwargs:
        return kwargs, name
    position = list(inspect.signature(loop).parameters).index(name)
    if position >= len(args):
        raise TypeError(f"{loop.__name__} is called without {name}")
    return args, position


def _listening(criteria: Any, generation: Generation) -> Any:
    """The same criteria. They report to `generation` what they answered, and add no operator to the iteration."""

    class Listening(type(criteria)):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
            done = super().__call__(input_ids, scores, **more)
            if _current_generation() is generation:
                generation.end(input_ids, done)
            return done

    return Listening(criteria)


def _around_loop_top(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    goes_on = wrapped(*args, **kwargs)
    generation = _current_generation()
    if goes_on and generation is not None:
        generation.begin()
    return goes_on


def _around_candidates(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    candidates = wrapped(*args, **kwargs)
    generation = _current_generation()
    if generation is not None and generation.candidates is None:
        generation.candidates = candidates
    return candidates


def _around_uncounted(wrapped: Callable[..., Any], _model: Any, args: Any, kwargs: Any) -> Any:
    return _run_uncounted(wrapped, args, kwargs, _UNCOUNTED[wrapped.__name__])


def _around_unknown(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    reason = f"{type(model).__name__} has a decode loop of its own, which does not mark its iterations"
    return _run_uncounted(wrapped, args, kwargs, reason)


def _run_uncounted(wrapped: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
    """Run a decode loop that is not captured. What it calls inside is not captured either."""
    owner = iteration_owner()
    if owner is None or (isinstance(owner, _Call) and owner.generation is None):
        name = wrapped.__name__.strip("_")
        _warn_if_waiting(f"no capture of {name}: {reason}, so its response tokens cannot be counted")
        if isinstance(owner, _Call):
            owner.loops += 1
    with owned_by(_NO_RESPONSE):
        return wrapped(*args, **kwargs)


def _hook_own_loops(model_class: type) -> None:
    """Hook the decode loops that a model class defines itself, each once."""
    for name in _COUNTED:
        owner = next((base for base in model_class.__mro__ if name in vars(base)), None)
        if owner is None or owner.__name__ == "GenerationMixin" or (owner, name) in _hooked_classes:
            continue
        _hooked_classes.add((owner, name))
        wrapt.wrap_function_wrapper(owner, name, _around_loop if _is_countable(vars(owner)[name]) else _around_unknown)


def _is_countable(loop: Any) -> bool:
    """Whether a decode loop marks its iterations as those of `GenerationMixin` do, or calls one of those."""
    code = getattr(inspect.unwrap(loop), "__code__", None)
    if code is None:
        return False
    delegates = "super" in code.co_names and any(name in code.co_names for name in _COUNTED)
    return delegates or (_LOOP_TOP in code.co_names and "stopping_criteria" in code.co_varnames)


def _is_in_force() -> bool:
    """Whether a window is in force here. One that cannot be read is logged once, and does not count."""
    try:
        return current_settings() is not None
    except Exception as error:
        _warn_unusable(error)
        return False


def _warn_if_waiting(text: str) -> None:
    """Log why there is no capture, if there could have been one."""
    try:
        session = open_loop("transformers", version("transformers"))
        if session is not None:
            warn_once(log, text, reason=text)
            session.arming.placeholders.report_unavailable(text)
    except Exception as error:
        _warn_unusable(error)


def _warn_unusable(error: Exception, session: LoopSession | None = None) -> None:
    text = f"generate cannot be windowed: {type(error).__name__}: {error}; it runs without a capture"
    warn_once(log, text)
    if session is not None:  # else the job's end would say that no iteration was reported
        with contextlib.suppress(Exception):
            session.arming.placeholders.report_unavailable(text)
