"""Captures at a URL, through fsspec: written locally first, then moved there whole or not at all.

A trace gets its name there when all of it has arrived, and its manifest follows. A manifest at the URL therefore means
that the trace beside it is whole.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.capture.manifest import Manifest

log = logging.getLogger(__name__)


class RemoteFolder:
    """A folder that fsspec reaches.

    Args:
        url: `s3://bucket/traces`, or any other that fsspec knows.

    Raises:
        ImportError: fsspec, or its package for this kind of URL, is not installed.
        ValueError: no file system of that name.
    """

    def __init__(self, url: str) -> None:
        fsspec: Any = importlib.import_module("fsspec")
        self.url = url.rstrip("/")
        self._fs: Any
        self._fs, path = fsspec.core.url_to_fs(self.url)
        self._path = str(path).rstrip("/")

    def write_problem(self) -> str | None:
        """Why nothing can be written there, in a few words; None: a file was written there, and removed."""
        probe = f"{self._path}/.verl-profiler-probe-{uuid.uuid4().hex[:12]}"
        try:
            self._fs.makedirs(self._path, exist_ok=True)
            self._fs.pipe_file(probe, b"verl-profiler")
            self._fs.rm_file(probe)
        except Exception as error:  # of any kind that a file system and its network have
            return _one_line(error)
        return None

    def move_all(self, folder: Path, run_id: str) -> dict[str, str]:
        """Move the captures of one job. One that cannot be moved stays where it is, and a warning says so.

        Args:
            folder: with the captures, on this machine.
            run_id: of the job.

        Returns:
            Name of a trace -> its URL.
        """
        urls: dict[str, str] = {}
        failures: list[str] = []
        count = 0
        for path in sorted(folder.glob(f"*{MANIFEST_SUFFIX}")):
            try:
                manifest = Manifest.from_json(path.read_bytes())
                if manifest.run_id != run_id:
                    continue
                count += 1
                url = self._move(manifest, path)
            except Exception as error:  # of any kind that a file system and its network have
                failures.append(_one_line(error))
                continue
            if manifest.trace is not None:
                urls[manifest.trace] = url
        if failures:
            log.warning(
                "%d of %d captures could not be moved to %s and stay in %s: %s",
                *(len(failures), count, self.url, folder, failures[0]),
            )
        if count > len(failures):
            log.info("moved %d captures to %s", count - len(failures), self.url)
        with contextlib.suppress(OSError):
            folder.rmdir()  # where nothing is left in it
        return urls

    def move_file(self, path: Path) -> str:
        """Move a file there, under its own name or, where that is taken, `<name>_2` and so on.

        Raises:
            Exception: of any kind that the file system has. The local file is there then.

        Returns:
            Its URL.
        """
        self._fs.makedirs(self._path, exist_ok=True)
        name, number = path.name, 1
        while self._fs.exists(f"{self._path}/{name}"):
            number += 1
            name = f"{path.stem}_{number}{path.suffix}"
        self._put(path, f"{self._path}/{name}")
        path.unlink()
        return f"{self.url}/{name}"

    def _move(self, manifest: Manifest, path: Path) -> str:
        """Move a capture there: its trace, then its manifest. The local files are removed at the end.

        Args:
            manifest: of the capture.
            path: of the manifest.

        Raises:
            Exception: of any kind that the file system has. The local files are all there then.

        Returns:
            The URL of the trace, or of the manifest where there is no trace.
        """
        folder = self._free_folder(manifest, path)
        self._fs.makedirs(folder, exist_ok=True)
        trace = None if manifest.trace is None else path.with_name(manifest.trace)
        if trace is not None:
            self._put(trace, f"{folder}/{trace.name}")
        self._put(path, f"{folder}/{path.name}")
        if trace is not None:
            shutil.rmtree(trace) if trace.is_dir() else trace.unlink()
        path.unlink()
        name = path.name if trace is None else trace.name
        return f"{self.url}{folder[len(self._path) :]}/{name}"

    def _free_folder(self, manifest: Manifest, path: Path) -> str:
        """Where no file of these names is: another machine may have made the same ones."""
        names = [path.name, *([] if manifest.trace is None else [manifest.trace])]
        if not any(self._fs.exists(f"{self._path}/{name}") for name in names):
            return self._path
        return f"{self._path}/{path.name.removesuffix(MANIFEST_SUFFIX)}_{uuid.uuid4().hex[:8]}"

    def _put(self, source: Path, target: str) -> None:
        head, _, name = target.rpartition("/")
        partial = f"{head}/.{name}.{uuid.uuid4().hex[:8]}.part"
        try:
            self._fs.put(str(source), partial, recursive=source.is_dir())
            self._fs.mv(partial, target, recursive=source.is_dir())
        except BaseException:
            self._remove(partial)
            raise

    def _remove(self, path: str) -> None:
        try:
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)
        except Exception:  # noqa: S110 - what is left is hidden and says that it is a part; the reason is raised
            pass


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
