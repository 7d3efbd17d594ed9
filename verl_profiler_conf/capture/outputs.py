"""What a session leaves on disk: traces with their manifests, and placeholder manifests for windows without a trace."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends import Recording, Written
from verl_profiler_conf.capture.files import manifest_path, reserve_stem, stem
from verl_profiler_conf.capture.manifest import Manifest, write_manifest
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.writer import Writer
from verl_profiler_conf.core.errors import why_no_capture
from verl_profiler_conf.core.gate import CloseReason, RecordedIteration
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.place import PLACE_NAME, Place, step_of
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where captures come from."""

    engine: str
    version: str
    rank: int


class CaptureOutputs:
    """Names files, fills manifests and gives recordings to the writer.

    A window that was not captured so far has a placeholder: a manifest without a trace that says why. It is updated in
    place, and deleted when the window is captured.
    """

    def __init__(self, settings: Settings, source: Source, writer: Writer) -> None:
        self.label = settings.label
        self.device = settings.device
        """The device as configured. The first capture replaces it with the device that was found."""
        self.when_captured: Callable[[Manifest], None] | None = None
        """Called with each manifest of a capture once it is on disk, on the writer's thread."""
        self._settings = settings
        self._source = source
        self._writer = writer
        self._folder = Path(settings.save_path or "profile").absolute()
        self._place = Place.from_json(os.environ.get(PLACE_NAME))
        self._placeholders: dict[TokenWindow, Path] = {}
        self._says_never_armed = False
        self._reported: set[TokenWindow] = set()
        """Windows of this arming that have a capture."""
        self._why_missed: dict[TokenWindow, str] = {}
        """Windows of this arming that were reached and not captured, and why."""
        self._lock = threading.RLock()

    def new_arming(self) -> None:
        """Keep what an earlier arming left. A placeholder that says "never armed" is deleted: it is no longer true."""
        with self._lock:
            if self._says_never_armed:
                self._says_never_armed = False
                for path in self._placeholders.values():
                    manifest_path(path).unlink(missing_ok=True)
            self._placeholders.clear()
            self._reported.clear()
            self._why_missed.clear()

    def write(
        self,
        capture: OpenCapture,
        recording: Recording,
        reason: CloseReason,
        *,
        furthest: int,
        error: Exception | None = None,
    ) -> None:
        """Have the recording written. Its manifest follows when the trace is on disk."""
        manifest = self._manifest(
            capture.window,
            furthest,
            part=capture.part,
            rows=capture.rows,
            tracked=capture.tracked,
            opened_by="window",
            closed_by=reason,
            opening_stall_ns=capture.opening_stall_ns,
            stall_ns=capture.stall_ns,
            coverage=capture.coverage,
            backend=capture.profiler.name,
            other_iterations=capture.other_iterations,
            notes=_notes(capture, reason, error),
        )
        with self._lock:
            path = self._reserve(capture.window)
            # Taken now: the next arming may begin before the trace is written, and it clears this table.
            stale = self._placeholders.pop(capture.window, None)
            self._reported.add(capture.window)
        self._writer.submit(recording, path, capture.renames, self._when_written(manifest, path, stale))

    def note_missed(self, window: TokenWindow, why: str) -> None:
        """The window was reached and could not be captured so far."""
        with self._lock:
            self._why_missed.setdefault(window, why)

    def report_missed(
        self, window: TokenWindow, rows: Sequence[RecordedIteration], part: int, why: str, *, furthest: int
    ) -> None:
        """Iterations of the window could not be recorded.

        Args:
            window: response tokens asked for.
            rows: the iterations; at least one.
            part: parts of the window that were recorded; 0: it has no capture, and a placeholder says so.
            why: they were not recorded.
            furthest: largest response token index seen so far.
        """
        if not part:
            self.note_missed(window, why)
            self._write_placeholder(window, furthest, [_reached(why)], opened_by="window")
            return
        lo, hi = min(row.lo for row in rows), max(row.hi for row in rows)
        note = f"the iterations of tokens [{lo}, {hi}) were not recorded: {why}"
        warn_once(log, f"tokens {window}: {note}")
        manifest = self._manifest(window, furthest, part=part + 1, opened_by="window", notes=[note])
        with self._lock:
            write_manifest(manifest, self._reserve(window))

    def report_unavailable(self, why: str) -> None:
        """Leave a placeholder for each window of which nothing is known yet: what ran could not be captured."""
        for window in self._settings.windows:
            with self._lock:
                if window in self._reported or window in self._placeholders:
                    continue
            self._write_placeholder(window, -1, [why], opened_by=None)

    def report_unfinished(self, capture: OpenCapture, *, furthest: int) -> None:
        """Leave a placeholder: the capture did not end in time. It is deleted if the capture still ends."""
        note = f"the capture was open when it had to end, and the loop of thread {capture.thread.name} did not end it"
        self._write_placeholder(capture.window, furthest, [note], opened_by="window")

    def report_unreached(self, window: TokenWindow, *, furthest: int, iterations: int, why: str | None = None) -> None:
        """Leave a placeholder: the window was not captured in the iterations that ran so far.

        Args:
            window: response tokens asked for.
            furthest: largest response token index seen so far; -1: none.
            iterations: how many ran so far.
            why: the reason, where the furthest token does not tell it.
        """
        with self._lock:
            if window in self._reported:
                return
            missed = self._why_missed.get(window)
        if missed is not None:
            self._write_placeholder(window, furthest, [_reached(missed)], opened_by="window")
            return
        seen = f"the furthest response token seen is {furthest}" if furthest >= 0 else "no response token was seen"
        note = f"tokens {window} were never reached in {iterations} iterations: {why or seen}"
        self._write_placeholder(window, furthest, [note], opened_by=None)
        if not self._settings.run_id:  # without a job there is no summary that would report it
            warn_once(log, f"{note}; no trace was written")

    def report_never_armed(self) -> None:
        """Leave a placeholder: iterations ran, but start_profile was not called."""
        self._says_never_armed = True
        note = "iterations ran, but start_profile was never called, which arm: request waits for"
        for window in self._settings.windows:
            if window not in self._placeholders:
                self._write_placeholder(window, -1, [note], opened_by=None)

    def report_failure(self, error: Exception, *, furthest: int) -> None:
        """Leave a placeholder for each window without a capture. The job reads manifests, not the logs of engines."""
        note = why_no_capture(error)
        for window in self._settings.windows:
            if window not in self._reported:
                self._write_placeholder(window, furthest, [note], opened_by=None, closed_by="error")

    # -- inside --------------------------------------------------------------------------------------------------

    def _when_written(
        self, manifest: Manifest, path: Path, stale: Path | None
    ) -> Callable[[Written | None, BaseException | None], None]:
        def done(written: Written | None, error: BaseException | None) -> None:
            if written is not None:
                manifest.trace = written.path.name if written.path is not None else None
                manifest.trace_bytes = written.bytes
                manifest.device_events = written.device_events
                _fill_counts(manifest, written)
                notes = [written.note, _missing_ranges(manifest, written) if self._names_iterations(manifest) else None]
                for note in filter(None, notes):
                    manifest.notes.append(note)
                    warn_once(log, f"tokens {manifest.window}: {note}")
            if error is not None:
                manifest.closed_by = "error"
                manifest.notes.append(f"the trace could not be written: {error}")
                log.warning(
                    "the trace of tokens %s could not be written to %s: %s", manifest.window, path.parent, error
                )
            write_manifest(manifest, path)
            if stale is not None:
                manifest_path(stale).unlink(missing_ok=True)
            if self.when_captured is not None:
                self.when_captured(manifest)

        return done

    def _names_iterations(self, manifest: Manifest) -> bool:
        """Whether the trace has the ranges of the iterations, and they were counted while it was written."""
        contents = set(self._settings.contents)
        return manifest.backend == "torch" and ("cpu" in contents or "cuda" not in contents)

    def _write_placeholder(
        self,
        window: TokenWindow,
        furthest: int,
        notes: list[str],
        *,
        opened_by: str | None,
        closed_by: str | None = None,
    ) -> None:
        manifest = self._manifest(window, furthest, opened_by=opened_by, closed_by=closed_by, notes=notes)
        with self._lock:
            path = self._placeholders.get(window)
            if path is None:
                path = self._placeholders[window] = self._reserve(window)
            write_manifest(manifest, path, replace=True)

    def _manifest(self, window: TokenWindow, furthest: int, **more: Any) -> Manifest:
        place = self._place
        if place is not None:
            more |= {"replica": place.replica, "node": place.node}
            more["global_rank"] = place.first_rank + self._source.rank
        return Manifest(
            window=window,
            engine=self._source.engine,
            engine_version=self._source.version,
            rank=self._source.rank,
            track=self._settings.track,
            furthest_token=furthest,
            run_id=self._settings.run_id,
            label=self.label,
            step=step_of(self.label),
            device=self.device,
            pid=os.getpid(),
            **more,
        )

    def _reserve(self, window: TokenWindow) -> Path:
        source = self._source
        self._folder.mkdir(parents=True, exist_ok=True)
        return reserve_stem(self._folder, stem(source.engine, window, source.rank, os.getpid(), self.label))


def _reached(why: str) -> str:
    return f"reached, but not captured: {why}"


def _notes(capture: OpenCapture, reason: CloseReason, error: Exception | None) -> list[str]:
    """Say what a reader of the capture would not expect."""
    notes = list(capture.notes)
    if error is not None:
        notes.append(f"closed by a failure: {type(error).__name__}: {error}")
    if reason == "other_profiler":
        notes.append("another profiler was prepared in this process, so the recording ended here")
    if reason == "thread":
        notes.append("the loop changes its thread, and torch records one thread: each iteration is a part of its own")
    if capture.other_iterations:
        notes.append(f"{capture.other_iterations} iterations of other loops of this process ran during the capture")
    if capture.interrupted_ranges:
        notes.append(
            f"{capture.interrupted_ranges} iterations have several ranges each, because iterations of other loops ran "
            "on the same thread meanwhile"
        )
    if capture.mixed_ranges:
        notes.append(
            f"{capture.mixed_ranges} iterations began while one of another loop was under way on the same thread, so "
            "their ranges may hold operators of both"
        )
    return notes


def _fill_counts(manifest: Manifest, written: Written) -> None:
    """What the trace holds of each iteration goes into its row."""
    for row in manifest.rows:
        counts = written.iterations.get(row.index)
        if counts is not None:
            row.operators = counts.operators
            if written.device_events is not None:
                row.kernels, row.device_ns = counts.kernels, counts.device_ns


def _missing_ranges(manifest: Manifest, written: Written) -> str | None:
    """Say which captured iterations the trace does not name, or None. Only for a trace whose ranges were counted."""
    missing = [row.index for row in manifest.rows if row.index not in written.iterations]
    if not missing:
        return None
    return (
        f"the trace names {len(manifest.rows) - len(missing)} of the {len(manifest.rows)} captured iterations; the "
        f"first one missing is {missing[0]}: the recording did not hold for the whole capture"
    )
