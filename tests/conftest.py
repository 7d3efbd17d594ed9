"""What tests of several folders need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf" / "wheels"


def _wheel(version: str) -> Path:
    """verl's released wheel, downloaded once per machine. verl itself is not installed: it needs gigabytes."""
    wheel = CACHE / f"verl-{version}-py3-none-any.whl"
    if not wheel.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"verl=={version}", "-d", folder]
            subprocess.run(command, check=True)
            Path(folder, wheel.name).replace(wheel)
    return wheel


@pytest.fixture(scope="session")
def verl_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Version of verl -> a folder with `verl/`, of which only the config files and the version are there."""
    root = tmp_path_factory.mktemp("verl")

    def extract(version: str) -> Path:
        folder = root / version
        if not folder.exists():
            with zipfile.ZipFile(_wheel(version)) as wheel:
                names = [name for name in wheel.namelist() if name.startswith("verl/") and name.endswith(".yaml")]
                wheel.extractall(folder, [*names, "verl/version/version"])
        return folder

    return extract


@pytest.fixture
def verl_configs(verl_package: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Version of verl -> a copy of its config folder that a test may write to."""

    def copy(version: str) -> Path:
        target = tmp_path / f"verl-{version}"
        shutil.copytree(verl_package(version) / "verl" / "trainer" / "config", target)
        return target

    return copy
