"""Has another thread do something, at a moment that suits that thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ThreadRequest:
    """One request at a time. torch can end a recording only on the thread that began it: others ask for the end."""

    def __init__(self) -> None:
        self._asked: Callable[[], None] | None = None
        self._answered = threading.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether something was asked for and is not done yet."""
        return self._asked is not None

    def ask(self, do: Callable[[], None]) -> None:
        """Have the other thread call `do` when it comes to `answer`."""
        self._answered.clear()
        self._asked = do

    def wait(self, patience_s: float) -> bool:
        """Wait so many seconds at most. False: the thread has not come. It does what was asked when it comes."""
        return self._answered.wait(patience_s)

    def answer(self) -> None:
        """Do what was asked for."""
        if self._asked is None:
            return
        do, self._asked = self._asked, None
        try:
            do()
        finally:
            self._answered.set()
