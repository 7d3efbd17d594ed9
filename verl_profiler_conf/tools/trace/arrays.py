"""numpy, or one line that says how to get it."""

from __future__ import annotations

from verl_profiler_conf.tools.trace.errors import ExtraMissingError

try:
    import numpy as np
except ImportError as error:
    raise ExtraMissingError("numpy", "the analysis of a trace") from error

__all__ = ["np"]
