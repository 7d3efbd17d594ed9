"""Cuts a trace into pieces of whole events. Nothing here knows what an event means, only where it ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Protocol, TypeVar

from verl_profiler_conf.tools.trace.errors import printable
from verl_profiler_conf.tools.trace.source import Source

PIECE_BYTES = 1 << 18
"""Bytes read at a time. A piece and what is made of it stay in the processor's cache: larger ones are slower."""

MAX_VALUE_BYTES = 1 << 24
"""The longest single event, or the longest value beside the events, that is read."""

MAX_MEMBERS_BYTES = 1 << 24
"""Bytes that are kept of what stands beside the events."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_SPACE = b" \t\r\n"
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
# Possessive where Python knows it: without, a string that never ends is tried again from each of its bytes.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"' if sys.version_info >= (3, 11) else rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(STRING + rb'|"|[\[\]{}]', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]+")
_KEY = re.compile(STRING, re.DOTALL)


class Decoder(Protocol[T_co]):
    """Decodes a piece, which is a JSON array of whole events."""

    def fast(self, data: bytes) -> T_co:
        """The usual way. Raises ValueError where the piece is no whole JSON array."""

    def slow(self, data: bytes) -> T_co:
        """Tried on a piece that `fast` refused although it is cut right. Raises ValueError where it is no JSON."""


class Chunks:
    """The pieces of one file, and what stands in it beside the events.

    Attributes:
        members: raw JSON of the other members of the top level, by name; whole once the pieces are read.
        is_array: the file is a plain array of events.
        omitted: names of members too long to keep.
        piece_at: where in the uncompressed file the latest piece begins, behind its bracket or comma.
    """

    def __init__(self, source: Source, piece_bytes: int = PIECE_BYTES) -> None:
        self.members: dict[str, bytes] = {}
        self.is_array = False
        self.omitted: list[str] = []
        self.piece_at = 0
        self._source = source
        self._size = piece_bytes
        self._buffer = bytearray()
        self._read = 0
        self._ended = False
        self._found = False

    def pieces(self, decoder: Decoder[T]) -> Iterator[T]:
        """What `decoder` makes of each piece.

        Raises:
            TraceError: not whole JSON, or no trace.
        """
        first = self._next_byte(0)
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            del self._buffer[:3]
            first = self._next_byte(0)
        if first is None:
            raise self._source.error("not whole JSON: there is nothing in it but white space")
        del self._buffer[:first]
        if b"\0" in self._buffer[:4]:
            raise self._no_trace(bytes(self._buffer[:4]))
        if self._buffer[:1] == b"[":
            self.is_array = True
            yield from self._array(decoder)
        elif self._buffer[:1] == b"{":
            yield from self._object(decoder)
        else:
            raise self._no_trace(bytes(self._buffer[:2]))
        rest = self._next_byte(0)
        if rest is not None:
            raise self._source.error(f"not whole JSON: more follows after its end, at byte {self._place(rest)}")

    def _object(self, decoder: Decoder[T]) -> Iterator[T]:
        del self._buffer[:1]
        opening = True
        while True:
            mark = self._expect(b"}" if opening else b",}", skip_key=opening)
            if mark == b"}":
                break
            name = self._key()
            self._expect(b":")
            begin = self._next_byte(0)
            if begin is None:
                raise self._cut_off()
            if name == "traceEvents" and self._buffer[begin : begin + 1] == b"[":
                del self._buffer[:begin]
                self._found = True
                yield from self._array(decoder)
            else:
                self._keep(name, begin)
            opening = False
        if not self._found:
            raise self._source.error("JSON, but no trace: it has no list of traceEvents")

    def _keep(self, name: str, begin: int) -> None:
        end = self._value_end(begin)
        if sum(map(len, self.members.values())) + end - begin <= MAX_MEMBERS_BYTES and len(self.members) < 1000:
            self.members[name] = bytes(self._buffer[begin:end])
        elif len(self.omitted) < 10:
            self.omitted.append(name)
        del self._buffer[:end]

    def _array(self, decoder: Decoder[T]) -> Iterator[T]:
        """Pieces of the array that the buffer begins with; afterwards the buffer begins behind it."""
        while True:
            if not self._fill(max(self._size, len(self._buffer))) and not self._buffer:
                raise self._cut_off()
            cut = self._likely_cut()
            if cut:
                try:
                    made = decoder.fast(bytes(self._buffer[:cut]) + b"]")
                except RecursionError:
                    raise self._too_deep() from None
                except ValueError:
                    pass  # cut inside an event, or the last events of the array, or an error: the exact cut shows which
                else:
                    self.piece_at = self._place(1)
                    self._advance(cut)
                    yield made
                    continue
            cut, is_last = self._exact_cut()
            if not cut:
                if self._ended:
                    raise self._cut_off()
                if len(self._buffer) > MAX_VALUE_BYTES:
                    raise self._source.error(f"an event of more than {MAX_VALUE_BYTES >> 20} MiB")
                continue
            made = self._decode(decoder, cut)
            self.piece_at = self._place(1)
            yield made
            if is_last:
                del self._buffer[: cut + 1]
                return
            self._advance(cut)

    def _decode(self, decoder: Decoder[T], cut: int) -> T:
        data = bytes(self._buffer[:cut]) + b"]"
        try:
            try:
                return decoder.fast(data)
            except ValueError:
                return decoder.slow(data)
        except RecursionError:
            raise self._too_deep() from None
        except ValueError as error:
            where = self._place(0)
            raise self._source.error(f"not whole JSON: {printable(error)} (in the piece at byte {where})") from None

    def _advance(self, cut: int) -> None:
        """Drop what stands before the comma at `cut`, and begin an array in its place."""
        del self._buffer[:cut]
        self._buffer[0] = 0x5B

    def _likely_cut(self) -> int:
        """Where the last comma between two objects stands; 0 for none. It may lie inside an event."""
        at = len(self._buffer)
        for _ in range(4):
            at = self._buffer.rfind(b"},", 1, at)
            if at < 0:
                return 0
            follows = _NOT_SPACE.search(self._buffer, at + 2)
            if follows is not None and follows.group() == b"{":
                return at + 1
        return 0

    def _exact_cut(self) -> tuple[int, bool]:
        """Where the last whole event in the buffer ends, and whether the array ends there; 0 for no event yet."""
        depth = 0
        cut = 0
        for token in _TOKEN.finditer(self._buffer):
            mark = token.group()
            if mark in (b"{", b"["):
                depth += 1
            elif mark in (b"}", b"]"):
                depth -= 1
                if depth == 1:
                    follows = _NOT_SPACE.search(self._buffer, token.end())
                    if follows is not None and follows.group() == b",":
                        cut = follows.start()
                elif depth == 0:
                    return token.start(), True
            elif mark == b'"':
                break  # a string that goes on beyond the buffer
        return cut, False

    def _value_end(self, begin: int) -> int:
        while True:
            end = self._try_value_end(begin)
            if end:
                return end
            if len(self._buffer) - begin > MAX_VALUE_BYTES:
                raise self._source.error(f"a value of more than {MAX_VALUE_BYTES >> 20} MiB beside the events")
            if not self._fill(max(self._size, len(self._buffer))):
                raise self._cut_off()

    def _try_value_end(self, begin: int) -> int:
        if self._buffer[begin] not in b'{["':
            match = _SCALAR.match(self._buffer, begin)
            if match is None:
                raise self._source.error(f"not whole JSON: no value at byte {self._place(begin)}")
            return match.end() if match.end() < len(self._buffer) else 0
        depth = 0
        for token in _TOKEN.finditer(self._buffer, begin):
            mark = token.group()
            if mark in (b"{", b"["):
                depth += 1
            elif mark in (b"}", b"]"):
                depth -= 1
            elif mark == b'"':
                return 0
            if depth == 0:
                return token.end()
        return 0

    def _expect(self, marks: bytes, *, skip_key: bool = False) -> bytes:
        """Take the next byte that is not white space, which has to be one of `marks`."""
        at = self._next_byte(0)
        if at is None:
            raise self._cut_off()
        mark = bytes(self._buffer[at : at + 1])
        if skip_key and mark == b'"':
            return mark
        if mark not in marks:
            raise self._source.error(f"not whole JSON: {printable(mark)} at byte {self._place(at)}")
        del self._buffer[: at + 1]
        return mark

    def _key(self) -> str:
        at = self._next_byte(0)
        if at is None:
            raise self._cut_off()
        if self._buffer[at : at + 1] != b'"':
            raise self._source.error(f"not whole JSON: no name of a member at byte {self._place(at)}")
        while (match := _KEY.match(self._buffer, at)) is None:
            if len(self._buffer) > MAX_VALUE_BYTES:
                raise self._source.error(f"a name of more than {MAX_VALUE_BYTES >> 20} MiB beside the events")
            if not self._fill(max(self._size, len(self._buffer))):
                raise self._cut_off()
        name = match.group()[1:-1].decode("utf-8", errors="replace")
        del self._buffer[: match.end()]
        return name

    def _next_byte(self, at: int) -> int | None:
        """Where the next byte stands that is not white space; None at the end of the file."""
        while (match := _NOT_SPACE.search(self._buffer, at)) is None:
            del self._buffer[at:]
            if not self._fill(self._size):
                return None
        return match.start()

    def _fill(self, size: int) -> bool:
        data = self._source.read(size)
        self._read += len(data)
        self._buffer += data
        self._ended = not data
        return bool(data)

    def _place(self, at: int) -> int:
        return self._read - len(self._buffer) + at

    def _cut_off(self) -> Exception:
        return self._source.error(f"not whole JSON: cut off after {self._read} bytes")

    def _no_trace(self, start: bytes) -> Exception:
        if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
            return self._source.error("not whole JSON: its text is not UTF-8")
        if start[:1] in b'"-0123456789tfn':
            return self._source.error("JSON, but no trace: it has no list of traceEvents")
        return self._source.error(f"not whole JSON: it begins with {printable(start[:1])}")

    def _too_deep(self) -> Exception:
        return self._source.error(f"nested too deeply (in the piece at byte {self._place(0)})")
