"""What has to be remembered of a vLLM request, read from the NewRequestData that its worker gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_profiler_conf.core.settings import TOKENS_BEFORE


@dataclass(frozen=True)
class Request:
    """What has to be remembered of a request while it lives.

    Attributes:
        prompt: length of its prompt; a preempted request that comes back as a new one still has its own, and a
            continuation that of its response.
        most: response tokens that it can have.
        stops: token ids that end it.
        before: response tokens that it continues, which its prompt as vLLM has it includes.
    """

    prompt: int
    most: int
    stops: frozenset[int] | set[int] = frozenset()
    before: int = 0


def remember(new: Any, longest: int) -> Request:
    """What counts of a NewRequestData, for a model that takes sequences of `longest` tokens."""
    prompt = prompt_length(new)
    params = new.sampling_params
    if params is None:  # pooling: it has no response
        return Request(prompt, 0)
    most = max(longest - prompt, 1)
    if params.max_tokens is not None:
        most = min(most, params.max_tokens)
    before = continued(new)
    return Request(prompt - before, before + most, getattr(params, "all_stop_token_ids", None) or frozenset(), before)


def continued(new: Any) -> int:
    """Response tokens in the prompt of a request that says it continues a response."""
    before = (getattr(new.sampling_params, "extra_args", None) or {}).get(TOKENS_BEFORE)
    return before if type(before) is int and 0 < before < prompt_length(new) else 0


def prompt_length(new: Any) -> int:
    """Tokens of a NewRequestData's prompt, also where the prompt came as embeddings."""
    if new.prompt_token_ids is not None:
        return len(new.prompt_token_ids)
    embeds = getattr(new, "prompt_embeds", None)
    return 0 if embeds is None else int(embeds.shape[0])


def resumed_by(new: Any) -> int:
    """Response tokens that a request brings along: those that it continues; and Model Runner V2 gets preempted ones
    back as new, with theirs."""
    filled = getattr(new, "prefill_token_ids", None)
    return continued(new) + (0 if filled is None else max(len(filled) - prompt_length(new), 0))
