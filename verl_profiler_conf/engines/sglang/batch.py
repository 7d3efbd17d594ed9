"""SGLang's ScheduleBatch -> response tokens per request, worked out only for the requests that are asked about.

A scheduler that runs a batch knows of each request the prompt and the response tokens that were processed so far
(`output_ids`), and of the batch the length that each sequence will have (`seq_lens_cpu`). Under the overlap schedule
`output_ids` lacks what is still in flight, `seq_lens_cpu` does not. So for a sequence of `length`

    length <  prompt + made    a chunk of a prompt, or of a retracted request's refill: no token
    length >= prompt + made    makes token `length - prompt`

Under speculation the lengths lag as well. There the next token is the number of those processed plus those in flight.
That is read from the result of the iteration before, near a window only: to read it waits for the device.

All this counts a request's own tokens. Where it continues a response and says so, the earlier tokens are added last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.sglang.members import Members
from verl_profiler_conf.engines.sglang.request import max_tokens, resumed_tokens, stop_tokens

InFlight = Sequence[tuple[Any, Any]]
"""(ScheduleBatch, GenerationBatchResult) of iterations that were started and are not processed, oldest first."""


@dataclass(frozen=True)
class SchedulerFacts:
    """What the batches of one scheduler look up.

    Attributes:
        windows: whose neighbourhood is worth waiting for the device.
        speculative: an iteration can make several tokens of a request...
        tokens_per_iteration: ...so many at most.
        in_flight: gives the iterations under way.
    """

    windows: tuple[TokenWindow, ...]
    speculative: bool
    tokens_per_iteration: int
    in_flight: Callable[[], InFlight]


class SglangBatch(Mapping[str, range]):
    """One iteration's real requests, in scheduling order -> response tokens that each is about to make.

    `len` counts all that run, also those that run once too often.
    """

    __slots__ = ("_answers", "_batch", "_facts", "_members")

    def __init__(self, batch: Any, members: Members, facts: SchedulerFacts) -> None:
        self._batch = batch
        self._members = members
        self._facts = facts
        self._answers: dict[str, range] = {}

    def __len__(self) -> int:
        return len(self._members.rows())

    def __iter__(self) -> Iterator[str]:
        return self._members.unfinished()

    def __contains__(self, request: object) -> bool:
        return isinstance(request, str) and self._members.find(request) >= 0

    def __getitem__(self, request: str) -> range:
        made: range | None = self.get(request)
        if made is None:
            raise KeyError(request)
        return made

    @property
    def asked(self) -> tuple[str, ...]:
        """Requests in it that were asked about."""
        return tuple(self._answers)

    def get(self, request: str, default: Any = None) -> Any:
        """The tokens of `request`, `default` where it is not in the batch."""
        made = self._answers.get(request)
        if made is None:
            row = self._members.find(request)
            if row < 0:
                return default
            made = self._work_out(row)
            resumed = resumed_tokens(self._batch.reqs[row])
            if resumed:
                made = range(made.start + resumed, made.stop + resumed)
            self._answers[request] = made
        return made

    def _work_out(self, row: int) -> range:
        batch = self._batch
        req = batch.reqs[row]
        made = len(req.output_ids)
        if req.finished_reason is not None:
            return range(made, made)
        lengths = batch.seq_lens_cpu
        extends = not batch.forward_mode.is_decode() and not self._decodes_among_prompts(row)
        if lengths is None or (self._facts.speculative and not extends):
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
        limit = max_tokens(req)
        first = min(first, limit)
        return range(first, max(first, min(stop, limit)))

    def _decodes_among_prompts(self, row: int) -> bool:
        """Whether it decodes within a batch of prompts (mixed chunked prefill)."""
        decoding = self._batch.decoding_reqs
        return bool(decoding) and row >= len(self._batch.reqs) - len(decoding)

    def _after_in_flight(self, req: Any, made: int) -> tuple[int, int]:
        """First token and upper bound of a decoding request: exact near a window, a lower bound elsewhere."""
        facts = self._facts
        least = most = made
        pending: list[tuple[Any, int]] = []
        for batch, result in facts.in_flight():
            row = _row_of(batch, req)
            if row < 0:
                continue
            least += 1  # a request that decodes has its prompt done, so that an extend in flight made its one token
            most += 1
            if facts.speculative and batch.forward_mode.is_decode():
                most += facts.tokens_per_iteration - 1
                pending.append((result, row))
        width = facts.tokens_per_iteration if self._batch.forward_mode.is_decode() else 1
        resumed = resumed_tokens(req)
        if pending and any(
            w.start < resumed + most + width and (w.end is None or resumed + least <= w.end) for w in facts.windows
        ):
            for result, row in pending:
                if result.accept_lens is None:
                    return least, most + width
                result.copy_done.synchronize()
                least += int(result.accept_lens[row]) - 1
            most = least
        return least, most + width

    def _may_be_over(self, req: Any, token: int) -> bool:
        """Whether the iteration in flight has made the request's last token, so that this one makes none of it.

        An overlapped scheduler learns of a stop token one iteration late. Asked only where a capture would open, where
        the device is waited for anyway. Elsewhere the request's final count tells.
        """
        if req.sampling_params.ignore_eos:
            return False
        token += resumed_tokens(req)
        if not any(window.start == token for window in self._facts.windows):
            return False
        for batch, result in self._facts.in_flight():
            row = _row_of(batch, req)
            if row < 0 or result.copy_done is None or result.next_token_ids is None:
                continue
            result.copy_done.synchronize()
            if int(result.next_token_ids[row]) in stop_tokens(req):
                return True
        return False


def _row_of(batch: Any, req: Any) -> int:
    return next((row for row, other in enumerate(batch.reqs) if other is req), -1)
