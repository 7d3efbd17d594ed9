"""What the hook keeps for one vLLM worker: its session, and its requests from iteration to iteration."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection
from typing import Any

from verl_profiler_conf.capture.session import Session, open_session
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.engines.announcing import announce
from verl_profiler_conf.engines.hooking import check_shape, published_settings, takes_profile_calls
from verl_profiler_conf.engines.skipping import SkipBudget, skippable
from verl_profiler_conf.engines.vllm.release import lacks, vllm_version
from verl_profiler_conf.engines.vllm.requests import VllmRequests
from verl_profiler_conf.engines.vllm.table import RequestTable

STATE = "_verl_profiler_conf"
"""Attribute of a worker that holds its hook; of its class, None."""

_hooks: weakref.WeakSet[WorkerHook] = weakref.WeakSet()
"""Of the workers of this process."""


class WorkerHook(SkipBudget):
    """What the hook keeps for one worker: its session, None where nothing is to be captured, and its requests.

    While any iterations are left to skip, they are only counted (`left`), and `begin` is not called.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.session: Session | None = None
        self.settings: Settings | None = None
        self.requests: VllmRequests | None = None
        self.owner: type | None = None
        """The class whose `execute_model` is called first in an iteration."""
        self.inside = False
        """An iteration is under way that has to be ended: its sampling is not done."""
        self.warming_up = False
        self.keeps_skipped = False
        """The requests want the outputs of skipped iterations."""
        self._worker = worker
        self._published: str | None = None

    @property
    def wants_iterations(self) -> bool:
        """Whether anything can come of an iteration, until a window is published or start_profile arrives."""
        session, requests = self.session, self.requests
        if session is None or requests is None:
            return False
        return session.is_waiting or (session.by_request and requests.table is None)

    def refresh(self) -> None:
        """Follow what is published: a job in the same process may have ended, and another one begun."""
        published = os.environ.get(ENV_NAME)
        if published == self._published:
            return
        self._published = published
        settings = published_settings("vLLM")
        if self.session is not None:
            self.session.close("job_end")  # which takes in skipped iterations
        self.session = self.requests = None
        self.settle()
        self.settings = settings
        if settings is None:
            return
        self.session = open_session(settings, engine="vllm", version=vllm_version(), rank=global_rank(self._worker))
        if self.session is not None:
            weak = weakref.WeakMethod(self._catch_up)  # sessions are kept until the process ends, workers are not
            self.session.catch_up = lambda: (weak() or _do_nothing)()
            self.requests = requests = make_requests(self._worker, settings)
            self.keeps_skipped = requests.keeps_skipped
            requests.armed()
            check_shape(self.session, "vLLM", vllm_version(), lacks())
            if not self.session.failed:
                announce(self.session, "vllm")

    def warm_up(self, begins: bool) -> None:
        """The worker's warm-up begins or ends. The requests that it makes up are none."""
        self._catch_up()
        self.warming_up = begins

    def claim(self, owner: type) -> bool:
        """Whether `execute_model` of this class is the first that an iteration calls: it may call one that it inherits,
        which is hooked as well."""
        if self.owner is None:
            self.owner = owner
        return self.owner is owner

    # -- one iteration -----------------------------------------------------------------------------------------------

    def begin(self, output: Any) -> None:
        """Before `execute_model`, of an iteration that is not skipped."""
        if self.warming_up:
            return
        if self.inside:  # ranks of a pipeline that do not sample may never be asked to
            self.end(None)
        if output.scheduled_new_reqs:
            self.refresh()
        session, requests = self.session, self.requests
        if session is None or requests is None:
            return
        if self.wants_iterations:
            self._ask(session, requests, output)
        elif session.by_request and session.iteration < 0:
            session.begin({})
            session.idle()  # leaves word that iterations run, and that nobody has called start_profile

    def skips_change(self, output: Any) -> bool:
        """Whether the skipping goes on with an output in which somebody comes or goes, or that runs no forward."""
        if output.scheduled_new_reqs and os.environ.get(ENV_NAME) != self._published:
            return False
        return self.requests is not None and self.requests.may_skip_change(output)

    def keep_skipped(self, output: Any) -> None:
        """An output is skipped, and wanted: `keeps_skipped`."""
        if self.requests is not None:
            self.requests.keep(output)
            self.inside = self.requests.keeps_skipped_results

    def end(self, result: Any) -> None:
        """After the last call of the iteration; `result` is what its sampling returned."""
        if not self.inside:
            return
        self.inside = False
        if self.requests is not None:
            self.requests.put_result(result)
        if self.session is not None:
            self.session.end()

    def fail_iteration(self) -> None:
        """The iteration that was begun has raised: it made no token, and its engine hardly survives it."""
        if not self.inside:
            return
        self.inside = False
        session, requests = self.session, self.requests
        if session is not None and requests is not None and not requests.skips:
            batch = requests.last_batch()
            session.idle({request: batch[request].start for request in tuple(batch.asked)}, reason="error")

    def _ask(self, session: Session, requests: VllmRequests, output: Any) -> None:
        """Put an iteration to the session."""
        self._catch_up(output.finished_req_ids)
        batch, finished = requests.advance(output)
        if batch is not None:
            self.inside = True
            session.begin(batch, finished)
            iterations = skippable(session.headroom, max_drafts=requests.max_drafts, in_flight=requests.in_flight)
            if iterations and requests.may_skip():
                self.grant(iterations)
        elif not requests.any_left(output.finished_req_ids):
            finished = requests.take_finished()
            if finished:
                session.idle(finished)

    def _catch_up(self, leaving: Collection[str] = ()) -> None:
        """Tell the session of the iterations that were skipped: how many, and how far everyone is."""
        skipped = self.settle()
        if skipped and self.session is not None and self.requests is not None:
            self.session.skip(self.requests.catch_up(skipped, leaving), skipped)

    # -- calls and ends ------------------------------------------------------------------------------------------------

    def profile(self, starts: bool, prefix: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        self.refresh()
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None and self.requests is not None:
            self._catch_up()
            if starts:
                self.session.start(prefix)
                self.requests.armed()
            else:
                self.session.stop()
        return True

    def close(self) -> None:
        """The worker ends, and perhaps its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.capture.writer import default_writer

            self.session.close("job_end")
            default_writer().flush()

    def give_up(self, error: Exception) -> None:
        """What vLLM said was not understood: leave this worker alone from here on, unless the user wants the error."""
        with contextlib.suppress(Exception):
            self.refresh()  # another job may have begun, and it has to be told as well
        session, self.session, self.requests = self.session, None, None
        self.inside = False
        self.settle()
        if session is not None:
            session.fail(error)


def _do_nothing() -> None:
    """The worker has gone."""


def hook_of(worker: Any) -> WorkerHook:
    """The hook's state, kept on the worker itself so that both go together."""
    hook: WorkerHook | None = getattr(worker, STATE, None)
    if hook is None:
        hook = WorkerHook(worker)
        setattr(worker, STATE, hook)
        _hooks.add(hook)
        hook.refresh()
    return hook


def wants_iterations() -> bool:
    """Whether any worker of this process wants to be told of its iterations."""
    return any(hook.wants_iterations for hook in _hooks)


def all_skip() -> bool:
    """Whether no worker of this process has to be told of its next iteration."""
    return all(hook.left or not hook.wants_iterations for hook in _hooks)


def make_requests(worker: Any, settings: Settings) -> VllmRequests:
    """For the engine that this worker belongs to."""
    config = worker.vllm_config

    def count_outputs(request: str) -> int | None:
        state = getattr(worker.model_runner, "requests", {}).get(request)
        return None if state is None else len(state.output_token_ids)

    stages = int(config.parallel_config.pipeline_parallel_size)
    at_once = stages  # batches: one for each stage of a pipeline...
    if getattr(config.scheduler_config, "async_scheduling", False):
        # ...and one more under async scheduling, which the V1 model runner has without a pipeline only
        at_once += stages == 1 or bool(getattr(config, "use_v2_model_runner", False))
        in_flight = at_once - 1
    else:
        in_flight = 0  # a request runs again after its result only
    max_drafts = int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0)
    max_model_len = int(config.model_config.max_model_len)
    table, runner = None, getattr(worker, "model_runner", None)
    # the table of another stage lags behind, and under async scheduling it takes drafts in flight for accepted
    if stages == 1 and not (in_flight and max_drafts) and RequestTable.can_read(runner):
        table = RequestTable(runner, max_model_len=max_model_len, max_drafts=max_drafts, in_flight=in_flight)
    return VllmRequests(
        settings.windows,
        in_flight=in_flight,
        max_drafts=max_drafts,
        max_model_len=max_model_len,
        kept_iterations=2 * at_once + 2,
        follow_all=settings.track != "lead",
        count_outputs=count_outputs,
        table=table,
    )


def global_rank(worker: Any) -> int:
    """Rank over all data-parallel engines: each of them counts its workers from 0, except under torchrun."""
    parallel = worker.vllm_config.parallel_config
    if parallel.data_parallel_size <= 1 or parallel.distributed_executor_backend == "external_launcher":
        return int(worker.rank)
    index = getattr(parallel, "data_parallel_index", None)  # data_parallel_rank is 0 in engines that share no layer
    return int(parallel.data_parallel_rank if index is None else index) * int(parallel.world_size) + int(worker.rank)
