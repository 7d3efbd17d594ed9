"""Numbers collected one by one, and taken out as arrays."""

from __future__ import annotations

from array import array
from typing import Any

from verl_profiler_conf.tools.trace.arrays import np


class Columns:
    """Columns of numbers that grow by a value at a time, one for each code of `array`."""

    def __init__(self, codes: tuple[str, ...]) -> None:
        self._codes = codes
        self.columns: list[Any] = [array(code) for code in codes]

    def take(self) -> list[Any]:
        """The columns as arrays; afterwards they are empty."""
        taken = [np.array(column) for column in self.columns]
        for column in self.columns:
            del column[:]
        return taken
