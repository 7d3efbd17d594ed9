"""The folder that the captures of a job go to. It is checked before the job starts.

In a folder that cannot be written the window would be lost after hours of work. So a small file is written there first,
also where the folder is a URL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.install import pip_install
from verl_profiler_conf.core.settings import FOLDER, Settings
from verl_profiler_conf.core.urls import is_url
from verl_profiler_conf.engines.torch_rank import is_reporting_rank
from verl_profiler_conf.launch.remote import RemoteFolder

log = logging.getLogger(__name__)

PROBE_BYTES = 4096
"""What is written and synced to check a folder. An empty file would not show a full disk or an exceeded quota."""


def prepare_folders(
    settings: Settings, run_dir: str | Path | None, *, prefix: str, over_ray: bool
) -> tuple[Path, RemoteFolder | None]:
    """The absolute folder on this machine that captures are written to, and the remote one that they are moved to.

    Args:
        settings: validated.
        run_dir: of the job; None: the working directory.
        prefix: path of the node with a dot at its end, to put before a key in a message.
        over_ray: the job is known to use Ray, so that engines may run on other machines.

    Raises:
        ConfigError: a folder cannot be written. In a Ray job that gathers nothing, the folders of other machines
            count, and a warning is logged.
    """
    key = f"{prefix}save_path"
    folder = local_folder(settings, run_dir)
    remote = open_remote(settings, key)
    if settings.mapping != "tokens" or not is_reporting_rank(settings.ranks, all_ranks=settings.all_ranks):
        return folder, remote
    shown = str(folder) if remote is not None or settings.save_path is None else settings.save_path
    problem = write_problem(folder)
    if problem is not None:
        if settings.gather == "never" and (over_ray or "ray" in sys.modules or "RAY_ADDRESS" in os.environ):
            log.warning("%s=%r cannot be written on this machine: %s; engines elsewhere may", key, shown, problem)
        else:
            raise ConfigError(key, shown, f"cannot be written: {problem}")
    problem = None if remote is None else remote.write_problem()
    if remote is not None and problem is not None:
        raise ConfigError(key, remote.url, f"cannot be written: {problem}")
    return folder, remote


def local_folder(settings: Settings, run_dir: str | Path | None) -> Path:
    """The absolute folder on this machine that captures are written to first.

    Args:
        settings: validated.
        run_dir: of the job; None: the working directory.
    """
    own = settings.save_path
    folder = Path(run_dir or "") / FOLDER if own is None or is_url(own) else Path(own)
    return folder.expanduser().absolute()


def open_remote(settings: Settings, key: str) -> RemoteFolder | None:
    """The remote folder that captures are moved to; None where `save_path` is a local folder.

    Raises:
        ConfigError: fsspec, or its package for this kind of URL, is not installed.
    """
    url = settings.save_path
    if url is None or not is_url(url):
        return None
    try:
        return RemoteFolder(url)
    except ImportError as error:
        if error.name == "fsspec":
            needs = f"needs fsspec: {pip_install('remote')}"
        else:
            needs = f"needs a package for this kind of URL: {_one_line(error)}"
        raise ConfigError(key, url, f"{needs}; or name a local folder") from error
    except ValueError as error:
        raise ConfigError(
            key, url, f"is no URL that fsspec knows: {_one_line(error)}; or name a local folder"
        ) from error


def write_problem(folder: Path, *, keep: bool = True) -> str | None:
    """Why nothing can be written to a folder, in a few words; None: a file was written there, and removed.

    Args:
        folder: is made where it is not there.
        keep: False: folders that were made are removed again.
    """
    made: list[Path] = []
    try:
        made = list(_missing(folder))
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".verl-profiler-probe-", dir=folder)
        try:
            os.write(descriptor, bytes(PROBE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a character that no file name can have
        return _one_line(error)
    finally:
        if not keep:
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()
    return None


def _missing(folder: Path) -> Iterator[Path]:
    """The folder and its parents that are not there, the deepest first."""
    for path in (folder, *folder.parents):
        if path.exists():
            return
        yield path


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
