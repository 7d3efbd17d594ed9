"""The window: which response tokens a capture holds, and what a window may be.

Schema, resolvers, callback, command line and engines all use this module. A window therefore means the same everywhere,
and a wrong one is refused in the same words. It knows no torch, no engine and no OmegaConf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.numbers import is_integer

MAX_TOKEN = 2**31 - 1
"""Largest token index an engine can count: vLLM and SGLang hold positions in signed 32-bit tensors."""

START_KEY = "profile_token_start"
END_KEY = "profile_token_end"
WINDOWS_KEY = "profile_token_windows"


@dataclass(frozen=True, order=True)
class TokenWindow:
    """Half-open interval `[start, end)` of 0-based response token indices of one request.

    Token 0 is made by the forward that finishes the prompt. `end` None: the window lasts until the request ends.
    """

    start: int
    end: int | None

    @classmethod
    def parse(cls, start: object, end: object, *, start_key: str = START_KEY, end_key: str = END_KEY) -> TokenWindow:
        """Build a window from two raw settings: integers, or None for "from token 0" and "until the request ends".

        Raises:
            ConfigError: one of them is no token index, or the window is empty.
        """
        first = _token_index(start, start_key)
        stop = _token_index(end, end_key)
        begin = 0 if first is None else first
        if stop is not None and stop <= begin:
            if first is None:
                raise ConfigError(end_key, stop, "an empty window; the end is exclusive, so it must be at least 1")
            # The message names both keys, because either of them can be the wrong one.
            raise ConfigError(end_key, stop, f"an empty window; must be greater than {start_key}={first}")
        return cls(begin, stop)

    @property
    def is_open(self) -> bool:
        """Whether the window has no end of its own."""
        return self.end is None

    @property
    def length(self) -> int | None:
        """Number of tokens in the window, None when it is open."""
        return None if self.end is None else self.end - self.start

    @property
    def label(self) -> str:
        """`20-80`, as it stands in file names; `40-end` for an open window."""
        return f"{self.start}-{'end' if self.end is None else self.end}"

    def overlaps(self, lo: int, hi: int) -> bool:
        """Whether any token of `[lo, hi)` is in the window. An empty range has none."""
        return lo < hi and hi > self.start and (self.end is None or lo < self.end)

    def __contains__(self, token: int) -> bool:
        return self.start <= token and (self.end is None or token < self.end)

    def __str__(self) -> str:
        return f"[{self.start}, {'end' if self.end is None else self.end})"


def parse_windows(start: object, end: object, windows: object, *, prefix: str = "") -> tuple[TokenWindow, ...]:
    """Turn the three raw settings of a config into at least one window, ascending and disjoint.

    Args:
        start: raw `profile_token_start`.
        end: raw `profile_token_end`.
        windows: raw `profile_token_windows`, a list of `[start, end]` pairs; empty or None when start/end are used.
        prefix: path of the node that holds the settings (`train.prof.`). Messages put it before each key.

    Raises:
        ConfigError: naming the full key, the value and what is allowed.
    """
    start_key, end_key, windows_key = prefix + START_KEY, prefix + END_KEY, prefix + WINDOWS_KEY
    pairs = _pairs(windows, windows_key)
    if not pairs:
        return (TokenWindow.parse(start, end, start_key=start_key, end_key=end_key),)
    for value, key in ((start, start_key), (end, end_key)):
        if value is not None:
            raise ConfigError(key, value, f"cannot be set together with {windows_key}; use one of the two")
    keyed = [
        (
            TokenWindow.parse(
                first, stop, start_key=f"{windows_key}[{index}][0]", end_key=f"{windows_key}[{index}][1]"
            ),
            index,
        )
        for index, (first, stop) in enumerate(pairs)
    ]
    keyed.sort(key=lambda item: (item[0].start, item[1]))
    for (before, i), (after, j) in pairwise(keyed):
        if before.end is None or after.start < before.end:
            first_index, second_index = sorted((i, j))
            raise ConfigError(
                windows_key,
                [list(pair) for pair in pairs],
                f"windows must not overlap: [{first_index}] {TokenWindow(*_bounds(pairs[first_index]))}"
                f" and [{second_index}] {TokenWindow(*_bounds(pairs[second_index]))}",
            )
    return tuple(window for window, _ in keyed)


def _bounds(pair: tuple[Any, Any]) -> tuple[int, int | None]:
    return pair[0] or 0, pair[1]


def _pairs(windows: object, key: str) -> list[tuple[Any, Any]]:
    allowed = "a list of [start, end] pairs, as in [[20,80],[4096,4112]]"
    if windows is None:
        return []
    if isinstance(windows, (str, bytes)) or not isinstance(windows, Sequence):
        raise ConfigError(key, windows, allowed)
    pairs: list[tuple[Any, Any]] = []
    for index, pair in enumerate(windows):
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(f"{key}[{index}]", pair, allowed)
        pairs.append((pair[0], pair[1]))
    return pairs


def _token_index(value: object, key: str) -> int | None:
    """A response token index, or None."""
    if value is None:
        return None
    if not is_integer(value) or not 0 <= value <= MAX_TOKEN:
        raise ConfigError(key, value, f"must be an integer from 0 to {MAX_TOKEN}, or null")
    return value
