"""The commands that make a trace from a trace, and the one that opens it: `slice`, `merge`, `open`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler_conf.tools.progress import progress_bar

if TYPE_CHECKING:
    from verl_profiler_conf.tools.trace.select import Selection


_STATUS = (
    "Exit status: 0: the trace is written; 1: a trace cannot be read, or not used as asked, or the output cannot be "
    "written; 2: the command line is wrong."
)


def add_slice(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`slice`: a part of a trace as a trace of its own."""
    parser = commands.add_parser(
        "slice",
        help="cut some iterations, or a span of time, out of a trace",
        description="Write a part of a trace as a smaller trace, which Perfetto and chrome://tracing open. "
        "Give tokens (--start, --end), a time (--time), or one iteration (--like-iteration).",
        epilog=_STATUS,
    )
    parser.add_argument("trace", type=Path, help="a .json or .json.gz trace")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the slice; compressed if it ends with .gz")
    parser.add_argument(
        "--start", type=int, help="first response token to keep; an iteration where no range names tokens"
    )
    parser.add_argument("--end", type=int, help="response token to stop at, exclusive; without: to the end")
    parser.add_argument(
        "--time", nargs=2, type=float, metavar=("FROM", "TO"), help="milliseconds after the first event of the trace"
    )
    parser.add_argument(
        "--like-iteration", metavar="N", help="one iteration: its number, or `typical` for the median one"
    )
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    parser.set_defaults(run=_slice)


def add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`merge`: the ranks of a capture in one trace."""
    parser = commands.add_parser(
        "merge",
        help="put the ranks of a capture into one trace, with their clocks aligned",
        description="Write one trace that holds all ranks of a capture.",
        epilog=_STATUS,
    )
    parser.add_argument("traces", type=Path, nargs="+", help="the folder of one capture, or a trace of each rank")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the merged trace")
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    parser.set_defaults(run=_merge)


def add_open(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`open`: how to look at a trace."""
    parser = commands.add_parser(
        "open",
        help="how to look at a trace; with --browser, open it in Perfetto",
        description="Perfetto runs in the browser and reads the file from this machine: nothing is uploaded.",
        epilog="Exit status: 0: done; 1: the trace cannot be read, or it was not fetched; 2: the command line "
        "is wrong.",
    )
    parser.add_argument("trace", type=Path, help="a trace, sliced or merged or as captured")
    parser.add_argument(
        "--browser", action="store_true", help="open Perfetto here, serve this file to it on loopback once, then end"
    )
    parser.set_defaults(run=_open)


def _slice(arguments: argparse.Namespace) -> int:
    def run() -> int:
        from verl_profiler_conf.tools.trace.slicing import slice_trace

        selection = _selection(arguments)
        with progress_bar(f"slicing {arguments.trace.name}") as progress:
            sliced = slice_trace(
                arguments.trace, arguments.output, selection, replace=arguments.force, progress=progress
            )
        _say(
            f"{sliced.path}: {sliced.events:,} of {sliced.of_events:,} events, {sliced.iterations} "
            f"{'iteration' if sliced.iterations == 1 else 'iterations'},"
            f" {sliced.path.stat().st_size:,} bytes"
        )
        return 0

    return _carry_out("slice", run)


def _selection(arguments: argparse.Namespace) -> Selection:
    from verl_profiler_conf.tools.trace.select import Selection

    like = arguments.like_iteration
    return Selection(
        start=arguments.start,
        end=arguments.end,
        time_us=tuple(1000 * edge for edge in arguments.time) if arguments.time else None,
        like=int(like) if like is not None and like.isdigit() else like,
    )


def _merge(arguments: argparse.Namespace) -> int:
    def run() -> int:
        from verl_profiler_conf.tools.trace.merging import merge_folder, merge_traces

        with progress_bar("merging") as progress:
            if len(arguments.traces) == 1 and arguments.traces[0].is_dir():
                merged = merge_folder(arguments.traces[0], arguments.output, replace=arguments.force, progress=progress)
            else:
                merged = merge_traces(arguments.traces, arguments.output, replace=arguments.force, progress=progress)
        _say(f"{merged.path}: {merged.events:,} events of {len(merged.ranks)} ranks")
        for rank in merged.ranks:
            _say(f"  rank {rank.rank}: clock moved by {rank.shift_us:+.1f} us (by {rank.aligned_by}), {rank.path.name}")
        return 0

    return _carry_out("merge", run)


def _open(arguments: argparse.Namespace) -> int:
    def run() -> int:
        from verl_profiler_conf.tools.serving import PERFETTO, FileServer

        path: Path = arguments.trace
        with path.open("rb"):
            pass
        if not arguments.browser:
            _say(f"{PERFETTO}: `Open trace file`, and choose {path.absolute()}")
            _say("chrome://tracing in a Chromium browser: `Load`, the same file (up to some 200 MB)")
            _say(f"verl-profiler open --browser {path}: does the first by itself")
            return 0
        import webbrowser

        with FileServer(path) as server:
            _say(f"open {server.viewer}")
            _say("waiting for the browser to read the file (Ctrl-C ends)")
            webbrowser.open(server.viewer)
            try:
                server.serve_once()
            except KeyboardInterrupt:
                return 1
        _say("the browser has read the file")
        return 0

    return _carry_out("open", run)


def _carry_out(command: str, run: Callable[[], int]) -> int:
    """Run a command. An error in its input is printed in one line, and the exit status is 1."""
    from verl_profiler_conf.tools.trace.errors import TraceError, printable

    try:
        return run()
    except TraceError as error:
        reason = str(error)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        reason = f"{name}{error.strerror or error}"
    sys.stderr.write(f"verl-profiler {command}: {printable(reason, 500)}\n")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
