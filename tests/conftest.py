"""What tests of several folders need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from released import released_or_skip
from verl_configs import FILES

# the models are tiny: more threads only wait for each other, on a busy machine for minutes; children inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray runs its workers at a low priority, so that a suite beside them takes nearly all of the machine
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def configs_of() -> Callable[[str, str], Path]:
    """Project and version -> a folder with the packages of its wheel, of which only the config files are there."""
    return lambda project, version: released_or_skip(project, version, "*.yaml")


@pytest.fixture(scope="session")
def verl_package() -> Callable[[str], Path]:
    """Version of verl -> a folder with `verl/`, of which only the config files and the version are there."""
    return lambda version: released_or_skip("verl", version, *FILES)


@pytest.fixture
def verl_configs(verl_package: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Version of verl -> a copy of its config folder that a test may write to."""

    def copy(version: str) -> Path:
        target = tmp_path / f"verl-{version}"
        shutil.copytree(verl_package(version) / "verl" / "trainer" / "config", target)
        return target

    return copy
