"""transformers: `model.generate`, windowed in the job's own process.

`hooks` says what is hooked in `generate`, `generation` what is kept for one call of it, `batch` which tokens its rows
make. `continuous` is the same for continuous batching (`generate_batch`).
"""

from __future__ import annotations

import functools

import wrapt

MODULE = "transformers.generation.utils"


@functools.lru_cache(maxsize=1)
def install() -> None:
    """Hook transformers as soon as it is imported, at once if it is."""
    from verl_profiler_conf.engines.transformers import continuous, hooks

    wrapt.register_post_import_hook(hooks.hook, MODULE)
    wrapt.register_post_import_hook(continuous.hook_continuous, continuous.MODULE)
