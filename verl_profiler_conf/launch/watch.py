"""Logs a line in the driver as soon as a capture of another process is on disk, while the job runs.

The user of a run of several days should not learn only at its end whether the window was captured. The folder is
checked every few seconds, and read only when it has changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from verl_profiler_conf.capture.manifest import Manifest, manifest_names

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two looks. A look at an unchanged folder costs one `stat`."""


class Watcher:
    """Watches one job's folder from a thread of its own.

    Args:
        folder: of the captures.
        run_id: the job's.
        on_capture: called from the thread with each new capture.
        on_look: called from the thread at every look, before the folder is read.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        on_capture: Callable[[Manifest], None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._on_capture = on_capture
        self._on_look = on_look
        self._changed_ns = self._settled_ns = -1
        self._read: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="verl-profiler-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End. Waits for a look that is under way; harmless when it was never started."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(EVERY_S)

    def _work(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self._on_look()
                self.look()
            except Exception as error:  # the job's end reads the folder again
                log.debug("the folder of the captures could not be read: %s", error)

    def look(self) -> None:
        """Report what is new since the last look.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed_ns == self._settled_ns:
            return
        for name in manifest_names(self._folder):
            if name not in self._read:
                self._report(self._folder / name)
        # another file may come in the same tick of the clock, so a folder is settled when two looks find the same time
        self._settled_ns = changed_ns if changed_ns == self._changed_ns else -1
        self._changed_ns = changed_ns

    def _report(self, path: Path) -> None:
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except (OSError, ValueError):
            return  # removed again, or not a manifest
        if manifest.run_id != self._run_id:
            self._read.add(path.name)
        elif manifest.has_rows:  # else a placeholder, which a capture may still replace
            self._read.add(path.name)
            self._on_capture(manifest)
