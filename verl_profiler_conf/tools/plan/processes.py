"""The processes of a planned launch: started, waited for, and all of them ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PROC = Path("/proc")

SAID_AFTER = 20.0
"""Seconds after which a launch that has not come to its job is spoken of: what it does meanwhile is done for real."""

ROUNDS = 10
"""Looks for processes that are left: one that is being ended may start another."""


class CannotRunError(Exception):
    """The command could not be started."""


def run(
    command: Sequence[str], environment: dict[str, str], output: Path, seconds: float, *, mark: str
) -> tuple[int | None, str]:
    """Run a command, and end all that it has started.

    Args:
        command: its words.
        environment: of the process; it has the variable `mark`.
        output: file for what it prints.
        seconds: after which it is ended.
        mark: `NAME=value` in the environment of the launch's processes, and of no others.

    Returns:
        Exit status (None: it had to be ended) and what the launch printed.

    Raises:
        CannotRunError: there is no such command.
    """
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as error:
            raise CannotRunError(f"{command[0]}: {error.strerror}") from error
        try:
            code = _wait(process, seconds)
        finally:  # after Ctrl-C too
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_marked(mark)
    return code, output.read_text(encoding="utf-8", errors="replace")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(min(SAID_AFTER, seconds))
    if seconds <= SAID_AFTER:
        return None
    sys.stderr.write(
        f"verl-profiler: after {SAID_AFTER:g} s the launch has not come to the start of a Hydra job; until then its"
        f" code runs as always; it is ended after {seconds:g} s (--timeout), or by Ctrl-C\n"
    )
    try:
        return process.wait(seconds - SAID_AFTER)
    except subprocess.TimeoutExpired:
        return None


def end_marked(mark: str) -> None:
    """End every process that has `mark` in its environment: those too that have left the launch's session."""
    for _ in range(ROUNDS):
        left = list(_marked(mark.encode()))
        if not left:
            return
        for number in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)


def _marked(mark: bytes) -> Iterator[int]:
    """Numbers of processes; none where there is no /proc. One that has ended has no environment any more."""
    for file in PROC.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)
