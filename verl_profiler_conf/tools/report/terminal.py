"""The report as tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from verl_profiler_conf.tools.report.figures_table import capture_section, ranks_table
from verl_profiler_conf.tools.report.summary import groups
from verl_profiler_conf.tools.report.table import account_table, captures_tables, iterations_table
from verl_profiler_conf.tools.trace.errors import printable

if TYPE_CHECKING:
    from verl_profiler_conf.tools.report.account import AskedWindow
    from verl_profiler_conf.tools.report.against import Pair
    from verl_profiler_conf.tools.report.captures import Capture, Reading

MOST_SECTIONS = 8
"""Captures whose figures are shown; of a larger run, give single folders or traces."""


def make_console() -> Console:
    """A console that takes names and messages as they are; a pipe gets lines that are not broken at column 80."""
    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)


def print_report(
    reading: Reading, asked: Sequence[AskedWindow], pairs: Sequence[Pair], *, top: int, with_iterations: bool
) -> None:
    """Print the whole report.

    Args:
        reading: the captures.
        asked: what was asked for.
        pairs: captures side by side; with any, they are shown in place of the figures of single ones.
        top: kernels and operators to list.
        with_iterations: a line for each captured iteration as well.
    """
    console = make_console()
    if asked:
        console.print(account_table(asked))
        for table in captures_tables(reading.captures, console):
            console.print(table)
    for capture in reading.captures:
        _print_file(capture)
        if with_iterations and capture.manifest is not None:
            console.print(iterations_table(capture))
    if pairs:
        from verl_profiler_conf.tools.report.against import against_section

        for pair in pairs:
            for piece in against_section(pair, top):
                console.print(piece)
    else:
        _print_figures(console, reading.captures, top)
    if reading.hint is not None:
        sys.stdout.write(reading.hint + "\n")


def _print_file(capture: Capture) -> None:
    sys.stdout.write(f"{printable(capture.path, 4096)}\n")
    for note in (*(capture.manifest.notes if capture.manifest is not None else ()), *capture.remarks):
        sys.stdout.write(f"  {printable(note, 1000)}\n")
    if capture.counts is not None and capture.manifest is None:
        counts = capture.counts
        sys.stdout.write(f"  {counts.events} events, {counts.operators} operators, {counts.kernels} kernels\n")


def _print_figures(console: Console, captures: Sequence[Capture], top: int) -> None:
    shown = [capture for capture in captures if capture.analysis is not None]
    for capture in shown[:MOST_SECTIONS]:
        for piece in capture_section(capture, top):
            console.print(piece)
    if len(shown) > MOST_SECTIONS:
        console.print(f"\nand {len(shown) - MOST_SECTIONS} more: give single folders or traces to see their figures")
    for group in groups(captures):
        console.print(ranks_table(group))
