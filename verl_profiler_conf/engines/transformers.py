"""transformers: `model.generate`, windowed.

Hooked are the two decode loops of `GenerationMixin` whose tokens can be counted, `_sample` (greedy and sampling) and
`_assisted_decoding`, and two calls that both make once per iteration: the stopping criteria at its end, and
`_has_unfinished_sequences` at the top of the next. All rows of a batch advance together, so a row's next token is the
number of columns that were added so far; what has to be learnt is which rows have ended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import wrapt

from verl_profiler_conf.engines.torch_rank import torch_rank
from verl_profiler_conf.session import Session, live_sessions, open_session

log = logging.getLogger(__name__)

_MODULE = "transformers.generation.utils"
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


@functools.lru_cache(maxsize=1)
def install() -> None:
    """Hook transformers as soon as it is imported, at once if it is."""
    wrapt.register_post_import_hook(_hook, _MODULE)


def _hook(module: Any) -> None:
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
    from verl_profiler_conf.engines import current_settings

    settings = current_settings()
    if settings is None:
        return None
    for session in live_sessions():
        if session.engine == "transformers" and session.settings == settings:
            return session
    return open_session(settings, engine="transformers", version=version("transformers"), rank=torch_rank())


class Generation:
    """One `generate` call: the rows of its batch as requests.

    Args:
        session: driven by it.
        number: which generate call of the session this is; part of the request ids.
        width: columns of `input_ids` before the first token, padding included.
        rows: sequences in the batch.
        most: columns that a loop may have in the end (`max_length`), None when unknown.
        ends_early: whether a row can end before the others; where none can, nothing is read back from the device.
    """

    def __init__(
        self, session: Session, *, number: int, width: int, rows: int, most: int | None, ends_early: bool
    ) -> None:
        self.session = session
        self.names = [f"generate{number}.row{row}" for row in range(rows)]
        self.alive = dict.fromkeys(self.names)
        self.made = 0
        self.candidates: Any = None
        self._width = width
        self._most = most
        self._ends_early = ends_early
        self._finished: dict[str, int | None] = {}
        self._inside = False

    def begin(self) -> None:
        """An iteration begins, unless one is under way (an assistant model's own loop passes here as well)."""
        if self._inside:
            return
        self._inside = True
        with self._guard():
            finished, self._finished = self._finished, {}
            self.session.begin(Rows(self.alive, range(self.made, self.made + self._at_most())), finished)

    def end(self, input_ids: Any, done: Any) -> None:
        """The iteration has appended its tokens: `input_ids` is `(rows, width + made)`, `done` `(rows,)` bool."""
        self._inside = False
        with self._guard():
            self.session.end()
            self.made = input_ids.shape[1] - self._width
            if self._ends_early and self.session.gate.armed and len(self.alive) > 1:
                for row, ended in enumerate(done.tolist()):
                    name = self.names[row]
                    if ended and name in self.alive:
                        del self.alive[name]
                        self._finished[name] = self.made

    def close(self, *, failed: bool) -> None:
        """`generate` returns or raises: every row has ended."""
        self.session.end()
        self._finished.update((name, self.made) for name in self.alive)
        self.session.idle(self._finished, reason="error" if failed else None)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A release whose objects are not what we take them for ends our session, not the job."""
        try:
            yield
        except Exception as error:
            if not self.session.failed:
                self.session.fail(error)
            elif self.session.settings.on_error == "raise":  # the session has said it, and raised it
                raise

    def _at_most(self) -> int:
        """Tokens that the coming iteration makes at most: 1, or one more than the candidates that it verifies."""
        if self.candidates is None:
            return 1
        for attribute in ("num_assistant_tokens", "num_output_tokens"):
            number = getattr(self.candidates, attribute, None)
            if number is not None:
                return int(number) + 1
        left = (self._most or 0) - self._width - self.made
        return max(left, 1)


class Rows(Mapping[str, range]):
    """The rows still running, all about to make the same tokens."""

    def __init__(self, alive: dict[str, None], tokens: range) -> None:
        self._alive = alive
        self._tokens = tokens

    def __getitem__(self, name: str) -> range:
        if name in self._alive:
            return self._tokens
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._alive)

    def __len__(self) -> int:
        return len(self._alive)

    def get(self, name: str, default: Any = None) -> Any:  # the inherited one raises and catches for a row that ended
        return self._tokens if name in self._alive else default

    def keys(self) -> Any:
        return self._alive.keys()


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
        if session is None or not session.gate.armed:
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
        _once("generate cannot be windowed: %s: %s; it runs without a capture", type(error).__name__, str(error))
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
        if session is not None and session.gate.armed:
            _once("no capture of %s: %s, so its response tokens cannot be counted", name.strip("_"), _UNCOUNTED[name])
    except Exception as error:
        _once("%s runs without a capture: %s: %s", name.strip("_"), type(error).__name__, str(error))
    return wrapped(*args, **kwargs)


@functools.cache
def _once(message: str, *values: str) -> None:
    # texts only: an error would be kept, and with it its frames and their tensors
    log.warning(message, *values)
