"""What differs between SGLang's releases, and what is fixed for all of them."""

from __future__ import annotations

import logging
import sys

from packaging.version import InvalidVersion, Version

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.engines.shape import Shape, is_newer, missing

log = logging.getLogger(__name__)

OLDEST = "0.5.11"
"""The first release that loads plugins, hooks of which run in the scheduler's process."""

NEWEST = "0.5.23"
"""The newest release that was tried. What is read of a newer one is checked first."""

READ: Shape = {
    "sglang.srt.managers.schedule_batch:Req": (
        "rid",
        "origin_input_ids",
        "output_ids",
        "sampling_params",
        "finished_reason",
        "finished_len",
        "tokenizer",
        "eos_token_ids",
    ),
    "sglang.srt.managers.schedule_batch:ScheduleBatch": (
        "reqs",
        "forward_mode",
        "seq_lens_cpu",
        "encoder_lens_cpu",
        "decoding_reqs",
    ),
    "sglang.srt.managers.utils:GenerationBatchResult": (
        "next_token_ids",
        "accept_lens",
        "copy_done",
        "delay_sample_func",
    ),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": ("is_decode", "is_prebuilt"),
    "sglang.srt.sampling.sampling_params:SamplingParams": ("max_new_tokens", "ignore_eos", "stop_token_ids"),
}
"""What is read of a scheduler's batches, in all releases from `OLDEST` on."""

CLOSE = "verl_profiler_conf_close"
"""The scheduler's method by which an engine that shuts down has captures finished (`Engine.collective_rpc`)."""

CLOSE_SECONDS = 60.0
"""How long an engine that shuts down may wait for its captures."""


def sglang_version() -> str:
    """Version of the running engine."""
    found = getattr(sys.modules.get("sglang"), "__version__", None)
    return found if isinstance(found, str) else installed_version("sglang") or "unknown"


def lacks() -> str | None:
    """What a release that is newer than `NEWEST` lacks of what is read; None: nothing, or it was tried."""
    return (", ".join(missing(READ)) or None) if is_newer(sglang_version(), NEWEST) else None


def is_too_old() -> bool:
    """Whether this SGLang loads no plugins. Said once, with what to do."""
    try:
        if Version(sglang_version()) >= Version(OLDEST):
            return False
    except InvalidVersion:  # a build from a fork: what it has is looked at when it is hooked
        return False
    warn_once(
        log,
        f"SGLang {sglang_version()} cannot be windowed by tokens (it loads no plugins; {OLDEST} or newer does): "
        "no capture; mapping: iterations uses the engine's own counters",
    )
    return True
