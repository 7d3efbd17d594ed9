"""`verl-profiler report`: what captures hold, for people and for programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler_conf.tools.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from verl_profiler_conf.tools.report.account import Answer
    from verl_profiler_conf.tools.report.captures import Reading

MOST_SECTIONS = 8
"""Captures whose figures the terminal shows; `--top` and single paths show the others."""


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`report`: what captures hold."""
    parser = commands.add_parser(
        "report",
        help="what was captured, what is missing, and where the time goes",
        description="Reads captures and says what was asked for, what is there, and what an iteration spends its time "
        "on.",
        epilog="Exit status: 0: all that was asked for is there; 1: something is missing, broken, or a trace disagrees "
        "with its manifest; 2: there is nothing to report on.",
    )
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="a run directory, any folder, or a trace")
    parser.add_argument("--iterations", action="store_true", help="one line for each captured iteration as well")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="kernels and operators to list (10)")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from verl_profiler_conf.tools.report.account import account
    from verl_profiler_conf.tools.report.captures import read_captures

    absent = [path for path in arguments.paths if not path.exists()]
    if absent:
        return _complain(f"{absent[0]}: not there; give a run directory, a folder or a trace")
    with progress_bar("reading") as progress:
        reading = read_captures(arguments.paths, progress)
    if not reading.captures and not reading.problems:
        names = ", ".join(map(str, arguments.paths))
        return _complain(f"{names}: no capture below it (no *.manifest.json and no trace)")
    answers = account(capture.manifest for capture in reading.captures if capture.manifest is not None)
    _print_tables(reading, answers, arguments)
    missing = [answer.line for answer in answers if answer.missing]
    for line in (*reading.problems, *missing):
        sys.stderr.write(line + "\n")
    return 1 if reading.problems or missing else 0


def _print_tables(reading: Reading, answers: list[Answer], arguments: argparse.Namespace) -> None:
    from verl_profiler_conf.tools.report.figures_table import capture_section, ranks_table
    from verl_profiler_conf.tools.report.summary import groups
    from verl_profiler_conf.tools.report.table import account_table, captures_table, iterations_table

    console = make_console()
    captures = reading.captures
    if answers:
        console.print(account_table(answers))
        console.print(captures_table(captures))
    for capture in captures:
        if arguments.iterations and capture.manifest is not None:
            console.print(iterations_table(capture))
        sys.stdout.write(f"{capture.path}\n")
        for note in (*(capture.manifest.notes if capture.manifest is not None else ()), *capture.remarks):
            sys.stdout.write(f"  {note}\n")
        if capture.counts is not None and capture.manifest is None:
            counts = capture.counts
            sys.stdout.write(f"  {counts.events} events, {counts.operators} operators, {counts.kernels} kernels\n")
    shown = [capture for capture in captures if capture.analysis is not None]
    for capture in shown[:MOST_SECTIONS]:
        for piece in capture_section(capture, arguments.top):
            console.print(piece)
    if len(shown) > MOST_SECTIONS:
        console.print(f"\nand {len(shown) - MOST_SECTIONS} more: give single folders or traces to see their figures")
    for group in groups(captures):
        console.print(ranks_table(group))
    if reading.hint is not None:
        sys.stdout.write(reading.hint + "\n")


def make_console() -> Console:
    """A console that takes names and messages as they are; a pipe gets lines that are not broken at column 80."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)


def _complain(line: str) -> int:
    sys.stderr.write(f"verl-profiler report: {line}\n")
    return 2
