"""What all manifests and files of one arming have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.claims import reserve_stem
from verl_profiler_conf.capture.files import stem
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.place import PLACE_NAME, Place, step_of
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow


@dataclass(frozen=True)
class Source:
    """Where captures come from."""

    engine: str
    version: str
    rank: int


class ManifestForm:
    """Makes manifests with the fields that all of one arming share, and reserves file names for them.

    Args:
        settings: validated.
        source: where the captures come from.
    """

    def __init__(self, settings: Settings, source: Source) -> None:
        self.settings = settings
        self.source = source
        self.folder = Path(settings.save_path or "profile").absolute()
        """Where traces and manifests go."""
        self.label = settings.label
        self.device = settings.device
        """The device as configured. The first capture replaces it with the device that was found."""
        self.times_skipped: Callable[[TokenWindow], int] = _never
        """How many times a window has gone by uncaptured since arming, as `skip_captures` asks."""
        self._place = Place.from_json(os.environ.get(PLACE_NAME))

    def manifest(self, window: TokenWindow, furthest: int, **more: Any) -> Manifest:
        """A manifest of the window.

        Args:
            window: response tokens asked for.
            furthest: largest response token index seen so far, -1 when none was seen.
            more: further fields.
        """
        if self._place is not None:
            more |= {"replica": self._place.replica, "node": self._place.node}
            more["global_rank"] = self._place.first_rank + self.source.rank
        return Manifest(
            window=window,
            engine=self.source.engine,
            engine_version=self.source.version,
            rank=self.source.rank,
            track=self.settings.track,
            furthest_token=furthest,
            run_id=self.settings.run_id,
            label=self.label,
            skip_captures=self.settings.skip_captures,
            skipped=self.times_skipped(window),
            step=step_of(self.label),
            device=self.device,
            pid=os.getpid(),
            **more,
        )

    def reserve(self, window: TokenWindow, label: str | None) -> Path:
        """A free name for the files of a capture, without suffix. It is this process's from here on.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        name = stem(self.source.engine, window, self.source.rank, os.getpid(), label)
        return reserve_stem(self.folder, name, self.settings.run_id)


def _never(_: TokenWindow) -> int:
    return 0
