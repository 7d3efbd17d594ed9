"""One line of what `verl-profiler doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` says what to do; it is empty when nothing is wrong."""

    about: str
    state: State
    text: str
    fix: str = ""
