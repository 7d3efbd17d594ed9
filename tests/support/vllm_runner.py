"""A model runner that keeps its requests as vLLM's V1 model runner does: `requests` and `input_batch`, updated from
scheduler outputs before a forward, and extended by what the forward made after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class V1Runner:
    """As `GPUModelRunner` from the hook's side (`_update_states`, `_bookkeeping_sync`).

    Args:
        overlapped: async scheduling; what was made is on its way, and stands as -1.
    """

    def __init__(self, *, overlapped: bool = False) -> None:
        self.overlapped = overlapped
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_id_to_index={})

    def update_states(self, output: Any) -> None:
        """Before the forward."""
        for request in output.finished_req_ids:
            self.requests.pop(request, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                prompt_token_ids=new.prompt_token_ids,
                prompt_embeds=getattr(new, "prompt_embeds", None),
                sampling_params=new.sampling_params,
                output_token_ids=[],
            )
        cached = output.scheduled_cached_reqs
        if self.overlapped:
            for request, count in zip(cached.req_ids, getattr(cached, "num_output_tokens", ()), strict=False):
                if request not in self.input_batch.req_id_to_index and count:  # it was preempted
                    self.requests[request].output_token_ids = [7] * count
        self.input_batch.req_id_to_index = {name: index for index, name in enumerate(output.num_scheduled_tokens)}

    def keep_sampled(self, sampled: dict[str, list[int]]) -> None:
        """After it: request -> the tokens that it made."""
        for request, tokens in sampled.items():
            self.requests[request].output_token_ids.extend([-1] * len(tokens) if self.overlapped else tokens)
