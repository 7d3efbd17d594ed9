"""What the hook keeps for one SGLang scheduler: its session, the requests it runs, and its rank."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from verl_profiler_conf.capture.opening import open_session
from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.engines.announcing import announce
from verl_profiler_conf.engines.hooking import check_shape, published_settings, refuse_unknown, takes_profile_calls
from verl_profiler_conf.engines.sglang.release import CLOSE_SECONDS, lacks, not_understood, sglang_version
from verl_profiler_conf.engines.sglang.requests import SglangRequests, UsualBatch
from verl_profiler_conf.engines.skipping import SkipBudget

log = logging.getLogger(__name__)


class SchedulerHook(SkipBudget):
    """What the hook keeps for one scheduler: its session, None where nothing is to be captured, and its requests.

    While any iterations are left to skip, they are only counted (`left`), and `begin` is not called.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.session: Session | None = None
        self.requests: SglangRequests | None = None
        self.inside = False
        """An iteration is under way that has to be ended."""
        self.may_skip: Callable[[Any], bool] = _never
        """That of the requests: whether the iteration at hand is skipped, asked while any are left."""
        self.usual = UsualBatch()
        """That of the requests: a batch that is skipped without asking."""
        self.settings = published_settings("SGLang")
        self._scheduler = scheduler
        self._ran = False
        """Something ran since the scheduler was idle."""
        self._is_understood = False
        """The form of what the scheduler says was looked at."""
        if self.settings is None or not scheduler.is_generation:
            return
        if getattr(scheduler, "enable_pdmux", False):
            warn_once(log, "SGLang with PD multiplexing runs two batches at once and cannot be windowed: no capture")
            return
        session = open_session(self.settings, engine="sglang", version=sglang_version(), rank=global_rank(scheduler))
        if session is not None:
            weak = weakref.WeakMethod(self._catch_up)  # sessions are kept until the process ends
            session.catch_up = lambda: (weak() or _do_nothing)()
            try:
                self.requests = make_requests(scheduler, session)
            except Exception as error:  # the scheduler has not what is read of it
                session.fail(error)
                return
            self.session = session
            self.may_skip, self.usual = self.requests.may_skip, self.requests.usual
            check_shape(session, "SGLang", sglang_version(), lacks())
            if not session.failed:
                announce(session, "sglang")

    @property
    def wants_iterations(self) -> bool:
        """Whether anything can come of an iteration, until start_profile arrives."""
        return self.session is not None and self.session.is_waiting

    # -- one iteration -----------------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """Before `run_batch`, of an iteration that is not skipped."""
        session, requests = self.session, self.requests
        if session is None or requests is None:
            return
        if not self._is_understood:
            refuse_unknown("SGLang", sglang_version(), not_understood(batch))
            self._is_understood = bool(batch.reqs)
        if not batch.reqs:  # data-parallel attention: other ranks have work, this one has not
            self.idle()
            return
        if batch.forward_mode.is_prebuilt():  # disaggregation: tokens that another engine made, and no forward
            return
        if session.is_waiting:
            self._ask(session, requests, batch)
        elif session.by_request and session.iteration < 0:
            session.begin({})
            session.idle()  # leaves a placeholder: iterations run, and start_profile was not called

    def end(self) -> None:
        """After `run_batch`, its sampling included."""
        if self.inside:
            self.inside = False
            if self.session is not None:
                self.session.end()

    def fail_iteration(self) -> None:
        """The iteration that was begun has raised: it made no token."""
        if not self.inside:
            return
        self.inside = False
        if self.session is not None and self.requests is not None:
            self.session.idle(self.requests.before_iteration(), reason="error")

    def idle(self) -> None:
        """A pass of the scheduler's loop had nothing to run. There are thousands of those."""
        if self._ran and self.session is not None and self.requests is not None and self._scheduler.is_fully_idle():
            self._ran = False
            self._catch_up()
            self.session.idle(self.requests.on_idle())

    def _ask(self, session: Session, requests: SglangRequests, batch: Any) -> None:
        """Put an iteration to the session."""
        self._catch_up()
        running, finished = requests.advance(batch)
        if running is None:
            return
        self.inside = self._ran = True
        session.begin(running, finished)
        headroom = session.headroom
        if headroom:
            self.grant(requests.skippable(headroom))

    def _catch_up(self) -> None:
        """Tell the session of the iterations that were skipped: how many, and which token each request has reached."""
        skipped = self.settle()
        if skipped and self.session is not None and self.requests is not None:
            self.session.skip(self.requests.standing(), skipped)

    # -- calls and ends ----------------------------------------------------------------------------------------------

    def profile(self, starts: bool, label: str | None) -> bool:
        """start_profile or stop_profile has arrived. False: it is meant for the engine's own profiler."""
        if not takes_profile_calls(self.settings):
            return False
        if self.session is not None and self.requests is not None:
            self._catch_up()
            if starts:
                self.session.start(label)
                self.requests.armed(queued_requests(self._scheduler))
            else:
                self.session.stop()
        return True

    def close(self, reason: Any = "job_end") -> None:
        """The scheduler ends, and its process with it: have everything on disk first."""
        if self.session is not None:
            from verl_profiler_conf.capture.writer import default_writer

            self.session.close(reason)
            default_writer().finish(CLOSE_SECONDS)

    def give_up(self, error: Exception) -> None:
        """The translation failed: leave this scheduler alone from here on, unless the user asked for the error."""
        session, self.session, self.requests = self.session, None, None
        self.inside = False
        self.settle()
        if session is not None:
            session.fail(error)


def _never(_: Any) -> bool:
    return False


def _do_nothing() -> None:
    """The scheduler has gone."""


def make_requests(scheduler: Any, session: Session) -> SglangRequests:
    """For the requests that this scheduler runs."""
    speculative = not scheduler.spec_algorithm.is_none()
    drafts = getattr(scheduler.server_args, "speculative_num_draft_tokens", None) if speculative else None
    follow_all = session.settings.track != "lead"
    has_more_queues = _has_more_queues(scheduler)
    return SglangRequests(
        session.settings.windows,
        speculative=speculative,
        tokens_per_iteration=max(int(drafts or 1), 1),
        follow_all=follow_all,
        in_flight=lambda: getattr(scheduler, "result_queue", ()),
        is_known=lambda req: has_more_queues or any(known is req for known in queued_requests(scheduler)),
        can_skip=not (has_more_queues and follow_all) and not (speculative and not drafts),
    )


def _has_more_queues(scheduler: Any) -> bool:
    """Whether requests can be elsewhere than in `queued_requests`: in a pipeline, and in a disaggregated engine."""
    mode = getattr(scheduler, "disaggregation_mode", None)
    return getattr(mode, "name", "NULL") != "NULL" or getattr(scheduler.server_args, "pp_size", 1) > 1


def queued_requests(scheduler: Any) -> Iterator[Any]:
    """All requests that the scheduler has, some of them twice. One that was aborted while it waited is not there."""
    chunked = getattr(scheduler, "chunked_req", None)
    if chunked is not None:
        yield chunked
    yield from scheduler.waiting_queue
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch")]
    batches += [entry[0] for entry in getattr(scheduler, "result_queue", ())]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs


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
