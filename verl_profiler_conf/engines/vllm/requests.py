"""The requests of one vLLM worker, from iteration to iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.gate import NONE_FINISHED, Batch
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow
from verl_profiler_conf.engines.vllm.batch import History, VllmBatch
from verl_profiler_conf.engines.vllm.finished import FinishedRequests
from verl_profiler_conf.engines.vllm.request import Request, tokens_on_arrival
from verl_profiler_conf.engines.vllm.table import RequestTable, Standing


class VllmRequests:
    """Turns scheduler outputs into batches and requests that have ended. Works per new and per finished request only.

    Of skipped iterations nothing is kept where the worker has a table of its requests: it is read afterwards. Elsewhere
    the last outputs are kept, and iterations are skipped only while no request comes or ends.

    Args:
        windows: whose neighbourhood is worth waiting for the device.
        in_flight: iterations that are scheduled before the result of one is taken in; 0: no async scheduling.
        max_drafts: drafts that an iteration verifies at most for a request; 0: no speculation.
        max_model_len: tokens that a sequence can have, prompt included.
        kept_iterations: the last ones in which a request that ended can have run.
        follow_all: the tokens of every request count (`track: any`, `all`), not those of one.
        count_outputs: response tokens of a request as the worker has them, for releases whose scheduler does not say.
        table: the worker's own; None: it has none.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        in_flight: int,
        max_drafts: int,
        max_model_len: int = MAX_TOKEN,
        kept_iterations: int = 4,
        follow_all: bool = False,
        count_outputs: Callable[[str], int | None] = lambda _: None,
        table: RequestTable | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.max_drafts = max_drafts
        self.max_model_len = max_model_len
        self.table = table
        self.recent: deque[VllmBatch] = deque(maxlen=max(kept_iterations, 2 * in_flight + 2))
        self.history = History(
            tuple(windows), in_flight, in_flight > 0 and max_drafts > 0, count_outputs, {}, self.recent, table
        )
        self._needs_results = max_drafts > 0 or in_flight > 0
        """Not otherwise: to free the result of a large batch takes longer than all else here."""
        self._keeps_all = table is None and max_drafts > 0
        """Skipped iterations are kept like others: drafts are counted before an iteration, and its result after it."""
        self.keeps_skipped = table is None or in_flight > 0
        """Outputs of skipped iterations are wanted (`keep`)..."""
        self.keeps_skipped_results = self._keeps_all or (table is not None and in_flight > 0)
        """...and so are their results (`put_result`)."""
        self._follow_all = follow_all
        self._watched: frozenset[str] = frozenset()
        """Requests on whose end the session's answer depends."""
        self._older: set[str] = set()
        """Requests that lived when the session was armed and have not run since. The session does not know how many
        tokens they have."""
        self._outputs = 0
        self._skipped: deque[Any] = deque(maxlen=1 if table is not None else self.recent.maxlen)
        """Outputs of the last skipped iterations, newer than all in `recent` and not looked at yet."""
        self._skipped_result: Any = None
        """What sampling returned in the last of these."""
        self._ended_unseen: dict[str, int | None] = {}
        """Requests that ended in skipped iterations."""
        self._ended: dict[str, int | None] = {}
        """Requests that have ended, and no iteration was put to the session since."""

    # -- iterations that are put to the session --------------------------------------------------------------------

    def advance(self, output: Any) -> tuple[VllmBatch | None, Mapping[str, int | None]]:
        """The next SchedulerOutput: its batch, None when it runs no forward; and the requests that have ended.

        Those that an output without a forward names are kept for the next one with a forward, or for `take_finished`.
        """
        ended: Mapping[str, int | None] = NONE_FINISHED
        requests, number = self.history.requests, self._outputs + 1
        if output.finished_req_ids:
            known = {request: self.history.take(request) for request in output.finished_req_ids}
            final = self.table.final if self.table is not None else _unknown
            ended = FinishedRequests(known, tuple(reversed(self.recent)), number, self.in_flight, final)
            self._older.difference_update(known)
        for new in output.scheduled_new_reqs:
            requests[new.req_id] = Request.of(new, self.max_model_len)
        self._outputs = number
        if not output.total_num_scheduled_tokens:
            self._ended.update(ended)
            return None, NONE_FINISHED
        if self._ended:
            ended = {**self.take_finished(), **ended}
        if self._older:
            self._older.difference_update(output.num_scheduled_tokens)
        return self._append(output, number), ended

    def last_batch(self) -> VllmBatch:
        """The iteration with a forward that runs, or ran last."""
        return self.recent[-1]

    def put_result(self, result: Any) -> None:
        """What sampling returned in the last iteration."""
        if self._skipped:
            self._skipped_result = result
        elif self._needs_results:
            self.last_batch().result = result

    @property
    def skips(self) -> bool:
        """Whether the last iteration was skipped."""
        return bool(self._skipped)

    def any_left(self, finished: Any) -> bool:
        """Whether any request lives, apart from those in `finished`."""
        living = self.history.requests if self.table is None else self.table
        return any(request not in finished for request in living)

    def take_finished(self) -> dict[str, int | None]:
        """Requests that ended and were not reported yet."""
        finished, self._ended = self._ended, {}
        return finished

    def armed(self) -> None:
        """The session waits for its windows from now on."""
        if self._follow_all:
            self._older = set(self.history.requests if self.table is None else self.table)

    # -- iterations that are skipped -------------------------------------------------------------------------------

    def may_skip(self) -> bool:
        """Whether iterations can be skipped from here on, after one that was put to the session."""
        if self._follow_all and (self.table is None or self._older):
            return False
        self._watched = frozenset(self.last_batch().asked)
        return True

    def may_skip_change(self, output: Any) -> bool:
        """Whether the skipping goes on with an output that has new or finished requests. If so, they are noted."""
        if self.table is None or not output.total_num_scheduled_tokens:
            return False
        if any(tokens_on_arrival(new) for new in output.scheduled_new_reqs):
            return False
        finished = output.finished_req_ids
        if not self._follow_all:
            self._ended_unseen.update(dict.fromkeys(finished))
            return self._watched.isdisjoint(finished)
        self._ended_unseen.update((request, self.table.final(request)) for request in finished)
        return True

    def keep(self, output: Any) -> None:
        """A skipped output, where `keeps_skipped`."""
        if self._keeps_all:
            self._outputs += 1
            self._append(output, self._outputs)
        else:
            self._skipped.append(output)

    def catch_up(self, skipped: int, leaving: Collection[str] = ()) -> Batch:
        """So many iterations were skipped: where the requests stand after them. Those in `leaving` have ended, and the
        output at hand reports them."""
        number = self._outputs + skipped - len(self._skipped)
        if self.table is not None:
            self.recent.clear()
            self.history.requests.clear()
        if not self._keeps_all:
            self._outputs += skipped
        while self._skipped:
            number += 1
            self._append(self._skipped.popleft(), number)
        if self._skipped_result is not None:
            self.last_batch().result, self._skipped_result = self._skipped_result, None
        if self.table is None:
            return self.last_batch()
        ended, self._ended_unseen = self._ended_unseen, {}
        self._ended.update(ended)
        return Standing(self.table, {**ended, **{request: self.table.final(request) for request in leaving}})

    def _append(self, output: Any, number: int) -> VllmBatch:
        batch = VllmBatch(output, self.history, number, self.recent[-1].last_index if self.recent else 0)
        self.recent.append(batch)
        return batch


def _unknown(_: str) -> int | None:
    """The final count of a request in which nothing was kept."""
    return None
