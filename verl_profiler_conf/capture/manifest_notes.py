"""What a manifest says in words, and what it counts out of the trace."""

from __future__ import annotations

from verl_profiler_conf.capture.backends import Written
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.core.gate import CloseReason
from verl_profiler_conf.core.window import TokenWindow


def skipped_clause(times: int) -> str:
    """Say how many times a window went by uncaptured."""
    return f"{times} time{'' if times == 1 else 's'} passed by uncaptured, as asked"


def unreached_note(window: TokenWindow, iterations: int, why: str, *, skipped: int, asked: int) -> str:
    """Say that a window was not captured so far.

    Args:
        window: response tokens asked for.
        iterations: how many ran since arming.
        why: the reason that it was not reached.
        skipped: how many times it went by uncaptured, as `skip_captures` asks.
        asked: `skip_captures`.
    """
    if not skipped:
        return f"tokens {window} were never reached in {iterations} iterations: {why}"
    if skipped < asked:
        times = f"{skipped} time{'' if skipped == 1 else 's'}"
        return (
            f"tokens {window} were reached only {times} in {iterations} iterations, and skip_captures={asked} lets the"
            f" first {asked} pass by uncaptured"
        )
    return f"tokens {window}: {skipped_clause(skipped)}, and never reached after that in {iterations} iterations"


def reached_note(why: str) -> str:
    """Say that a window was reached and has no capture."""
    return f"reached, but not captured: {why}"


def capture_notes(capture: OpenCapture, reason: CloseReason, error: Exception | None) -> list[str]:
    """Say what a reader of the capture would not expect."""
    notes = list(capture.notes)
    if error is not None:
        notes.append(f"closed by a failure: {type(error).__name__}: {error}")
    if reason == "other_profiler":
        notes.append("another profiler was prepared in this process, so the recording ended here")
    if reason == "thread":
        notes.append("the loop changes its thread, and torch records one thread: each iteration is a part of its own")
    if capture.other_iterations:
        notes.append(f"{capture.other_iterations} iterations of other loops of this process ran during the capture")
    if capture.interrupted_ranges:
        notes.append(
            f"{capture.interrupted_ranges} iterations have several ranges each, because iterations of other loops ran "
            "on the same thread meanwhile"
        )
    if capture.mixed_ranges:
        notes.append(
            f"{capture.mixed_ranges} iterations began while one of another loop was under way on the same thread, so "
            "their ranges may hold operators of both"
        )
    return notes


def fill_counts(manifest: Manifest, written: Written) -> None:
    """What the trace holds of each iteration goes into its row."""
    for row in manifest.rows:
        counts = written.iterations.get(row.index)
        if counts is not None:
            row.operators = counts.operators
            if written.device_events is not None:
                row.kernels, row.device_ns = counts.kernels, counts.device_ns


def missing_ranges_note(manifest: Manifest, written: Written) -> str | None:
    """Say which captured iterations the trace does not name, or None. Only for a trace whose ranges were counted."""
    missing = [row.index for row in manifest.rows if row.index not in written.iterations]
    if not missing:
        return None
    return (
        f"the trace names {len(manifest.rows) - len(missing)} of the {len(manifest.rows)} captured iterations; the "
        f"first one missing is {missing[0]}: the recording did not hold for the whole capture"
    )
