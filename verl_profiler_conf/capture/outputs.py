"""What a session leaves on disk: traces with their manifests, and placeholder manifests for windows without a trace."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends import Recording, Written
from verl_profiler_conf.capture.capture_name import CaptureName
from verl_profiler_conf.capture.claims import claim_again, reserve_stem
from verl_profiler_conf.capture.files import manifest_path, stem
from verl_profiler_conf.capture.manifest import Manifest, host_name, write_manifest
from verl_profiler_conf.capture.manifest_notes import (
    capture_notes,
    fill_counts,
    missing_ranges_note,
    reached_note,
    unreached_note,
)
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.writer import OnDone, Writer
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
    place, and its name goes to the capture when the window is captured.
    """

    def __init__(self, settings: Settings, source: Source, writer: Writer) -> None:
        self.label = settings.label
        self.device = settings.device
        """The device as configured. The first capture replaces it with the device that was found."""
        self.when_captured: Callable[[Manifest], None] | None = None
        """Called with each manifest of a capture once it is on disk, on the writer's thread."""
        self.times_skipped: Callable[[TokenWindow], int] = _never
        """How many times a window has gone by uncaptured since arming, as `skip_captures` asks."""
        self._settings = settings
        self._source = source
        self._writer = writer
        self.folder = Path(settings.save_path or "profile").absolute()
        """Where traces and manifests go."""
        self._place = Place.from_json(os.environ.get(PLACE_NAME))
        self._placeholders: dict[TokenWindow, Path] = {}
        self._says_never_armed = False
        self._waited_for: set[TokenWindow] = set()
        """Windows whose placeholder says no more than that they are waited for."""
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
            self._waited_for.clear()
            self._reported.clear()
            self._why_missed.clear()

    def report_waiting(self) -> None:
        """Leave a placeholder for each window of which nothing is known: the process may be killed at any time."""
        for window in self._settings.windows:
            if window not in self._reported and window not in self._placeholders:
                self._report_waiting(window, -1)

    def report_opening(self, window: TokenWindow, part: int, backend: str, *, furthest: int) -> None:
        """Leave a placeholder: a capture of the window begins, and the process may be killed within it."""
        note = f"a capture was open in {_this_process()}, which has left no later word: it was killed, or still runs"
        self._write_placeholder(window, furthest, [note], opened_by="window", part=part, backend=backend, sync=False)

    def report_discarded(self, window: TokenWindow, *, furthest: int) -> None:
        """The capture that has begun holds nothing of its window, which is waited for again."""
        if window in self._placeholders:
            self._report_waiting(window, furthest)

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
            coverage=capture.coverage,
            backend=capture.profiler.name,
            other_iterations=capture.other_iterations,
            notes=capture_notes(capture, reason, error),
        )
        with self._lock:
            # Taken now: the next arming may begin before the trace is written, and it clears this table.
            reserve = functools.partial(self._reserve, capture.window, self.label)
            placeholder = self._placeholders.pop(capture.window, None)
            if placeholder is not None:
                claim_again(placeholder, self._settings.run_id)  # others wait for what is being written
            name = CaptureName(reserve, placeholder)
            self._reported.add(capture.window)
        renames = capture.renames
        # once more when the writer has it: the rollout waits for that as well, and the manifest is written later
        manifest.stall_ns = time.perf_counter_ns() - capture.closing_since_ns
        self._writer.submit(recording, name, renames, self._when_written(manifest, name))
        manifest.stall_ns = time.perf_counter_ns() - capture.closing_since_ns

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
            self._write_placeholder(window, furthest, [reached_note(why)], opened_by="window")
            return
        lo, hi = min(row.lo for row in rows), max(row.hi for row in rows)
        note = f"the iterations of tokens [{lo}, {hi}) were not recorded: {why}"
        warn_once(log, f"tokens {window}: {note}")
        manifest = self._manifest(window, furthest, part=part + 1, opened_by="window", notes=[note])
        with self._lock:
            path = self._placeholders.pop(window, None)
            write_manifest(manifest, path or self._reserve(window, self.label), replace=path is not None)

    def report_unavailable(self, why: str) -> None:
        """Leave a placeholder for each window of which nothing is known yet: what ran could not be captured."""
        for window in self._settings.windows:
            with self._lock:
                if window in self._reported or (window in self._placeholders and window not in self._waited_for):
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
            self._write_placeholder(window, furthest, [reached_note(missed)], opened_by="window")
            return
        seen = f"the furthest response token seen is {furthest}" if furthest >= 0 else "no response token was seen"
        note = unreached_note(
            window,
            iterations,
            why or seen,
            skipped=self.times_skipped(window),
            asked=self._settings.skip_captures,
        )
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
            if window not in self._reported or window in self._placeholders:
                self._write_placeholder(window, furthest, [note], opened_by=None, closed_by="error")

    # -- inside --------------------------------------------------------------------------------------------------

    def _report_waiting(self, window: TokenWindow, furthest: int) -> None:
        note = (
            f"tokens {window} were waited for in {_this_process()}, which has left no later word: it was killed, or "
            "still runs"
        )
        self._write_placeholder(window, furthest, [note], opened_by=None, sync=False)
        self._waited_for.add(window)

    def _when_written(self, manifest: Manifest, name: CaptureName) -> OnDone:
        notes, closed_by = list(manifest.notes), manifest.closed_by
        failures: list[str] = []

        def done(written: Written | None, error: BaseException | None) -> None:
            manifest.notes, manifest.closed_by = list(notes), closed_by  # without those of an earlier failure
            if written is not None:
                self._fill_in(manifest, written)
            if error is not None:
                manifest.closed_by = "error"
                failure = f"the trace could not be written: {error}"
                manifest.notes.append(failure)
                if failure not in failures:
                    log.warning("tokens %s, %s: %s", manifest.window, self.folder, failure)
                failures.append(failure)
            elif failures:
                log.warning("tokens %s: the trace has been written after all", manifest.window)
            write_manifest(manifest, name(), replace=name.has_manifest)
            name.has_manifest = True
            if self.when_captured is not None:
                self.when_captured(manifest)

        return done

    def _fill_in(self, manifest: Manifest, written: Written) -> None:
        """What has become of the recording goes into its manifest."""
        manifest.trace = written.path.name if written.path is not None else None
        manifest.trace_bytes = written.bytes
        manifest.device_events = written.device_events
        fill_counts(manifest, written)
        notes = [written.note, missing_ranges_note(manifest, written) if self._names_iterations(manifest) else None]
        for note in filter(None, notes):
            manifest.notes.append(note)
            warn_once(log, f"tokens {manifest.window}: {note}")

    def _names_iterations(self, manifest: Manifest) -> bool:
        """Whether the trace has the ranges of the iterations, and they were counted while it was written."""
        contents = set(self._settings.contents)
        return manifest.backend == "torch" and ("cpu" in contents or "cuda" not in contents)

    def _write_placeholder(
        self, window: TokenWindow, furthest: int, notes: list[str], *, sync: bool = True, **more: Any
    ) -> None:
        """A folder that cannot be written now may be later, and a job goes on without the word of a window."""
        manifest = self._manifest(window, furthest, notes=notes, **more)
        try:
            with self._lock:
                path = self._placeholders.get(window)
                if path is None:
                    path = self._placeholders[window] = self._reserve(window, self.label)
                self._waited_for.discard(window)
                write_manifest(manifest, path, replace=True, sync=sync)
        except OSError as error:
            if self._settings.on_error == "raise":
                raise
            warn_once(log, f"tokens {window}: {self.folder} cannot be written now: {error.strerror or error}")

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
            skip_captures=self._settings.skip_captures,
            skipped=self.times_skipped(window),
            step=step_of(self.label),
            device=self.device,
            pid=os.getpid(),
            **more,
        )

    def _reserve(self, window: TokenWindow, label: str | None) -> Path:
        source = self._source
        self.folder.mkdir(parents=True, exist_ok=True)
        name = stem(source.engine, window, source.rank, os.getpid(), label)
        return reserve_stem(self.folder, name, self._settings.run_id)


def _this_process() -> str:
    return f"process {os.getpid()} of {host_name()}"


def _never(_: TokenWindow) -> int:
    return 0
