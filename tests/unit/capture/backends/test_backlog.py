"""The limit on raw traces that wait to be packed."""

from __future__ import annotations

import logging
import os
import threading

import pytest
from waiting import wait_until

from verl_profiler_conf.capture.backends import backlog, engine_idle
from verl_profiler_conf.capture.backends.backlog import Backlog


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "LIMIT", 100)


def test_below_the_limit_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "engine_stands_still", lambda: pytest.fail("waits"))
    waiting = Backlog()
    waiting.add("a", 60)
    waiting.add("a", 99)  # the same one, larger
    waiting.wait()


def test_it_waits_until_there_is_room() -> None:
    waiting = Backlog()
    waiting.add("a", 60)
    waiting.add("b", 60)
    engine_idle.engine_runs()
    thread = threading.Thread(target=waiting.wait, daemon=True)
    thread.start()
    wait_until(lambda: engine_idle._is_idle, "the export waits")
    waiting.remove("absent")
    assert thread.is_alive()
    waiting.remove("a")
    thread.join(60)
    assert not thread.is_alive()
    assert not engine_idle._is_idle, "it is as it was"
    engine_idle.engine_is_idle()


def test_it_gives_up_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backlog, "PATIENCE_S", 0.01)
    waiting = Backlog()
    waiting.add("a", 3 << 30)
    with caplog.at_level(logging.WARNING):
        waiting.wait()
    assert "3.0 GiB of raw traces wait to be compressed" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_has_no_backlog() -> None:
    backlog.backlog.add("of the parent", 1000)
    try:
        child = os.fork()
        if child == 0:
            os._exit(backlog.backlog.bytes != 0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        backlog.backlog.remove("of the parent")
