"""Runs `fault_job` with a window and without one, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clone import SUPPORT, python_path
from fault_outcome import Outcome, job_environment


class Forks:
    """Runs jobs in forks of a process that has what they need: the engine, with a model in it."""

    def __init__(self, engine: str) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, str(SUPPORT / "fault_job.py"), engine, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )

    def run(self, folder: Path, fault: str, env: dict[str, str]) -> Outcome:
        order = {"cwd": str(folder), "fault": fault, "env": env}
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
    """Of the engine that this environment has."""
    forks = Forks("vllm" if importlib.util.find_spec("vllm") is not None else "transformers")
    yield forks
    forks.close()


_plain: dict[str, Outcome] = {}
"""Runs without a window, which are the same for several tests."""


@pytest.fixture
def both(tmp_path: Path, forks: Forks) -> Callable[..., tuple[Outcome, Outcome]]:
    """Run the job without a window and with one: `both("raise", profile_token_start=3)`."""

    def run(name: str, fault: str, window: dict[str, Any] | None) -> Outcome:
        folder = tmp_path / name
        folder.mkdir()
        return forks.run(folder, fault, job_environment(folder, window))

    def run_both(fault: str, **window: Any) -> tuple[Outcome, Outcome]:
        if fault not in _plain:
            _plain[fault] = run("plain", fault, None)
        return _plain[fault], run("windowed", fault, window)

    return run_both
