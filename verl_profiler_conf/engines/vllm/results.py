"""Which tokens one vLLM iteration really made, read from what its sampling returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Pending:
    """Where a result that is still on its way from the device keeps things."""

    output: str
    """The ModelRunnerOutput that it will become."""
    event: str
    """Recorded when the copies to the host are done."""
    tokens: str
    """Host array `(requests, 1 + drafts)`; rejected drafts are -1 or, with `counts`, whatever follows."""
    counts: str | None = None
    """Host array `(requests,)`: how many of a row count."""


_PENDING = (
    _Pending("_model_runner_output", "async_copy_ready_event", "sampled_token_ids_cpu"),
    _Pending("_model_runner_output", "_async_copy_ready_event", "_sampled_token_ids_cpu"),
    _Pending("model_runner_output", "copy_event", "sampled_token_ids", "num_sampled_tokens_np"),
    _Pending("model_runner_output", "copy_event", "sampled_token_ids", "num_sampled_tokens_cpu"),
)
"""By the names that releases gave them: the V1 model runner's two, then those of Model Runner V2."""


def sampled_tokens(result: Any, request: str) -> list[int] | None:
    """Tokens of `request` in what `execute_model` or `sample_tokens` returned; None where they cannot be had.

    Waits for the device when the result is still under way: ask near the window only.
    """
    if result is None:
        return None
    for form in _PENDING:
        if all(hasattr(result, name) for name in (form.output, form.event, form.tokens, form.counts or form.tokens)):
            return _from_pending(result, form, request)
    row = _row(result, request)
    tokens = getattr(result, "sampled_token_ids", None)
    if row is None or not tokens:
        return None
    return [int(token) for token in tokens[row]]


def _from_pending(result: Any, form: _Pending, request: str) -> list[int] | None:
    row = _row(getattr(result, form.output), request)
    if row is None:
        return None
    getattr(result, form.event).synchronize()
    tokens = [int(token) for token in getattr(result, form.tokens)[row].tolist()]
    if form.counts is not None:
        return tokens[: int(getattr(result, form.counts)[row])]
    return [token for token in tokens if token >= 0]


def _row(output: Any, request: str) -> int | None:
    rows = getattr(output, "req_id_to_index", None)
    return None if rows is None else rows.get(request)
