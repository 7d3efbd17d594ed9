"""From Kineto's raw JSON to the trace that is kept: ranges renamed, compressed, under its final name."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from verl_profiler_conf.capture.files import publish, temporary_name

_CHUNK = 256 * 1024
"""Read at once. Scanning a chunk holds Python's lock for well under a millisecond; compressing it does not."""

_LEVEL = 1
"""A trace shrinks elevenfold with 1, thirteenfold with 6, which takes three times as long."""

_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def pack(raw: Path, target: Path, renames: Mapping[str, str]) -> int:
    """Compress a raw trace to `target`, whole or not at all.

    Args:
        raw: Kineto's JSON; stays where it is.
        target: `....json.gz`, must not exist.
        renames: range names -> what they are to read.

    Returns:
        Number of device events (kernels, copies, memsets) in it.

    Raises:
        FileExistsError: `target` exists.
        OSError: the raw trace is missing or cut short (disk full), or the disk refused.
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
    # Kineto writes through a stream that reports nothing: a full disk leaves a short file, or none
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
    rest = b""
    while chunk := source.read(_CHUNK):
        head, newline, rest_of_chunk = chunk.rpartition(b"\n")  # names never cross a line
        if not newline:
            rest += chunk
            continue
        lines, rest = rest + head + newline, rest_of_chunk
        events += sum(lines.count(mark) for mark in _DEVICE_EVENTS)
        sink.write(packer.compress(rename(lines)))
    sink.write(packer.compress(rename(rest)))
    sink.write(packer.flush())
    return events


def _renamer(renames: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """Replace quoted strings. The text is scanned once for all names that begin alike, however many there are."""
    table = {old.encode(): new.encode() for old, new in renames.items()}
    # in practice two groups: the ranges, which all begin with `response_tokens[`, and the name of the file itself
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
