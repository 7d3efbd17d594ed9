"""Decides whether an engine process captures, and opens its session."""

from __future__ import annotations

import logging

from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.core.settings import Settings

log = logging.getLogger(__name__)


def open_session(settings: Settings, *, engine: str, version: str, rank: int = 0) -> Session | None:
    """The session of one engine process.

    None where nothing is to be captured in it: profiling is disabled, only the engine's own counters are used
    (`mapping: iterations`), or the rank was not asked to capture.
    """
    if not captures_here(settings, engine, rank):
        return None
    return Session(settings, engine=engine, version=version, rank=rank)


def captures_here(settings: Settings, engine: str, rank: int) -> bool:
    """Whether the settings ask for captures of this rank, through the gate."""
    if not settings.enable or settings.mapping != "tokens":
        return False
    if not settings.all_ranks and rank not in settings.ranks:
        log.debug("rank %d of %s captures nothing (ranks=%s)", rank, engine, list(settings.ranks))
        return False
    return True
