"""SGLang's ScheduleBatch -> response tokens per request, worked out only for the requests that are asked about.

What a scheduler knows when it runs a batch: of each request the prompt, and the response tokens processed so far
(`output_ids`); of the batch, the length that each sequence will have. Under the overlap schedule `output_ids` lags by
what is still in flight, `seq_lens_cpu` does not. So, for a request that stands at `length`:

    length <  prompt + made    a chunk of a prompt, or of a retracted request's refill: no token
    length >= prompt + made    makes token `length - prompt`

Under speculation the lengths lag as well. There the next token is the number of those processed plus those in flight,
which is read from the result of the iteration before: near a window only, since that waits for the device.

All this is in a request's own tokens. Where it continues a response and says so, what lies behind is added last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.gate import NONE_FINISHED
from verl_profiler_conf.core.settings import TOKENS_BEFORE
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow

HEALTH_CHECK = "HEALTH_CHECK"
"""Begins the id of a health check's request (sglang.srt.constants: HEALTH_CHECK_RID_PREFIX)."""

WARM_UP = "verl_profiler_conf_warm_up_"
"""Begins the id that `sglang_client` gives to a server's own warm-up requests."""

ARTIFICIAL = (HEALTH_CHECK, WARM_UP)

InFlight = Sequence[tuple[Any, Any]]
"""(ScheduleBatch, GenerationBatchResult) of iterations that were started and are not processed, oldest first."""


LOOK_EVERY = 8
"""Iterations in which a request is away before it is looked for, again and again."""


class SglangRequests:
    """The requests of one scheduler from iteration to iteration. Costs the same for any batch as long as one request
    is asked about and the batch has the same members.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        widest: tokens that one iteration makes of a request at most; more than 1: speculation.
        follow_all: every request is asked about in every iteration (`track: any`, `all`).
        in_flight: gives the iterations under way.
        holds: whether the scheduler has a request somewhere, running, waiting or in between.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        widest: int = 1,
        speculative: bool = False,
        follow_all: bool = False,
        in_flight: Callable[[], InFlight] = tuple,
        holds: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self.windows = tuple(windows)
        self.widest = widest
        self.speculative = speculative
        self.in_flight = in_flight
        self._holds = holds
        self._follow_all = follow_all
        self._asked: dict[str, Any] = {}
        """Requests whose tokens were asked for in the iteration before: their end will be, too."""
        self._asking: dict[str, Any] = {}
        self._ended_before: dict[str, int | None] = {}
        """Not told yet: no real request has run since."""
        self._reqs: list[Any] = []
        self._members: tuple[int, Any] = (-1, None)
        self._rows: dict[str, int] = {}
        self._order: dict[str, int] | None = None
        self._over: set[str] = set()
        """Requests in the batch whose last token is in flight: SGLang up to some release runs them once more."""
        self._away: dict[str, int] = {}
        """Requests that are asked about and not in the batch -> for how many iterations."""

    def advance(self, batch: Any) -> tuple[SglangBatch | None, Mapping[str, int | None]]:
        """The next batch: what it makes, None when no real request is in it; and who has ended since."""
        ended = self._turn()
        reqs = batch.reqs
        members = (len(reqs), reqs[-1])
        if reqs is not self._reqs or members != self._members:
            self._reqs, self._members = reqs, members
            self._rows, self._order, self._over = {}, None, set()
        if reqs[0].rid.startswith(ARTIFICIAL) and not self.rows():
            self._ended_before.update(ended)
            return None, NONE_FINISHED
        running = SglangBatch(batch, self)
        return running, self._foresee(running, ended)

    def on_idle(self) -> Mapping[str, int | None]:
        """Nothing is left to run: who has ended of those asked about."""
        self._asking = {**self._asked, **self._asking}
        ended = self._turn()
        self._asked = {}
        self._reqs, self._members, self._rows = [], (-1, None), {}
        return ended

    def _foresee(self, running: SglangBatch, ended: Mapping[str, int | None]) -> Mapping[str, int | None]:
        """Add requests that have all their tokens, the last of them still in flight."""
        in_flight = len(self.in_flight())
        if not in_flight:
            return ended
        for request, req in list(self._asked.items()):
            most = req.sampling_params.max_new_tokens or MAX_TOKEN
            if len(req.output_ids) + in_flight * self.widest < most:
                continue
            made = running.get(request)
            total = most + resumed_tokens(req)
            if made is not None and made.start >= total:
                ended = {**ended, request: total}
                self._over.add(request)
                del self._asked[request], self._asking[request]
        return ended

    def _turn(self) -> Mapping[str, int | None]:
        """An iteration has passed: who has ended since it began."""
        asked = self._asking if not self._follow_all else {**self._asked, **self._asking}
        self._asked, self._asking = asked, {}
        ended: dict[str, int | None] = {
            request: resumed_tokens(req) + final_count(req)
            for request, req in asked.items()
            if req.finished_reason is not None
        }
        for request, iterations in self._away.items():
            # one that is aborted while it waits is dropped without a word; to look for it takes a walk through queues
            if request in asked and request not in ended and iterations % LOOK_EVERY == 0:
                req = asked[request]
                if not self._holds(req):
                    ended[request] = resumed_tokens(req) + final_count(req)
        for request in ended:
            del asked[request]
            self._away.pop(request, None)
        if self._ended_before:
            ended, self._ended_before = {**self._ended_before, **ended}, {}
        return ended or NONE_FINISHED

    def rows(self) -> dict[str, int]:
        """Real request -> its row, in scheduling order. Proportional to the batch, once per change of its members."""
        if self._order is None:
            self._order = {req.rid: row for row, req in enumerate(self._reqs) if not req.rid.startswith(ARTIFICIAL)}
        return self._order

    def unfinished(self) -> Iterator[str]:
        """Real requests that have tokens to come."""
        return (request for request in self.rows() if request not in self._over)

    def find(self, request: str) -> int:
        """The row of `request`, -1 where it is not in the batch, or for nothing."""
        row = self._rows.get(request)
        if row is None:
            if self._order is not None:
                row = self._order.get(request, -1)
            else:
                row = next((row for row, req in enumerate(self._reqs) if req.rid == request), -1)
            self._rows[request] = row
        if request in self._over:
            return -1
        if row >= 0:
            self._asking[request] = self._reqs[row]
            if self._away:
                self._away.pop(request, None)
        elif request in self._asked:
            self._asking[request] = self._asked[request]
            self._away[request] = self._away.get(request, 0) + 1
        return row


class SglangBatch(Mapping[str, range]):
    """One iteration's real requests, in scheduling order -> response tokens that each is about to make.

    `len` counts all that run, also those that run once too often.
    """

    __slots__ = ("_batch", "_seen", "_tracker")

    def __init__(self, batch: Any, tracker: SglangRequests) -> None:
        self._batch = batch
        self._tracker = tracker
        self._seen: dict[str, range] = {}

    def __len__(self) -> int:
        return len(self._tracker.rows())

    def __iter__(self) -> Iterator[str]:
        return self._tracker.unfinished()

    def __contains__(self, request: object) -> bool:
        return isinstance(request, str) and self._tracker.find(request) >= 0

    def __getitem__(self, request: str) -> range:
        made: range | None = self.get(request)
        if made is None:
            raise KeyError(request)
        return made

    def get(self, request: str, default: Any = None) -> Any:
        """The tokens of `request`, `default` where it is not in the batch."""
        made = self._seen.get(request)
        if made is None:
            row = self._tracker.find(request)
            if row < 0:
                return default
            made = self._work_out(row)
            before = resumed_tokens(self._batch.reqs[row])
            if before:
                made = range(made.start + before, made.stop + before)
            self._seen[request] = made
        return made

    def _work_out(self, row: int) -> range:
        batch, tracker = self._batch, self._tracker
        req = batch.reqs[row]
        made = len(req.output_ids)
        if req.finished_reason is not None:
            return range(made, made)
        most = req.sampling_params.max_new_tokens or MAX_TOKEN
        lengths = batch.seq_lens_cpu
        extends = not batch.forward_mode.is_decode() and not self._rides_along(row)
        if lengths is None or (tracker.speculative and not extends):
            first, stop = self._after_in_flight(req, made)
        else:
            first = int(lengths[row]) - len(req.origin_input_ids)
            if batch.encoder_lens_cpu is not None:
                first += int(batch.encoder_lens_cpu[row])
            if first < made:
                return range(made, made)
            stop = first + 1
            if self._may_be_over(req, first):
                return range(first, first)
        first = min(first, most)
        return range(first, max(first, min(stop, most)))

    def _rides_along(self, row: int) -> bool:
        """Whether it decodes within a batch of prompts (mixed chunked prefill)."""
        decoding = self._batch.decoding_reqs
        return bool(decoding) and row >= len(self._batch.reqs) - len(decoding)

    def _after_in_flight(self, req: Any, made: int) -> tuple[int, int]:
        """First token and upper bound of a decoding request: exact near a window, a lower bound elsewhere."""
        tracker = self._tracker
        least = most = made
        pending: list[tuple[Any, int]] = []
        for batch, result in tracker.in_flight():
            row = _row(batch, req)
            if row < 0:
                continue
            least += 1  # a request that decodes has its prompt done, so that an extend in flight made its one token
            most += 1
            if tracker.speculative and batch.forward_mode.is_decode():
                most += tracker.widest - 1
                pending.append((result, row))
        width = tracker.widest if self._batch.forward_mode.is_decode() else 1
        before = resumed_tokens(req)
        if pending and any(
            w.start < before + most + width and (w.end is None or before + least <= w.end) for w in tracker.windows
        ):
            for result, row in pending:
                if result.accept_lens is None:
                    return least, most + width
                result.copy_done.synchronize()
                least += int(result.accept_lens[row]) - 1
            most = least
        return least, most + width

    def _may_be_over(self, req: Any, token: int) -> bool:
        """Whether the iteration in flight has made the request's last token, so that nothing will come of this one.

        An overlapped scheduler learns of a stop token one iteration late. Looked at where a capture would open, where
        the device is waited for anyway: elsewhere the request's final count tells.
        """
        if req.sampling_params.ignore_eos:
            return False
        token += resumed_tokens(req)
        if not any(window.start == token for window in self._tracker.windows):
            return False
        for batch, result in self._tracker.in_flight():
            row = _row(batch, req)
            if row < 0 or result.copy_done is None or result.next_token_ids is None:
                continue
            result.copy_done.synchronize()
            if int(result.next_token_ids[row]) in stop_tokens(req):
                return True
        return False


def _row(batch: Any, req: Any) -> int:
    return next((row for row, other in enumerate(batch.reqs) if other is req), -1)


def resumed_tokens(req: Any) -> int:
    """Response tokens in the prompt of a request that says it continues a response."""
    own = getattr(req.sampling_params, "custom_params", None)
    before = own.get(TOKENS_BEFORE) if own else None
    return before if type(before) is int and 0 < before < len(req.origin_input_ids) else 0


def final_count(req: Any) -> int:
    """Response tokens that a request which has ended got, those cut off behind its end not counted."""
    return len(req.output_ids) if req.finished_len is None else int(req.finished_len)


def stop_tokens(req: Any) -> set[int]:
    """Token ids that end the request."""
    found: set[int] = set()
    tokenizer = req.tokenizer
    for ids in (
        req.sampling_params.stop_token_ids,
        req.eos_token_ids,
        getattr(tokenizer, "additional_stop_token_ids", None),
    ):
        found.update(ids or ())
    if getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(tokenizer.eos_token_id)
    return found
