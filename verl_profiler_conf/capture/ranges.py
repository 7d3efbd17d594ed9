"""The range that names a captured iteration in a trace: how it is written, and the pattern that reads it back."""

from __future__ import annotations

import re

from verl_profiler_conf.capture.manifest import IterationRecord

RANGE = re.compile(r"response_tokens\[(\d+):(\d+)\) iter=(\d+) reqs=(\d+)")
"""Groups: first response token, one past the last, iteration, requests in the batch."""


def range_name(record: IterationRecord) -> str:
    """`response_tokens[20:21) iter=25 reqs=8`: the name that a captured iteration bears in the trace."""
    return f"response_tokens[{record.lo}:{record.hi}) iter={record.index} reqs={record.requests}"
