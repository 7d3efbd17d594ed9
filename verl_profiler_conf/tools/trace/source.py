"""The bytes of a trace file, uncompressed, a block at a time."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from verl_profiler_conf.tools.trace.errors import TraceError, printable

Progress = Callable[[int, int], None]
"""Called with the bytes of the file read so far and its size, both as they are on disk."""

_GZIP = b"\x1f\x8b"


class Source:
    """A `.json` or `.json.gz`, of one gzip member or several. What it is, the first bytes say, not the name.

    Args:
        path: the file.
        progress: told how far the reading is.

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
            self._stream = _gzip_reader(self._file)
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
        try:
            data: bytes = self._stream.read(size)
            if self._progress is not None:
                self._progress(self._file.tell(), self._size)
        except EOFError:
            raise self.error("cut off: the compressed data ends before its end marker") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.error(f"not whole gzip data: {printable(error)}") from None
        except OSError as error:
            raise self.error(f"cannot be read: {printable(error.strerror or error)}") from None
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _gzip_reader(file: IO[bytes]) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=file, mode="rb")
