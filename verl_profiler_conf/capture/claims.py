"""Claims on the name of a capture. A claim is a hidden marker file, which stands until the manifest has the name.

Two containers that share the folder may have the same pid, and a process that was killed leaves its markers for ever.
So a marker names the run, the machine and the process. A job waits only for markers of its own run, and only as long as
their process may be alive.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.capture.files import ENDINGS, marker

_SUFFIX = ".reserved"
_NUMBER = re.compile(r"_(\d+)(?=\.|_ascend|$)")

_TRIES = 16
"""Names that are tried one after the other. When other processes have them all, the folder is read again."""

_WRITTEN_WITHIN_S = 2.0
"""A younger marker without content is just being written. Nobody can tell yet which process writes it."""

_used_numbers: dict[Path, dict[str, int]] = {}
"""Folder -> name -> the highest number that is in use. The folder is read once, and then it is counted: an engine that
captures for days would read a folder of thousands of files for each capture."""


@dataclass(frozen=True)
class Claim:
    """One marker in a folder.

    Attributes:
        name: the claimed stem.
        run_id: of the job; None: not known yet.
        pid: of the process; 0: not known yet.
        is_here: whether the process runs on this machine, and in this container: each one numbers its own processes.
        is_gone: whether the process has ended, as far as can be told from here.
    """

    name: str
    run_id: str | None = None
    pid: int = 0
    is_here: bool = False
    is_gone: bool = False

    def may_be_of(self, run_id: str) -> bool:
        """Whether the capture is one of this run."""
        return self.run_id in (run_id, None)


def reserve_stem(folder: Path, name: str, run_id: str = "") -> Path:
    """`<folder>/<name>_<n>`, claimed, where n is above every number of that name in the folder.

    Args:
        folder: is read at the first call only.
        name: as `files.stem` makes it.
        run_id: of the job, for the marker.

    Raises:
        OSError: the folder cannot be written.
    """
    numbers = _used_numbers.get(folder)
    if numbers is None:
        numbers = _used_numbers[folder] = _highest_numbers(folder)
    while True:
        for _ in range(_TRIES):
            numbers[name] = number = numbers.get(name, 0) + 1
            path = claim_stem(folder / f"{name}_{number}", run_id)
            if path is not None:
                return path
        for other, number in _highest_numbers(folder).items():
            numbers[other] = max(number, numbers.get(other, 0))


def claim_stem(path: Path, run_id: str = "") -> Path | None:
    """The stem itself, claimed for this process; None where a file or another process has it.

    Raises:
        OSError: the folder cannot be written.
    """
    claim = marker(path)
    try:
        descriptor = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    try:
        os.write(descriptor, _content(run_id))
    except OSError:
        claim.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    # looked at after the claim: another process removes its marker only when its manifest can be seen
    if not any(os.path.lexists(f"{path}{ending}") for ending in ENDINGS):
        return path
    claim.unlink(missing_ok=True)
    return None


def claim_again(path: Path, run_id: str = "") -> None:
    """Claim a stem that has this process's own manifest: another one will replace it. Raises nothing."""
    with contextlib.suppress(OSError):
        marker(path).write_bytes(_content(run_id))


def claims(folder: Path) -> Iterator[Claim]:
    """The names in a folder whose manifest is still to come, whoever claimed them. None where there is no folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX) and entry.name.startswith("."):
                claim = _read(entry)
                if claim is not None:
                    yield claim


def has_ended(host: str, pid: int) -> bool:
    """Whether a process has ended, as far as can be told from here: of another machine nothing can."""
    return host == _machine()[0] and not _is_alive(pid)


def _read(entry: os.DirEntry[str]) -> Claim | None:
    """None where the manifest has just been written, or where the marker names no process."""
    name = entry.name.removeprefix(".").removesuffix(_SUFFIX)
    try:
        text = Path(entry.path).read_bytes()
        age = time.time() - entry.stat().st_mtime
    except OSError:
        return None
    try:
        raw = json.loads(text)
        run_id, pid, here = str(raw["run"]), int(raw["pid"]), (raw["host"], raw["pids"]) == _machine()
        if pid <= 0:
            raise ValueError("no process")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Claim(name) if age < _WRITTEN_WITHIN_S else None
    return Claim(name, run_id, pid, here, is_gone=here and not _is_alive(pid))


def _content(run_id: str) -> bytes:
    host, pids = _machine()
    return json.dumps({"run": run_id, "host": host, "pids": pids, "pid": os.getpid()}).encode()


@functools.cache
def _machine() -> tuple[str, str]:
    """The machine's name, and a name for its set of process ids: each container has its own set."""
    try:
        pids = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        pids = ""
    return socket.gethostname(), pids


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    try:  # a process that was killed stays in the process table until its parent has waited for it
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in (b"Z", b"X")


def _highest_numbers(folder: Path) -> dict[str, int]:
    """Name -> the highest number after it, over all files of the folder, markers included."""
    numbers: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            for match in _NUMBER.finditer(entry.name):
                name = entry.name[: match.start()].removeprefix(".")
                numbers[name] = max(int(match[1][:9]), numbers.get(name, 0))
    return numbers
