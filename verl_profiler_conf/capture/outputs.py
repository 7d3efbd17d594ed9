"""What a session leaves on disk: traces with their manifests, and word of windows that were never reached."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends import Recording, Written
from verl_profiler_conf.capture.files import manifest_path, reserve_stem, stem
from verl_profiler_conf.capture.manifest import Manifest, write_manifest
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.writer import Writer
from verl_profiler_conf.core.gate import CloseReason, Opening
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
    """Names files, fills manifests, hands recordings to the writer.

    A window that was not reached so far has a manifest without a trace, kept up to date in place and taken away once
    the window is captured.
    """

    def __init__(self, settings: Settings, source: Source, writer: Writer) -> None:
        self.label = settings.label
        self.device = settings.device
        """As asked for, until the first capture finds out what there is."""
        self._settings = settings
        self._source = source
        self._writer = writer
        self._folder = Path(settings.save_path or "profile").absolute()
        self._placeholders: dict[TokenWindow, Path] = {}
        self._never_armed = False
        self._settled: set[TokenWindow] = set()
        """Windows of this arming that have a capture, or word that they were reached."""
        self._logged: set[str] = set()

    def new_arming(self) -> None:
        """What is left of an earlier arming stays as it is; that there was none is true no more."""
        if self._never_armed:
            self._never_armed = False
            for path in self._placeholders.values():
                manifest_path(path).unlink(missing_ok=True)
        self._placeholders.clear()
        self._settled.clear()

    def put(
        self,
        capture: OpenCapture,
        recording: Recording,
        reason: CloseReason,
        *,
        furthest: int,
        error: Exception | None = None,
    ) -> None:
        """Have the recording written; its manifest follows when the trace is whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
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
            backend=capture.profiler.name,
        )
        if error is not None:
            manifest.notes.append(f"closed by a failure: {type(error).__name__}: {error}")
        path = self._reserve(capture.window)
        # taken now: another arming may begin before the trace is written, and forgets this one's words
        stale = self._placeholders.pop(capture.window, None)
        self._writer.submit(recording, path, capture.renames, self._finisher(manifest, path, stale))
        self._settled.add(capture.window)

    def missed(self, opening: Opening, why: str, *, furthest: int) -> None:
        """The window was reached and could not be captured."""
        self._once(f"no capture of tokens {opening.window}: {why}; the job goes on")
        self._write_placeholder(opening.window, furthest, [f"reached, but not captured: {why}"], opened_by="window")
        self._placeholders.pop(opening.window, None)
        self._settled.add(opening.window)

    def unreached(self, window: TokenWindow, *, furthest: int, iterations: int) -> None:
        """Leave word that the window was not reached in the `iterations` run so far."""
        seen = f"the furthest response token seen is {furthest}" if furthest >= 0 else "no response token was seen"
        note = f"tokens {window} were never reached in {iterations} iterations: {seen}"
        self._write_placeholder(window, furthest, [note], opened_by=None)
        if not self._settings.run_id:  # no job gathers the manifests, so nobody else would say it
            self._once(f"{note}; no trace was written")

    def never_armed(self) -> None:
        """Leave word, once, that iterations run and nothing has told this session to wait for its windows."""
        self._never_armed = True
        note = "iterations ran, but start_profile was never called, which arm: request waits for"
        for window in self._settings.windows:
            if window not in self._placeholders:
                self._write_placeholder(window, -1, [note], opened_by=None)

    def failed(self, error: Exception, *, furthest: int) -> None:
        """Leave word that windows without a capture will have none, and why: the job gathers manifests, not the logs
        of engine processes."""
        note = f"profiling stopped by a failure: {type(error).__name__}: {error}"
        for window in self._settings.windows:
            if window not in self._settled:
                self._write_placeholder(window, furthest, [note], opened_by=None, closed_by="error")

    # -- inside --------------------------------------------------------------------------------------------------

    def _finisher(
        self, manifest: Manifest, path: Path, stale: Path | None
    ) -> Callable[[Written | None, BaseException | None], None]:
        def done(written: Written | None, error: BaseException | None) -> None:
            if written is not None:
                manifest.trace = written.path.name if written.path is not None else None
                manifest.trace_bytes = written.bytes
                manifest.device_events = written.device_events
                _fill_counts(manifest, written)
                if written.note:
                    manifest.notes.append(written.note)
                    self._once(written.note)
            if error is not None:
                manifest.closed_by = "error"
                manifest.notes.append(f"the trace could not be written: {error}")
                log.warning(
                    "the trace of tokens %s could not be written to %s: %s", manifest.window, path.parent, error
                )
            write_manifest(manifest, path)
            if stale is not None:
                manifest_path(stale).unlink(missing_ok=True)

        return done

    def _write_placeholder(
        self,
        window: TokenWindow,
        furthest: int,
        notes: list[str],
        *,
        opened_by: str | None,
        closed_by: str | None = None,
    ) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._placeholders.get(window)
        if path is None:
            path = self._placeholders[window] = self._reserve(window)
        manifest = self._manifest(window, furthest, opened_by=opened_by, closed_by=closed_by, notes=notes)
        write_manifest(manifest, path, replace=True)

    def _manifest(self, window: TokenWindow, furthest: int, **more: Any) -> Manifest:
        return Manifest(
            window=window,
            engine=self._source.engine,
            engine_version=self._source.version,
            rank=self._source.rank,
            track=self._settings.track,
            furthest_token=furthest,
            run_id=self._settings.run_id,
            label=self.label,
            device=self.device,
            pid=os.getpid(),
            **more,
        )

    def _reserve(self, window: TokenWindow) -> Path:
        source = self._source
        return reserve_stem(self._folder, stem(source.engine, window, source.rank, os.getpid(), self.label))

    def _once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.warning("%s", message)


def _fill_counts(manifest: Manifest, written: Written) -> None:
    """What the trace holds of each iteration goes into its row."""
    for row in manifest.rows:
        counts = written.iterations.get(row.index)
        if counts is not None:
            row.operators = counts.operators
            if written.device_events is not None:
                row.kernels, row.device_ns = counts.kernels, counts.device_ns
