"""The bytes of a trace file, uncompressed, a block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from verl_profiler_conf.tools.trace.compression import DAMAGED as _DAMAGED
from verl_profiler_conf.tools.trace.compression import open_gzip
from verl_profiler_conf.tools.trace.errors import TraceError, printable

Progress = Callable[[int, int], None]
"""Called with the bytes of the file read so far and its size, both as they are on disk."""

_GZIP = b"\x1f\x8b"


class Source:
    """A `.json` or `.json.gz`, of one gzip member or several. Its first bytes show which, not its name.

    Args:
        path: the file.
        progress: called with how far the reading is.

    Raises:
        TraceError: missing, not readable, empty, or of another kind.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self._progress = progress
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise TraceError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
        try:
            self._size = path.stat().st_size
            start = self._file.read(4)
            self._file.seek(0)
        except OSError as error:
            self._file.close()
            raise TraceError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
        if not start:
            self.close()
            raise self.error("empty")
        self._stream: Any = self._file
        self.compressed = start.startswith(_GZIP)
        if self.compressed:
            self._stream = open_gzip(self._file)
        elif path.suffix == ".gz" and start[:1] not in b"{[ \t\r\n\xef":
            self.close()
            raise self.error("not whole gzip data: it does not begin as gzip does")

    def error(self, text: str) -> TraceError:
        """A TraceError about this file."""
        return TraceError(f"{printable(self.path)}: {text}")

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end.

        Raises:
            TraceError: the compressed data is cut off or damaged, or the disk failed.
        """
        with self._naming_errors():
            data: bytes = self._stream.read(size)
            if self._progress is not None:
                self._progress(self._file.tell(), self._size)
            return data

    def seek(self, at: int) -> None:
        """Go to byte `at` of the uncompressed file; forwards is faster.

        Raises:
            TraceError: as of `read`.
        """
        with self._naming_errors():
            self._stream.seek(at)

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Errors of the body become a `TraceError` that names the file."""
        try:
            yield
        except EOFError:
            raise self.error("cut off: the compressed data ends before its end marker") from None
        except _DAMAGED as error:
            raise self.error(f"not whole gzip data: {printable(error)}") from None
        except OSError as error:
            raise self.error(f"cannot be read: {printable(error.strerror or error)}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()
