"""transformers: `model.generate`, windowed in the job's own process.

`hooks` says what is hooked in `generate`, `generation` what is kept for one call of it, `batch` which tokens its rows
make. `continuous` is the same for continuous batching (`generate_batch`).
"""

from __future__ import annotations

MODULE = "transformers.generation.utils"


def install() -> None:
    """Hook transformers as soon as it is imported, at once if it is. Repeatable."""
    from verl_profiler_conf.engines.hooking import when_imported
    from verl_profiler_conf.engines.transformers import continuous, hooks

    when_imported(MODULE, hooks.hook)
    when_imported(continuous.MODULE, continuous.hook_continuous)
