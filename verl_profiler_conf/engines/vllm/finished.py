"""How many response tokens a vLLM request got in the end, as far as the worker can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from verl_profiler_conf.engines.vllm.batch import VllmBatch
from verl_profiler_conf.engines.vllm.request import Request
from verl_profiler_conf.engines.vllm.results import sampled_tokens


class FinishedRequests(Mapping[str, "int | None"]):
    """Requests that ended since the iteration before -> how many response tokens they got, worked out on demand.

    Args:
        ended: the requests, each with what is known of it.
        recent: the iterations before, the newest first.
        number: of the scheduler output that says so.
        in_flight: iterations that are scheduled before the result of one is taken in.
        final: for a request that ran in none of `recent`: it ran before they were kept.
    """

    __slots__ = ("_ended", "_final", "_in_flight", "_number", "_recent")

    def __init__(
        self,
        ended: dict[str, Request | None],
        recent: tuple[VllmBatch, ...],
        number: int,
        in_flight: int,
        final: Callable[[str], int | None],
    ) -> None:
        self._ended = ended
        self._recent = recent
        self._number = number
        self._in_flight = in_flight
        self._final = final

    def __len__(self) -> int:
        return len(self._ended)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ended)

    def __contains__(self, request: object) -> bool:
        return request in self._ended

    def __getitem__(self, request: str) -> int | None:
        known = self._ended[request]
        ran_in = [batch for batch in self._recent if request in batch]
        if known is None or not ran_in:
            return self._final(request)
        counted = [batch for batch in ran_in if self._number - batch.number > self._in_flight]
        if counted and counted[0] is ran_in[0]:
            return _tokens_after(ran_in[0], request, known)
        # the scheduler knew of the end before it had the results of the others: nothing of those counts
        made = ran_in[len(ran_in) - len(counted) - 1].tokens_of(request, known).start
        if counted and counted[0].drafts(request):
            made = min(made, _tokens_after(counted[0], request, known))
        return made


def _tokens_after(batch: VllmBatch, request: str, known: Request) -> int:
    """Response tokens after `batch`, in which the request ran last."""
    made = batch.tokens_of(request, known)
    if len(made) <= 1 or not batch.drafts(request):
        return made.stop
    tokens = sampled_tokens(batch.result, request)
    if tokens is None:
        return made.stop
    for index, token in enumerate(tokens):
        if token in known.stops:  # vLLM drops what follows it in an accepted draft
            tokens = tokens[: index + 1]
            break
    return min(made.start + len(tokens), known.max_tokens)
