"""The window in force in this process, and the sessions of the loops that run in the job's own process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar

from verl_profiler_conf.capture.arming import shared_arming
from verl_profiler_conf.capture.form import Source
from verl_profiler_conf.capture.loop_session import LoopSession
from verl_profiler_conf.capture.opening import captures_here
from verl_profiler_conf.core.logs import warn_once
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.engines.torch_rank import torch_rank

log = logging.getLogger(__name__)

_of_the_job: Settings | None = None

_ran_elsewhere: dict[str, int] = {}
"""Engine that ran in this process on a rank that was not asked to capture -> that rank."""


def put_in_force(settings: Settings | None) -> None:
    """The job's own settings take effect in this process; None: the job has ended."""
    global _of_the_job
    _of_the_job = settings
    if settings is not None:
        _ran_elsewhere.clear()


def ran_on_another_rank() -> dict[str, int]:
    """Engine that ran in this process during the job on a rank that was not asked to capture -> that rank."""
    return dict(_ran_elsewhere)


def is_job_process() -> bool:
    """Whether this is the process of the job (or a fork of it), whose log tells what was captured."""
    return _of_the_job is not None


def settings_of_the_job() -> Settings | None:
    """What `put_in_force` was called with last."""
    return _of_the_job


def current_settings() -> Settings | None:
    """The settings in force in this process: the job's own, else those that a parent process published.

    Raises:
        ConfigError: the published ones cannot be used.
    """
    if _of_the_job is not None:
        return _of_the_job
    published = os.environ.get(ENV_NAME)
    return Settings.from_json(published) if published else None


def open_loop(engine: str, version: str) -> LoopSession | None:
    """A session for one loop in the job's own process. None where nothing is captured, or nothing more.

    Raises:
        ConfigError: the settings that a parent process published cannot be used.
    """
    settings = current_settings()
    if settings is None:
        return None
    rank = torch_rank()
    if not captures_here(settings, engine, rank):
        if settings.enable and settings.mapping == "tokens":
            _ran_elsewhere[engine] = rank
        return None
    arming = shared_arming(settings, Source(engine, version, rank))
    if settings.arm == "request":
        why = f"no capture: arm: request waits for start_profile, which {engine} does not have; use arm: job"
        warn_once(log, why, reason=why)
        arming.placeholders.report_unavailable(why)
        return None
    return LoopSession(arming) if arming.is_waiting else None


_owner: ContextVar[object | None] = ContextVar("verl_profiler_conf_owner", default=None)


def iteration_owner() -> object | None:
    """The loop whose iteration, or whose `generate` call, is under way in this context; None: there is none.

    A context is a thread, an asyncio task, or what these call with asyncio's own means. What runs in it is part of the
    owner's iteration, and never a response of its own.
    """
    return _owner.get()


@contextlib.contextmanager
def owned_by(owner: object) -> Iterator[None]:
    """What runs in the body is part of an iteration of `owner`."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        try:
            _owner.reset(token)
        except ValueError:  # the body ended in another context than it began in
            _owner.set(None)
