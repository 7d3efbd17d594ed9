"""Where this clone is, and what the processes that its tests start import from."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
CLONE = SUPPORT.parents[1]


def python_path(*first: Path) -> str:
    """A PYTHONPATH for subprocesses: the given folders, what the variable holds already, and the tests' helpers."""
    return os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH"), str(SUPPORT)]))
