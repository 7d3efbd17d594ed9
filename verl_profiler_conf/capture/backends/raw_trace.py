"""Kineto's raw JSON between its export and its packing: a hidden file, or, where there is no room, memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from verl_profiler_conf.capture.backends.backlog import backlog

ROOM = 4 << 30
"""Bytes. With less free room on the disk a raw trace goes to memory, compressed. 256 iterations of 2,000 kernels make
half a gigabyte of raw JSON and 50 MB compressed."""


class RawTrace(Protocol):
    """A raw trace that has been exported and waits to be packed."""

    @property
    def name(self) -> str:
        """The file name that Kineto has written into the trace."""
        ...

    def open(self) -> BinaryIO:
        """Read it from its beginning."""
        ...

    def check_whole(self) -> None:
        """Raises:
        OSError: it is missing or cut short.
        """
        ...

    def remove(self) -> None:
        """Give back the room that it takes."""
        ...


class RawFile:
    """A raw trace in a hidden file. The file goes when this object does, so that a failed capture leaves nothing."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.remove = weakref.finalize(self, _unlink, path, os.getpid())

    def count(self) -> None:
        """It is exported, and takes room until it is removed."""
        with contextlib.suppress(OSError):  # `check_whole` says why there is none
            backlog.add(str(self.path), self.path.stat().st_size)

    def open(self) -> BinaryIO:
        return self.path.open("rb")

    def check_whole(self) -> None:
        # Kineto does not report a failed write. A full disk leaves a short file, or none.
        folder = self.path.parent
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                file.seek(max(0, size - 16))
                ending = file.read()
        except FileNotFoundError:
            raise OSError(f"the profiler wrote no trace to {folder} (is it writable, is there room?)") from None
        if not ending.rstrip().endswith(b"}"):
            raise OSError(f"the profiler's trace is cut short after {size} bytes (is there room in {folder}?)")


class RawInMemory:
    """A raw trace in memory, compressed."""

    def __init__(self, compressed: bytes, name: str, ending: bytes) -> None:
        self._compressed = compressed
        self._ending = ending
        self.name = name
        self._forget = weakref.finalize(self, backlog.remove, name)
        backlog.add(name, len(compressed))

    def open(self) -> BinaryIO:
        return cast("BinaryIO", gzip.GzipFile(fileobj=io.BytesIO(self._compressed)))

    def check_whole(self) -> None:
        if not self._ending.rstrip().endswith(b"}"):
            raise OSError("the profiler wrote no whole trace")

    def remove(self) -> None:
        self._compressed = b""
        self._forget()


def has_room(folder: Path) -> bool:
    """Whether the disk of `folder` has room for a raw trace, as far as that can be told."""
    try:
        return shutil.disk_usage(folder).free >= ROOM
    except OSError:
        return True


@contextlib.contextmanager
def export_name(folder: Path) -> Iterator[tuple[Path, str]]:
    """A hidden file in `folder`, and the name by which Kineto reaches it.

    Kineto changes some characters of a path, and writes others into the trace unescaped. On Linux it gets a name
    without any of them, through an open descriptor of the folder. Elsewhere a folder with such characters is replaced
    by a temporary one.

    Raises:
        OSError: the folder cannot be made or opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f".kineto-{os.getpid()}-{uuid.uuid4().hex[:12]}.json"
    if _is_plain(str(folder)):
        yield folder / name, str(folder / name)
        return
    if not Path("/proc/self/fd").is_dir():
        beside = Path(tempfile.gettempdir()) / name
        yield beside, str(beside)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield folder / name, f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> None:
    """Make sure that Kineto can write to a path: it exports once only, and does not say when it cannot.

    Raises:
        OSError: the file cannot be made, or the process has no descriptors left.
    """
    probe = written_first(path)
    try:
        with probe.open("xb"), Path(os.devnull).open("rb"):  # of two files: a pipe has two ends
            pass
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def written_first(path: Path) -> Path:
    """The name that Kineto writes to, before it renames the file."""
    return path.with_name(f"{path.name}.tmp")


def _is_plain(path: str) -> bool:
    """Whether Kineto writes a trace to this path and names it correctly."""
    return path.isascii() and path.isprintable() and not set(path) & set('"\\%:') and "//" not in path


def _unlink(path: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork must not take its parent's file away
    backlog.remove(str(path))
    # Kineto writes to the second name first. On a full disk that file stays, and takes up the room that is left.
    for name in (path, written_first(path)):
        with contextlib.suppress(OSError):
            name.unlink(missing_ok=True)
