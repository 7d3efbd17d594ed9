"""A batch of `generate`: row -> response tokens that it is about to make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class GenerateBatch(Mapping[str, range]):
    """The rows that are still running. All of them are about to make the same tokens."""

    def __init__(self, running: dict[str, None], tokens: range) -> None:
        self._running = running
        self._tokens = tokens

    def __getitem__(self, name: str) -> range:
        if name in self._running:
            return self._tokens
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def get(self, name: str, default: Any = None) -> Any:  # the inherited one raises and catches for a row that ended
        return self._tokens if name in self._running else default

    def keys(self) -> Any:
        return self._running.keys()
