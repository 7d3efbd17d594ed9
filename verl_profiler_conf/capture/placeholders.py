"""Placeholders: manifests without a trace, which say of a window why it has no capture so far."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.claims import claim_again
from verl_profiler_conf.capture.files import manifest_path
from verl_profiler_conf.capture.form import ManifestForm
from verl_profiler_conf.capture.manifest import host_name, write_manifest
from verl_profiler_conf.capture.manifest_notes import reached_note, unreached_note
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.core.errors import why_no_capture
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.window import TokenWindow

log = logging.getLogger(__name__)


class Placeholders:
    """Writes the placeholders of one arming, at most one for each window.

    A placeholder is updated in place. When the window is captured, the capture takes over its name.
    """

    def __init__(self, form: ManifestForm) -> None:
        self._form = form
        self._settings = form.settings
        self._paths: dict[TokenWindow, Path] = {}
        """Window -> the name of its placeholder, without suffix."""
        self._says_never_armed = False
        self._waited_for: set[TokenWindow] = set()
        """Windows whose placeholder says no more than that they are waited for."""
        self._captured: set[TokenWindow] = set()
        """Windows of this arming that have a capture."""
        self._why_missed: dict[TokenWindow, str] = {}
        """Windows of this arming that were reached and not captured, and why."""
        self._lock = threading.RLock()

    def new_arming(self) -> None:
        """Keep what an earlier arming left. A placeholder that says "never armed" is deleted: it is no longer true."""
        with self._lock:
            if self._says_never_armed:
                self._says_never_armed = False
                for path in self._paths.values():
                    manifest_path(path).unlink(missing_ok=True)
            self._paths.clear()
            self._waited_for.clear()
            self._captured.clear()
            self._why_missed.clear()

    def take(self, window: TokenWindow) -> Path | None:
        """The window is captured: give the name of its placeholder, if it has one, to the capture."""
        with self._lock:
            self._captured.add(window)
            path = self.release(window)
            if path is not None:
                claim_again(path, self._settings.run_id)  # others wait for what is being written
            return path

    def release(self, window: TokenWindow) -> Path | None:
        """Give the name of the window's placeholder, if it has one, to another manifest."""
        with self._lock:
            return self._paths.pop(window, None)

    # -- what is known for now: the process may be killed at any time --------------------------------------------------

    def report_waiting(self) -> None:
        """Leave a placeholder for each window of which nothing is known."""
        for window in self._settings.windows:
            if window not in self._captured and window not in self._paths:
                self._report_waiting(window, -1)

    def report_opening(self, window: TokenWindow, part: int, backend: str, *, furthest: int) -> None:
        """Leave a placeholder: a capture of the window begins."""
        note = (
            f"a capture was open in {_this_process()}, which has reported nothing since: it was killed, or still runs"
        )
        opened = {"opened_by": "window", "part": part, "backend": backend}
        self._write(window, furthest, [note], final=False, sync=False, **opened)

    def report_discarded(self, window: TokenWindow, *, furthest: int) -> None:
        """The capture that has begun holds nothing of its window, which is waited for again."""
        if window in self._paths:
            self._report_waiting(window, furthest)

    def _report_waiting(self, window: TokenWindow, furthest: int) -> None:
        note = (
            f"tokens {window} were waited for in {_this_process()}, which has reported nothing since: it was killed, "
            "or still runs"
        )
        self._write(window, furthest, [note], opened_by=None, final=False, sync=False)
        self._waited_for.add(window)

    # -- why a window has no capture -----------------------------------------------------------------------------------

    def note_missed(self, window: TokenWindow, why: str) -> None:
        """Remember that the window was reached and could not be captured so far."""
        with self._lock:
            self._why_missed.setdefault(window, why)

    def report_missed(self, window: TokenWindow, why: str, *, furthest: int) -> None:
        """Leave a placeholder: the window was reached, and none of its iterations could be recorded."""
        self.note_missed(window, why)
        self._write(window, furthest, [reached_note(why)], opened_by="window")

    def report_unavailable(self, why: str) -> None:
        """Leave a placeholder for each window of which nothing is known yet: what ran could not be captured."""
        for window in self._settings.windows:
            with self._lock:
                if window in self._captured or (window in self._paths and window not in self._waited_for):
                    continue
            self._write(window, -1, [why], opened_by=None)

    def report_unfinished(self, capture: OpenCapture, *, furthest: int) -> None:
        """Leave a placeholder: the capture did not end in time. It is deleted if the capture still ends."""
        note = f"the capture was open when it had to end, and the loop of thread {capture.thread.name} did not end it"
        self._write(capture.window, furthest, [note], opened_by="window")

    def report_unreached(self, window: TokenWindow, *, furthest: int, iterations: int, why: str | None = None) -> None:
        """Leave a placeholder: the window was not captured in the iterations that ran so far.

        Args:
            window: response tokens asked for.
            furthest: largest response token index seen so far; -1: none.
            iterations: how many ran so far.
            why: the reason, where the furthest token does not tell it.
        """
        with self._lock:
            if window in self._captured:
                return
            missed = self._why_missed.get(window)
        if missed is not None:
            self._write(window, furthest, [reached_note(missed)], opened_by="window")
            return
        seen = f"the furthest response token seen is {furthest}" if furthest >= 0 else "no response token was seen"
        note = unreached_note(
            window,
            iterations,
            why or seen,
            skipped=self._form.times_skipped(window),
            asked=self._settings.skip_captures,
        )
        self._write(window, furthest, [note], opened_by=None)
        if not self._settings.run_id:  # without a job there is no summary that would report it
            warn_once(log, f"{note}; no trace was written")

    def report_never_armed(self) -> None:
        """Leave a placeholder: iterations ran, but start_profile was not called."""
        self._says_never_armed = True
        note = "iterations ran, but start_profile was never called, which arm: request waits for"
        for window in self._settings.windows:
            if window not in self._paths:
                self._write(window, -1, [note], opened_by=None)

    def report_failure(self, error: Exception, *, furthest: int) -> None:
        """Leave a placeholder for each window without a capture. The job reads manifests, not the logs of engines."""
        note = why_no_capture(error)
        for window in self._settings.windows:
            if window not in self._captured or window in self._paths:
                self._write(window, furthest, [note], opened_by=None, closed_by="error")

    def _write(self, window: TokenWindow, furthest: int, notes: list[str], *, sync: bool = True, **more: Any) -> None:
        """A folder that cannot be written now may be later, and a job goes on without the placeholder of a window."""
        manifest = self._form.manifest(window, furthest, notes=notes, **more)
        try:
            with self._lock:
                path = self._paths.get(window)
                if path is None:
                    path = self._paths[window] = self._form.reserve(window, self._form.label)
                self._waited_for.discard(window)
                write_manifest(manifest, path, replace=True, sync=sync)
        except OSError as error:
            if self._settings.on_error == "raise":
                raise
            folder = self._form.folder
            warn_once(log, f"tokens {window}: {folder} cannot be written now: {error.strerror or error}")


def _this_process() -> str:
    return f"process {os.getpid()} of {host_name()}"
