"""Runs tests on every Python from 3.10 on that this machine has, each in an environment without torch.

    python tests/envs/every_python.py [--jobs 2] tests/unit [more arguments of pytest]

Pythons are looked for on PATH and where pyenv and uv keep theirs. `make_env.py` makes the environments, `light-3.x` in
`.venvs/`. Prints one line for each Python, and the whole output where tests fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLONE = HERE.parents[1]
MINORS = range(10, 15)
WHICH = "import sys, venv; print(sys.executable, *sys.version_info[:3])"


@dataclass(frozen=True)
class Python:
    """An interpreter that works."""

    path: str
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True)
class Outcome:
    """What came of one Python."""

    python: Python
    passed: bool
    output: str

    def __str__(self) -> str:
        lines = self.output.strip().splitlines() or ["no output"]
        return f"Python {self.python}: {lines[-1].strip('= ')}"


def find_pythons() -> list[Python]:
    """One of each minor version; of several the newest."""
    found: dict[tuple[int, int], Python] = {}
    for path in _candidates():
        python = _examine(path)
        if python is not None and python.version[:2] in {(3, minor) for minor in MINORS}:
            known = found.get(python.version[:2])
            if known is None or known.version < python.version:
                found[python.version[:2]] = python
    return [found[key] for key in sorted(found)]


def _candidates() -> Iterator[str]:
    yield sys.executable
    for minor in MINORS:
        if path := shutil.which(f"python3.{minor}"):
            yield path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python")
    for pattern in (pyenv / "versions" / "3.*", uv / "cpython-3.*"):
        for folder in sorted(pattern.parent.glob(pattern.name)):
            yield str(folder / "bin" / "python3")


def _examine(path: str) -> Python | None:
    """None: it does not run (pyenv's shims do so only for versions that are switched on), or has no venv."""
    try:
        done = subprocess.run([path, "-c", WHICH], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    executable, *version = done.stdout.rsplit(maxsplit=3)
    major, minor, micro = map(int, version)
    return Python(executable, (major, minor, micro))


def make(python: Python) -> Outcome | None:
    """Makes its environment; None if that went well."""
    command = [python.path, str(HERE / "make_env.py"), _name(python)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return None
    return Outcome(python, False, f"{done.stdout}\nno environment: make_env.py ended with {done.returncode}")


def test(python: Python, arguments: list[str]) -> Outcome:
    # no cache, which runs at the same time would share
    command = [str(CLONE / ".venvs" / _name(python) / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*command, *arguments],
        cwd=CLONE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Outcome(python, done.returncode == 0, done.stdout)


def _name(python: Python) -> str:
    return f"light-3.{python.version[1]}"


def main(arguments: list[str], jobs: int) -> int:
    pythons = find_pythons()
    outcomes = [outcome for python in pythons if (outcome := make(python)) is not None]
    without = {outcome.python for outcome in outcomes}
    with ThreadPoolExecutor(jobs) as pool:
        outcomes += pool.map(lambda python: test(python, arguments), [p for p in pythons if p not in without])
    for outcome in outcomes:
        if not outcome.passed:
            print(outcome.output)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.python.version):
        print(outcome)
    missing = sorted(set(MINORS) - {python.version[1] for python in pythons})
    if missing:
        print(f"not on this machine: {', '.join(f'Python 3.{minor}' for minor in missing)}")
    return int(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="Pythons that run at once")
    known, rest = parser.parse_known_args()
    sys.exit(main(rest, known.jobs))
