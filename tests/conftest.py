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

# the models are tiny: more threads only wait for each other, on a busy machine for minutes; children inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf" / "wheels"


def _wheel(project: str, version: str) -> Path:
    """A released wheel, downloaded once per machine. Nothing of it is installed: such projects need gigabytes."""
    name = f"{project}-{version}-py3-none-any.whl"
    wheel = CACHE / name
    if not wheel.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python", "-d", folder]
            done = subprocess.run([*pip, f"{project}=={version}"], capture_output=True, text=True, check=False)
            if "NewConnectionError" in done.stderr or "ConnectTimeoutError" in done.stderr:
                pytest.skip(f"{name}: the package registry cannot be reached")
            assert done.returncode == 0, done.stderr
            Path(folder, name).replace(wheel)
    return wheel


@pytest.fixture(scope="session")
def configs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Project and version -> a folder with the packages of its wheel, of which only the config files are there."""
    root = tmp_path_factory.mktemp("wheels")

    def extract(project: str, version: str) -> Path:
        folder = root / f"{project}-{version}"
        if not folder.exists():
            with zipfile.ZipFile(_wheel(project, version)) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith((".yaml", ".yml"))])
        return folder

    return extract


@pytest.fixture(scope="session")
def verl_package(configs_of: Callable[[str, str], Path]) -> Callable[[str], Path]:
    """Version of verl -> a folder with `verl/`, of which only the config files and the version are there."""

    def extract(version: str) -> Path:
        folder = configs_of("verl", version)
        (folder / "verl" / "version").mkdir(exist_ok=True)
        (folder / "verl" / "version" / "version").write_text(version)
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
