"""Events with their text as it stands in the file, so that they can be copied byte for byte."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verl_profiler_conf.tools.trace.chunks import STRING
from verl_profiler_conf.tools.trace.events import HAS_MSGSPEC, Event, PlainDecoder, TypedDecoder

if HAS_MSGSPEC:
    import msgspec

    _RAW: Any = msgspec.json.Decoder(list[msgspec.Raw])

_TOKEN = re.compile(STRING + rb"|[\[\]{},]", re.DOTALL)


@dataclass(slots=True)
class RawPiece:
    """A piece of a trace: its events, and on demand the text of each."""

    events: list[Event]
    data: bytes

    def texts(self) -> list[Any]:
        """The JSON of each event, in the order of `events`, as bytes or what joins with bytes."""
        if HAS_MSGSPEC:
            try:
                return _RAW.decode(self.data)  # type: ignore[no-any-return]
            except msgspec.DecodeError:  # what is not quite JSON, such as NaN
                pass
        return [text for text in split(self.data) if text.startswith(b"{")]


class RawDecoder:
    """Decodes pieces into `RawPiece`s."""

    def __init__(self) -> None:
        self._plain = PlainDecoder()
        self._fast = TypedDecoder() if HAS_MSGSPEC else self._plain

    def fast(self, data: bytes) -> RawPiece:
        return RawPiece(self._fast.fast(data), data)

    def slow(self, data: bytes) -> RawPiece:
        return RawPiece(self._plain.slow(data), data)


def split(array: bytes) -> list[bytes]:
    """The elements of a JSON array, which has to be whole."""
    found: list[bytes] = []
    depth = 0
    begin = 0
    for token in _TOKEN.finditer(array):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
            if depth == 1:
                begin = token.end()
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                found.append(array[begin : token.start()].strip())
        elif mark == b"," and depth == 1:
            found.append(array[begin : token.start()].strip())
            begin = token.end()
    return [element for element in found if element]
