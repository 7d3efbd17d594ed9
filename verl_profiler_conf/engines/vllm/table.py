"""The requests of a vLLM worker, as its model runner keeps them: read when they are wanted, not followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_profiler_conf.engines.vllm.request import Request, resumed_tokens


class RequestTable:
    """Reads the V1 model runner's `requests`, which names every request from its first iteration until it ends.

    Args:
        runner: the model runner.
        max_model_len: tokens that a sequence can have, prompt included.
        max_drafts: drafts that an iteration verifies at most for a request.
        in_flight: iterations that are scheduled before the result of one is taken in: 0 or 1.
    """

    def __init__(self, runner: Any, *, max_model_len: int, max_drafts: int, in_flight: int) -> None:
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_drafts = max_drafts
        self._in_flight = in_flight

    @staticmethod
    def can_read(runner: Any) -> bool:
        """Whether this model runner keeps its requests so."""
        batch = getattr(runner, "input_batch", None)
        return isinstance(getattr(runner, "requests", None), dict) and hasattr(batch, "req_id_to_index")

    def __iter__(self) -> Iterator[str]:
        return iter(self._runner.requests)

    def request(self, request: str) -> Request | None:
        """What is known of a request."""
        state = self._runner.requests.get(request)
        return None if state is None else Request.of(state, self._max_model_len)

    def made(self, request: str) -> int | None:
        """Response tokens so far, those in flight included."""
        state = self._runner.requests.get(request)
        return None if state is None else resumed_tokens(state) + len(state.output_token_ids)

    def final(self, request: str) -> int | None:
        """Response tokens of a request that has ended and is still in the table."""
        state, known = self._runner.requests.get(request), self.request(request)
        if state is None or known is None:
            return None
        count = len(state.output_token_ids)
        if self._in_flight:
            # the scheduler knew of the end before it had the result of the last iteration: nothing of that counts
            count -= bool(count) and request in self._runner.input_batch.req_id_to_index
        elif self._max_drafts:
            verified = state.output_token_ids[-1 - self._max_drafts :]
            stop = next((index for index, token in enumerate(verified) if token in known.stops), None)
            if stop is not None:  # vLLM drops what follows it in an accepted draft
                count -= len(verified) - 1 - stop
        return min(known.resumed_tokens + count, known.max_tokens)


class Standing(Mapping[str, range]):
    """Where every request stands after skipped iterations: request -> the last token that it made.

    Args:
        table: the requests that live, or have just ended.
        ended: those that ended in these iterations -> their final number of tokens. A name can be in use again.
    """

    def __init__(self, table: RequestTable, ended: Mapping[str, int | None]) -> None:
        self._table = table
        self._ended = ended

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[str]:
        yield from self._table
        for request in self._ended:
            if self._table.made(request) is None:
                yield request

    def get(self, request: str, default: Any = None) -> Any:
        """The last token of `request`, as a range; an empty one where it has made none."""
        made = self._ended.get(request)
        if made is None:
            made = self._table.made(request)
        return default if made is None else range(max(made - 1, 0), made)

    def __getitem__(self, request: str) -> range:
        found: range | None = self.get(request)
        if found is None:
            raise KeyError(request)
        return found
