"""One call of transformers' `generate`: its rows as requests, its iterations for the session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verl_profiler_conf.capture.loop_session import LoopSession
from verl_profiler_conf.engines.transformers.batch import GenerateBatch


class Generation:
    """One decode loop of `generate`: the rows of its batch as requests.

    Args:
        session: is driven by this loop.
        width: columns of `input_ids` before the first token, padding included.
        rows: sequences in the batch.
        max_columns: columns that `input_ids` may have in the end (`max_length`), None when unknown.
        is_speculative: an iteration may make several tokens. Otherwise each makes one.
        ends_early: whether a row can end before the others. Where none can, nothing is read back from the device.
    """

    def __init__(
        self,
        session: LoopSession,
        *,
        width: int,
        rows: int,
        max_columns: int | None,
        is_speculative: bool,
        ends_early: bool,
    ) -> None:
        self.session = session
        number = session.arming.next_number()
        self.names = [f"generate{number}.row{row}" for row in range(rows)]
        self.running = dict.fromkeys(self.names)
        self.made = 0
        self.candidates: Any = None
        """Drafts tokens; None without speculation, and until it is known."""
        self._width = width
        self._max_columns = max_columns
        self._is_speculative = is_speculative
        self._ends_early = ends_early
        self._finished: dict[str, int | None] = {}
        self._is_in_iteration = False
        self._expected = 1
        """Tokens that the iteration under way makes at most."""

    def begin(self) -> None:
        """An iteration begins, unless one is under way already."""
        if self._is_in_iteration:
            return
        self._is_in_iteration = True
        with self._guard():
            finished, self._finished = self._finished, {}
            self._expected = self._max_tokens()
            self.session.begin(GenerateBatch(self.running, range(self.made, self.made + self._expected)), finished)

    def end(self, input_ids: Any, done: Any) -> None:
        """The iteration has made its tokens.

        Args:
            input_ids: `(rows, width + made)` under speculation. Models with several codebooks have shapes of their own.
            done: `(rows,)`, bool: the rows that have ended.
        """
        with self._guard():
            if not self._is_in_iteration:
                raise RuntimeError("this decode loop asks its stopping criteria outside of its iterations")
            self._is_in_iteration = False
            self.session.end()
            made = input_ids.shape[1] - self._width if self._is_speculative else self.made + 1
            if not self.made < made <= self.made + self._expected:
                raise RuntimeError(f"an iteration made {made - self.made} tokens, 1 to {self._expected} were expected")
            self.made = made
            if self._ends_early and self.session.is_waiting and len(self.running) > 1:
                for row, ended in enumerate(done.tolist()):
                    name = self.names[row]
                    if ended and name in self.running:
                        del self.running[name]
                        self._finished[name] = self.made

    def close(self, *, failed: bool) -> None:
        """`generate` returns or raises: every row has ended."""
        self._finished.update((name, self.made) for name in self.running)
        self.session.finish(self._finished, reason="error" if failed else None)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A release whose objects are not understood ends the session, not the job."""
        try:
            yield
        except Exception as error:
            if not self.session.failed:
                self.session.fail(error)
            elif self.session.settings.on_error == "raise":  # the session has logged it, and raised it
                raise

    def _max_tokens(self) -> int:
        """Tokens that the coming iteration makes at most: 1, or one more than the candidates that it verifies."""
        if self.candidates is None:
            return 1
        for attribute in ("num_assistant_tokens", "num_output_tokens"):
            number = getattr(self.candidates, attribute, None)
            if number is not None:
                return int(number) + 1
        left = (self._max_columns or 0) - self._width - self.made
        return max(left, 1)
