"""The window in each engine's own counters, and what a setting of those counters captures.

Pure: no engine is imported and nothing is looked up; the caller says which version it has. What differs from version to
version stands in a table beside each engine's arithmetic (`vllm.py`, `sglang.py`, `trtllm.py`).

Counters count iterations, a window counts tokens. They agree for a request that makes one token in each iteration from
a known one on; an answer names what it takes for granted, and says so when no counter can hold the window. The gate
(`mapping: tokens`) has none of these limits.
"""

from verl_profiler_conf.core.iterations.plain import plain_counters
from verl_profiler_conf.core.iterations.planning import captured, captured_iterations, plan
from verl_profiler_conf.core.iterations.result import CounterPlan, Fit
from verl_profiler_conf.core.iterations.trtllm import start_stop_text

__all__ = [
    "CounterPlan",
    "Fit",
    "captured",
    "captured_iterations",
    "plain_counters",
    "plan",
    "start_stop_text",
]
