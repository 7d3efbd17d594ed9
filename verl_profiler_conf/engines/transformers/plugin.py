"""transformers: `model.generate`, windowed in the job's own process.

`hooks` says what is hooked, `generation` what is kept for one call of `generate`, `batch` which tokens its rows make.
"""

from __future__ import annotations

import functools

import wrapt

MODULE = "transformers.generation.utils"


@functools.lru_cache(maxsize=1)
def install() -> None:
    """Hook transformers as soon as it is imported, at once if it is."""
    from verl_profiler_conf.engines.transformers.hooks import hook

    wrapt.register_post_import_hook(hook, MODULE)
