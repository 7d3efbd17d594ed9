"""The gate: positions of the running requests -> open, keep or close the device profiler.

Pure: no torch, no engine, no clock.

    gate = make_gate(windows, track="lead")
    verdict = gate.step({"request-1": range(19, 20), "request-2": range(0, 0)}, finished={})   # before each iteration

The engine says, before each iteration, which response tokens each scheduled request is about to make. Three facts of
engines shape the interface:

- a prompt chunk makes no token: its range is empty, and starts at the request's next token (`range(k, k)`);
- speculative decoding makes 1 to k+1 tokens: `range.start` is always certain, `range.stop` is an upper bound, and the
  truth comes with the next iteration's start or with the request's final count;
- which requests ended is known one iteration later (`finished`), with the final count where the engine tells it.
"""

from verl_profiler_conf.core.gate.base import MAX_GAP, Gate
from verl_profiler_conf.core.gate.batch import BatchGate
from verl_profiler_conf.core.gate.lead import LeadGate
from verl_profiler_conf.core.gate.make import make_gate
from verl_profiler_conf.core.gate.verdict import (
    NO_ACTION,
    NONE_FINISHED,
    PREPARE,
    Batch,
    CloseReason,
    Finished,
    Opening,
    RecordedIteration,
    Verdict,
)

__all__ = [
    "MAX_GAP",
    "NONE_FINISHED",
    "NO_ACTION",
    "PREPARE",
    "Batch",
    "BatchGate",
    "CloseReason",
    "Finished",
    "Gate",
    "LeadGate",
    "Opening",
    "RecordedIteration",
    "Verdict",
    "make_gate",
]
