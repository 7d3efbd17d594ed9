"""What the driver asks another node of its cluster: which captures of this job are there, and what their traces hold.

These functions run in a Ray task on that node. They use only the standard library and this package, and not Ray.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.capture.claims import Claim, claims
from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.capture.manifest import Manifest

POLL_S = 0.2


@dataclass(frozen=True)
class RemoteFile:
    """One file of a trace: its path below the folder of the captures, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class RemoteCapture:
    """One capture on a node.

    Attributes:
        name: file name of the manifest.
        manifest: its content.
        files: of its trace; empty when it has none. Several where the trace is a directory.
    """

    name: str
    manifest: bytes
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Of the trace, in bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Listing:
    """The captures on a node, and the names of those that were never finished there."""

    captures: tuple[RemoteCapture, ...]
    unfinished: tuple[str, ...]


def list_captures(
    folder: str, run_id: str, known: Mapping[str, str], patience: float, captures_only: bool = False
) -> Listing:
    """The captures of one job in a folder of this node.

    Args:
        folder: where the job's captures go.
        run_id: the job's.
        known: file name of a manifest -> digest of its content. These are left out: the driver has them.
        patience: seconds to wait for captures that processes of this node are still writing.
        captures_only: leave out windows that were not reached so far.
    """
    place = Path(folder)
    end = time.monotonic() + patience
    while any(claim.is_here and not claim.is_gone for claim in _claims(place, run_id)) and time.monotonic() < end:
        time.sleep(POLL_S)
    found = []
    for path in sorted(place.glob(f"*{MANIFEST_SUFFIX}")):
        try:
            content = path.read_bytes()
            manifest = Manifest.from_json(content)
        except (OSError, ValueError):
            continue
        if captures_only and not manifest.has_rows:
            continue
        if manifest.run_id == run_id and known.get(path.name) != digest(content):
            found.append(RemoteCapture(path.name, content, _files(place, manifest.trace)))
    return Listing(tuple(found), tuple(claim.name for claim in _claims(place, run_id)))


def read_chunk(folder: str, name: str, offset: int, size: int) -> bytes:
    """Bytes of one file, `size` of them where there are as many."""
    with Path(folder, name).open("rb") as file:
        file.seek(offset)
        return file.read(size)


def digest(content: bytes) -> str:
    """Two manifests with the same digest are the same."""
    return hashlib.sha256(content).hexdigest()


def _files(folder: Path, trace: str | None) -> tuple[RemoteFile, ...]:
    if trace is None:
        return ()
    path = folder / trace
    below = sorted(path.rglob("*")) if path.is_dir() else [path]
    return tuple(
        RemoteFile(file.relative_to(folder).as_posix(), file.stat().st_size) for file in below if file.is_file()
    )


def _claims(folder: Path, run_id: str) -> list[Claim]:
    """Captures of the job whose manifest is still to come."""
    return [claim for claim in claims(folder) if claim.may_be_of(run_id)]
