"""`verl-profiler report`: what captures hold, for people and for programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler_conf.capture.files import write_atomically
from verl_profiler_conf.tools.progress import progress_bar

if TYPE_CHECKING:
    from verl_profiler_conf.tools.report.account import AskedWindow
    from verl_profiler_conf.tools.report.against import Pair
    from verl_profiler_conf.tools.report.captures import Reading

OUTPUTS = ("csv", "html", "png")
"""Options that write a file, and how its name ends."""


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`report`: what captures hold."""
    parser = commands.add_parser(
        "report",
        help="what was captured, what is missing, and where the time goes",
        description="Reads captures and says what was asked for, what is there, and what an iteration spends its time "
        "on.",
        epilog="Exit status: 0: all that was asked for is there, as far as responses went; 1: something is missing or "
        "broken, or a trace disagrees with its manifest; 2: there is nothing to report on, or nothing can be written.",
    )
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="a run directory, any folder, or a trace")
    parser.add_argument("--iterations", action="store_true", help="one line for each captured iteration as well")
    parser.add_argument("--top", type=_count, default=10, metavar="N", help="kernels and operators to list (10)")
    parser.add_argument("--against", metavar="OTHER", type=Path, help="what has changed since this run or trace")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output, in place of tables")
    parser.add_argument("--csv", metavar="OUT.csv", type=Path, help="write one row for each iteration")
    parser.add_argument("--html", metavar="OUT.html", type=Path, help="write one page with plots, which opens offline")
    parser.add_argument("--png", metavar="OUT.png", type=Path, help="write the plots as one picture")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from verl_profiler_conf.tools.report.account import asked_windows
    from verl_profiler_conf.tools.report.captures import read_captures
    from verl_profiler_conf.tools.trace.errors import TraceError, printable

    others = [arguments.against] if arguments.against is not None else []
    absent = [path for path in (*arguments.paths, *others) if not path.exists()]
    if absent:
        return _complain(f"{absent[0]}: not there; give a run directory, a folder or a trace")
    for option in OUTPUTS:
        out = getattr(arguments, option)
        if out is not None and out.suffix != f".{option}":  # a slip of the hand must not overwrite a trace
            return _complain(f"--{option} {out}: the name of the file has to end with .{option}")
    with progress_bar("reading") as progress:
        reading = read_captures(arguments.paths, progress)
        other = read_captures(others, progress) if others else None
    if not reading.captures and not reading.problems:
        names = ", ".join(map(str, arguments.paths))
        return _complain(f"{names}: no capture below it (no *.manifest.json and no trace)")
    asked = asked_windows(capture.manifest for capture in reading.captures if capture.manifest is not None)
    missing = [each.line for each in asked if each.missing]
    short = [each.line for each in asked if each.unmade and not each.missing]
    problems = reading.problems + (other.problems if other is not None else ())
    try:
        pairs = _compare(reading, other)
        _write_files(reading, asked, pairs, arguments)
    except TraceError as error:
        return _complain(printable(error, 500))
    except OSError as error:
        return _complain(f"{_output_of(error, arguments)}: {error.strerror or error}")
    if arguments.json:
        _print_json(reading, asked, pairs)
    else:
        from verl_profiler_conf.tools.report.terminal import print_report

        print_report(reading, asked, pairs, top=arguments.top, with_iterations=arguments.iterations)
    for line in (*problems, *missing, *short):
        sys.stderr.write(printable(line, 1000) + "\n")
    return 1 if problems or missing else 0


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or a positive number")
    return int(text)


def _output_of(error: OSError, arguments: argparse.Namespace) -> object:
    """The file as it was asked for: what could not be written is a temporary one beside it."""
    folder = Path(error.filename or "").parent
    outputs = [out for option in OUTPUTS if (out := getattr(arguments, option)) is not None]
    return next((out for out in outputs if out.parent == folder), error.filename)


def _compare(reading: Reading, other: Reading | None) -> list[Pair]:
    if other is None:
        return []
    _need_figures(reading, "--against")
    from verl_profiler_conf.tools.report.against import pair_up

    return pair_up(other.captures, reading.captures)


def _write_files(reading: Reading, asked: list[AskedWindow], pairs: list[Pair], arguments: argparse.Namespace) -> None:
    for option in OUTPUTS:
        if getattr(arguments, option) is not None:
            _need_figures(reading, f"--{option}")
    if arguments.csv is not None:
        from verl_profiler_conf.tools.report.rows import csv_text

        write_atomically(arguments.csv, csv_text(reading.captures).encode(errors="backslashreplace"), replace=True)
    if arguments.html is not None:
        from verl_profiler_conf.tools.report.page import write_page

        write_page(arguments.html, reading, asked, pairs)
    if arguments.png is not None:
        from verl_profiler_conf.tools.report.picture import write_picture

        write_picture(arguments.png, reading.captures)
    for option in OUTPUTS:
        if getattr(arguments, option) is not None:
            sys.stderr.write(f"written: {getattr(arguments, option)}\n")


def _need_figures(reading: Reading, option: str) -> None:
    from verl_profiler_conf.tools.trace.errors import TraceError

    if reading.hint is not None:
        raise TraceError(f"{option}: {reading.hint}")


def _print_json(reading: Reading, asked: list[AskedWindow], pairs: list[Pair]) -> None:
    import json

    from verl_profiler_conf.tools.report.data import report_data

    sys.stdout.write(json.dumps(report_data(reading, asked, pairs), indent=1) + "\n")


def _complain(line: str) -> int:
    sys.stderr.write(f"verl-profiler report: {line}\n")
    return 2
