"""Turns Kineto's raw JSON into the final trace: renames ranges, counts, compresses, and gives the file its name."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl_profiler_conf.capture.backends.iteration_counts import EventCounter, TraceCounts
from verl_profiler_conf.capture.backends.raw_trace import RawTrace
from verl_profiler_conf.capture.files import publish, temporary_name

_CHUNK = 64 * 1024
"""Bytes read at once. Scanning them holds Python's lock for less than a millisecond. Compressing does not hold it."""

_END = 4 * 1024
"""Bytes of the first and of the last piece. They are parsed, which takes four times as long as packing them."""

_LEVEL = 1
"""Level 1 makes a trace 11 times smaller. Level 6 makes it 13 times smaller and takes three times as long."""

_BARE_QUOTE = re.compile(rb'user_annotation",\s+"name": "[^"\\\n]*(?:\\.[^"\\\n]*)*"(?!,\s+"|\s*[\n}])')
"""A name that seems to end before its end: Kineto does not escape quotes in the names of a job's own ranges."""

_NAME = re.compile(rb'(?<="name": ")(.*?)(?="(?:,\s+"(?:pid|ph|ts)"|\s*\n))')
_UNESCAPED = re.compile(rb'(?<!\\)"')

_ORDINARY = bytes(code for code in (*b"\t\n\r", *range(32, 128)) if code not in b"\\")
"""Bytes that no JSON text goes wrong by. The others are control characters, the backslash, and those beyond ASCII."""


_Rename = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Packed:
    """What packing found.

    Attributes:
        counts: what the trace holds.
        flaw: why the trace is not valid JSON, as far as that was checked; None when no flaw was found.
    """

    counts: TraceCounts
    flaw: str | None = None


def pack(raw: RawTrace, target: Path, renames: Mapping[str, str], *, records_device: bool = True) -> Packed:
    """Compress a raw trace to `target`, whole or not at all.

    Args:
        raw: Kineto's JSON. It stays as it is.
        target: the `.json.gz` to write. It must not exist.
        renames: name of a range in the raw trace -> name in the final one.
        records_device: whether the trace can hold events of a device, to be counted.

    Raises:
        FileExistsError: `target` exists.
        OSError: the raw trace is missing or cut short (disk full), or `target` could not be written.
    """
    raw.check_whole()
    rename, rename_at_ends = _renamer(renames), _renamer({**renames, raw.name: str(target)})
    with temporary_name(target) as temporary:
        with raw.open() as source, temporary.open("xb") as sink:
            packed = _compress(source, sink, rename, rename_at_ends, EventCounter(records_device=records_device))
            sink.flush()
            os.fsync(sink.fileno())
        publish(temporary, target)
    return packed


def _compress(
    source: BinaryIO, sink: BinaryIO, rename: _Rename, rename_at_ends: _Rename, counter: EventCounter
) -> Packed:
    """Compress all of `source`. The trace's own file name stands behind its events, ranges stand between them."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)  # | 16: a gzip file
    flaw = None
    for piece, opens, closes in _pieces(source):
        # Few pieces hold ranges, and what is done to their names takes longer than to look for them.
        has_ranges = b'user_annotation"' in piece
        text = piece
        if has_ranges or opens or closes:
            text = _escape_quotes((rename_at_ends if opens or closes else rename)(piece))
        counter.feed(text, has_ranges=has_ranges, closes=closes)
        if flaw is None and (opens or closes or _is_suspect(text)):
            flaw = _flaw(text, opens=opens, closes=closes)
        sink.write(packer.compress(text))
    sink.write(packer.flush())
    return Packed(counter.result(), flaw)


def _pieces(source: BinaryIO) -> Iterator[tuple[bytes, bool, bool]]:
    """Cut the trace between events. Each piece comes with whether it is the first, and whether it is the last."""
    unfinished, opens = source.read(_END), True
    while chunk := source.read(_CHUNK):
        unfinished += chunk
        cut = _cut(unfinished, _END) if opens else 0
        if cut <= 0:
            cut = _cut(unfinished, len(unfinished))
        if cut <= 0:
            continue
        piece, unfinished = unfinished[:cut], unfinished[cut:]
        yield piece, opens, False
        opens = False
    cut = _cut(unfinished, len(unfinished) - _END)
    if cut > 0:
        yield unfinished[:cut], opens, False
        unfinished, opens = unfinished[cut:], False
    yield unfinished, opens, True


def _cut(text: bytes, before: int) -> int:
    """Where the last event begins whose `"ph"` lies before a position. 0 or less: there is none."""
    return text.rfind(b"{", 0, max(0, text.rfind(b'"ph":', 0, max(before, 0))))


def _escape_quotes(text: bytes) -> bytes:
    """Mend names with quotes in them. A trace with one of them is no JSON, and no viewer opens it."""
    if _BARE_QUOTE.search(text) is None:
        return text
    return _NAME.sub(lambda match: _UNESCAPED.sub(rb"\"", match[1]), text)


def _is_suspect(text: bytes) -> bool:
    """Whether a piece holds anything that Kineto could have written wrongly. Parsing all pieces takes four times as
    long as packing them."""
    return bool(text.translate(None, _ORDINARY))


def _flaw(text: bytes, *, opens: bool, closes: bool) -> str | None:
    """Say why a piece is not valid JSON, or None. The pieces are parsed as lists of events of their own."""
    whole = text if opens else b'{"traceEvents": [' + text
    if not closes:
        whole = whole.rstrip().removesuffix(b",") + b"]}"
    try:
        json.loads(whole)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return str(error)
    return None


def _renamer(renames: Mapping[str, str]) -> _Rename:
    """Make a function that replaces quoted texts. It scans once for all names that begin with the same bytes."""
    table = {_quoted(old): _quoted(new) for old, new in renames.items()}
    # There are two groups in practice: the ranges (`response_tokens[...`), and the name of the file itself.
    beginnings = sorted({name[:17] for name in table})
    pattern = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"')

    def rename(text: bytes) -> bytes:
        for beginning in beginnings:
            at = text.find(beginning)
            if at < 0:
                continue
            pieces, done = [], 0
            while at >= 0:
                match = pattern.match(text, at)
                end = match.end() if match else at + 1
                pieces += [text[done:at], table.get(text[at:end], text[at:end])]
                done = end
                at = text.find(beginning, done)
            text = b"".join([*pieces, text[done:]])
        return text

    return rename


def _quoted(text: str) -> bytes:
    """The JSON string of a text. A path that is not UTF-8 keeps its bytes as lone surrogates, escaped."""
    return json.dumps(text).encode()
