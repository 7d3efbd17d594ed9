"""Keeps more rows of numbers than memory should hold. Beyond a limit they go to a temporary file, in sorted runs."""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl_profiler_conf.tools.trace.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[Any]

KEEP_ROWS = 1 << 19
"""Rows that one spool keeps in memory."""

_STEP = 4096
"""Rows of a run from one remembered key to the next. Fewer where few rows are kept."""


class Spool:
    """Takes rows in any order, and gives them back in the order of a key. Rows of one key keep their order.

    Args:
        dtype: fields of a row.
        key: the field to order by, an integer.
        keep: rows to keep in memory; more go to a temporary file, which disappears with the spool.
    """

    def __init__(self, dtype: list[tuple[str, str]], key: str, keep: int = KEEP_ROWS) -> None:
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._key = key
        self._keep = keep
        self._step = max(1, min(_STEP, keep // 8))
        self._pending: list[Rows] = []
        self._pending_rows = 0
        self._file: Any = None
        self._runs: list[_Run] = []
        self._is_settled = False

    def add(self, rows: Rows) -> None:
        """Take rows of the spool's dtype; the array belongs to the spool afterwards."""
        if not len(rows):
            return
        self._pending.append(rows)
        self._is_settled = False
        self._pending_rows += len(rows)
        self.rows += len(rows)
        if self._pending_rows > self._keep:
            self._spill()

    def sorted_blocks(self) -> Iterator[Rows]:
        """All rows in the order of the key, about a quarter of `keep` at a time; rows of one key are never parted."""
        self._settle()
        lows = self._cuts(self._keep // 4)
        for low, high in zip([None, *lows], [*lows, None], strict=True):
            block = self.between(low, high)
            if len(block):
                yield block

    def between(self, low: int | None, high: int | None) -> Rows:
        """The rows whose key is at least `low` and below `high`, in order; None: no bound."""
        self._settle()
        parts = [_slice(self._load(run, low, high), self._key, low, high) for run in self._runs]
        parts += [_slice(rows, self._key, low, high) for rows in self._pending]
        found: Rows = np.concatenate(parts) if parts else np.empty(0, self.dtype)
        return found if len(parts) < 2 else found[np.argsort(found[self._key], kind="stable")]

    def _cuts(self, most: int) -> list[int]:
        keys = [key for run in self._runs for key in run.keys[1:]]
        for rows in self._pending:
            keys += rows[self._key][self._step :: self._step].tolist()
        keys.sort()
        each = max(1, most // self._step)
        return sorted(set(keys[each - 1 :: each]))

    def _settle(self) -> None:
        """Leave at most one array pending, sorted."""
        if len(self._pending) > 1 or (self._pending and not self._is_settled):
            self._pending = [self._sorted()]
        self._is_settled = True

    def _sorted(self) -> Rows:
        rows = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending = []
        keys = rows[self._key]
        return rows if bool(np.all(keys[:-1] <= keys[1:])) else rows[np.argsort(keys, kind="stable")]

    def _spill(self) -> None:
        rows = self._sorted()
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="verl_profiler_")  # noqa: SIM115
        self._file.seek(0, 2)
        offset = self._file.tell()
        rows.tofile(self._file)
        self._runs.append(_Run(offset, len(rows), rows[self._key][:: self._step].tolist()))
        self._pending_rows = 0
        self._is_settled = False

    def _load(self, run: _Run, low: int | None, high: int | None) -> Rows:
        first = 0 if low is None else max(0, bisect.bisect_left(run.keys, low) - 1)
        last = len(run.keys) if high is None else bisect.bisect_left(run.keys, high)
        begin, end = first * self._step, min(run.rows, last * self._step)
        if begin >= end:
            return np.empty(0, self.dtype)
        self._file.flush()
        size = self.dtype.itemsize
        self._file.seek(run.offset + begin * size)
        return np.fromfile(self._file, self.dtype, end - begin)


class _Run:
    def __init__(self, offset: int, rows: int, keys: list[int]) -> None:
        self.offset = offset
        self.rows = rows
        self.keys = keys


def _slice(rows: Rows, key: str, low: int | None, high: int | None) -> Rows:
    keys = rows[key]
    begin = 0 if low is None else int(np.searchsorted(keys, low, "left"))
    end = len(rows) if high is None else int(np.searchsorted(keys, high, "left"))
    return rows[begin:end]
