"""The name that all files of one capture have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path


class CaptureName:
    """The name of a capture's files: that of its placeholder, else one that is reserved as soon as that is possible.

    Attributes:
        has_manifest: a manifest of the capture stands under the name, and is replaced.
    """

    def __init__(self, reserve: Callable[[], Path], placeholder: Path | None) -> None:
        self._reserve = reserve
        self._path = placeholder
        self.has_manifest = placeholder is not None
        with contextlib.suppress(OSError):  # it is tried again when the trace is written
            self()

    def __call__(self) -> Path:
        """The path without suffix.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._path is None:
            self._path = self._reserve()
        return self._path
