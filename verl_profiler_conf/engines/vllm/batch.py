"""vLLM's SchedulerOutput -> response tokens per request, worked out only for the requests that are asked about.

A scheduler output says (in any release from 0.11) how many tokens to compute of each request, and how many are computed
already. Of a request that the worker has seen before, it also says how many response tokens there are, those in flight
included. So

    computed + scheduled <  prompt + made    a chunk of a prompt, or of a preempted request's refill: no token
    computed + scheduled >= prompt + made    makes token `made`, and up to one more per scheduled draft

Two cases need more. Under speculation with overlapped (async) scheduling, the counts take every draft of the iteration
before for accepted. What that iteration really made stands in its result, which is read near a window only: to read it
waits for the device. And an overlapped engine learns of a stop token one iteration late. The iteration that it started
meanwhile makes nothing for that request, and must not open a capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Any

from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.vllm.request import Request, tokens_on_arrival
from verl_profiler_conf.engines.vllm.results import sampled_tokens
from verl_profiler_conf.engines.vllm.table import RequestTable


@dataclass
class History:
    """What the batches of one worker look up: the engine's kind, the requests, and the iterations before.

    Attributes:
        windows: whose neighbourhood is worth waiting for the device.
        in_flight: iterations that are scheduled before the result of one is taken in; 0: no async scheduling.
        counts_all_drafts: the scheduler's counts take every draft in flight for accepted.
        count_outputs: response tokens of a request as the worker has them, for releases whose scheduler does not say.
        requests: what is known of each request.
        recent: the last iterations with a forward, the newest last.
        table: the worker's own table of its requests; None: it has none.
    """

    windows: tuple[TokenWindow, ...]
    in_flight: int
    counts_all_drafts: bool
    count_outputs: Callable[[str], int | None]
    requests: dict[str, Request]
    recent: deque[VllmBatch]
    table: RequestTable | None = None

    def known(self, request: str) -> Request | None:
        """What is known of a request."""
        found = self.requests.get(request)
        if found is None and self.table is not None:
            found = self.table.request(request)
            if found is not None:
                self.requests[request] = found
        return found

    def take(self, request: str) -> Request | None:
        """What is known of a request that has ended: nothing, from then on."""
        found = self.known(request)
        self.requests.pop(request, None)
        return found


class VllmBatch(Mapping[str, range]):
    """One iteration's requests, in scheduling order -> response tokens that each is about to make."""

    __slots__ = ("_answers", "_history", "_new", "_output", "_scheduled", "last_index", "number", "result")

    def __init__(self, output: Any, history: History, number: int, last_index: int) -> None:
        self.number = number
        """Of the scheduler output, those without a forward included."""
        self.last_index = last_index
        """Where in the lists of cached requests the request was that was asked about last."""
        self.result: Any = None
        """What sampling returned, once it has."""
        self._output = output
        self._history = history
        self._scheduled: dict[str, int] = output.num_scheduled_tokens
        new = output.scheduled_new_reqs
        self._new: dict[str, Any] | None = {data.req_id: data for data in new} if new else None
        self._answers: dict[str, tuple[range, int]] = {}
        """Request -> its tokens, and its drafts."""

    def __len__(self) -> int:
        return len(self._scheduled)

    def __iter__(self) -> Iterator[str]:
        return iter(self._scheduled)

    def __contains__(self, request: object) -> bool:
        return request in self._scheduled

    def keys(self) -> KeysView[str]:
        return self._scheduled.keys()

    def get(self, request: str, default: Any = None) -> Any:  # asked in every iteration; the inherited one is slower
        return self[request] if request in self._scheduled else default

    def __getitem__(self, request: str) -> range:
        return self.tokens_of(request, self._history.known(request))

    def tokens_of(self, request: str, known: Request | None) -> range:
        """As `[request]`, for the request that `known` describes: it may have ended, and its name be in use again."""
        answer = self._answers.get(request)
        if answer is None:  # worked out once: engines shorten the lists of drafts in place while the iteration runs
            answer = self._answers[request] = self._work_out(request, self._scheduled[request], known)
        return answer[0]

    @property
    def asked(self) -> KeysView[str]:
        """Requests that were asked about."""
        return self._answers.keys()

    def drafts(self, request: str) -> int:
        """Drafts scheduled for verification. A request that is not in the batch has 0."""
        if request not in self._scheduled:
            return 0
        answer = self._answers.get(request)
        return len(self._output.scheduled_spec_decode_tokens.get(request, ())) if answer is None else answer[1]

    def _work_out(self, request: str, scheduled: int, known: Request | None) -> tuple[range, int]:
        drafts = len(self._output.scheduled_spec_decode_tokens.get(request, ()))
        new = self._new.get(request) if self._new is not None else None
        if new is not None:
            computed, made = new.num_computed_tokens, tokens_on_arrival(new)
        else:
            index = self._index_of(request)
            computed = self._output.scheduled_cached_reqs.num_computed_tokens[index]
            made = self._made_so_far(request, index, computed + scheduled - drafts, known)
        if known is None:  # it ran before it was hooked: what is longer than a token and its drafts is a chunk
            return range(made, made + (drafts + 1 if scheduled == drafts + 1 else 0)), drafts
        makes_token = computed + scheduled >= known.prompt + made
        if self._history.counts_all_drafts and new is None:
            made = self._without_rejected_drafts(request, made, made + drafts + 1, known)
        made = min(made, known.max_tokens)
        stop = min(made + drafts + 1, known.max_tokens) if makes_token else made
        if self._history.in_flight and self._has_ended(request, made, stop, known):
            stop = made
        return range(made, stop), drafts

    def _has_ended(self, request: str, made: int, stop: int, known: Request) -> bool:
        """Whether the iteration before made a stop token, which an overlapped scheduler does not know yet.

        Asked only where a capture would open or be complete: nothing that comes later would tell in time.
        """
        before = self._unprocessed(request)
        if before is None or not any(
            made <= window.start < stop or made < (window.end or 0) <= stop for window in self._history.windows
        ):
            return False
        return any(token in known.stops for token in sampled_tokens(before.result, request) or ())

    def _made_so_far(self, request: str, index: int, reached: int, known: Request | None) -> int:
        resumed = 0 if known is None else known.resumed_tokens
        counts = getattr(self._output.scheduled_cached_reqs, "num_output_tokens", None)
        if counts is not None:
            return resumed + int(counts[index])
        count = self._history.count_outputs(request)  # releases before 0.11.1
        if count is not None:
            return resumed + count
        return max(reached - known.prompt, 0) if known is not None else 0

    def _index_of(self, request: str) -> int:
        """Index in the lists of cached requests: where it was last time, or behind the one that was asked about."""
        ids, index = self._output.scheduled_cached_reqs.req_ids, self.last_index
        if index >= len(ids) or ids[index] != request:
            index += 1
            if index >= len(ids) or ids[index] != request:
                index = ids.index(request)
            self.last_index = index
        return index

    def _unprocessed(self, request: str) -> VllmBatch | None:
        """The iteration that ran `request` before this one, if its result was not known when this one was scheduled."""
        if request in getattr(self._output.scheduled_cached_reqs, "resumed_req_ids", ()):
            return None
        for batch in reversed(self._history.recent):
            if batch.number < self.number - self._history.in_flight:
                break
            if batch.number < self.number and request in batch:
                return batch
        return None

    def _without_rejected_drafts(self, request: str, made: int, bound: int, known: Request) -> int:
        """`made` without the drafts of the iteration before that were rejected.

        Exact near a window, a lower bound elsewhere.
        """
        before = self._unprocessed(request)
        drafts = 0 if before is None else before.drafts(request)
        if before is None or not drafts:
            return made
        least = made - drafts
        if any(w.start <= bound and (w.end is None or least <= w.end) for w in self._history.windows):
            tokens = sampled_tokens(before.result, request)
            if tokens is not None:
                # vLLM drops what follows a stop token in an accepted draft
                last = next((i for i, token in enumerate(tokens) if token in known.stops), len(tokens) - 1)
                return least + max(last, 0)
        return least
