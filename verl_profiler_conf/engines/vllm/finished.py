"""How many response tokens a vLLM request got in the end, as far as the worker can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from verl_profiler_conf.engines.vllm.request import Request
from verl_profiler_conf.engines.vllm.results import sampled_tokens

if TYPE_CHECKING:
    from verl_profiler_conf.engines.vllm.batch import VllmBatch


class FinishedRequests(Mapping[str, "int | None"]):
    """Requests that ended since the iteration before -> how many response tokens they got, worked out on demand."""

    __slots__ = ("_ahead", "_gone", "_recent", "_turn")

    def __init__(self, gone: dict[str, Request | None], recent: tuple[VllmBatch, ...], turn: int, ahead: int) -> None:
        self._gone = gone
        self._recent = recent
        """Iterations before, the newest first."""
        self._turn = turn
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._gone)

    def __iter__(self) -> Iterator[str]:
        return iter(self._gone)

    def __contains__(self, request: object) -> bool:
        return request in self._gone

    def __getitem__(self, request: str) -> int | None:
        known = self._gone[request]
        ran = [batch for batch in self._recent if request in batch]
        if known is None or not ran:
            return None
        counted = [batch for batch in ran if self._turn - batch.turn > self._ahead]
        if counted and counted[0] is ran[0]:
            return _reached(ran[0], request, known)
        # its end was known before the results of the others were: nothing of them counts
        made = ran[len(ran) - len(counted) - 1].made(request, known).start
        if counted and counted[0].drafts(request):
            made = min(made, _reached(counted[0], request, known))
        return made


def _reached(batch: VllmBatch, request: str, known: Request) -> int:
    """Response tokens after `batch`, which made the last of the request."""
    made = batch.made(request, known)
    if len(made) <= 1 or not batch.drafts(request):
        return made.stop
    tokens = sampled_tokens(batch.result, request)
    if tokens is None:
        return made.stop
    for index, token in enumerate(tokens):
        if token in known.stops:  # what follows in an accepted draft is dropped
            tokens = tokens[: index + 1]
            break
    return min(made.start + len(tokens), known.most)
