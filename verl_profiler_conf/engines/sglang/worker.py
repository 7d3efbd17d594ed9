"""What the hook keeps for one SGLang scheduler: its session, the requests it runs, and its rank."""

from __future__ import annotations

from typing import Any

from verl_profiler_conf.capture.session import Session, open_session
from verl_profiler_conf.engines.hooking import published_settings, say_once, takes_profile_calls
from verl_profiler_conf.engines.sglang.release import CLOSE_SECONDS, sglang_version
from verl_profiler_conf.engines.sglang.requests import SglangRequests


class SchedulerHook:
    """What the hook keeps for one scheduler: its session, None where nothing is to be captured, and its requests."""

    def __init__(self, scheduler: Any) -> None:
        self.session: Session | None = None
        self.requests: SglangRequests | None = None
        self.inside = False
        """An iteration is under way."""
        self.settings = published_settings("SGLang")
        self._scheduler = scheduler
        self._ran = False
        """Something ran since the scheduler was idle."""
        if self.settings is None or not scheduler.is_generation:
            return
        if getattr(scheduler, "enable_pdmux", False):
            say_once("SGLang with PD multiplexing runs two batches at once and cannot be windowed: no capture")
            return
        self.session = open_session(
            self.settings, engine="sglang", version=sglang_version(), rank=global_rank(scheduler)
        )
        if self.session is not None:
            self.requests = make_requests(scheduler, self.session)

    def begin(self, batch: Any) -> None:
        """Before `run_batch`."""
        session, requests = self.session, self.requests
        if session is None or requests is None or not (session.is_waiting or session.by_request):
            return
        if not batch.reqs:  # data-parallel attention: other ranks have work, this one has not
            self.idle()
            return
        if batch.forward_mode.is_prebuilt():  # disaggregation: tokens that another engine made, and no forward
            return
        running, finished = requests.advance(batch)
        if running is not None:
            self.inside = self._ran = True
            session.begin(running, finished)

    def end(self) -> None:
        """After `run_batch`, its sampling included."""
        if self.inside:
            self.inside = False
            if self.session is not None:
                self.session.end()

    def idle(self) -> None:
        """A pass of the scheduler's loop had nothing to run. There are thousands of those."""
        if self._ran and self.session is not None and self.requests is not None and self._scheduler.is_fully_idle():
            self._ran = False
            self.session.idle(self.requests.on_idle())

    def profile(self, starts: bool, label: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None:
            if starts:
                self.session.start(label)
            else:
                self.session.stop()
        return True

    def close(self, reason: Any = "job_end") -> None:
        """The scheduler ends, and its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.capture.writer import default_writer

            self.session.close(reason)
            default_writer().flush(CLOSE_SECONDS)

    def give_up(self, error: Exception) -> None:
        """The translation failed: leave this scheduler alone from here on, unless the user asked for the error."""
        session, self.session, self.requests = self.session, None, None
        self.inside = False
        if session is not None:
            session.fail(error)


def make_requests(scheduler: Any, session: Session) -> SglangRequests:
    """For the requests that this scheduler runs."""
    speculative = not scheduler.spec_algorithm.is_none()
    drafts = getattr(scheduler.server_args, "speculative_num_draft_tokens", None) if speculative else None
    return SglangRequests(
        session.settings.windows,
        speculative=speculative,
        tokens_per_iteration=max(int(drafts or 1), 1),
        follow_all=session.settings.track != "lead",
        in_flight=lambda: getattr(scheduler, "result_queue", ()),
        is_known=lambda req: _is_known(scheduler, req),
    )


def _is_known(scheduler: Any, req: Any) -> bool:
    """Whether the scheduler still has a request that is not in its batch. An aborted one is in none of its queues.

    Always true in a pipeline and in a disaggregated engine, which have more queues than these.
    """
    mode = getattr(scheduler, "disaggregation_mode", None)
    if getattr(mode, "name", "NULL") != "NULL" or getattr(scheduler.server_args, "pp_size", 1) > 1:
        return True
    if req is getattr(scheduler, "chunked_req", None):
        return True
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch")]
    batches += [entry[0] for entry in getattr(scheduler, "result_queue", ())]
    queues = [scheduler.waiting_queue, *(batch.reqs for batch in batches if batch is not None)]
    return any(known is req for queue in queues for known in queue)


def global_rank(scheduler: Any) -> int:
    """Rank over all pipeline stages and data-parallel replicas of the engine."""
    place = scheduler if hasattr(scheduler, "tp_rank") else _parallel(scheduler)
    rank = int(place.pp_rank) * int(place.tp_size) + int(place.tp_rank)
    if getattr(scheduler.server_args, "enable_dp_attention", False):
        return rank  # its replicas share one group of ranks
    return rank + int(place.dp_rank or 0) * int(place.tp_size) * int(place.pp_size)


def _parallel(scheduler: Any) -> Any:
    place = getattr(scheduler, "ps", None)  # 0.5.13 and newer, until it became the process's own
    if place is None:
        from sglang.srt.runtime_context import get_parallel

        place = get_parallel()
    return place
