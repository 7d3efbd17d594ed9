"""What a job logs at its end: one line for each capture, and a warning for each that is missing."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler_conf.capture.capture_lines import log_capture
from verl_profiler_conf.capture.manifest import Manifest, gather
from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.logs import is_logged_reason
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.in_process import ran_on_another_rank
from verl_profiler_conf.engines.torch_rank import is_reporting_rank
from verl_profiler_conf.launch.asked import account, answer
from verl_profiler_conf.launch.folder import write_problem

if TYPE_CHECKING:
    from verl_profiler_conf.launch.collect import Collector
    from verl_profiler_conf.launch.remote import RemoteFolder

log = logging.getLogger(__name__)

MOST_LINES = 16
"""Captures that get a line of their own. A large job leaves one for each rank and window."""

GRACE_S = 3.0
"""Seconds to wait for the first manifest. An engine process may write it a moment after its last answer."""

PATIENCE_S = 30.0
"""Seconds to wait for traces that engine processes are still writing."""


def summarise(
    settings: Settings,
    *,
    since: float,
    asked: Asked | None = None,
    collector: Collector | None = None,
    remote: RemoteFolder | None = None,
) -> None:
    """Log what this job captured.

    Args:
        settings: of the job, with an absolute `save_path`.
        since: when the job started, in seconds as `time.time()` gives them.
        asked: what a preset knows to be asked for; None: not known.
        collector: that has looked after captures of other processes meanwhile.
        remote: where the captures are moved; None: they stay in `save_path`.
    """
    if settings.mapping == "iterations":
        log.info("mapping=iterations: the engine's own profiler writes the captures to its own folder")
        return
    folder = Path(settings.save_path or "")
    reports = is_reporting_rank(settings.ranks, all_ranks=settings.all_ranks)
    unfinished = _await_engines(folder, settings, since) if reports or _has_workers() else 0
    manifests = gather(folder, settings.run_id) if folder.is_dir() else []
    captured = [manifest for manifest in manifests if manifest.rows]
    urls = remote.move_all(folder, settings.run_id) if remote is not None and manifests else {}
    new = [manifest for manifest in captured if collector is None or not collector.has_logged(manifest)]
    for manifest in new[:MOST_LINES]:
        log_capture(log, manifest, folder, urls.get(manifest.trace or ""))
    if len(new) > MOST_LINES:
        log.info("and %d more captures in %s", len(new) - MOST_LINES, folder)
    if len(new) < len(captured):
        log.info("%d captures in %s", len(captured), folder)
    if unfinished:
        log.warning("other processes are still writing %d traces to %s", unfinished, folder)
    unheard = "; ".join(collector.unheard_nodes) if collector is not None else ""
    answers = answer(asked, manifests, unheard) if asked is not None else None
    if asked is not None and answers is not None and (manifests or unheard):
        for line in account(asked, answers):
            log.warning("%s", line)
        return
    for line in collector.unheard_nodes if collector is not None else ():
        log.warning("%s: what it captured, if anything, is not in %s", line, folder)
    if reports or manifests:
        for line in missing_lines(settings, manifests, unfinished=unfinished > 0):
            log.warning("%s", line)


def missing_lines(settings: Settings, manifests: list[Manifest], *, unfinished: bool) -> Iterator[str]:
    """One line for each window without a capture: what is known about the cause, and what to do."""
    windows = ", ".join(map(str, settings.windows))
    if not manifests:
        problem = write_problem(Path(settings.save_path), keep=False) if settings.save_path else None
        if problem is not None:
            yield f"tokens {windows}: no capture is known, because {settings.save_path} cannot be written: {problem}"
        elif ran := ran_on_another_rank():
            seen = ", ".join(f"{engine} ran on rank {rank}" for engine, rank in ran.items())
            yield (
                f"tokens {windows}: no capture, because {seen}, and ranks={list(settings.ranks)} asks for another;"
                " name a rank that runs, or set all_ranks=true"
            )
        elif not unfinished:
            ranks = "" if settings.all_ranks or 0 in settings.ranks else f" on rank {_listed(settings.ranks)}"
            yield (
                f"tokens {windows}: no capture, because no engine reported an iteration{ranks}; `verl-profiler doctor`"
                " says which engines are hooked, and engine processes must be started by this job and reach"
                f" {settings.save_path}"
            )
        return
    for window in settings.windows:
        of_window = [manifest for manifest in manifests if manifest.window == window]
        missed = _armings_without_capture(of_window)
        if missed:
            yield _no_trace(window, missed)
        elif not of_window and not unfinished:
            yield f"tokens {window}: never reached; no trace was written"


def _armings_without_capture(manifests: list[Manifest]) -> list[Manifest]:
    """The placeholder manifests of armings of which no process captured anything. Each arming has one label."""
    captured = {manifest.label for manifest in manifests if manifest.rows}
    # A framework may profile only some of several replicas. The others are never armed and have no label.
    armed = {manifest.label for manifest in manifests} - {None} or {None}
    return [manifest for manifest in manifests if manifest.label in armed - captured]


def _listed(ranks: tuple[int, ...]) -> str:
    return " or ".join(map(str, ranks))


def _no_trace(window: TokenWindow, missed: list[Manifest]) -> str:
    furthest = max(missed, key=lambda manifest: manifest.furthest_token)
    notes = furthest.notes or [f"tokens {window} were never reached"]
    if all(map(is_logged_reason, notes)):
        return f"tokens {window}: no trace was written, for the reason that this log gave"
    labels = list(dict.fromkeys(manifest.label for manifest in missed if manifest.label))
    return f"{', '.join(labels)}{': ' if labels else ''}{'; '.join(notes)}; no trace was written"


def _await_engines(folder: Path, settings: Settings, since: float) -> int:
    """Give engine processes time to finish. Return the number of traces that are still unfinished then."""
    started = time.monotonic()
    if _has_workers():
        while time.monotonic() - started < GRACE_S and not (_reserved(folder, since) or _all_known(folder, settings)):
            time.sleep(0.1)
    is_logged = False
    while reserved := _reserved(folder, since):
        if time.monotonic() - started > PATIENCE_S:
            return len(reserved)
        if not is_logged:
            log.info("waiting for %d traces that engine processes are writing", len(reserved))
            is_logged = True
        time.sleep(0.1)
    return 0


def _all_known(folder: Path, settings: Settings) -> bool:
    """Whether every window has a manifest."""
    known = {manifest.window for manifest in gather(folder, settings.run_id)} if folder.is_dir() else set()
    return known.issuperset(settings.windows)


def _reserved(folder: Path, since: float) -> list[Path]:
    """Markers of names that were reserved after the job started and have no manifest yet."""
    fresh = []
    for marker in folder.glob(".*.reserved"):
        try:
            if marker.stat().st_mtime >= since - 1:
                fresh.append(marker)
        except OSError:
            continue  # The manifest has just been written, and the marker is gone.
    return fresh


def _has_workers() -> bool:
    """Whether engines may run in other processes."""
    if "ray" in sys.modules:
        return True
    multiprocessing = sys.modules.get("multiprocessing")
    return bool(multiprocessing and multiprocessing.active_children()) or _has_children()


def _has_children() -> bool:
    try:
        return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip())
    except OSError:
        return False
