"""Every capture that was asked for is answered for: where it is, why it is not there, or that nothing is known."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch.asked import CAPTURED, LOST, NOT_REACHED, NOT_REPORTED, account, answer, counted
from verl_profiler_conf.launch.job import Job

WINDOW = TokenWindow(20, 30)
ASKED = Asked(steps=(1, 3), replicas={0: 0, 5: 2}, windows=(WINDOW,))


def manifest(step: int | None, rank: int | None, *, rows: bool = True, **more: Any) -> Manifest:
    record = [IterationRecord(9, 20, 30, 1, 10, 1000)] if rows else []
    trace = f"s{step}_r{rank}.pt.trace.json.gz" if rows else None
    fields = {"trace": trace, "rows": record, "step": step, "global_rank": rank, "run_id": "job", **more}
    return Manifest(WINDOW, "vllm", "0.32.0", 0, "lead", **fields)


def states(*manifests: Manifest, asked: Asked = ASKED) -> list[str]:
    answers = answer(asked, manifests)
    assert answers is not None
    return [each.state for each in answers]


def lines(*manifests: Manifest, asked: Asked = ASKED, unanswered: str = "") -> list[str]:
    answers = answer(asked, manifests, unanswered)
    assert answers is not None
    return list(account(asked, answers))


EVERY = [manifest(step, rank) for step in (1, 3) for rank in (0, 5)]


def test_all_there_needs_no_word() -> None:
    assert states(*EVERY) == [CAPTURED] * 4
    assert lines(*EVERY) == []


def test_a_replica_without_word_is_named_with_what_is_known() -> None:
    here = [each for each in EVERY if each.global_rank == 0]
    assert states(*here) == [CAPTURED, NOT_REPORTED, CAPTURED, NOT_REPORTED]
    assert lines(*here) == [
        "2 of 4 captures that were asked for are there",
        "step 1, rank 5 (replica 2): tokens [20, 30) not reported",
        "step 3, rank 5 (replica 2): tokens [20, 30) not reported",
    ]
    assert lines(*here, unanswered="node 10.0.0.2 died")[1].endswith("not reported: node 10.0.0.2 died")


def test_a_process_that_was_killed_while_it_waited_has_not_answered() -> None:
    note = f"tokens {WINDOW} were waited for in process 7 of host, which has reported nothing since"
    waiting = manifest(3, 5, rows=False, final=False, notes=[note])
    short = manifest(3, 0, rows=False, furthest_token=11, notes=[f"tokens {WINDOW} were never reached: 11"])
    assert states(*EVERY[:2], short, waiting) == [CAPTURED, CAPTURED, NOT_REACHED, LOST]
    assert lines(*EVERY[:2], short, waiting) == [
        "2 of 4 captures that were asked for are there",
        f"step 3, rank 5 (replica 2): {note}",
        f"step 3, rank 0 (replica 0): tokens {WINDOW} were never reached: 11",
    ]


def test_a_step_that_never_came_is_named() -> None:
    first = [each for each in EVERY if each.step == 1]
    told = lines(*first)
    assert told[0] == "2 of 4 captures that were asked for are there"
    assert told[1].startswith("step 3 never came: no engine was told to capture there")
    assert len(told) == 2


def test_the_furthest_rank_speaks_for_a_window_that_was_not_reached() -> None:
    short = [
        manifest(3, rank, rows=False, furthest_token=token, notes=[f"tokens {WINDOW} were never reached: {token}"])
        for rank, token in ((0, 7), (5, 11))
    ]
    assert states(*EVERY[:2], *short) == [CAPTURED, CAPTURED, NOT_REACHED, NOT_REACHED]
    assert lines(*EVERY[:2], *short)[1:] == [
        "step 3, ranks 0, 5 (replicas 0, 2): tokens [20, 30) were never reached: 11"
    ]


def test_a_trace_that_could_not_be_written_is_lost() -> None:
    lost = manifest(3, 5, trace=None, notes=["the trace could not be written: disk full"])
    assert states(*EVERY[:3], lost) == [CAPTURED, CAPTURED, CAPTURED, LOST]
    assert lines(*EVERY[:3], lost)[1:] == [
        "step 3, rank 5 (replica 2): tokens [20, 30) lost: the trace could not be written: disk full"
    ]


def test_nsys_keeps_its_own_trace() -> None:
    assert states(manifest(1, 0, trace=None, backend="cudart"), *EVERY[1:]) == [CAPTURED] * 4


def test_a_capture_counts_whatever_else_is_said_of_it() -> None:
    unreached = manifest(1, 0, rows=False)
    assert states(unreached, *EVERY) == states(*EVERY, unreached) == [CAPTURED] * 4


def test_an_engine_that_was_never_told_is_known() -> None:
    told = lines(*EVERY[::2], manifest(None, 5, rows=False))
    assert told[1].endswith("not reported: its engine ran, and was never told to capture")


@pytest.mark.parametrize("unnamed", [manifest(None, 0), manifest(1, None)], ids=["no step", "no rank"])
def test_captures_that_do_not_say_where_they_come_from_are_held_against_nothing(unnamed: Manifest) -> None:
    assert answer(ASKED, [unnamed]) is None


def test_armed_once_whatever_the_step() -> None:
    asked = Asked(steps=(), replicas={0: 0, 1: 1}, windows=(WINDOW, TokenWindow(40, 50)))
    assert states(manifest(None, 1), asked=asked) == [NOT_REPORTED, CAPTURED, NOT_REPORTED, NOT_REPORTED]
    assert lines(manifest(None, 1), asked=asked)[1:] == [
        "rank 0 (replica 0): tokens [20, 30) not reported",
        "ranks 0, 1 (replicas 0, 1): tokens [40, 50) not reported",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "step 3"), ([1, 2], "steps 1, 2"), ([0, 1, 2, 3, 9], "steps 0-3, 9"), ([1, 2, 4, 5, 6], "steps 1, 2, 4-6")],
)
def test_numbers_as_people_write_them(numbers: list[int], text: str) -> None:
    assert counted("step", numbers) == text


def test_the_jobs_end_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, each in enumerate(EVERY[:3]):
        write_manifest(each, tmp_path / f"capture_{number}")
    caplog.set_level(logging.INFO, logger="verl_profiler_conf.launch.summary")
    Job(Settings(windows=(WINDOW,), run_id="job", save_path=str(tmp_path)), asked=ASKED).close()
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "verl_profiler_conf.launch.summary"]
    assert [level for level, _ in said] == ["INFO"] * 3 + ["WARNING"] * 2
    assert [", rank 5 -> " in line for _, line in said[:3]] == [False, True, False], "as the user counts ranks"
    assert said[3:] == [
        ("WARNING", "3 of 4 captures that were asked for are there"),
        ("WARNING", "step 3, rank 5 (replica 2): tokens [20, 30) not reported"),
    ]
