"""How many of a window's tokens the captures hold, where the tokens of every request count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow


class Coverage:
    """Counts tokens of the windows, each request's by itself: those that captures hold, and those that there are.

    A request that still runs counts as one that makes all tokens of a window.
    """

    def __init__(self, windows: Sequence[TokenWindow]) -> None:
        self._spans = [range(window.start, MAX_TOKEN if window.end is None else window.end) for window in windows]
        self._held = [0] * len(windows)
        self._made = [0] * len(windows)
        """Of requests that have ended, less those that are not asked for."""
        self._first: dict[str, int] = {}
        """Requests that were not seen from token 0 on -> the first token that was."""

    def begin(self, request: str, first: int) -> None:
        """A request was seen for the first time, about to make its token `first`."""
        if first:
            self._first[request] = first

    def end(self, request: str, count: int) -> None:
        """A request has ended with so many tokens."""
        made = range(self._first.pop(request, 0), count)
        for index, span in enumerate(self._spans):
            self._made[index] += _overlap(span, made)

    def hold(self, index: int, made: Iterable[range]) -> None:
        """A capture of window `index` holds an iteration in which its requests made these tokens."""
        self._held[index] += sum(_overlap(self._spans[index], tokens) for tokens in made)

    def leave_out(self, index: int, made: Iterable[range]) -> None:
        """Window `index` goes by in an iteration in which its requests made these tokens. They are not asked for."""
        self._made[index] -= sum(_overlap(self._spans[index], tokens) for tokens in made)

    def figures(self, index: int, running: Mapping[str, object]) -> tuple[int, int]:
        """Tokens of window `index` in captures, and all that are asked for once those that run have made theirs."""
        span = self._spans[index]
        coming = sum(_overlap(span, range(self._first.get(request, 0), MAX_TOKEN)) for request in running)
        return self._held[index], self._made[index] + coming


def _overlap(span: range, tokens: range) -> int:
    return max(min(span.stop, tokens.stop) - max(span.start, tokens.start), 0)
