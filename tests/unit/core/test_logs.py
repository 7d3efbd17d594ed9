"""Log lines that come once."""

from __future__ import annotations

import logging

import pytest

from verl_profiler_conf.core.logs import forget_logged_texts, warn_once

LOG, OTHER = logging.getLogger("test_logs.one"), logging.getLogger("test_logs.two")


def test_a_text_is_logged_once_by_each_logger_until_it_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    for log in (LOG, LOG, OTHER):
        warn_once(log, "100% of it")
    assert [record.name for record in caplog.records] == ["test_logs.one", "test_logs.two"]
    forget_logged_texts()
    warn_once(LOG, "100% of it")
    assert [record.getMessage() for record in caplog.records] == ["100% of it"] * 3
