"""The requests of one vLLM worker, from iteration to iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.gate import NONE_FINISHED
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow
from verl_profiler_conf.engines.vllm.batch import History, VllmBatch
from verl_profiler_conf.engines.vllm.finished import FinishedRequests
from verl_profiler_conf.engines.vllm.request import Request


class VllmRequests:
    """Turns scheduler outputs into batches and requests that have ended. Works per new and per finished request only.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        in_flight: iterations that are scheduled before the result of one is taken in; 0: no async scheduling.
        max_drafts: drafts that an iteration verifies at most for a request; 0: no speculation.
        max_model_len: tokens that a sequence can have, prompt included.
        kept_iterations: the last ones in which a request that ended can have run.
        count_outputs: response tokens of a request as the worker has them, for releases whose scheduler does not say.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        in_flight: int,
        max_drafts: int,
        max_model_len: int = MAX_TOKEN,
        kept_iterations: int = 4,
        count_outputs: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        self.in_flight = in_flight
        self.max_drafts = max_drafts
        self.max_model_len = max_model_len
        self.recent: deque[VllmBatch] = deque(maxlen=max(kept_iterations, 2 * in_flight + 2))
        self.history = History(
            tuple(windows), in_flight, in_flight > 0 and max_drafts > 0, count_outputs, {}, self.recent
        )
        self._skipped: deque[Any] = deque(maxlen=self.recent.maxlen)
        """Outputs of skipped iterations, newer than all in `recent` and not looked at yet."""
        self.skip_output: Callable[[Any], Any] = self._append if max_drafts else self._skipped.append
        """`advance`, for an output with a forward in which nobody comes or goes: looked at later, if at all."""
        self._outputs = 0
        self._unreported: dict[str, int | None] = {}
        """Requests that have ended, and no iteration has run since."""

    def advance(self, output: Any) -> tuple[VllmBatch | None, Mapping[str, int | None]]:
        """The next SchedulerOutput: its batch, None when it runs no forward; and the requests that have ended.

        Those that an output without a forward names are kept for the next one with a forward, or for `take_finished`.
        """
        ended: Mapping[str, int | None] = NONE_FINISHED
        requests, number = self.history.requests, self._outputs + 1
        if output.finished_req_ids:
            known = {request: requests.pop(request, None) for request in output.finished_req_ids}
            ended = FinishedRequests(known, tuple(reversed(self.recent)), number, self.in_flight)
        for new in output.scheduled_new_reqs:
            requests[new.req_id] = Request.of(new, self.max_model_len)
        if not output.total_num_scheduled_tokens:
            self._outputs = number
            self._unreported.update(ended)
            return None, NONE_FINISHED
        if self._unreported:
            ended = {**self.take_finished(), **ended}
        return self._append(output), ended

    def catch_up(self, skipped: int) -> VllmBatch:
        """Take in the outputs of so many skipped iterations; returns the last batch."""
        if not self.max_drafts:
            number = self._outputs + skipped - len(self._skipped)
            self._outputs += skipped
            while self._skipped:
                number += 1
                self._keep(self._skipped.popleft(), number)
        return self.last_batch()

    def last_batch(self) -> VllmBatch:
        """The iteration with a forward that runs, or ran last."""
        return self.recent[-1]

    @property
    def any_left(self) -> bool:
        """Whether any request lives."""
        return bool(self.history.requests)

    def take_finished(self) -> dict[str, int | None]:
        """Requests that ended and were not reported yet."""
        finished, self._unreported = self._unreported, {}
        return finished

    def _append(self, output: Any) -> VllmBatch:
        self._outputs += 1
        return self._keep(output, self._outputs)

    def _keep(self, output: Any, number: int) -> VllmBatch:
        batch = VllmBatch(output, self.history, number, self.recent[-1].last_index if self.recent else 0)
        self.recent.append(batch)
        return batch
