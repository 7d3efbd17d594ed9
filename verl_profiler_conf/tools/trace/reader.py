"""Reads a trace file from its first event to its last, in memory that does not grow with the file.

    reader = TraceReader(path)
    for events in reader.events():      # some hundred events at a time, in the order of the file
        for event in events:
            ...
    reader.member("distributedInfo")    # what stands beside the events; whole once they are read

Reads what torch's profiler writes on CUDA, ROCm, XPU and CPU, in old forms and new, compressed or not, pretty-printed
or on one line, SGLang's and vLLM's traces, and Ascend's `trace_view.json`. With msgspec (the extra `report`) at some
hundred MB a second; without it the same events, ten times slower.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from verl_profiler_conf.tools.trace.chunks import PIECE_BYTES, Chunks, Decoder
from verl_profiler_conf.tools.trace.errors import TraceError
from verl_profiler_conf.tools.trace.events import Event, decoder
from verl_profiler_conf.tools.trace.source import Progress, Source

T = TypeVar("T")

__all__ = ["TraceError", "TraceReader"]


class TraceReader:
    """Reads a file from front to back, as often as asked.

    Args:
        path: a `.json` or `.json.gz`.
        progress: called with (bytes read, bytes in all) of the file on disk, after each piece.
        piece_bytes: bytes read at a time, uncompressed.

    Attributes:
        path: the file.
        members: raw JSON of what stands beside the events, by name; whole once a reading is over.
        omitted: names of what stood beside the events and was too long to keep.
        is_array: the file is a plain array of events, without anything beside them.
        piece_at: where in the uncompressed file the events of the latest piece begin.
    """

    def __init__(self, path: Path, *, progress: Progress | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self.path = path
        self.members: dict[str, bytes] = {}
        self.omitted: list[str] = []
        self.is_array = False
        self.piece_at = 0
        self._progress = progress
        self._piece_bytes = piece_bytes

    def events(self) -> Iterator[list[Event]]:
        """The events, a few hundred at a time. Nothing but events: what else the list holds is passed over.

        Raises:
            TraceError: the file cannot be read, is no JSON, is cut off, or is no trace; one line.
        """
        return self.pieces(decoder())

    def pieces(self, decoder: Decoder[T]) -> Iterator[T]:
        """The result of a decoder for each piece of the list of events.

        Raises:
            TraceError: as of `events`.
        """
        source = Source(self.path, self._progress)
        try:
            chunks = Chunks(source, self._piece_bytes)
            for piece in chunks.pieces(decoder):
                self.piece_at = chunks.piece_at
                yield piece
            self.members = chunks.members
            self.omitted = chunks.omitted
            self.is_array = chunks.is_array
        finally:
            source.close()

    def again(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Pieces that were read before, as JSON arrays. What lies between them is not read.

        Args:
            places: `piece_at` of each and the bytes of its events, ascending.

        Raises:
            TraceError: the file cannot be read any more, or is another one.
        """
        source = Source(self.path, self._progress)
        try:
            for at, size in places:
                source.seek(at)
                data = source.read(size)
                while len(data) < size and (more := source.read(size - len(data))):
                    data += more
                if len(data) < size:
                    raise source.error("has changed while it was read")
                yield b"[" + data + b"]"
        finally:
            source.close()

    def member(self, name: str) -> Any:
        """A member of the file beside its events, such as `distributedInfo`; None where it is not there."""
        raw = self.members.get(name)
        if raw is None:
            return None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return None
