"""`track` -> the gate that follows it."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler_conf.core.gate.base import Gate
from verl_profiler_conf.core.gate.batch import BatchGate
from verl_profiler_conf.core.gate.lead import LeadGate
from verl_profiler_conf.core.window import TokenWindow


def make_gate(
    windows: Sequence[TokenWindow],
    *,
    track: str = "lead",
    max_iterations: int | None = None,
    max_captures: int | None = 1,
    armed: bool = True,
) -> Gate:
    """The gate for `track`: `lead` follows one request, `any` and `all` the whole batch."""
    if track == "lead":
        return LeadGate(windows, max_iterations=max_iterations, max_captures=max_captures, armed=armed)
    return BatchGate(
        windows, everyone=track == "all", max_iterations=max_iterations, max_captures=max_captures, armed=armed
    )
