"""The page of one job's captures, as `profiler.report: html` leaves it; made by a process that the job's end starts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_profiler_conf.tools.report.account import asked_windows
from verl_profiler_conf.tools.report.captures import read_captures
from verl_profiler_conf.tools.report.page import write_page
from verl_profiler_conf.tools.trace.errors import TraceError, printable


def main(arguments: Sequence[str]) -> int:
    """Write the page of a folder and a run id, and print its path; else one line on standard error, and status 1."""
    folder, run_id = arguments
    try:
        path = write_job_page(Path(folder), run_id)
    except (TraceError, OSError) as error:
        sys.stderr.write(printable(error, 500) + "\n")
        return 1
    with contextlib.suppress(OSError):  # the job has stopped waiting
        sys.stdout.write(f"{path}\n")
        sys.stdout.flush()
    return 0


def write_job_page(folder: Path, run_id: str) -> Path:
    """Write `report.html` into the folder; where that is there already, `report_2.html` and so on.

    Args:
        folder: where the captures are.
        run_id: of the job. The folder may hold captures of other jobs, which are left out.

    Returns:
        The page.

    Raises:
        TraceError: the folder holds no capture of the job, or the extra `report` is not installed; one line.
        OSError: the page cannot be written.
    """
    reading = read_captures([folder], run_id=run_id)
    if reading.hint is not None:
        raise TraceError(reading.hint)
    if not reading.captures:
        raise TraceError(f"{printable(folder)}: no capture of this job in it")
    asked = asked_windows(capture.manifest for capture in reading.captures if capture.manifest is not None)
    number = 1
    while True:
        out = folder / ("report.html" if number == 1 else f"report_{number}.html")
        try:
            write_page(out, reading, asked, replace=False)
        except FileExistsError:
            number += 1
        else:
            return out
