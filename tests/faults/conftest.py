"""Runs `fault_job` with a window and without one, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from clone import SUPPORT, python_path

WINDOW = (4, 10)


@dataclass
class Outcome:
    """What a run of the job left."""

    code: int
    said: str
    err: str
    folder: Path

    @property
    def out(self) -> list[str]:
        return self.said.splitlines()

    @cached_property
    def manifests(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.manifest.json"))]

    @property
    def captured(self) -> list[list[int]]:
        """First tokens of the captured iterations, of each capture that has a trace."""
        return [[row["lo"] for row in each["rows"]] for each in self.manifests if each["trace"]]

    @property
    def notes(self) -> str:
        return "\n".join(note for each in self.manifests for note in each["notes"])

    @property
    def leftovers(self) -> list[str]:
        """Hidden files: what is written, and what claims a name."""
        return sorted(p.name for p in self.folder.iterdir() if p.name.startswith(".")) if self.folder.is_dir() else []

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("verl_profiler_conf") and " WARNING " in line]


class Forks:
    """Runs jobs in forks of a process that has imported what they need."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, str(SUPPORT / "fault_job.py"), "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )

    def run(self, folder: Path, arguments: tuple[str, ...], env: dict[str, str]) -> Outcome:
        order = {"cwd": str(folder), "arguments": arguments, "env": env}
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        code = int(self._parent.stdout.readline())
        return Outcome(code, *(folder.joinpath(name).read_text() for name in ("out", "err")), folder / "profile")

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(60)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def job_environment(folder: Path, window: dict[str, Any] | None) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_PROFILER", "FAULT_"))}
    environ |= {"PYTHONPATH": python_path(), "FAULT_PIPE": str(folder / "pipe")}
    if window is not None:
        settings = {"profile_token_start": WINDOW[0], "profile_token_end": WINDOW[1], "device": "cpu"}
        environ["FAULT_WINDOW"] = json.dumps({**settings, "save_path": str(folder / "profile"), **window})
    return environ


_plain: dict[tuple[str, ...], Outcome] = {}
"""Runs without a window, which are the same for several tests."""


@pytest.fixture
def both(tmp_path: Path, forks: Forks) -> Callable[..., tuple[Outcome, Outcome]]:
    """Run the job on transformers without a window and with one: `both("raise", profile_token_start=3)`."""

    def run(name: str, fault: str, window: dict[str, Any] | None) -> Outcome:
        folder = tmp_path / name
        folder.mkdir()
        return forks.run(folder, ("transformers", fault), job_environment(folder, window))

    def run_both(fault: str, **window: Any) -> tuple[Outcome, Outcome]:
        key = ("transformers", fault)
        if key not in _plain:
            _plain[key] = run("plain", fault, None)
        return _plain[key], run("windowed", fault, window)

    return run_both
