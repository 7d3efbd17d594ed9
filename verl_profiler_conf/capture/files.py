"""The files that a capture leaves: their names, and how they are written whole or not at all.

Pure standard library. Everything here works on a folder that other processes, on other machines too, write to at the
same time.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from verl_profiler_conf.core.window import TokenWindow

MANIFEST_SUFFIX = ".manifest.json"

ENDINGS = (MANIFEST_SUFFIX, ".pt.trace.json.gz", ".pt.trace.json", ".pickle", "_ascend_pt", "")
"""What follows a stem in the names of the files that captures leave, whichever the device profiler."""


def stem(engine: str, window: TokenWindow, rank: int, pid: int, label: str | None = None) -> str:
    """`<engine>_tokens<start>-<end>_rank<r>_pid<pid>[_<label>]`: the name of a capture but for its number."""
    ending = f"_{_file_safe(label)}" if label else ""
    return f"{_file_safe(engine)}_tokens{window.label}_rank{rank}_pid{pid}{ending}"


def _file_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text).strip("-.")[:80] or "x"


def marker(path: Path) -> Path:
    """The hidden file by which a process claims the stem `path`."""
    return path.with_name(f".{path.name}.reserved")


def manifest_path(path: Path) -> Path:
    """The manifest's file for a reserved stem."""
    return path.with_name(path.name + MANIFEST_SUFFIX)


def write_atomically(path: Path, data: bytes, *, replace: bool = False, sync: bool = True) -> None:
    """Write a file that is never seen half written: under a temporary name in the same folder, synced, then renamed.

    Args:
        path: the file.
        data: all of it.
        replace: overwrite an older one.
        sync: False: the file need not survive a crash of the machine. That is faster.

    Raises:
        FileExistsError: `path` exists and `replace` is false; it is left as it was.
        OSError: the disk refused; nothing is left behind.
    """
    with temporary_name(path) as temporary:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        publish(temporary, path, replace=replace)


@contextlib.contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """A hidden name beside `path`, for this process alone; whatever file bears it at the end is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path, *, replace: bool = False) -> None:
    """Give a finished file its name, in one step.

    Raises:
        FileExistsError: `path` exists and `replace` is false.
    """
    if replace:
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)  # unlike rename, link refuses to replace
    except FileExistsError:
        raise
    except OSError:
        # this file system has no hard links (some network and object-store mounts); nobody else uses a reserved stem
        if path.exists():
            raise FileExistsError(f"{path} exists already") from None
        temporary.rename(path)
