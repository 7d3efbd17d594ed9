"""The app of these tests, run as users run theirs: a script in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

APPS = Path(__file__).parent / "apps"


@dataclass
class Run:
    """What a run of the app left."""

    code: int
    out: str
    err: str
    folder: Path

    def _reports(self, word: str) -> list[Any]:
        lines = (line for line in self.out.splitlines() if line.startswith(word + " "))
        return [json.loads(line.removeprefix(word + " ")) for line in lines]

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """What each task function that ran saw: `job` (the published settings), `cwd`, `torch` (imported), `cfg`."""
        return self._reports("TASK")

    @property
    def after(self) -> dict[str, Any]:
        """What the script saw after its last job."""
        return self._reports("AFTER")[0]  # type: ignore[no-any-return]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the first task found published."""
        return json.loads(self.tasks[0]["job"])  # type: ignore[no-any-return]

    @property
    def ours(self) -> list[str]:
        """Lines of the console that come from us."""
        said = (line for line in (self.out + self.err).splitlines() if not line.startswith("TASK "))
        return [line for line in said if "verl_profiler_conf" in line]

    def manifests(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.rglob("*.manifest.json"))]


@pytest.fixture
def app(tmp_path: Path) -> Callable[..., Run]:
    """Run the app in an empty folder: `app("+profiler=torch_window", ..., base="1.1", env={...})`."""

    def run(*arguments: str, base: str = "none", env: dict[str, str] | None = None, file: str = "app.py") -> Run:
        environ = {key: value for key, value in os.environ.items() if key != "VERL_PROFILER_CONF"}
        environ |= {"APP_VERSION_BASE": base, "PYTHONWARNINGS": "default", **(env or {})}
        done = subprocess.run(
            [sys.executable, str(APPS / file), *arguments],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr, tmp_path)

    return run


@pytest.fixture
def composed() -> Iterator[Callable[..., DictConfig]]:
    """The app's config in this process: `composed("+profiler=torch_window", name="plain")`."""
    with initialize_config_dir(version_base=None, config_dir=str(APPS / "conf")):

        def make(*overrides: str, name: str = "plain") -> DictConfig:
            return compose(name, overrides=list(overrides))

        yield make
    GlobalHydra.instance().clear()
