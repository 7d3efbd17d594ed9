"""Puts a capture of another node into the job's folder: whole or not at all, and never over an older file."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from verl_profiler_conf.capture.claims import claim_stem, reserve_stem
from verl_profiler_conf.capture.files import MANIFEST_SUFFIX, manifest_path, marker, publish
from verl_profiler_conf.capture.manifest import Manifest, write_manifest
from verl_profiler_conf.core.sizes import size_text
from verl_profiler_conf.launch.on_node import RemoteCapture, digest

CHUNK = 16 * 2**20
"""Bytes that are asked for at once."""

Read = Callable[[str, int, int], bytes]
"""File name, offset, number of bytes -> bytes of a file on the node."""


def bring(capture: RemoteCapture, folder: Path, *, node: str, source: str, read: Read, limit: int) -> Manifest | None:
    """Bring one capture.

    Args:
        capture: as its node lists it.
        folder: the job's, here.
        node: address of the node, which goes into the manifest.
        source: the folder on the node.
        read: reads bytes of a file there.
        limit: maximum bytes of a trace. A larger one stays where it is, and the manifest says where.

    Returns:
        The manifest as it is here now. None where this folder holds the capture already, because the nodes share it.

    Raises:
        OSError: this folder cannot be written. Nothing is left behind.
        ValueError: what the node sent is no manifest.
    """
    name = capture.name.removesuffix(MANIFEST_SUFFIX)
    if _is_here(manifest_path(folder / name), capture):
        return None
    manifest = Manifest.from_json(capture.manifest)
    folder.mkdir(parents=True, exist_ok=True)
    # another node may have used the same name: each node numbers its own processes
    stem = claim_stem(folder / name, manifest.run_id) or reserve_stem(
        folder, re.sub(r"_\d+$", "", name), manifest.run_id
    )
    try:
        manifest.node = manifest.node or node
        if manifest.trace is not None and capture.files:
            _bring_trace(manifest, capture, stem, node=node, source=source, read=read, limit=limit)
        write_manifest(manifest, stem)
    finally:
        marker(stem).unlink(missing_ok=True)
    return manifest


def _is_here(path: Path, capture: RemoteCapture) -> bool:
    try:
        return digest(path.read_bytes()) == digest(capture.manifest)
    except OSError:
        return False


def _bring_trace(
    manifest: Manifest, capture: RemoteCapture, stem: Path, *, node: str, source: str, read: Read, limit: int
) -> None:
    trace = str(manifest.trace)
    name = capture.name.removesuffix(MANIFEST_SUFFIX)
    target = stem.with_name(stem.name + trace.removeprefix(name))
    why = f"{size_text(capture.size)}, and {size_text(limit)} of gather_limit are left" if capture.size > limit else ""
    if not why:
        try:
            _fetch(capture, trace, target, read)
        except OSError as error:  # of this disk
            why = f"{type(error).__name__}: {error}"
        except Exception as error:  # whatever the cluster raises when the node goes away
            why = f"the node stopped answering: {type(error).__name__}"
    if why:
        manifest.left_at = f"{node}:{source}/{trace}"
        manifest.notes.append(f"the trace was not brought from its node ({why})")
        manifest.trace = None
    else:
        manifest.trace = target.name


def _fetch(capture: RemoteCapture, trace: str, target: Path, read: Read) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        for file in capture.files:
            below = file.name.removeprefix(trace).removeprefix("/")
            path = temporary / below if below else temporary
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch_file(file.name, file.size, path, read)
        if temporary.is_dir():
            temporary.rename(target)
        else:
            publish(temporary, target)
    finally:
        shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def _fetch_file(name: str, size: int, path: Path, read: Read) -> None:
    with path.open("xb") as file:
        while file.tell() < size:
            chunk = read(name, file.tell(), CHUNK)
            if not chunk:
                raise OSError(f"{name} became shorter while it was read")
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
