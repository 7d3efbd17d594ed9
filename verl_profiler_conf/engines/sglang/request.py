"""What is read of one SGLang request (`Req`), in its scheduler."""

from __future__ import annotations

from typing import Any

from verl_profiler_conf.core.settings import TOKENS_BEFORE
from verl_profiler_conf.core.window import MAX_TOKEN

HEALTH_CHECK = "HEALTH_CHECK"
"""Begins the id of a health check's request (sglang.srt.constants: HEALTH_CHECK_RID_PREFIX)."""

WARM_UP = "verl_profiler_conf_warm_up_"
"""Begins the id that `client` gives to a server's own warm-up requests."""

ARTIFICIAL = (HEALTH_CHECK, WARM_UP)
"""Requests whose ids begin so were made up by the server."""


def resumed_tokens(req: Any) -> int:
    """Response tokens in the prompt of a request that says it continues a response."""
    params = getattr(req.sampling_params, "custom_params", None)
    before = params.get(TOKENS_BEFORE) if params else None
    return before if type(before) is int and 0 < before < len(req.origin_input_ids) else 0


def max_tokens(req: Any) -> int:
    """Response tokens that it can have, those that it continues not counted."""
    return req.sampling_params.max_new_tokens or MAX_TOKEN


def final_count(req: Any) -> int:
    """Response tokens that a request which has ended got, those that it continues included.

    Tokens that SGLang made behind its end, and cut off, do not count.
    """
    own = len(req.output_ids) if req.finished_len is None else int(req.finished_len)
    return resumed_tokens(req) + own


def stop_tokens(req: Any) -> set[int]:
    """Token ids that end the request."""
    found: set[int] = set()
    tokenizer = req.tokenizer
    for ids in (
        req.sampling_params.stop_token_ids,
        req.eos_token_ids,
        getattr(tokenizer, "additional_stop_token_ids", None),
    ):
        found.update(ids or ())
    if getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(tokenizer.eos_token_id)
    return found
