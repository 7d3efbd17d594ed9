"""Errors of reading and using a trace."""

from __future__ import annotations

from verl_profiler_conf.core.install import pip_install

EXTRA = "report"
"""The extra of this package that brings the libraries for reading traces fast."""

MERGED = "verl_profiler_merge"
"""Member of a merged trace, beside its events: the ranks, their files, and by how much each clock was moved."""


class TraceError(ValueError):
    """A trace that cannot be read, or not used as asked. Its text is one line: the file, and what is wrong."""


class ExtraMissingError(TraceError):
    """A library that the extra `report` brings is not installed."""

    def __init__(self, library: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}: {pip_install(EXTRA)}")


def printable(text: object, most: int = 200) -> str:
    """`text` on one line without control characters, for a message: a name in a trace may hold anything."""
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)[: most + 1])
    return line if len(line) <= most else line[:most] + "..."
