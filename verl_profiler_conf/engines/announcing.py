"""What an engine process says in its own log: once that a window is armed, and once what each capture holds.

A server that was started by hand has no job that would say it. The job's own process says nothing here, because its
summary does.
"""

from __future__ import annotations

import logging
from pathlib import Path

from verl_profiler_conf.capture.capture_lines import log_capture
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.engines.in_process import is_job_process

log = logging.getLogger(__name__)

PACKAGE_LOG = "verl_profiler_conf"
FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


def announce(session: Session, engine_log: str) -> None:
    """Log that the session waits for its windows, and from here on each of its captures.

    Args:
        session: of an engine worker, just made.
        engine_log: name of the engine's own logger: where it is silent about INFO, so is this.
    """
    if is_job_process():
        return
    _make_heard(engine_log)
    folder = session.arming.form.folder
    log.info("%s", armed_line(session.settings, session.engine, session.rank, folder))

    def captured(manifest: Manifest) -> None:
        log_capture(log, manifest, folder)

    session.arming.outputs.when_captured = captured


def armed_line(settings: Settings, engine: str, rank: int, folder: Path) -> str:
    """One line: which tokens are waited for, of whom, and where the traces go.

    Example: `armed: rank 0 of vllm waits for response tokens [20, 80); captures go to /run/profile`
    """
    windows = ", ".join(map(str, settings.windows))
    windows += f" after {settings.skip_captures} uncaptured" if settings.skip_captures else ""
    if settings.arm == "request":
        return (
            f"rank {rank} of {engine} waits for start_profile, and from then on for response tokens {windows};"
            f" captures go to {folder}"
        )
    return f"armed: rank {rank} of {engine} waits for response tokens {windows}; captures go to {folder}"


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as the process has configured no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _make_heard(engine_log: str) -> None:
    """Let INFO of this package reach stderr. Python prints only warnings where nobody has configured logging, and
    vLLM configures its own logger alone."""
    package = logging.getLogger(PACKAGE_LOG)
    if package.hasHandlers() or logging.getLogger(engine_log).getEffectiveLevel() > logging.INFO:
        return
    handler = _LastResort()
    handler.setFormatter(logging.Formatter(FORMAT, "%m-%d %H:%M:%S"))
    package.addHandler(handler)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
