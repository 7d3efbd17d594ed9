"""Writes a trace file: whole or not at all, and compressed if its name ends with `.gz`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from verl_profiler_conf.tools.trace.compression import write_gzip
from verl_profiler_conf.tools.trace.project import publish, temporary_name


class TraceWriter:
    """Writes events, a piece at a time, with what stands beside them in front.

    Args:
        path: where to; compressed where the name ends with `.gz`.
        members: raw JSON of what stands beside the events, by name.
        added: further members, as data.
        is_array: write a plain array of events, as Ascend's are; it has no place for members.
        replace: write over a file that is there.

    Raises:
        FileExistsError: on leaving, if a file is there and `replace` is false.
        OSError: the disk refused; nothing is left behind.
    """

    def __init__(
        self,
        path: Path,
        members: dict[str, bytes],
        added: dict[str, Any],
        *,
        is_array: bool = False,
        replace: bool = False,
    ) -> None:
        self.path = path
        self.events = 0
        self._members = {**members, **{name: json.dumps(value).encode() for name, value in added.items()}}
        self._is_array = is_array
        self._replace = replace
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> TraceWriter:
        with self._stack:  # closes what is open if the beginning cannot be written
            self._temporary = self._stack.enter_context(temporary_name(self.path))
            self._raw = self._stack.enter_context(self._temporary.open("xb"))
            self._file: IO[bytes] = self._raw
            if self.path.suffix == ".gz":
                self._file = self._stack.enter_context(write_gzip(self._raw))
            if self._is_array:
                self._file.write(b"[")
            else:
                self._file.write(b"{\n")
                for name, value in self._members.items():
                    self._file.write(json.dumps(name).encode() + b": " + value + b",\n")
                self._file.write(b'"traceEvents": [')
            self._stack = self._stack.pop_all()
        return self

    def write(self, texts: list[Any]) -> None:
        """Add events, each as JSON."""
        if texts:
            self._file.write((b",\n" if self.events else b"\n") + b",\n".join(texts))
            self.events += len(texts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is not None:
                return
            self._file.write(b"\n]" if self._is_array else b"\n]\n}\n")
            self._file.flush()
            if self._file is not self._raw:
                self._file.close()
            self._raw.close()
            publish(self._temporary, self.path, replace=self._replace)
