"""What differs between SGLang's releases, and what is fixed for all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Sized
from typing import Any

from packaging.version import InvalidVersion, Version

from verl_profiler_conf.core.releases import SGLANG
from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.engines.hooking import say_once
from verl_profiler_conf.engines.shape import Forms, Shape, a, anything, is_newer, missing, unlike

OLDEST = SGLANG.tokens_since
"""The first release that loads plugins, hooks of which run in the scheduler's process."""

NEWEST = SGLANG.newest
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


_FORMS: Forms = {
    "reqs": a(Sequence),
    "forward_mode": anything,
    "seq_lens_cpu": anything,
    "encoder_lens_cpu": anything,
    "decoding_reqs": a(Sequence, type(None)),
}
_MODE_FORMS: Forms = {"is_decode": callable, "is_prebuilt": callable}
_REQ_FORMS: Forms = {
    "rid": a(str),
    "origin_input_ids": a(Sized),
    "output_ids": a(Sized),
    "sampling_params": anything,
    "finished_reason": anything,
    "finished_len": a(int, type(None)),
}
"""What the values of a scheduler's batch look like, in all releases."""


def not_understood(batch: Any) -> str | None:
    """What a batch has in another form than in any release; None: it can be read.

    Asked once a session. A form that merely looked empty would lose the window without a word.
    """
    found = list(unlike(batch, _FORMS, "ScheduleBatch"))
    if found:
        return ", ".join(found)
    found += unlike(batch.forward_mode, _MODE_FORMS, "ForwardMode")
    for req in batch.reqs:
        found += unlike(req, _REQ_FORMS, "Req")
        break
    return ", ".join(found) or None


def is_too_old() -> bool:
    """Whether this SGLang loads no plugins. Said once, with what to do."""
    try:
        if Version(sglang_version()) >= Version(OLDEST):
            return False
    except InvalidVersion:  # a build from a fork: what it has is looked at when it is hooked
        return False
    say_once(
        f"SGLang {sglang_version()} cannot be windowed by tokens (it loads no plugins; {OLDEST} or newer does): "
        "no capture; mapping: iterations uses the engine's own counters"
    )
    return True
