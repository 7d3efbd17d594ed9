"""What a session leaves on disk of its captures: traces with their manifests."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

from verl_profiler_conf.capture.backends import Recording, Written
from verl_profiler_conf.capture.capture_name import CaptureName
from verl_profiler_conf.capture.form import ManifestForm
from verl_profiler_conf.capture.manifest import Manifest, write_manifest
from verl_profiler_conf.capture.manifest_notes import capture_notes, fill_counts, missing_ranges_note
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.placeholders import Placeholders
from verl_profiler_conf.capture.writer import OnDone, Writer
from verl_profiler_conf.core.gate import CloseReason, RecordedIteration
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.window import TokenWindow

log = logging.getLogger(__name__)


class CaptureOutputs:
    """Names files, fills manifests and gives recordings to the writer.

    Args:
        form: of the manifests.
        placeholders: of the windows; a capture takes over the name of its own.
        writer: writes the traces.
    """

    def __init__(self, form: ManifestForm, placeholders: Placeholders, writer: Writer) -> None:
        self.when_captured: Callable[[Manifest], None] | None = None
        """Called with each manifest of a capture once it is on disk, on the writer's thread."""
        self._form = form
        self._placeholders = placeholders
        self._writer = writer

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
        manifest = self._form.manifest(
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
        # The label as it is now: the next arming may begin before the trace is written, and changes it.
        reserve = functools.partial(self._form.reserve, capture.window, self._form.label)
        name = CaptureName(reserve, self._placeholders.take(capture.window))
        renames = capture.renames
        # once more when the writer has it: the rollout waits for that as well, and the manifest is written later
        manifest.stall_ns = time.perf_counter_ns() - capture.closing_since_ns
        self._writer.submit(recording, name, renames, self._when_written(manifest, name))
        manifest.stall_ns = time.perf_counter_ns() - capture.closing_since_ns

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
            self._placeholders.report_missed(window, why, furthest=furthest)
            return
        lo, hi = min(row.lo for row in rows), max(row.hi for row in rows)
        note = f"the iterations of tokens [{lo}, {hi}) were not recorded: {why}"
        warn_once(log, f"tokens {window}: {note}")
        manifest = self._form.manifest(window, furthest, part=part + 1, opened_by="window", notes=[note])
        path = self._placeholders.release(window)
        write_manifest(manifest, path or self._form.reserve(window, self._form.label), replace=path is not None)

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
                    log.warning("tokens %s, %s: %s", manifest.window, self._form.folder, failure)
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
        contents = set(self._form.settings.contents)
        return manifest.backend == "torch" and ("cpu" in contents or "cuda" not in contents)
