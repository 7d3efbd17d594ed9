"""The writer: in order, off the caller's thread, nothing lost, nothing raised into the job."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from waiting import when_logged

from verl_profiler_conf.capture.backends import Written
from verl_profiler_conf.capture.writer import MOST_FAILED, Writer, default_writer


class FakeRecording:
    """Stands for a device's: writes a line, when it may."""

    def __init__(self, gate: threading.Event | None = None, failure: BaseException | None = None) -> None:
        self.gate = gate
        self.failure = failure
        self.thread: threading.Thread | None = None

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        self.thread = threading.current_thread()
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        path.write_text(f"{dict(renames)}")
        return Written(path, path.stat().st_size)


class Outcomes:
    def __init__(self) -> None:
        self.seen: list[tuple[Written | None, BaseException | None]] = []

    def __call__(self, written: Written | None, error: BaseException | None) -> None:
        self.seen.append((written, error))


def test_writes_elsewhere_and_reports(tmp_path: Path) -> None:
    writer, outcomes, recording = Writer(), Outcomes(), FakeRecording()
    writer.submit(recording, tmp_path / "a", {"x": "y"}, outcomes)
    assert writer.flush(30)
    assert recording.thread is not threading.current_thread()
    assert outcomes.seen == [(Written(tmp_path / "a", 10), None)]
    assert (tmp_path / "a").read_text() == "{'x': 'y'}"


def test_submitting_does_not_wait(tmp_path: Path) -> None:
    writer, outcomes, gate = Writer(), Outcomes(), threading.Event()
    for name in "abc":
        writer.submit(FakeRecording(gate), tmp_path / name, {}, outcomes)
    assert outcomes.seen == []
    assert writer.pending == 3
    assert not writer.flush(0.01)
    gate.set()
    assert writer.flush(30)
    assert [written.path.name for written, _ in outcomes.seen if written and written.path] == ["a", "b", "c"]
    assert writer.pending == 0


def test_a_failure_is_reported_and_the_next_is_written(tmp_path: Path) -> None:
    writer, outcomes, failure = Writer(), Outcomes(), OSError("no room")
    writer.submit(FakeRecording(failure=failure), tmp_path / "a", {}, outcomes)
    writer.submit(FakeRecording(), tmp_path / "b", {}, outcomes)
    assert writer.flush(30)
    assert outcomes.seen[0] == (None, failure)
    assert outcomes.seen[1][1] is None


def test_a_failing_report_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def report(*_: object) -> None:
        raise ValueError("cannot be recorded")

    writer, outcomes = Writer(), Outcomes()
    writer.submit(FakeRecording(), tmp_path / "a", {}, report)
    writer.submit(FakeRecording(), tmp_path / "b", {}, outcomes)
    assert writer.flush(30)
    assert len(outcomes.seen) == 1
    assert "outcome of a could not be recorded" in caplog.text


def test_flush_within_a_report_does_not_wait_for_itself(tmp_path: Path) -> None:
    writer, answers = Writer(), []
    writer.submit(FakeRecording(), tmp_path / "a", {}, lambda *_: answers.append(writer.flush()))
    assert writer.flush(30)
    assert answers == [False]


def test_waiting_for_long_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, outcomes, gate = Writer(), Outcomes(), threading.Event()
    writer.submit(FakeRecording(gate), tmp_path / "a", {}, outcomes)
    with when_logged("still being written: 1", gate.set):
        writer.finish_or_give_up(every=0.01)
    assert len(outcomes.seen) == 1
    assert "still being written: 1" in caplog.text


def test_draining_within_a_report_does_not_wait_for_itself(tmp_path: Path) -> None:
    writer, finished = Writer(), threading.Event()
    writer.submit(FakeRecording(), tmp_path / "a", {}, lambda *_: (writer.finish_or_give_up(0.01), finished.set())[0])
    assert writer.flush(30)
    assert finished.is_set()


def test_nothing_to_do_is_done() -> None:
    assert Writer().flush()


def test_no_thread_while_nothing_is_to_be_written(tmp_path: Path) -> None:
    writer, recording = Writer(), FakeRecording()
    writer.submit(recording, tmp_path / "a", {}, Outcomes())
    assert writer.flush(30)
    assert recording.thread is not None
    recording.thread.join(30)
    assert not recording.thread.is_alive()


def test_without_another_thread_it_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer, outcomes, recording = Writer(), Outcomes(), FakeRecording()
    writer.submit(recording, tmp_path / "a", {}, outcomes)
    assert recording.thread is threading.current_thread()
    assert outcomes.seen[0][1] is None
    assert writer.flush(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_begins_empty_and_can_write(tmp_path: Path) -> None:
    writer, gate = Writer(), threading.Event()
    writer.submit(FakeRecording(gate), tmp_path / "parents", {}, Outcomes())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if writer.pending == 0 and writer.flush(1):
                writer.submit(FakeRecording(), tmp_path / "childs", {}, Outcomes())
                status = 0 if writer.flush(30) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "childs").exists()
    gate.set()
    assert writer.flush(30)
    assert (tmp_path / "parents").exists()


def test_what_could_not_be_written_is_tried_again_at_the_end(tmp_path: Path) -> None:
    writer, outcomes, failure = Writer(), Outcomes(), OSError(errno.ENOSPC, "no room")
    recording = FakeRecording(failure=failure)
    writer.submit(recording, tmp_path / "a", {}, outcomes)
    assert writer.flush(30)
    assert outcomes.seen == [(None, failure)]
    recording.failure = None
    writer.finish_or_give_up()
    assert [written is not None for written, _ in outcomes.seen] == [False, True]
    writer.finish_or_give_up()
    assert len(outcomes.seen) == 2


def test_it_is_tried_again_once_and_only_where_that_can_help(tmp_path: Path) -> None:
    writer, outcomes = Writer(), Outcomes()
    for failure in (OSError("no room"), FileExistsError("there"), RuntimeError("dropped")):
        writer.submit(FakeRecording(failure=failure), tmp_path / "a", {}, outcomes)
    writer.finish_or_give_up()
    writer.finish_or_give_up()
    assert [str(error) for _, error in outcomes.seen] == ["no room", "there", "dropped", "no room"]


def test_few_recordings_are_kept_for_that(tmp_path: Path) -> None:
    writer, outcomes = Writer(), Outcomes()
    for _ in range(3 * MOST_FAILED):
        writer.submit(FakeRecording(failure=OSError("no room")), tmp_path / "a", {}, outcomes)
    writer.finish_or_give_up()
    assert len(outcomes.seen) == 4 * MOST_FAILED


def test_a_name_that_cannot_be_had_yet_is_asked_for_again(tmp_path: Path) -> None:
    writer, outcomes, names = Writer(), Outcomes(), iter([OSError("no descriptors"), tmp_path / "a"])

    def name() -> Path:
        found = next(names)
        if isinstance(found, OSError):
            raise found
        return found

    writer.submit(FakeRecording(), name, {}, outcomes)
    writer.finish_or_give_up()
    assert (tmp_path / "a").exists()
    assert [written is not None for written, _ in outcomes.seen] == [False, True]


@pytest.fixture
def exit_handlers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs the tests ends as it always does."""
    monkeypatch.setattr("verl_profiler_conf.capture.writer.end_without_exit_handlers", lambda: None)


@pytest.mark.usefixtures("exit_handlers_stay")
def test_what_never_comes_to_an_end_is_given_up_and_recorded_if_it_does_after_all(tmp_path: Path) -> None:
    writer, outcomes, gate = Writer(), Outcomes(), threading.Event()
    stuck = FakeRecording(gate)
    writer.submit(stuck, tmp_path / "a", {}, outcomes)
    writer.submit(FakeRecording(), tmp_path / "b", {}, outcomes)
    writer.finish_or_give_up(patience_s=0.05)
    assert ["given up" in str(error) for _, error in outcomes.seen] == [True, True]
    assert writer.pending == 0
    writer.submit(FakeRecording(), tmp_path / "c", {}, outcomes)  # the next job of the process
    assert writer.flush(30)
    gate.set()
    assert stuck.thread is not None
    stuck.thread.join(30)
    assert [written.path.name for written, _ in outcomes.seen if written and written.path] == ["c", "a"]
    assert not (tmp_path / "b").exists()


@pytest.mark.usefixtures("exit_handlers_stay")
def test_ctrl_c_gives_up_at_once(tmp_path: Path) -> None:
    writer, outcomes, gate = Writer(), Outcomes(), threading.Event()
    writer.submit(FakeRecording(gate), tmp_path / "a", {}, outcomes)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            when_logged("still being written: 1", lambda: os.kill(os.getpid(), signal.SIGINT)),
            pytest.raises(KeyboardInterrupt),
        ):
            writer.finish_or_give_up(every=0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Ctrl-C" in str(outcomes.seen[0][1])
    gate.set()


SCRIPT = """
import atexit, sys, threading
from pathlib import Path
from verl_profiler_conf.capture.backends import Written
from verl_profiler_conf.capture.writer import default_writer

ending = threading.Event()
threading._register_atexit(ending.set)  # called when the main thread has ended, before others are waited for

class Long:
    def write(self, path, renames):
        if threading.current_thread() is not threading.main_thread():
            assert ending.wait(60)  # so the process is ending while this is being written
        for _ in range(2_000_000):
            pass
        path.write_text("whole")
        return Written(path, 5)

def submit(name):
    default_writer().submit(Long(), Path(sys.argv[1]) / name, {}, lambda *_: None)

def at_exit():
    submit("late")
    default_writer().flush()

if sys.argv[2] == "late":
    atexit.register(at_exit)
submit("early")
if sys.argv[2] == "raise":
    raise RuntimeError("the job's own")
"""


@pytest.mark.parametrize(
    ("how", "status", "names"), [("return", 0, ["early"]), ("raise", 1, ["early"]), ("late", 0, ["early", "late"])]
)
def test_an_ending_process_waits_for_its_traces(how: str, status: int, names: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "whole")


def test_sessions_share_one() -> None:
    assert default_writer() is default_writer()
