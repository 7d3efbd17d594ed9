"""The rows of a transformers batch -> response tokens that each is about to make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class GenerateBatch(Mapping[str, range]):
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
