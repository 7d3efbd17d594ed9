"""The releases of the engines that were tried, in one place. What differs between them is in tables with a row for each
change: `core/iterations/` for the engines' own counters, `engines/*/release.py` for what is read of a scheduler.

A test holds this against the environments in which the real engines are run, and against the releases whose own sources
are read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """The releases of one engine.

    Attributes:
        counters_since: the oldest whose own counters are understood.
        tokens_since: the oldest that can be windowed by tokens.
        newest: the newest that was tried in any way. What is read of a newer one is looked at before it is windowed.
        run: those on which the tests run the real engine.
        read: those of which the tests run the scheduler's own sources.
    """

    counters_since: str
    tokens_since: str
    newest: str
    run: tuple[str, ...]
    read: tuple[str, ...] = ()


VLLM = Tried(
    counters_since="0.10.2",
    tokens_since="0.11",
    newest="0.33.0",
    run=("0.28.0", "0.30.0", "0.32.0"),
    read=("0.11.0", "0.11.2", "0.12.0", "0.16.0", "0.24.0", "0.33.0"),
)

SGLANG = Tried(
    counters_since="0.4.6",
    tokens_since="0.5.11",
    newest="0.5.23",
    run=("0.5.12", "0.5.23"),
)
