"""gzip, by isal where it is installed: it reads traces five times, and writes them four times as fast."""

from __future__ import annotations

import gzip
import zlib
from typing import IO, Any

try:
    from isal import igzip, isal_zlib
except ImportError:
    _ISAL: Any = None
    _ISAL_ERRORS: Any = ()
else:
    _ISAL = igzip.IGzipFile
    _ISAL_ERRORS = (isal_zlib.IsalError,)

DAMAGED: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error, *_ISAL_ERRORS)
"""What reading damaged data raises."""

_ISAL_LEVEL = 2
_ZLIB_LEVEL = 1
"""Fast levels: on a trace both leave a quarter more than the slow ones, in a fifth of the time or less."""


def open_gzip(file: IO[bytes]) -> Any:
    """A reader of what `file` holds, of one gzip member or several."""
    return _ISAL(fileobj=file, mode="rb") if _ISAL else gzip.GzipFile(fileobj=file, mode="rb")


def write_gzip(file: IO[bytes]) -> Any:
    """A writer into `file`, which stays open when the writer closes. No name and no time are in what it writes."""
    if _ISAL:
        return _ISAL(filename="", fileobj=file, mode="wb", compresslevel=_ISAL_LEVEL, mtime=0)
    return gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=_ZLIB_LEVEL, mtime=0)
