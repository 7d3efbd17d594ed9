"""The requests of one SGLang scheduler, from iteration to iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.gate import NONE_FINISHED
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.sglang.batch import InFlight, SchedulerFacts, SglangBatch
from verl_profiler_conf.engines.sglang.members import Members
from verl_profiler_conf.engines.sglang.request import ARTIFICIAL, final_count, max_tokens, resumed_tokens

SEARCH_EVERY = 8
"""Iterations after which a followed request that is not in the batch is searched for again."""


class SglangRequests:
    """Turns schedule batches into batches and requests that have ended.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        speculative: an iteration can make several tokens of a request...
        tokens_per_iteration: ...so many at most.
        follow_all: every request is asked about in every iteration (`track: any`, `all`).
        in_flight: gives the iterations under way.
        is_known: whether the scheduler has a request somewhere: running, waiting or in between.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        speculative: bool = False,
        tokens_per_iteration: int = 1,
        follow_all: bool = False,
        in_flight: Callable[[], InFlight] = tuple,
        is_known: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self.members = Members()
        self._facts = SchedulerFacts(tuple(windows), speculative, tokens_per_iteration, in_flight)
        self._is_known = is_known
        self._follow_all = follow_all
        self._unreported: dict[str, int | None] = {}
        """Requests that have ended, and no real request has run since."""

    def advance(self, batch: Any) -> tuple[SglangBatch | None, Mapping[str, int | None]]:
        """The next batch: what it makes, None when no real request is in it; and the requests that have ended."""
        ended = self._take_ended()
        self.members.take(batch.reqs)
        if batch.reqs[0].rid.startswith(ARTIFICIAL) and not self.members.rows():
            self._unreported.update(ended)
            return None, NONE_FINISHED
        running = SglangBatch(batch, self.members, self._facts)
        return running, self._add_complete(running, ended)

    def on_idle(self) -> Mapping[str, int | None]:
        """Nothing is left to run: which of the followed requests have ended."""
        self.members.asked = {**self.members.followed, **self.members.asked}
        ended = self._take_ended()
        self.members.followed = {}
        self.members.take([])
        return ended

    def _add_complete(self, running: SglangBatch, ended: Mapping[str, int | None]) -> Mapping[str, int | None]:
        """Add requests that have all their tokens, the last of them still in flight."""
        in_flight = len(self._facts.in_flight())
        if not in_flight:
            return ended
        members = self.members
        for request, req in list(members.followed.items()):
            limit = max_tokens(req)
            if len(req.output_ids) + in_flight * self._facts.tokens_per_iteration < limit:
                continue
            made = running.get(request)
            total = limit + resumed_tokens(req)
            if made is not None and made.start >= total:
                ended = {**ended, request: total}
                members.complete.add(request)
                del members.followed[request], members.asked[request]
        return ended

    def _take_ended(self) -> Mapping[str, int | None]:
        """An iteration has passed: which of the followed requests have ended since it began."""
        absent = self.members.absent
        followed = self.members.turn(keep_all=self._follow_all)
        ended: dict[str, int | None] = {
            request: final_count(req) for request, req in followed.items() if req.finished_reason is not None
        }
        for request, iterations in absent.items():
            # one that is aborted while it waits is dropped without a word; to search for it takes a walk through queues
            if request in followed and request not in ended and iterations % SEARCH_EVERY == 0:
                req = followed[request]
                if not self._is_known(req):
                    ended[request] = final_count(req)
        for request in ended:
            del followed[request]
            absent.pop(request, None)
        if self._unreported:
            ended, self._unreported = {**self._unreported, **ended}, {}
        return ended or NONE_FINISHED
