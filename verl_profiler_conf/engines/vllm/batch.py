"""vLLM's SchedulerOutput -> response tokens per request, worked out only for the requests that are asked about.

What a worker is told for an iteration (any release from 0.11): the tokens to compute per request, how many are computed
already, and for requests seen before how many response tokens there are, tokens in flight included. From these:

    computed + scheduled <  prompt + made    a chunk of a prompt, or of a preempted request's refill: no token
    computed + scheduled >= prompt + made    makes token `made`, and up to one more per scheduled draft

Two things need more. With speculation under overlapped (async) scheduling the counts take every draft of the iteration
before for accepted; what it really made is read from its result, near a window only, since that waits for the device.
And an overlapped engine learns of a stop token one iteration late: the iteration that it started meanwhile makes
nothing for that request, and must not open a capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.gate import NONE_FINISHED
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow
from verl_profiler_conf.engines.vllm.finished import FinishedRequests
from verl_profiler_conf.engines.vllm.request import Request, remember, resumed_by
from verl_profiler_conf.engines.vllm.results import sampled_tokens


class VllmRequests:
    """The requests of one worker from iteration to iteration. Touched per new and per finished request only.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        ahead: iterations that are scheduled before a result is taken in; 0: none (no async scheduling).
        drafts: that an iteration verifies at most for a request; 0: no speculation.
        longest: tokens that a sequence can have, prompt included.
        remember: iterations in which a request that ended must have been, counted back.
        count_outputs: response tokens of a request as the worker has them, for releases whose scheduler does not say.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        ahead: int,
        drafts: int,
        longest: int = MAX_TOKEN,
        remember: int = 4,
        count_outputs: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        self.windows = tuple(windows)
        self.ahead = ahead
        self.drafts = drafts
        self.over_counts = ahead > 0 and drafts > 0
        self.longest = longest
        self.count_outputs = count_outputs
        self.requests: dict[str, Request] = {}
        self.recent: deque[VllmBatch] = deque(maxlen=max(remember, 2 * ahead + 2))
        """The last iterations with a forward, the newest last."""
        self._passed: deque[Any] = deque(maxlen=self.recent.maxlen)
        """Outputs that came after those, not looked at yet."""
        self.skip_output: Callable[[Any], Any] = self._append if drafts else self._passed.append
        """`advance`, for an output with a forward in which nobody comes or goes: looked at later, if at all."""
        self._turn = 0
        self._held: dict[str, int | None] = {}

    def advance(self, output: Any) -> tuple[VllmBatch | None, Mapping[str, int | None]]:
        """The next SchedulerOutput: its batch, None when it runs no forward; and the requests that have ended.

        Those that an output without a forward names are kept for the next with one, or for `take_finished`.
        """
        ended: Mapping[str, int | None] = NONE_FINISHED
        turn = self._turn + 1
        if output.finished_req_ids:
            gone = {request: self.requests.pop(request, None) for request in output.finished_req_ids}
            ended = FinishedRequests(gone, tuple(reversed(self.recent)), turn, self.ahead)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = remember(new, self.longest)
        if not output.total_num_scheduled_tokens:
            self._turn = turn
            self._held.update(ended)
            return None, NONE_FINISHED
        if self._held:
            ended = {**self.take_finished(), **ended}
        return self._append(output), ended

    def catch_up(self, passed: int) -> VllmBatch:
        """Take in the outputs that were passed by, so many of them; returns the last one."""
        if not self.drafts:
            turn = self._turn + passed - len(self._passed)
            self._turn += passed
            while self._passed:
                turn += 1
                self._keep(self._passed.popleft(), turn)
        return self.last()

    def last(self) -> VllmBatch:
        """The iteration with a forward that runs, or ran last."""
        return self.recent[-1]

    def _append(self, output: Any) -> VllmBatch:
        self._turn += 1
        return self._keep(output, self._turn)

    def _keep(self, output: Any, turn: int) -> VllmBatch:
        batch = VllmBatch(output, self, turn, self.recent[-1].hint if self.recent else 0)
        self.recent.append(batch)
        return batch

    def take_finished(self) -> dict[str, int | None]:
        """Requests that ended and were not reported yet."""
        held, self._held = self._held, {}
        return held


class VllmBatch(Mapping[str, range]):
    """One iteration's requests, in scheduling order -> response tokens that each is about to make."""

    __slots__ = ("_new", "_output", "_seen", "_tokens", "_tracker", "hint", "result", "turn")

    def __init__(self, output: Any, tracker: VllmRequests, turn: int, hint: int) -> None:
        self.turn = turn
        self.hint = hint
        """Where in the lists of cached requests the one was that was asked about last."""
        self.result: Any = None
        """What sampling returned, once it has."""
        self._output = output
        self._tracker = tracker
        self._tokens: dict[str, int] = output.num_scheduled_tokens
        new = output.scheduled_new_reqs
        self._new: dict[str, Any] | None = {data.req_id: data for data in new} if new else None
        self._seen: dict[str, tuple[range, int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def __contains__(self, request: object) -> bool:
        return request in self._tokens

    def keys(self) -> KeysView[str]:
        return self._tokens.keys()

    def get(self, request: str, default: Any = None) -> Any:  # asked in every iteration; the inherited one is slower
        return self[request] if request in self._tokens else default

    def __getitem__(self, request: str) -> range:
        return self.made(request, self._tracker.requests.get(request))

    def made(self, request: str, known: Request | None) -> range:
        """As `[request]`, for one that `known` describes: it may have ended, and its name be in use again."""
        seen = self._seen.get(request)
        if seen is None:  # once: engines shorten the lists of drafts in place while the iteration runs
            seen = self._seen[request] = self._work_out(request, self._tokens[request], known)
        return seen[0]

    def drafts(self, request: str) -> int:
        """Drafts scheduled for verification; 0 as well for a request that is not in the batch."""
        if request not in self._tokens:
            return 0
        seen = self._seen.get(request)
        return len(self._output.scheduled_spec_decode_tokens.get(request, ())) if seen is None else seen[1]

    def _work_out(self, request: str, scheduled: int, known: Request | None) -> tuple[range, int]:
        drafts = len(self._output.scheduled_spec_decode_tokens.get(request, ()))
        new = self._new.get(request) if self._new is not None else None
        if new is not None:
            computed, made = new.num_computed_tokens, resumed_by(new)
        else:
            place = self._place(request)
            computed = self._output.scheduled_cached_reqs.num_computed_tokens[place]
            made = self._made_so_far(request, place, computed + scheduled - drafts, known)
        if known is None:  # it was under way before we looked: more than a token and its drafts is a chunk
            return range(made, made + (drafts + 1 if scheduled == drafts + 1 else 0)), drafts
        makes = computed + scheduled >= known.prompt + made
        if self._tracker.over_counts and new is None:
            made = self._corrected(request, made, made + drafts + 1, known)
        made = min(made, known.most)
        stop = min(made + drafts + 1, known.most) if makes else made
        if self._tracker.ahead and self._has_ended(request, made, stop, known):
            stop = made
        return range(made, stop), drafts

    def _has_ended(self, request: str, made: int, stop: int, known: Request) -> bool:
        """Whether the iteration before made a stop token, which an overlapped scheduler does not know yet. Looked at
        where a capture would open or be complete: nothing that comes later would tell in time."""
        before = self._in_flight(request)
        if before is None or not any(
            made <= window.start < stop or made < (window.end or 0) <= stop for window in self._tracker.windows
        ):
            return False
        return any(token in known.stops for token in sampled_tokens(before.result, request) or ())

    def _made_so_far(self, request: str, place: int, reached: int, known: Request | None) -> int:
        before = 0 if known is None else known.before
        counts = getattr(self._output.scheduled_cached_reqs, "num_output_tokens", None)
        if counts is not None:
            return before + int(counts[place])
        count = self._tracker.count_outputs(request)  # releases before 0.11.1
        if count is not None:
            return before + count
        return max(reached - known.prompt, 0) if known is not None else 0

    def _place(self, request: str) -> int:
        """Index in the lists of cached requests: where it was last time, or after the one asked about before."""
        ids, hint = self._output.scheduled_cached_reqs.req_ids, self.hint
        if hint >= len(ids) or ids[hint] != request:
            hint += 1
            if hint >= len(ids) or ids[hint] != request:
                hint = ids.index(request)
            self.hint = hint
        return hint

    def _in_flight(self, request: str) -> VllmBatch | None:
        """The iteration that ran `request` before this one, if its result was not known when this one was scheduled."""
        if request in getattr(self._output.scheduled_cached_reqs, "resumed_req_ids", ()):
            return None
        for batch in reversed(self._tracker.recent):
            if batch.turn < self.turn - self._tracker.ahead:
                break
            if batch.turn < self.turn and request in batch:
                return batch
        return None

    def _corrected(self, request: str, made: int, bound: int, known: Request) -> int:
        """`made` without the drafts of the iteration before that were rejected: exactly near a window, a lower bound
        elsewhere."""
        before = self._in_flight(request)
        drafts = 0 if before is None else before.drafts(request)
        if before is None or not drafts:
            return made
        least = made - drafts
        if any(w.start <= bound and (w.end is None or least <= w.end) for w in self._tracker.windows):
            tokens = sampled_tokens(before.result, request)
            if tokens is not None:
                # what follows a stop token in an accepted draft is dropped
                last = next((i for i, token in enumerate(tokens) if token in known.stops), len(tokens) - 1)
                return least + max(last, 0)
        return least
