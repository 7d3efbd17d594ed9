"""`track` -> the gate that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_profiler_conf.core.gate.base import Gate
from verl_profiler_conf.core.gate.batch import BatchGate
from verl_profiler_conf.core.gate.lead import LeadGate
from verl_profiler_conf.core.gate.quota import CaptureQuota
from verl_profiler_conf.core.window import TokenWindow


def make_gate(
    windows: Sequence[TokenWindow],
    *,
    track: str = "lead",
    max_iterations: int | None = None,
    max_captures: int | None = 1,
    skip_captures: int = 0,
    armed: bool = True,
    quota: CaptureQuota | None = None,
) -> Gate:
    """The gate for `track`: `lead` follows one request, `any` and `all` the whole batch. For the rest see `Gate`."""
    limits: dict[str, Any] = {
        "max_iterations": max_iterations,
        "max_captures": max_captures,
        "skip_captures": skip_captures,
    }
    if track == "lead":
        return LeadGate(windows, armed=armed, quota=quota, **limits)
    return BatchGate(windows, everyone=track == "all", armed=armed, quota=quota, **limits)
