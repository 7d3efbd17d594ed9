"""Collects the captures of other processes and nodes in the driver, while the job runs and once more at its end.

Each new capture gets a line in the log, and the captures of other nodes are brought to the driver's folder. In a job
that never imports Ray no thread runs.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

from verl_profiler_conf.capture.capture_lines import log_capture
from verl_profiler_conf.capture.manifest import Manifest, gather
from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.launch.asked import CAPTURED, answer
from verl_profiler_conf.launch.gather import Gatherer, running_ray
from verl_profiler_conf.launch.watch import Watcher

log = logging.getLogger(__name__)

GATHER_EVERY_S = 60.0
"""Seconds between two gatherings while the job runs and something that was asked for is not there yet."""

_current: Collector | None = None


class Collector:
    """Collects for one job.

    Args:
        settings: the job's; `save_path` absolute.
        asked: the captures that the job is asked for; None: not known. Other nodes are then asked at the end only.
    """

    def __init__(self, settings: Settings, asked: Asked | None) -> None:
        self._settings = settings
        self._asked = asked
        self._folder = Path(settings.save_path or "")
        self._gatherer = Gatherer(settings)
        self._watcher = Watcher(self._folder, settings.run_id, self._log_capture, self._visit_nodes)
        self._logged: set[tuple[Any, ...]] = set()
        self._next_gather = time.monotonic() + GATHER_EVERY_S
        self._nodes_are_known = False
        self._pid = os.getpid()
        self._started = False

    def start(self) -> None:
        """Begin to watch. Repeatable."""
        if not self._started and self._settings.mapping == "tokens":
            self._started = True
            self._watcher.start()

    def finish(self) -> None:
        """Stop watching, and bring what is still on other nodes. Repeatable."""
        self._watcher.stop()
        if self._settings.mapping == "tokens" and os.getpid() == self._pid and self._is_missing():
            self._gatherer.gather()

    @property
    def unanswered_nodes(self) -> list[str]:
        """One line for each node that did not answer: its address, and why."""
        return self._gatherer.unanswered

    def has_logged(self, manifest: Manifest) -> bool:
        """Whether the log has the capture's line already."""
        return _identity(manifest) in self._logged

    def _log_capture(self, manifest: Manifest) -> None:
        self._logged.add(_identity(manifest))
        log_capture(log, manifest, self._folder)

    def _visit_nodes(self) -> None:
        """Note the nodes when Ray has started. From time to time, bring what they have captured."""
        if not self._nodes_are_known and running_ray() is not None:
            self._nodes_are_known = True
            self._gatherer.note_live_nodes()
        if self._asked is not None and time.monotonic() >= self._next_gather:
            if self._is_missing():
                self._gatherer.gather(patience=0.0, captures_only=True)
            self._next_gather = time.monotonic() + GATHER_EVERY_S

    def _is_missing(self) -> bool:
        """Whether a capture that was asked for is not in the folder here. True where that is not known."""
        if self._asked is None:
            return True
        answers = answer(self._asked, gather(self._folder, self._settings.run_id) if self._folder.is_dir() else [])
        return answers is None or any(each.state != CAPTURED for each in answers)


def collect(settings: Settings, asked: Asked | None, *, over_ray: bool) -> Collector:
    """Make the collector of the job that begins. It starts at once over Ray, else when Ray is imported.

    Args:
        settings: the job's; `save_path` absolute.
        asked: the captures that the job is asked for, where a preset knows them.
        over_ray: the job is known to use Ray.
    """
    global _current
    _current = Collector(settings, asked)
    if over_ray or "ray" in sys.modules:
        _current.start()
    _hook_ray()
    return _current


@functools.cache
def _hook_ray() -> None:
    wrapt.register_post_import_hook(_on_ray, "ray")


def _on_ray(ray: Any) -> None:
    if _current is not None:
        _current.start()
    wrapt.wrap_function_wrapper(ray, "shutdown", _before_shutdown)


def _before_shutdown(shutdown: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Collect before Ray is shut down: afterwards no other node can be asked."""
    try:
        if _current is not None and running_ray() is not None:
            _current.finish()
    except Exception as error:
        log.warning("captures of other nodes were not brought: %s: %s", type(error).__name__, error)
    return shutdown(*args, **kwargs)


def _identity(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.host, manifest.pid, manifest.created, manifest.rank, manifest.window, manifest.part
