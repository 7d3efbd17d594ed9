"""What a job logs at its end: one line for each capture, and a warning for each that is missing."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler_conf.capture.capture_lines import coverage_lines, log_capture
from verl_profiler_conf.capture.claims import Claim, claims, has_ended
from verl_profiler_conf.capture.manifest import Manifest, gather
from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.logs import is_logged_reason
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.in_process import ran_on_another_rank
from verl_profiler_conf.engines.torch_rank import is_reporting_rank, torch_place
from verl_profiler_conf.launch.asked import account, answer
from verl_profiler_conf.launch.ending import RETURNED, Ending
from verl_profiler_conf.launch.folder import write_problem
from verl_profiler_conf.launch.report import write_report

if TYPE_CHECKING:
    from verl_profiler_conf.launch.collect import Collector
    from verl_profiler_conf.launch.remote import RemoteFolder

log = logging.getLogger(__name__)

MOST_LINES = 16
"""Captures that get a line of their own. A large job leaves one for each rank and window."""

MOST_NOTES = 4
"""What is told of a window without a capture: why, and which processes were lost."""

GRACE_S = 3.0
"""Seconds to wait for final manifests. An engine process may write one a moment after its last answer."""

PATIENCE_S = 30.0
"""Seconds to wait for traces that engine processes are still writing."""


def summarise(
    settings: Settings,
    *,
    asked: Asked | None = None,
    collector: Collector | None = None,
    remote: RemoteFolder | None = None,
    ending: Ending = RETURNED,
) -> None:
    """Log what this job captured.

    Args:
        settings: of the job, with an absolute `save_path`.
        asked: what a preset knows to be asked for; None: not known.
        collector: that has looked after captures of other processes meanwhile.
        remote: where the captures are moved; None: they stay in `save_path`.
        ending: how the job ended.

    Raises:
        KeyboardInterrupt: Ctrl-C came while traces of other processes were waited for; the rest was logged.
    """
    if settings.mapping == "iterations":
        log.info("mapping=iterations: the engine's own profiler writes the captures to its own folder")
        return
    folder = Path(settings.save_path or "")
    reports = is_reporting_rank(settings.ranks, all_ranks=settings.all_ranks)
    unfinished, interrupt = 0, None
    if reports or _has_workers():
        try:
            unfinished = _await_engines(folder, settings)
        except KeyboardInterrupt as error:
            interrupt, unfinished = error, len(_being_written(folder, settings.run_id))
            log.warning("Ctrl-C: the traces that other processes are still writing are not waited for")
    _log_summary(settings, unfinished, reports, asked, collector, remote, ending)
    if interrupt is not None:
        raise interrupt


def _log_summary(
    settings: Settings,
    unfinished: int,
    reports: bool,
    asked: Asked | None,
    collector: Collector | None,
    remote: RemoteFolder | None,
    ending: Ending,
) -> None:
    folder = Path(settings.save_path or "")
    manifests = gather(folder, settings.run_id) if folder.is_dir() else []
    captured = [manifest for manifest in manifests if manifest.has_rows]
    if remote is not None:
        write_report(settings, folder, remote)  # before the traces leave the folder
    urls = remote.move_all(folder, settings.run_id) if remote is not None and manifests else {}
    _log_captures(captured, folder, urls, collector)
    if unfinished:
        log.warning("other processes are still writing %d traces to %s", unfinished, folder)
    lost = list(_lost_lines(folder, settings.run_id))
    for line in lost:
        log.warning("%s", line)
    unanswered = "; ".join(collector.unanswered_nodes) if collector is not None else ""
    answers = answer(asked, manifests, unanswered) if asked is not None else None
    if asked is not None and answers is not None and (manifests or unanswered):
        for line in account(asked, answers):
            log.warning("%s", line)
        return
    for line in collector.unanswered_nodes if collector is not None else ():
        log.warning("%s: what it captured, if anything, is not in %s", line, folder)
    if reports or manifests:
        is_unknown = unfinished > 0 or bool(lost)
        for line in missing_lines(settings, manifests, unfinished=is_unknown, ending=ending):
            log.warning("%s", line)


def _log_captures(captured: list[Manifest], folder: Path, urls: dict[str, str], collector: Collector | None) -> None:
    new = [manifest for manifest in captured if collector is None or not collector.has_logged(manifest)]
    for manifest in new[:MOST_LINES]:
        log_capture(log, manifest, folder, urls.get(manifest.trace or ""))
    if len(new) > MOST_LINES:
        log.info("and %d more captures in %s", len(new) - MOST_LINES, folder)
    if len(new) < len(captured):
        log.info("%d captures in %s", len(captured), folder)
    for line in coverage_lines(captured):
        log.info("%s", line)


def missing_lines(
    settings: Settings, manifests: list[Manifest], *, unfinished: bool, ending: Ending = RETURNED
) -> Iterator[str]:
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
        elif ending.is_early and not unfinished:
            yield f"tokens {windows}: no capture, because {ending.words} before any engine reported an iteration"
        elif not unfinished:
            ranks = "" if settings.all_ranks or 0 in settings.ranks else f" on rank {_listed(settings.ranks)}"
            yield (
                f"tokens {windows}: no capture, because no engine reported an iteration{ranks}; `verl-profiler doctor`"
                " says which engines are hooked, and engine processes must be started by this job and reach"
                f" {settings.save_path}{f'; {ending.words}' if ending.words else ''}"
            )
        return
    captured = _captured(manifests)
    for manifest in manifests:
        if not manifest.final and (manifest.window, manifest.label) in captured:
            yield f"tokens {manifest.window}, part {manifest.part}, rank {manifest.rank}: {'; '.join(manifest.notes)}"
    silent = sorted({*settings.ranks} - {manifest.rank for manifest in manifests})
    if silent and not settings.all_ranks and torch_place()[1] == 1:  # ranks of torch.distributed end one by one
        yield (
            f"rank {_listed(tuple(silent))} left no manifest in {settings.save_path}: it does not exist, it ended"
            " before it ran an iteration, or it writes elsewhere"
        )
    after = f"; {ending.words}" if ending.is_early else ""
    for window in settings.windows:
        of_window = [manifest for manifest in manifests if manifest.window == window]
        missed = _armings_without_capture(of_window)
        if missed:
            yield _no_trace(window, missed) + after
        elif not of_window and not unfinished:
            yield f"tokens {window}: never reached; no trace was written{after}"


def _armings_without_capture(manifests: list[Manifest]) -> list[Manifest]:
    """The placeholder manifests of armings of which no process captured anything. Each arming has one label."""
    captured = {manifest.label for manifest in manifests if manifest.has_rows}
    # A framework may profile only some of several replicas. The others are never armed and have no label.
    armed = {manifest.label for manifest in manifests} - {None} or {None}
    return [manifest for manifest in manifests if manifest.label in armed - captured]


def _captured(manifests: list[Manifest]) -> set[tuple[TokenWindow, str | None]]:
    return {(manifest.window, manifest.label) for manifest in manifests if manifest.has_rows}


def _listed(ranks: tuple[int, ...]) -> str:
    return " or ".join(map(str, ranks))


def _no_trace(window: TokenWindow, missed: list[Manifest]) -> str:
    furthest = max(missed, key=lambda manifest: manifest.furthest_token)
    notes = furthest.notes or [f"tokens {window} were never reached"]
    if all(map(is_logged_reason, notes)):
        return f"tokens {window}: no trace was written, for the reason that this log gave"
    labels = list(dict.fromkeys(manifest.label for manifest in missed if manifest.label))
    others = [note for manifest in missed if not manifest.final for note in manifest.notes]
    words = "; ".join(list(dict.fromkeys([*notes, *others]))[:MOST_NOTES])
    place = ", ".join(labels)
    if str(window) not in words:
        place += f"{', ' if place else ''}tokens {window}"
    return f"{place}{': ' if place else ''}{words}; no trace was written"


def _await_engines(folder: Path, settings: Settings) -> int:
    """Give engine processes time to finish. Return the number of traces that are still unfinished then."""
    started = time.monotonic()
    if _has_workers():
        while time.monotonic() - started < GRACE_S and not (
            _being_written(folder, settings.run_id) or _is_all_told(folder, settings)
        ):
            time.sleep(0.1)
    is_logged = False
    while reserved := _being_written(folder, settings.run_id):
        if time.monotonic() - started > PATIENCE_S:
            return len(reserved)
        if not is_logged:
            log.info("waiting for %d traces that engine processes are writing", len(reserved))
            is_logged = True
        time.sleep(0.1)
    return 0


def _is_all_told(folder: Path, settings: Settings) -> bool:
    """Whether every window has a final manifest, and no living process still owes one."""
    manifests = gather(folder, settings.run_id) if folder.is_dir() else []
    known = {manifest.window for manifest in manifests if manifest.final}
    owed = (manifest for manifest in manifests if not manifest.final)
    return known.issuperset(settings.windows) and all(has_ended(each.host, each.pid) for each in owed)


def _being_written(folder: Path, run_id: str) -> list[Claim]:
    """Captures of this job whose manifest is still to come, except those whose process has ended."""
    return [claim for claim in claims(folder) if claim.may_be_of(run_id) and not claim.is_gone]


def _lost_lines(folder: Path, run_id: str) -> Iterator[str]:
    """One line for the captures of this job that a process did not live to finish."""
    lost = [claim for claim in claims(folder) if claim.run_id == run_id and claim.is_gone]
    if lost:
        pids = ", ".join(map(str, sorted({claim.pid for claim in lost})))
        names = ", ".join(sorted(claim.name for claim in lost)[:3]) + (
            f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        )
        yield f"captures that were not finished, because their process (pid {pids}) ended before: {names}"


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
