"""The gate decides, before each iteration, whether the device profiler opens, stays as it is, or closes.

It knows no torch, no engine and no clock.

    gate = make_gate(windows, track="lead")
    verdict = gate.step({"request-1": range(19, 20), "request-2": range(0, 0)}, finished={})   # before each iteration

The caller says which response tokens each scheduled request is about to make. Three facts about engines shape this:

- A prompt chunk makes no token. Its range is empty and starts at the request's next token: `range(k, k)`.
- Speculative decoding makes 1 to k+1 tokens. `range.start` is certain, `range.stop` is an upper bound. The next
  iteration's start, or the request's final count, tells how many were made.
- Which requests ended is known one iteration later (`finished`), with the final count where the engine tells it.
"""

from verl_profiler_conf.core.gate.base import MAX_GAP, Gate
from verl_profiler_conf.core.gate.batch import BatchGate
from verl_profiler_conf.core.gate.lead import LeadGate
from verl_profiler_conf.core.gate.make import make_gate
from verl_profiler_conf.core.gate.quota import CaptureQuota
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
    "CaptureQuota",
    "CloseReason",
    "Finished",
    "Gate",
    "LeadGate",
    "Opening",
    "RecordedIteration",
    "Verdict",
    "make_gate",
]
