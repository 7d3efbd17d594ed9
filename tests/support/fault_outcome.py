"""What a run of a fault job leaves, and the environment that it gets."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clone import python_path

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


def job_environment(folder: Path, window: dict[str, Any] | None) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_PROFILER", "FAULT_"))}
    environ |= {"PYTHONPATH": python_path(), "FAULT_PIPE": str(folder / "pipe")}
    if window is not None:
        settings = {"profile_token_start": WINDOW[0], "profile_token_end": WINDOW[1], "device": "cpu"}
        environ["FAULT_WINDOW"] = json.dumps({**settings, "save_path": str(folder / "profile"), **window})
    return environ
