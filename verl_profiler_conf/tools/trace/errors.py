"""What can be wrong with a trace."""

from __future__ import annotations

HOW_TO_GET_IT = "pip install isal matplotlib msgspec numpy plotly shtab (the extra `report` of verl-profiler-conf)"
"""By the libraries' own names, because no index that pip asks has this package."""

MERGED = "verl_profiler_merge"
"""What a merged trace says beside its events: its ranks, their files, and by how much each clock was moved."""


class TraceError(ValueError):
    """A trace that cannot be read, or not used as asked. Its text is one line: the file, and what is wrong."""


class ExtraMissingError(TraceError):
    """A library that the extra `report` brings is not installed."""

    def __init__(self, library: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}: {HOW_TO_GET_IT}")


def printable(text: object, most: int = 200) -> str:
    """`text` on one line without control characters, for a message: a name in a trace may hold anything."""
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)[: most + 1])
    return line if len(line) <= most else line[:most] + "..."
