"""Reading a trace file: whole, or with one line that says what is wrong with it."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.ranges import RANGE


class TraceError(ValueError):
    """A trace that cannot be read. Its text is one line: the file, and what is wrong."""


@dataclass(frozen=True)
class Range:
    """A captured iteration as the trace itself names it. Times in microseconds, on the trace's own clock."""

    lo: int
    hi: int
    iteration: int
    requests: int
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """The events of one trace file."""

    path: Path
    events: list[dict[str, Any]]

    @property
    def ranges(self) -> list[Range]:
        """The captured iterations, in the order they ran."""
        found = []
        for event in self.events:
            match = RANGE.fullmatch(str(event.get("name", "")))
            if match is None or event.get("ph") != "X" or event.get("cat") == "gpu_user_annotation":
                continue  # an accelerator's timeline repeats the range: the host's is the one that brackets
            begin = float(event["ts"])
            lo, hi, iteration, requests = (int(group) for group in match.groups())
            found.append(Range(lo, hi, iteration, requests, begin, begin + float(event.get("dur", 0))))
        return sorted(found, key=lambda r: r.begin)

    @property
    def operators(self) -> int:
        """Operators that the host ran."""
        return sum(event.get("cat") == "cpu_op" for event in self.events)

    @property
    def kernels(self) -> int:
        """Work that an accelerator ran."""
        return sum(event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") for event in self.events)


def read_trace(path: Path) -> Trace:
    """Read a `.json` or `.json.gz`, of one gzip member or several.

    Raises:
        TraceError: missing, cut off, no gzip, no JSON, or no trace.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except EOFError:
            raise TraceError(f"{path}: cut off: the compressed data ends before its end marker") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path}: not whole gzip data: {error}") from None
    try:
        raw = json.loads(data)
    except ValueError as error:  # UnicodeDecodeError is one
        raise TraceError(f"{path}: not whole JSON: {error}") from None
    events = raw.get("traceEvents") if isinstance(raw, dict) else raw
    if not isinstance(events, list):
        raise TraceError(f"{path}: JSON, but no trace: it has no list of traceEvents")
    return Trace(path, [event for event in events if isinstance(event, dict)])
