"""Turns Kineto's raw JSON into the final trace: renames ranges, compresses, and gives the file its name."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from verl_profiler_conf.capture.files import publish, temporary_name

_CHUNK = 256 * 1024
"""Bytes read at once. Scanning them holds Python's lock for less than a millisecond. Compressing does not hold it."""

_LEVEL = 1
"""Level 1 makes a trace 11 times smaller. Level 6 makes it 13 times smaller and takes three times as long."""

_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def pack(raw: Path, target: Path, renames: Mapping[str, str]) -> int:
    """Compress a raw trace to `target`, whole or not at all.

    Args:
        raw: Kineto's JSON. It stays as it is.
        target: the `.json.gz` to write. It must not exist.
        renames: name of a range in the raw trace -> name in the final one.

    Returns:
        Number of device events (kernels, copies, memsets) in the trace.

    Raises:
        FileExistsError: `target` exists.
        OSError: the raw trace is missing or cut short (disk full), or `target` could not be written.
    """
    _check_whole(raw)
    with temporary_name(target) as temporary:
        with raw.open("rb") as source, temporary.open("xb") as sink:
            events = _compress(source, sink, _renamer({**renames, str(raw): str(target)}))
            sink.flush()
            os.fsync(sink.fileno())
        publish(temporary, target)
    return events


def _check_whole(raw: Path) -> None:
    # Kineto does not report a failed write. A full disk leaves a short file, or none.
    try:
        size = raw.stat().st_size
        with raw.open("rb") as file:
            file.seek(max(0, size - 16))
            ending = file.read()
    except FileNotFoundError:
        raise OSError(f"the profiler wrote no trace to {raw.parent} (is it writable, is there room?)") from None
    if not ending.rstrip().endswith(b"}"):
        raise OSError(f"the profiler's trace is cut short after {size} bytes (is there room in {raw.parent}?)")


def _compress(source: BinaryIO, sink: BinaryIO, rename: Callable[[bytes], bytes]) -> int:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)  # | 16: a gzip file
    events = 0
    unfinished = b""
    while chunk := source.read(_CHUNK):
        head, newline, tail = chunk.rpartition(b"\n")  # a name never crosses a line
        if not newline:
            unfinished += chunk
            continue
        lines, unfinished = unfinished + head + newline, tail
        events += sum(lines.count(mark) for mark in _DEVICE_EVENTS)
        sink.write(packer.compress(rename(lines)))
    sink.write(packer.compress(rename(unfinished)))
    sink.write(packer.flush())
    return events


def _renamer(renames: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """Make a function that replaces quoted texts. It scans once for all names that begin with the same bytes."""
    table = {old.encode(): new.encode() for old, new in renames.items()}
    # There are two groups in practice: the ranges (`response_tokens[...`), and the name of the file itself.
    beginnings = sorted({b'"' + name[:16] for name in table})
    pattern = re.compile(rb'"([^"\\\n]*)"')

    def swap(match: re.Match[bytes]) -> bytes:
        name = match.group(1)
        return b'"' + table.get(name, name) + b'"'

    def rename(text: bytes) -> bytes:
        for beginning in beginnings:
            at = text.find(beginning)
            if at < 0:
                continue
            pieces, done = [], 0
            while at >= 0:
                match = pattern.match(text, at)
                end = match.end() if match else at + 1
                pieces += [text[done:at], swap(match) if match else text[at:end]]
                done = end
                at = text.find(beginning, done)
            text = b"".join([*pieces, text[done:]])
        return text

    return rename
