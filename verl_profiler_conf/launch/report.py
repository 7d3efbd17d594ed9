"""The page that a job writes beside its traces when it ends: `profiler.report: html`.

A separate process makes it, at a low priority, so the job itself does not import the libraries that draw it. The job's
end waits for that process for a limited time, because a container may end together with the job. No failure here
changes how the job ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from verl_profiler_conf.capture.manifest import gather
from verl_profiler_conf.core.install import pip_install
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.engines.torch_rank import torch_place
from verl_profiler_conf.launch.remote import RemoteFolder
from verl_profiler_conf.launch.termination import is_terminating

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds that the job's end waits for the page."""

LIBRARIES = ("numpy", "plotly")
"""What the page needs of the extra `report`."""

NICE = 10
"""Priority of the process. Other jobs of the machine come first."""

_CODE = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verl_profiler_conf.tools.report.job_page import main
sys.exit(main(sys.argv[2:]))
"""
"""The code of that process. It looks for modules where the job does. It is a text because this file must not import
from `tools`."""


def warn_of_missing_extra(settings: Settings) -> None:
    """Warn at the job's start, when a user can still install the extra, that there will be no page."""
    missing = _missing_libraries()
    if settings.report is not None and missing and _is_writer(settings):
        log.warning(
            "report=%s needs %s: %s; the job goes on without a report",
            settings.report,
            " and ".join(missing),
            pip_install("report"),
        )


def write_report(settings: Settings, folder: Path, remote: RemoteFolder | None = None) -> None:
    """Write the page of a job's captures, and log where it is. A job without a manifest gets no page.

    Args:
        settings: of the job.
        folder: with its captures, all of them on this machine.
        remote: where the page is moved; None: it stays in the folder.
    """
    if settings.report is None or not _is_writer(settings) or _missing_libraries() or is_terminating():
        return
    try:
        if not gather(folder, settings.run_id):
            return
        page = _page(settings, folder, is_kept=remote is None)
        if page is not None:
            log.info("report: %s", page if remote is None else remote.move_file(page))
    except Exception as error:
        _log_failure(folder, f"{type(error).__name__}: {error}")


def _is_writer(settings: Settings) -> bool:
    """Whether this process writes the page. Under torchrun each rank is a job of its own: the first that captures."""
    rank, world = torch_place()
    capturing = range(world) if settings.all_ranks else [rank for rank in settings.ranks if rank < world]
    return rank == min(capturing, default=0)


def _missing_libraries() -> list[str]:
    return [name for name in LIBRARIES if find_spec(name) is None]


def _page(settings: Settings, folder: Path, *, is_kept: bool) -> Path | None:
    """Have the page made. Returns None where it is not there, and logs why.

    Args:
        settings: of the job.
        folder: with its captures.
        is_kept: the captures stay where they are, so the page may be finished after the job's end.
    """
    process = _start(settings, folder)
    with contextlib.suppress(OSError, AttributeError):  # no such thing on this system
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    log.info("writing the report, %.0f seconds at most (Ctrl-C leaves it out)", PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                out, err = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                if is_terminating():
                    process.kill()
                    return None
                if time.monotonic() > until:
                    break
            else:
                if process.returncode == 0:
                    return Path(out.strip())
                _log_failure(folder, (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1])
                return None
    except KeyboardInterrupt:
        process.kill()
        _log_failure(folder, "interrupted")
        return None
    if is_kept:
        log.info("the report takes longer: process %d goes on writing it to %s", process.pid, folder)
        return None
    process.kill()
    process.wait()
    _log_failure(folder, f"not done after {PATIENCE_S:.0f} seconds")
    return None


def _start(settings: Settings, folder: Path) -> subprocess.Popen[str]:
    """Start the process in a session of its own, so that Ctrl-C does not reach it. It keeps no file of the job open."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            _CODE,
            json.dumps([path or str(Path.cwd()) for path in sys.path]),
            folder,
            settings.run_id,
        ],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != ENV_NAME},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _log_failure(folder: Path, reason: str) -> None:
    log.warning("no report: %s; `verl-profiler report %s --html report.html` makes one", reason, folder)
