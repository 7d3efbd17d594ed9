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
from dataclasses import dataclass
from typing import Any

from verl_profiler_conf.engines.vllm_tokens import sampled_tokens
from verl_profiler_conf.window import MAX_TOKEN, TokenWindow

NO_ONE: Mapping[str, int | None] = {}


@dataclass(frozen=True)
class Request:
    """What has to be remembered of a request while it lives.

    Attributes:
        prompt: length of its prompt; a preempted request that comes back as a new one still has its own.
        most: response tokens that it can have.
        stops: token ids that end it.
    """

    prompt: int
    most: int
    stops: frozenset[int] | set[int] = frozenset()


class Tracker:
    """The requests of one worker from iteration to iteration. Touched per new and per finished request only.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        ahead: iterations that are scheduled before a result is taken in; 0: none (no async scheduling).
        speculative: drafts are verified.
        longest: tokens that a sequence can have, prompt included.
        remember: iterations in which a request that ended must have been, counted back.
        count_outputs: response tokens of a request as the worker has them, for releases whose scheduler does not say.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        ahead: int,
        speculative: bool,
        longest: int = MAX_TOKEN,
        remember: int = 4,
        count_outputs: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        self.windows = tuple(windows)
        self.ahead = ahead
        self.over_counts = ahead > 0 and speculative
        self.longest = longest
        self.count_outputs = count_outputs
        self.requests: dict[str, Request] = {}
        self.recent: deque[Scheduled] = deque(maxlen=max(remember, 2 * ahead + 2))
        """The last iterations with a forward, the newest last."""
        self._turn = 0
        self._held: dict[str, int | None] = {}

    def advance(self, output: Any) -> tuple[Scheduled | None, Mapping[str, int | None]]:
        """The next SchedulerOutput: its batch, None when it runs no forward; and the requests that have ended.

        Those that an output without a forward names are kept for the next with one, or for `drain`.
        """
        self._turn += 1
        ended: Mapping[str, int | None] = NO_ONE
        if output.finished_req_ids:
            gone = {request: self.requests.pop(request, None) for request in output.finished_req_ids}
            ended = Ended(gone, tuple(reversed(self.recent)), self._turn, self.ahead)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = self._remember(new)
        if not output.total_num_scheduled_tokens:
            self._held.update(ended)
            return None, NO_ONE
        if self._held:
            ended = {**self.drain(), **ended}
        hint = self.recent[-1].hint if self.recent else 0
        batch = Scheduled(output, self, self._turn, hint)
        self.recent.append(batch)
        return batch, ended

    def drain(self) -> dict[str, int | None]:
        """Requests that ended and were not reported yet."""
        held, self._held = self._held, {}
        return held

    def _remember(self, new: Any) -> Request:
        prompt = prompt_length(new)
        most = max(self.longest - prompt, 1)
        params = new.sampling_params
        if params is None:  # pooling: it has no response
            return Request(prompt, 0)
        if params.max_tokens is not None:
            most = min(most, params.max_tokens)
        return Request(prompt, most, getattr(params, "all_stop_token_ids", None) or frozenset())


class Scheduled(Mapping[str, range]):
    """One iteration's requests, in scheduling order -> response tokens that each is about to make."""

    __slots__ = (
        "_cached",
        "_counts",
        "_new",
        "_seen",
        "_spec",
        "_tokens",
        "_tracker",
        "hint",
        "result",
        "turn",
    )

    def __init__(self, output: Any, tracker: Tracker, turn: int, hint: int) -> None:
        self.turn = turn
        self.hint = hint
        """Where in the lists of cached requests the one was that was asked about last."""
        self.result: Any = None
        """What sampling returned, once it has."""
        self._tracker = tracker
        self._tokens: dict[str, int] = output.num_scheduled_tokens
        self._spec: dict[str, list[int]] = output.scheduled_spec_decode_tokens
        self._cached = output.scheduled_cached_reqs
        self._counts: list[int] | None = getattr(self._cached, "num_output_tokens", None)
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
        return len(self._spec.get(request, ())) if seen is None else seen[1]

    def _work_out(self, request: str, scheduled: int, known: Request | None) -> tuple[range, int]:
        drafts = len(self._spec.get(request, ()))
        new = self._new.get(request) if self._new is not None else None
        if new is not None:
            computed, made = new.num_computed_tokens, tokens_before(new)
        else:
            place = self._place(request)
            computed = self._cached.num_computed_tokens[place]
            made = self._made_so_far(request, place, computed + scheduled - drafts, known)
        if known is None:  # it was under way before we looked: more than a token and its drafts is a chunk
            return range(made, made + (drafts + 1 if scheduled == drafts + 1 else 0)), drafts
        makes = computed + scheduled >= known.prompt + made
        if self._tracker.over_counts and new is None:
            made = self._corrected(request, made, made + drafts + 1)
        made = min(made, known.most)
        stop = min(made + drafts + 1, known.most) if makes else made
        if self._tracker.ahead and self._has_ended(request, made, stop, known):
            stop = made
        return range(made, stop), drafts

    def _has_ended(self, request: str, made: int, stop: int, known: Request) -> bool:
        """Whether the iteration before made a stop token, which an overlapped scheduler does not know yet. Looked at
        where a capture would open: it would hold nothing."""
        before = self._in_flight(request)
        if before is None or not any(made <= window.start < stop for window in self._tracker.windows):
            return False
        return any(token in known.stops for token in sampled_tokens(before.result, request) or ())

    def _made_so_far(self, request: str, place: int, reached: int, known: Request | None) -> int:
        if self._counts is not None:
            return self._counts[place]
        count = self._tracker.count_outputs(request)  # releases before 0.11.1
        if count is not None:
            return count
        return max(reached - known.prompt, 0) if known is not None else 0

    def _place(self, request: str) -> int:
        """Index in the lists of cached requests: where it was last time, or after the one asked about before."""
        ids, hint = self._cached.req_ids, self.hint
        if hint >= len(ids) or ids[hint] != request:
            hint += 1
            if hint >= len(ids) or ids[hint] != request:
                hint = ids.index(request)
            self.hint = hint
        return hint

    def _in_flight(self, request: str) -> Scheduled | None:
        """The iteration that ran `request` before this one, if its result was not known when this one was scheduled."""
        if request in getattr(self._cached, "resumed_req_ids", ()):
            return None
        for batch in reversed(self._tracker.recent):
            if batch.turn < self.turn - self._tracker.ahead:
                break
            if batch.turn < self.turn and request in batch:
                return batch
        return None

    def _corrected(self, request: str, made: int, bound: int) -> int:
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
                return least + max(len(tokens) - 1, 0)
        return least


class Ended(Mapping[str, "int | None"]):
    """Requests that ended since the iteration before -> how many response tokens they got, worked out on demand."""

    __slots__ = ("_ahead", "_gone", "_recent", "_turn")

    def __init__(self, gone: dict[str, Request | None], recent: tuple[Scheduled, ...], turn: int, ahead: int) -> None:
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


def _reached(batch: Scheduled, request: str, known: Request) -> int:
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


def prompt_length(new: Any) -> int:
    """Tokens of a NewRequestData's prompt, also where the prompt came as embeddings."""
    if new.prompt_token_ids is not None:
        return len(new.prompt_token_ids)
    embeds = getattr(new, "prompt_embeds", None)
    return 0 if embeds is None else int(embeds.shape[0])


def tokens_before(new: Any) -> int:
    """Response tokens that a request brings along: Model Runner V2 gets preempted ones back as new, with theirs."""
    filled = getattr(new, "prefill_token_ids", None)
    return 0 if filled is None else max(len(filled) - prompt_length(new), 0)
