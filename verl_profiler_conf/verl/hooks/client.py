"""verl's client of the rollout servers. It passes on how many response tokens a continued response has already.

An agent loop may continue a response: the next turn of a conversation, or a rollout that a weight update cut short. It
sends all tokens so far as the prompt of a new request with a new id. Nothing in that request says where the response
began. The client knows it: all requests of one response go through it under one id, and the first of them holds only
the prompt. The index of a response token is its place after that prompt, which is its place in verl's `response_ids`.
Tokens that tools and environments put in between count as well.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import TOKENS_BEFORE
from verl_profiler_conf.engines.hooking import when_imported

log = logging.getLogger(__name__)

MODULE = "verl.workers.rollout.llm_server"
CLIENT = "LLMServerClient"
"""Every request goes through this class's `generate`; a subclass that resumes aborted requests calls it too."""

CARRIERS = {"vllm": "extra_args", "sglang": "custom_params"}
"""Engine -> the sampling parameter that callers may fill, and that the engine passes to its scheduler."""

MAX_RESPONSES = 65536
"""Responses that are remembered. The oldest is forgotten first."""


class Responses:
    """How long the prompt of each response was."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._prompts: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def tokens_before(self, response: str, tokens: Sequence[int]) -> int:
        """Response tokens among `tokens`, the prompt of this response's next request; 0 for its first request.

        The same id with other tokens at its begin is a new response: in deterministic runs verl uses its ids again.
        """
        known = self._prompts.get(response)
        if known is not None:
            length, digest = known
            if len(tokens) >= length and hash(tuple(tokens[:length])) == digest:
                self._prompts.move_to_end(response)
                return len(tokens) - length
        self._prompts[response] = (len(tokens), hash(tuple(tokens)))
        self._prompts.move_to_end(response)
        if len(self._prompts) > self._max_responses:
            self._prompts.popitem(last=False)
        return 0


def register() -> None:
    """Hook the client as soon as it is imported."""
    when_imported(MODULE, hook_client)


def hook_client(module: Any) -> None:
    """Wrap the client's `generate`. If this verl has another client, log what that means."""
    generate = getattr(getattr(module, CLIENT, None), "generate", None)
    if generate is None:
        warn_once(
            log,
            f"{MODULE} has no {CLIENT}.generate: responses of several requests (several turns, partial rollouts) are"
            " counted from the last request's own prompt",
        )
        return
    getattr(module, CLIENT).generate = _counting(generate, Responses())


def _counting(generate: Callable[..., Any], responses: Responses) -> Callable[..., Any]:
    @functools.wraps(generate)
    async def counted(self: Any, request_id: Any, **kwargs: Any) -> Any:
        try:
            kwargs = _with_tokens_before(self, responses, request_id, kwargs)
        except Exception as error:
            warn_once(log, f"continued responses are counted from 0: {type(error).__name__}: {error}")
        return await generate(self, request_id, **kwargs)

    return counted


def _with_tokens_before(client: Any, responses: Responses, request_id: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    carrier = CARRIERS.get(client.config.actor_rollout_ref.rollout.name)
    tokens_before = responses.tokens_before(str(request_id), kwargs["prompt_ids"]) if carrier else 0
    if carrier is None or not tokens_before:
        return kwargs
    params = dict(kwargs["sampling_params"])  # the caller uses its own again for the next turn
    params[carrier] = {**(params.get(carrier) or {}), TOKENS_BEFORE: tokens_before}
    return {**kwargs, "sampling_params": params}
