"""One call of transformers' `generate`: its rows as requests, its iterations for the session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.engines.transformers.batch import GenerateBatch


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
            self.session.begin(GenerateBatch(self.alive, range(self.made, self.made + self._at_most())), finished)

    def end(self, input_ids: Any, done: Any) -> None:
        """The iteration has appended its tokens: `input_ids` is `(rows, width + made)`, `done` `(rows,)` bool."""
        self._inside = False
        with self._guard():
            self.session.end()
            self.made = input_ids.shape[1] - self._width
            if self._ends_early and self.session.is_waiting and len(self.alive) > 1:
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
