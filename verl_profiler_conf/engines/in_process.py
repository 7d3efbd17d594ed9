"""The window in force in this process, and the session of what runs in the job's own process."""

from __future__ import annotations

import os

from verl_profiler_conf.capture.session import Session, live_sessions, open_session
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.engines.torch_rank import torch_rank

_of_the_job: Settings | None = None


def put_in_force(settings: Settings | None) -> None:
    """The job's own settings take effect in this process; None: the job has ended."""
    global _of_the_job
    _of_the_job = settings


def current_settings() -> Settings | None:
    """The settings in force in this process: the job's own, else those that a parent process published.

    Raises:
        ConfigError: the published ones cannot be used.
    """
    if _of_the_job is not None:
        return _of_the_job
    published = os.environ.get(ENV_NAME)
    return Settings.from_json(published) if published else None


def in_process_session(engine: str, version: str) -> Session | None:
    """The session of an engine that runs in the job's own process, opened when it is first asked for.

    None where nothing is to be captured.

    Raises:
        ConfigError: the settings that a parent process published cannot be used.
    """
    settings = current_settings()
    if settings is None:
        return None
    for session in live_sessions():
        if session.engine == engine and session.settings == settings:
            return session
    return open_session(settings, engine=engine, version=version, rank=torch_rank())
