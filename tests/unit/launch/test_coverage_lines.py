"""The lines of the summary about captures."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from verl_profiler_conf import Settings, activate, decode_loop
from verl_profiler_conf.capture.capture_lines import coverage_lines
from verl_profiler_conf.capture.manifest import IterationRecord, Manifest
from verl_profiler_conf.core.window import TokenWindow

WINDOW = TokenWindow(20, 24)
LINE = (
    "tokens {}: the captures hold {} of this window's tokens of all requests that had started when the last capture"
    " closed"
)


def manifest(coverage: tuple[int, int] | None, *, pid: int = 1, window: TokenWindow = WINDOW) -> Manifest:
    rows = [IterationRecord(20, 20, 21, 2, 2, 1)]
    return Manifest(window, "vllm", "1", 0, "any", rows=rows, coverage=coverage, pid=pid, host="here")


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        ([(4, 16)], "25%"),
        ([(4, 16), (8, 20)], "40%"),  # the second counts what the first did as well
        ([(999, 1000)], "99%"),
        ([(1, 1000)], "less than 1%"),
        ([(8, 16), (16, 16)], "100%"),
    ],
)
def test_share_of_several_requests(counts: list[tuple[int, int]], share: str) -> None:
    assert list(coverage_lines([manifest(pair) for pair in counts])) == [LINE.format("[20, 24)", share)]


def test_processes_are_added_up_and_windows_are_not() -> None:
    later = TokenWindow(40, 44)
    found = [manifest((4, 4)), manifest((0, 4), pid=2), manifest((1, 4), window=later)]
    assert list(coverage_lines(found)) == [LINE.format("[20, 24)", "50%"), LINE.format("[40, 44)", "25%")]


def test_nothing_is_said_of_one_whole_capture_or_of_one_request() -> None:
    assert list(coverage_lines([manifest((16, 16))])) == []
    assert list(coverage_lines([manifest(None), manifest(None)])) == []


def test_summary_says_what_share_two_stretches_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three rows begin together and go on one after the other; the captures hold the window of two of them."""
    pytest.importorskip("torch")
    caplog.set_level(logging.INFO)
    settings = Settings(windows=(TokenWindow(2, 4),), track="any", max_captures=2, device="cpu")
    with activate(settings, run_dir=tmp_path), decode_loop(rows=3) as loop:
        with loop.iteration():
            pass
        for iteration in range(18):
            with loop.iteration({iteration // 6: 1}):
                pass
    lines = [record.getMessage() for record in caplog.records]
    assert LINE.format("[2, 4)", "66%") in lines
