"""The public API for hand-written decode loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
from verl_profiler_conf.capture.live import live_sessions
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.loop import decode_loop


def step(number: int) -> None:
    with torch.profiler.record_function(f"forward#{number}"):
        torch.ones(4, 4) @ torch.ones(4, 4)


def test_a_loop_is_windowed(windowed: Any) -> None:
    def run() -> None:
        with decode_loop(rows=2) as loop:
            for number in range(30):
                with loop.iteration():
                    step(number)

    outcome = windowed(run, profile_token_start=5, profile_token_end=9)
    assert outcome.traces[0].forwards == [5, 6, 7, 8]
    assert outcome.captured[0].engine == "loop"


def test_prompt_chunks_and_rows_that_differ(windowed: Any) -> None:
    def run() -> None:
        with decode_loop(rows=2) as loop:
            with loop.iteration(makes={0: 0, 1: 0}):  # a chunk of both prompts
                step(0)
            for number in range(1, 20):
                with loop.iteration(makes={0: 1, 1: 2}):
                    step(number)

    outcome = windowed(run, profile_token_start=5, profile_token_end=7)
    assert outcome.traces[0].forwards == [6, 7]


def test_finished_rows_hand_the_lead_over(windowed: Any) -> None:
    def run() -> None:
        with decode_loop(rows=2) as loop:
            for number in range(20):
                with loop.iteration():
                    step(number)
                if number == 3:
                    loop.finish([0])

    outcome = windowed(run, profile_token_start=5, profile_token_end=7)
    assert outcome.traces[0].forwards == [5, 6]
    assert outcome.captured[0].tracked[0].endswith("row1")


@pytest.mark.parametrize("row", [0, 1, -1])
def test_a_row_that_finished_or_never_was_cannot_run(row: int) -> None:
    with decode_loop(rows=1) as loop:
        loop.finish([0])
        with pytest.raises(KeyError), loop.iteration(makes={row: 1}):
            pass


def test_without_a_window_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_NAME, raising=False)
    monkeypatch.chdir(tmp_path)
    recording = []
    with decode_loop(rows=1) as loop:
        for number in range(3):
            with loop.iteration():
                step(number)
                recording.append(torch.autograd._profiler_enabled())
        sessions = list(live_sessions())
    assert recording == [False] * 3
    assert sessions == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ends", ["inside an iteration", "between two"])
def test_the_loops_own_error_comes_first(windowed: Any, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    stop = TorchProfiler.stop
    failed = []

    def fail(profiler: TorchProfiler) -> None:
        failed.append(profiler)
        stop(profiler).drop()
        raise OSError("closing the profiler fails as well")

    monkeypatch.setattr(TorchProfiler, "stop", fail)

    def run() -> None:
        with decode_loop(rows=2) as loop:
            for number in range(30):
                with loop.iteration():
                    step(number)
                    if number == 5 and ends == "inside an iteration":
                        raise LookupError("the loop's own")
                if number == 5:
                    raise LookupError("the loop's own")

    window = (5, 6) if ends == "inside an iteration" else (5, 9)
    with pytest.raises(LookupError, match="the loop's own"):
        windowed(run, profile_token_start=window[0], profile_token_end=window[1], on_error="raise")
    assert len(failed) == 1


def test_a_stream_that_nobody_reads_any_further_ends_as_a_response_does(windowed: Any) -> None:
    def stream() -> Any:
        with decode_loop(rows=1) as loop:
            for number in range(30):
                with loop.iteration():
                    step(number)
                yield number

    def run() -> None:
        for number in (tokens := stream()):
            if number == 6:
                break
        tokens.close()

    outcome = windowed(run, profile_token_start=5, profile_token_end=9)
    assert outcome.traces[0].forwards == [5, 6]
    assert outcome.captured[0].closed_by == "request_end"
