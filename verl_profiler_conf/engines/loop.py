"""Hand-written decode loops, windowed by a few lines of the loop's own.

    with decode_loop(rows=8) as loop:
        for _ in range(response_tokens):
            with loop.iteration():            # one forward: every row that runs makes one token
                tokens = step(model, tokens)
            loop.finish(rows_that_hit_eos)    # rows that have ended

Without a window in force (no option selected, no environment variable) all of it does nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType

from verl_profiler_conf.engines.in_process import iteration_owner, open_loop, owned_by

_numbers = itertools.count()


class DecodeLoop:
    """One rollout of a batch. Rows are counted from 0. Several loops may run at once, in one thread or in several.

    Args:
        rows: sequences in the batch.
        engine: goes into the file names of captures.
        version: of the caller's engine, for the manifest.
    """

    def __init__(self, rows: int, *, engine: str = "loop", version: str = "") -> None:
        number = next(_numbers)
        self._names = [f"loop{number}.row{row}" for row in range(rows)]
        self._made = dict.fromkeys(range(rows), 0)
        self._finished: dict[str, int | None] = {}
        self._session = open_loop(engine, version)
        if self._session is not None:
            weakref.finalize(self, self._session.finish).atexit = False  # a loop that is dropped without its end

    @contextmanager
    def iteration(self, makes: int | Mapping[int, int] = 1) -> Iterator[None]:
        """Put around one forward and its sampling. Inside the iteration of another loop, it is part of that one.

        Args:
            makes: response tokens that it makes of each running row: one number for all, or row -> number where they
                differ (0 for a chunk of a prompt; rows left out are not in the forward).

        Raises:
            KeyError: a row in `makes` that has finished, or never was.
        """
        counts = dict.fromkeys(self._made, makes) if isinstance(makes, int) else makes
        made = {row: range(self._made[row], self._made[row] + count) for row, count in counts.items()}
        session = self._session
        if session is None or iteration_owner() is not None:
            yield
        else:
            finished, self._finished = self._finished, {}
            session.begin({self._names[row]: tokens for row, tokens in made.items()}, finished)
            with _ending(session.end), owned_by(self):
                yield
        for row, count in counts.items():
            self._made[row] += count

    def finish(self, rows: Iterable[int]) -> None:
        """These rows have ended. Rows that ended before are ignored."""
        for row in rows:
            made = self._made.pop(row, None)
            if made is not None:
                self._finished[self._names[row]] = made

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(list(self._made))
        # GeneratorExit: the reader of a stream has stopped, which is an end like any other
        failed = error is not None and kind is not GeneratorExit
        if self._session is not None:
            try:
                self._session.finish(self._finished, reason="error" if failed else None)
            except Exception:  # on_error: raise
                if error is None:  # the loop's own error comes first
                    raise


def decode_loop(rows: int, *, engine: str = "loop", version: str = "") -> DecodeLoop:
    """A context manager around one rollout of `rows` sequences; see the module's example."""
    return DecodeLoop(rows, engine=engine, version=version)


@contextmanager
def _ending(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` in any case. What it raises (`on_error: raise`) never replaces an error of the body."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            end()
        raise
    end()
