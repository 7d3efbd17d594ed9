"""What is kept of a vLLM request while it lives, read from the NewRequestData that its worker gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_profiler_conf.core.settings import TOKENS_BEFORE


@dataclass(frozen=True)
class Request:
    """The facts of one request that decide which tokens an iteration makes of it.

    Attributes:
        prompt: tokens of its own prompt. A preempted request that comes back as a new one still has its own prompt. A
            continuation has the prompt of the response that it continues.
        max_tokens: response tokens that it can have, those that it continues included.
        stops: token ids that end it.
        resumed_tokens: response tokens that it continues. vLLM counts them as part of its prompt.
    """

    prompt: int
    max_tokens: int
    stops: frozenset[int] | set[int] = frozenset()
    resumed_tokens: int = 0

    @classmethod
    def of(cls, new: Any, max_model_len: int) -> Request:
        """Read a NewRequestData, for a model that takes sequences of `max_model_len` tokens."""
        prompt = prompt_length(new)
        params = new.sampling_params
        if params is None:  # a pooling request has no response
            return cls(prompt, 0)
        room = max(max_model_len - prompt, 1)
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        resumed = resumed_tokens(new)
        stops = getattr(params, "all_stop_token_ids", None) or frozenset()
        return cls(prompt - resumed, resumed + room, stops, resumed)


def resumed_tokens(new: Any) -> int:
    """Response tokens in the prompt of a request that says it continues a response."""
    before = (getattr(new.sampling_params, "extra_args", None) or {}).get(TOKENS_BEFORE)
    return before if type(before) is int and 0 < before < prompt_length(new) else 0


def tokens_on_arrival(new: Any) -> int:
    """Response tokens that a new request already has.

    It has those that it continues. Under Model Runner V2 a preempted request comes back as a new one, with its own.
    """
    filled = getattr(new, "prefill_token_ids", None)
    return resumed_tokens(new) + (0 if filled is None else max(len(filled) - prompt_length(new), 0))


def prompt_length(new: Any) -> int:
    """Tokens of a NewRequestData's prompt, also where the prompt came as embeddings."""
    if new.prompt_token_ids is not None:
        return len(new.prompt_token_ids)
    embeds = getattr(new, "prompt_embeds", None)
    return 0 if embeds is None else int(embeds.shape[0])
