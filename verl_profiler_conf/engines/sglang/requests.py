"""The requests of one SGLang scheduler, from iteration to iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.gate import NONE_FINISHED, Batch
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.sglang.batch import InFlight, SchedulerFacts, SglangBatch
from verl_profiler_conf.engines.sglang.members import Members
from verl_profiler_conf.engines.sglang.request import ARTIFICIAL, final_count, max_tokens, resumed_tokens
from verl_profiler_conf.engines.skipping import skippable

SEARCH_EVERY = 8
"""Iterations after which a followed request that is not in the batch is searched for again."""


class UsualBatch:
    """What a batch has to look like so that the skipping goes on without asking `may_skip`.

    Attributes:
        mode: the mode of a batch that decodes; none has it before one has been seen.
        lead: the one request that was asked about; None: no batch has to have one. The session's answer depends on its
            end.
        row: of the lead.
    """

    __slots__ = ("lead", "mode", "row")

    def __init__(self) -> None:
        self.mode: Any = object()
        self.lead: Any = None
        self.row = 0


class SglangRequests:
    """Turns schedule batches into batches and requests that have ended.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        speculative: an iteration can make several tokens of a request...
        tokens_per_iteration: ...so many at most.
        follow_all: every request is asked about in every iteration (`track: any`, `all`).
        in_flight: gives the iterations under way.
        is_known: whether the scheduler has a request somewhere: running, waiting or in between.
        can_skip: iterations may be skipped, far from the windows.
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
        can_skip: bool = True,
    ) -> None:
        self.members = Members()
        self._facts = SchedulerFacts(tuple(windows), speculative, tokens_per_iteration, in_flight)
        self._is_known = is_known
        self._follow_all = follow_all
        self._can_skip = can_skip
        self._running: SglangBatch | None = None
        self.usual = UsualBatch()
        """While iterations are skipped."""
        self._older: dict[str, Any] = {}
        """Requests that lived when the session was armed and have not run since. The session does not know how many
        tokens they have."""
        self._unreported: dict[str, int | None] = {}
        """Requests that have ended, and no real request has run since."""

    def advance(self, batch: Any) -> tuple[SglangBatch | None, Mapping[str, int | None]]:
        """The next batch: what it makes, None when no real request is in it; and the requests that have ended."""
        ended = self._take_ended()
        self.members.take(batch.reqs)
        if batch.reqs[0].rid.startswith(ARTIFICIAL) and not self.members.rows():
            self._unreported.update(ended)
            return None, NONE_FINISHED
        if self._older:
            self._older = {
                request: req
                for request, req in self._older.items()
                if req.finished_reason is None and request not in self.members.rows()
            }
        self._running = running = SglangBatch(batch, self.members, self._facts)
        return running, self._add_complete(running, ended)

    def before_iteration(self) -> Mapping[str, int | None]:
        """Tokens that the requests that were asked about had before the iteration that runs."""
        running = self._running
        return {} if running is None else {request: running[request].start for request in running.asked}

    def on_idle(self) -> Mapping[str, int | None]:
        """Nothing is left to run: which of the followed requests have ended."""
        self.members.asked = self.members.all_followed()
        ended = self._take_ended()
        self.members.followed = {}
        self.members.take([])
        return ended

    def armed(self, queued: Iterable[Any]) -> None:
        """The session waits for its windows from now on, and the scheduler has these requests."""
        self.members.followed, self.members.asked = {}, {}
        self.members.absent.clear()
        self._older = {req.rid: req for req in queued if req.output_ids} if self._follow_all else {}

    # -- iterations that are skipped -------------------------------------------------------------------------------

    def skippable(self, headroom: int) -> int:
        """How many iterations can be skipped after one that was put to the session."""
        facts, members = self._facts, self.members
        if not self._can_skip or self._older:
            return 0
        iterations = skippable(headroom, max_drafts=facts.tokens_per_iteration - 1, in_flight=1)
        usual = self.usual
        usual.lead = None
        if self._follow_all or not iterations:
            return iterations
        if len(members.asked) != 1:
            return 0
        ((request, usual.lead),) = members.asked.items()
        usual.row = members.find(request)
        # the iteration of its last token is not skipped: the session sees it while it is in flight
        left = max_tokens(usual.lead) - len(usual.lead.output_ids)
        return 0 if usual.row < 0 else min(iterations, max(left // facts.tokens_per_iteration - 2, 0))

    def may_skip(self, batch: Any) -> bool:
        """Whether the skipping goes on with this batch."""
        usual, reqs = self.usual, batch.reqs
        lead = usual.lead
        if lead is not None and lead.finished_reason is not None:
            return False
        if not batch.forward_mode.is_decode():
            return self._may_skip_prompts(batch)
        usual.mode = batch.forward_mode
        if lead is None:
            return True
        usual.row = next((row for row, req in enumerate(reqs) if req is lead), -1)
        return usual.row >= 0

    def _may_skip_prompts(self, batch: Any) -> bool:
        if not batch.reqs or batch.forward_mode.is_prebuilt():
            return False
        real = [req for req in batch.reqs if not req.rid.startswith(ARTIFICIAL)]
        if not real or any(resumed_tokens(req) for req in real):  # a request that comes starts at 0 otherwise
            return False
        if self._follow_all:
            self.members.asked.update((req.rid, req) for req in real)
        return True

    def standing(self) -> Batch:
        """Where the followed requests stand after skipped iterations: request -> the last token that it made."""
        in_flight = [{id(req) for req in batch.reqs} for batch, _ in self._facts.in_flight()]
        standing = {}
        for request, req in self.members.all_followed().items():
            made = self._made(req, in_flight) if req.finished_reason is None else final_count(req)
            standing[request] = range(max(made - 1, 0), made)
        return standing

    def _made(self, req: Any, in_flight: list[set[int]]) -> int:
        own = len(req.output_ids)
        if own:  # a request with tokens decodes, and each iteration in flight makes one of it at least
            own += sum(id(req) in members for members in in_flight)
        return resumed_tokens(req) + min(own, max_tokens(req))

    # -- ends ------------------------------------------------------------------------------------------------------

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
            # SGLang drops a request that is aborted while it waits, and says nothing; the search walks its queues
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
