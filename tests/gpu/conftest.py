"""These tests run on a machine with one CUDA GPU, torch 2.11 or newer and transformers; `make test-gpu` runs them.

Elsewhere they are skipped. With VERL_PROFILER_CONF_GPU_DRY_RUN=1 those that can run on the CPU do, to test the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpu_checks import DRY_RUN, Machine  # noqa: E402

CLONE = Path(__file__).resolve().parents[2]


def _why_not() -> str | None:
    if os.environ.get(DRY_RUN):
        return None
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "no CUDA GPU here, or a torch without CUDA; `make test-gpu` runs this where there is one"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return None if release >= (2, 11) else f"torch {torch.__version__} is older than 2.11"


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The GPU, or in a dry run the CPU."""
    why_not = _why_not()
    if why_not is not None:
        pytest.skip(why_not)
    return Machine("cpu" if os.environ.get(DRY_RUN) else "cuda")


@pytest.fixture
def gpu(machine: Machine) -> Machine:
    """The GPU. What needs it has nothing to do in a dry run."""
    if machine.is_dry_run:
        pytest.skip("a dry run: needs a GPU")
    return machine


@pytest.fixture
def in_fresh_process(machine: Machine) -> Callable[..., str]:
    """Run a script that begins with a `Machine` and a folder in a process of its own; returns what it printed."""

    def run(script: str, folder: Path, *, status: int = 0) -> str:
        begin = (
            "import sys\nfrom pathlib import Path\nfrom gpu_checks import Machine, Windowed, trace_of\n"
            f"machine, folder = Machine({machine.device!r}), Path(sys.argv[1])\n"
        )
        path = os.pathsep.join([str(CLONE), str(CLONE / "tests" / "support")])
        done = subprocess.run(
            [sys.executable, "-c", begin + script, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
