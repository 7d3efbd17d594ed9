"""Files of releases that are not installed here, out of their wheels.

pip downloads a wheel once per machine. A wheel may hold hundreds of megabytes; only the files asked for are kept.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf"

# Only text is read, so the wheel of one Python and one platform serves all. pip takes a list of platforms literally.
_GLIBCS = (17, 24, 28, 31, 34, 35)
_PLATFORMS = ["any", "manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{glibc}_x86_64" for glibc in _GLIBCS)]
_TARGET = ["--python-version", "3.11", "--implementation", "cp", "--only-binary", ":all:", "--no-deps"]

_NO_ANSWER = ("after connection broken by", "Connection timed out", "HTTP error 5")
"""What pip writes when no registry answers. About a release that does not exist it writes something else."""


class RegistryUnreachableError(RuntimeError):
    """No package registry answered, and the files are not in the cache."""


def released(project: str, version: str, *patterns: str) -> Path:
    """Folder with the files of a release that match a pattern, by their paths in the wheel; `*` also matches `/`.

    The folder is shared by all tests and all clones of this machine, so nothing may be written to it.

    Raises:
        RegistryUnreachableError: no package registry answered.
        RuntimeError: pip failed for another reason, for instance because there is no such release.
        LookupError: a pattern without `*` names a file that the wheel does not hold.
    """
    home = CACHE / "released" / f"{project}-{version}"
    missing = [pattern for pattern in patterns if not _mark(home, pattern).exists()]
    if missing:
        home.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=CACHE) as scratch,
            zipfile.ZipFile(_download(project, version, Path(scratch))) as wheel,
        ):
            for pattern in missing:
                _keep(wheel, pattern, home, Path(scratch, "content"))
    return home


def released_or_skip(project: str, version: str, *patterns: str) -> Path:
    """As `released`, for a test: without a registry the test is skipped, and on CI (CI=1 or CI=true) it fails."""
    import pytest

    try:
        return released(project, version, *patterns)
    except RegistryUnreachableError as error:
        stop = pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip
        return stop(str(error))  # both raise


def _mark(home: Path, pattern: str) -> Path:
    """An empty file that says that all files of a pattern are there."""
    return home.parent / "complete" / f"{home.name}-{quote(pattern, safe='')}"


def _keep(wheel: zipfile.ZipFile, pattern: str, home: Path, scratch: Path) -> None:
    names = [name for name in wheel.namelist() if fnmatchcase(name, pattern) and not name.endswith("/")]
    if not names and "*" not in pattern:
        raise LookupError(f"{home.name}: no {pattern} in its wheel")
    wheel.extractall(scratch, names)
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).replace(home / name)  # whole or not there, also for tests that run at the same time
    mark = _mark(home, pattern)
    mark.parent.mkdir(exist_ok=True)
    mark.touch()


def _download(project: str, version: str, folder: Path) -> Path:
    platforms = [argument for platform in _PLATFORMS for argument in ("--platform", platform)]
    command = [*_pip(), "download", "--quiet", "--disable-pip-version-check", *_TARGET, *platforms]
    command += ["--dest", str(folder), f"{project}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if any(words in done.stderr for words in _NO_ANSWER):
            raise RegistryUnreachableError(f"{project} {version}: the package registry cannot be reached")
        raise RuntimeError(f"{project} {version}: pip could not download it: {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip() -> Sequence[str]:
    """The environments that engines run in have no pip of their own."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    home = CACHE / "pip-for-wheels"
    python = home / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True, symlinks=True).create(home)
    return [str(python), "-m", "pip"]
