"""Rewrites the events of one rank for a merged trace: other process numbers, other arrow ids, another clock."""

from __future__ import annotations

import json
from typing import Any

from verl_profiler_conf.tools.trace.events import HAS_MSGSPEC

if HAS_MSGSPEC:
    import msgspec

    _ROWS: Any = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
    _ENCODE: Any = msgspec.json.encode

_OWN_NAMES = ("process_name", "process_labels", "process_sort_index")
_IDS = 2**32
"""Number of arrow ids that a rank has. An id that is not a number below this is kept as text, after the rank."""


class Rewriter:
    """Decodes a piece into the texts of its rewritten events.

    Args:
        place: of the rank, 0-based: parts its arrows from those of other ranks.
        pids: new numbers of its processes.
        shift_ns: added to its times.
    """

    def __init__(self, place: int, pids: dict[object, int], shift_ns: int) -> None:
        self._place = place
        self._pids = {str(pid): str(number).encode() for pid, number in pids.items()}
        self._found: dict[bytes, bytes] = {}
        self._shift_ns = shift_ns

    def fast(self, data: bytes) -> list[Any]:
        """Raises ValueError where the piece is no whole JSON array."""
        if not HAS_MSGSPEC:
            return self.slow(data)
        made = []
        for row in _ROWS.decode(data):
            if self._rewrite(row, msgspec.Raw):
                made.append(_ENCODE(row))
        return made

    def slow(self, data: bytes) -> list[Any]:
        """Raises ValueError where the piece is no JSON."""
        made = []
        for whole in json.loads(data):
            if not isinstance(whole, dict):
                continue
            row: dict[str, Any] = {key: json.dumps(value).encode() for key, value in whole.items()}
            if self._rewrite(row, bytes):
                made.append(b"{" + b", ".join(json.dumps(k).encode() + b": " + v for k, v in row.items()) + b"}")
        return made

    def _rewrite(self, row: dict[str, Any], raw: Any) -> bool:
        """Change an event in place; False where it does not belong to the merged trace."""
        phase = bytes(row.get("ph", b""))
        if phase == b'"M"' and bytes(row.get("name", b"")).strip(b'"').decode("ascii", "replace") in _OWN_NAMES:
            return False
        text = bytes(row.get("pid", b"0"))
        pid = self._found.get(text)
        if pid is None:
            pid = self._pids.get(str(json.loads(text)))
            if pid is None:
                return False  # metadata of a process without events
            self._found[text] = pid
        row["pid"] = raw(pid)
        if "id" in row:
            row["id"] = raw(self._id(bytes(row["id"])))
        if self._shift_ns and phase != b'"M"' and "ts" in row:
            row["ts"] = raw(moved(bytes(row["ts"]), self._shift_ns))
        return True

    def _id(self, text: bytes) -> bytes:
        if text.isdigit() and len(text) < 11 and int(text) < _IDS:
            return str(self._place * _IDS + int(text)).encode()
        return json.dumps(f"{self._place}:{text.decode('utf-8', 'replace').strip(chr(34))}").encode()


def moved(text: bytes, shift_ns: int) -> bytes:
    """A time in microseconds as JSON, later by `shift_ns`; no digit of it is lost."""
    whole, _, part = text.strip(b'"').partition(b".")
    if b"e" in text or b"E" in text or len(part) > 3:
        time = round(float(text.strip(b'"')) * 1e3)
    else:
        sign = -1 if whole.startswith(b"-") else 1
        time = int(whole) * 1000 + sign * int(part.ljust(3, b"0"))
    whole_us, rest = divmod(abs(time + shift_ns), 1000)
    return f"{'-' if time + shift_ns < 0 else ''}{whole_us}.{rest:03}".encode()
