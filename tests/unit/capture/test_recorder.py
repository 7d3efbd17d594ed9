"""What may come between the begin and the end of a recording: failures, Ctrl-C, other threads and profilers, forks."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from strict_profiler import StrictKineto, StrictProfiler, StrictRecording, Turns

from verl_profiler_conf.capture import ending, live
from verl_profiler_conf.capture.arming import Arming, forget_armings, shared_arming
from verl_profiler_conf.capture.form import Source
from verl_profiler_conf.capture.interruptions import signals_held_back
from verl_profiler_conf.capture.loop_session import LoopSession
from verl_profiler_conf.capture.manifest import Manifest, gather
from verl_profiler_conf.capture.recorder import recorder
from verl_profiler_conf.capture.writer import default_writer
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.engines import in_process
from verl_profiler_conf.engines.loop import decode_loop


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    forget_logged_texts()
    yield
    for session in live.live_sessions():
        session.begin_close("job_end")
    forget_armings()
    recorder.reset()


@pytest.fixture
def turns() -> Iterator[Turns]:
    threads = Turns(3)
    yield threads
    threads.close()


class Job:
    """Loops in one process, and what they leave."""

    def __init__(self, folder: Path, profiler: type[StrictProfiler] = StrictProfiler, **fields: Any) -> None:
        self.kineto = StrictKineto()
        self.folder = folder
        raw = {"profile_token_start": 2, "profile_token_end": 5, "save_path": str(folder), "run_id": "job", **fields}
        self.arming: Arming = shared_arming(Settings.from_mapping({**raw, "device": "cpu"}), Source("toy", "1", 0))
        self.arming._profiler = profiler(self.kineto)
        self.opened = 0

    def loop(self) -> LoopSession:
        self.opened += 1
        return LoopSession(self.arming)

    def iterate(self, session: LoopSession, tokens: range, name: str = "r") -> None:
        for token in tokens:
            session.begin({name: range(token, token + 1)})
            self.kineto.operator(f"{name}#{token}")
            session.end()

    def left(self) -> list[Manifest]:
        assert default_writer().flush(30)
        return gather(self.folder, "job")

    def off(self) -> bool:
        return self.kineto.running is None and recorder.holder is None and not self.kineto.breaches


def rows(manifest: Manifest) -> list[int]:
    return [row.lo for row in manifest.rows]


# -- failures and Ctrl-C ------------------------------------------------------------------------------------


class RaisesAfterStart(StrictProfiler):
    def start(self) -> None:
        super().start()
        raise RuntimeError("begun, and then this")


class RaisesAtStop(StrictProfiler):
    def stop(self) -> StrictRecording:
        raise RuntimeError("not ended at all")

    def discard(self) -> None:
        self._kineto.running = None


@pytest.mark.parametrize("profiler", [RaisesAfterStart, RaisesAtStop])
def test_a_profiler_that_raises_is_off_afterwards(profiler: type[StrictProfiler], tmp_path: Path) -> None:
    job = Job(tmp_path, profiler)
    session = job.loop()
    job.iterate(session, range(8))
    session.finish({"r": 8})
    assert job.off()
    (manifest,) = job.left()
    assert manifest.closed_by == "error"
    assert not job.arming.is_waiting


class InterruptedAtStart(StrictProfiler):
    def start(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().start()


class InterruptedAtStop(StrictProfiler):
    def stop(self) -> StrictRecording:
        signal.raise_signal(signal.SIGINT)
        return super().stop()


class InterruptedTwiceAtStop(InterruptedAtStop):
    def stop(self) -> StrictRecording:
        signal.raise_signal(signal.SIGINT)
        return super().stop()

    def discard(self) -> None:
        self._kineto.running = None


@pytest.mark.parametrize(
    ("profiler", "captured"),
    [(InterruptedAtStart, []), (InterruptedAtStop, [[2, 3, 4]]), (InterruptedTwiceAtStop, [])],
)
def test_ctrl_c_while_a_recording_begins_or_ends_leaves_it_off(
    profiler: type[StrictProfiler], captured: list[list[int]], tmp_path: Path
) -> None:
    job = Job(tmp_path, profiler)
    session = job.loop()
    with pytest.raises(KeyboardInterrupt):
        job.iterate(session, range(8))
    session.finish(reason="error")
    assert job.off()
    assert [rows(manifest) for manifest in job.left() if manifest.rows] == captured
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_waits_for_the_end_of_the_body_and_runs_once() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("handled"))
    try:
        with signals_held_back():
            signal.raise_signal(signal.SIGTERM)
            seen.append("body")
        assert seen == ["body", "handled"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_without_a_handler_in_python_is_not_touched() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with signals_held_back():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_other_threads_hold_nothing_back(turns: Turns) -> None:
    def look() -> object:
        with signals_held_back():
            return signal.getsignal(signal.SIGINT)

    assert turns.run(0, look) is signal.default_int_handler


# -- ends that come from another thread --


def in_background(call: Callable[[], object], until: Callable[[], bool]) -> threading.Thread:
    """Run `call` on a thread of its own, and return once `until` holds."""
    thread = threading.Thread(target=call)
    thread.start()
    while not until():
        thread.join(0.0005)
        assert thread.is_alive() or until()
    return thread


def test_the_jobs_end_waits_for_the_thread_of_the_capture(tmp_path: Path, turns: Turns) -> None:
    job = Job(tmp_path)
    session = job.loop()
    turns.run(0, lambda: job.iterate(session, range(3)))
    turns.run(0, lambda: session.begin({"r": range(3, 4)}))
    closing = in_background(live.close_all, lambda: session._capturer.request.is_waiting)
    assert job.kineto.running is not None
    turns.run(0, session.end)
    closing.join(30)
    assert job.off()
    (manifest,) = job.left()
    assert (rows(manifest), manifest.closed_by) == ([2, 3], "job_end")
    turns.run(0, lambda: job.iterate(session, range(4, 8)))
    turns.run(0, lambda: session.finish({"r": 8}))
    assert len(job.left()) == 1


def test_an_end_that_the_thread_does_not_come_to_is_said(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "PATIENCE_S", 0.01)
    job = Job(tmp_path)
    session = job.loop()
    turns.run(0, lambda: job.iterate(session, range(4)))
    live.close_all()
    assert "thread turn-0 did not begin or end an iteration" in caplog.text
    (manifest,) = job.left()
    assert manifest.trace is None
    assert "the capture was open when it had to end" in manifest.notes[0]
    turns.run(0, lambda: session.begin({"r": range(4, 5)}))  # it comes after all
    assert job.off()
    (manifest,) = job.left()
    assert (rows(manifest), manifest.closed_by) == ([2, 3], "job_end")


def test_a_thread_that_has_ended_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    session = job.loop()
    thread = threading.Thread(target=lambda: job.iterate(session, range(4)))
    thread.start()
    thread.join()
    live.close_all()
    assert recorder.holder is None
    assert "did not begin or end" not in caplog.text
    (manifest,) = job.left()
    assert "the thread that recorded them has ended" in manifest.notes[0]


def test_loops_that_have_not_begun_capture_nothing_after_the_jobs_end(tmp_path: Path) -> None:
    job = Job(tmp_path)
    session = job.loop()
    live.close_all()
    job.iterate(session, range(8))
    session.finish({"r": 8})
    assert [manifest.trace for manifest in job.left()] in ([], [None])


def test_a_loop_that_is_dropped_without_its_end_gives_the_recorder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    monkeypatch.setattr(in_process, "_of_the_job", job.arming.settings)
    monkeypatch.setattr(in_process, "shared_arming", lambda *_: job.arming)
    loop = decode_loop(rows=1)
    for _ in range(4):
        with loop.iteration():
            pass
    assert recorder.holder is not None
    del loop
    gc.collect()
    assert job.off()
    (manifest,) = job.left()
    assert (rows(manifest), manifest.closed_by) == ([2, 3], "request_end")


# -- loops that change their thread --


def test_each_iteration_in_a_thread_of_its_own_becomes_a_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    session = job.loop()
    for token in range(7):
        thread = threading.Thread(target=job.iterate, args=(session, range(token, token + 1)))
        thread.start()
        thread.join()
    session.finish({"r": 7})
    assert job.off()
    manifests = job.left()
    assert [rows(manifest) for manifest in manifests] == [[2], [3], [4]]
    assert [manifest.part for manifest in manifests] == [1, 2, 3]
    assert [manifest.closed_by for manifest in manifests] == ["thread", "thread", "window"]
    assert "each iteration is a part of its own" in manifests[0].notes[0]


def test_a_recording_on_a_thread_that_ended_is_reported_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, profile_token_start=0)
    session = job.loop()
    for token in range(3):
        thread = threading.Thread(target=job.iterate, args=(session, range(token, token + 1)))
        thread.start()
        thread.join()
        if token == 0:
            job.kineto.running = None  # as Kineto's, it ends with its thread
    session.finish({"r": 3})
    assert recorder.holder is None
    lost, *parts = sorted(job.left(), key=lambda manifest: bool(manifest.rows))
    assert "tokens [0, 1) were not recorded: the thread that recorded them has ended" in lost.notes[0]
    assert [rows(manifest) for manifest in parts] == [[1], [2]]
    assert "the loop changes its thread" in caplog.text


def test_a_recording_on_a_thread_that_comes_back_is_kept(tmp_path: Path, turns: Turns) -> None:
    job = Job(tmp_path, profile_token_start=0)
    session, other = job.loop(), job.loop()
    turns.run(0, lambda: job.iterate(session, range(1)))
    job.arming._profiler.busy = lambda: "it runs on" if job.kineto.running else None  # type: ignore[union-attr, method-assign]
    turns.run(1, lambda: job.iterate(session, range(1, 2)))  # cannot be recorded: the old thread still records
    turns.run(0, lambda: job.iterate(other, range(1), "o"))
    turns.run(1, lambda: job.iterate(session, range(2, 3)))
    turns.run(1, lambda: session.finish({"r": 3}))
    assert job.off()
    manifests = [manifest for manifest in job.left() if manifest.rows]
    assert [(rows(manifest), manifest.closed_by) for manifest in manifests] == [([0], "thread"), ([2], "thread")]


# -- other profilers --


def test_a_window_that_another_profiler_covers_is_waited_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.kineto.other_runs = True
    first = job.loop()
    job.iterate(first, range(8))
    first.finish({"r": 8})
    (manifest,) = job.left()
    assert manifest.notes == ["reached, but not captured: the job's own profiler runs"]
    assert "no capture of tokens [2, 5): the job's own profiler runs; the job goes on" in caplog.text
    job.kineto.other_runs = False
    second = job.loop()
    job.iterate(second, range(8))
    second.finish({"r": 8})
    (manifest,) = job.left()
    assert rows(manifest) == [2, 3, 4]
    assert job.off()


def test_the_rest_of_the_window_is_recorded_when_the_other_profiler_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path)
    session = job.loop()
    job.iterate(session, range(3))
    session.step_aside()
    job.kineto.other_runs = True
    job.iterate(session, range(3, 4))
    job.kineto.other_runs = False
    job.iterate(session, range(4, 6))
    session.finish({"r": 6})
    assert job.off()
    first, second, missed = sorted(job.left(), key=lambda manifest: (not manifest.rows, manifest.part))
    assert (rows(first), first.closed_by, first.part) == ([2], "other_profiler", 1)
    assert (rows(second), second.closed_by, second.part) == ([4], "window", 2)
    assert missed.notes == ["the iterations of tokens [3, 4) were not recorded: the job's own profiler runs"]


def test_another_profiler_waits_for_the_thread_of_the_capture(tmp_path: Path, turns: Turns) -> None:
    job = Job(tmp_path)
    session = job.loop()
    turns.run(0, lambda: job.iterate(session, range(3)))
    turns.run(0, lambda: session.begin({"r": range(3, 4)}))
    other = in_background(session.step_aside, lambda: session._capturer.request.is_waiting)
    turns.run(0, session.end)
    other.join(30)
    assert job.kineto.running is None
    assert job.left()[0].closed_by == "other_profiler"


def test_another_profiler_does_not_wait_for_ever(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "STEP_ASIDE_S", 0.01)
    job = Job(tmp_path)
    session = job.loop()
    turns.run(0, lambda: job.iterate(session, range(3)))
    session.step_aside()
    assert "both traces may be wrong" in caplog.text
    turns.run(0, lambda: session.finish({"r": 3}))


# -- several loops --


def test_a_window_reached_while_another_loop_is_recorded_is_reported(tmp_path: Path) -> None:
    job = Job(tmp_path, profile_token_start=None, profile_token_end=None, profile_token_windows=[[2, 9], [20, 22]])
    first, second = job.loop(), job.loop()
    job.iterate(first, range(3))
    job.iterate(second, range(24), "s")
    first.finish({"r": 3})
    second.finish({"s": 24})
    manifests = {manifest.window.start: manifest for manifest in job.left()}
    assert rows(manifests[2]) == [2]
    assert manifests[2].other_iterations == 24
    assert manifests[20].notes == ["reached, but not captured: another loop of this process was being recorded"]


def test_iterations_are_numbered_on_from_loop_to_loop(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for length in (2, 8):
        session = job.loop()
        job.iterate(session, range(length))
        session.finish({"r": length})
    (manifest,) = job.left()
    assert [row.index for row in manifest.rows] == [4, 5, 6]


def test_what_was_never_reached_counts_every_loop(tmp_path: Path) -> None:
    job = Job(tmp_path, profile_token_start=10, profile_token_end=20)
    for length in (7, 2):
        session = job.loop()
        job.iterate(session, range(length))
        session.finish({"r": length})
    (manifest,) = job.left()
    assert manifest.notes == [
        "tokens [10, 20) were never reached in 9 iterations: the furthest response token seen is 6"
    ]
    assert manifest.furthest_token == 6


# -- forks --


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_fork_the_sessions_are_dead(tmp_path: Path) -> None:
    job = Job(tmp_path)
    session = job.loop()
    job.iterate(session, range(3))
    pid = os.fork()
    if pid == 0:
        try:
            job.iterate(session, range(3, 8))
            session.finish({"r": 8})
            live.close_all()
            new = job.loop()
            job.iterate(new, range(8), "child")
            new.finish({"child": 8})
            fine = session.failed and live.live_sessions() == () and recorder.holder is None
            fine = fine and [manifest.final for manifest in job.left()] == [False]  # as the parent left it
        except BaseException:
            fine = False
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    job.iterate(session, range(3, 8))
    session.finish({"r": 8})
    (manifest,) = job.left()
    assert rows(manifest) == [2, 3, 4]


def test_a_failure_is_for_all_loops_of_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    first, second = job.loop(), job.loop()
    with caplog.at_level(logging.WARNING):
        first.fail(ValueError("not understood"))
        job.iterate(second, range(8))
        second.finish({"r": 8})
    (manifest,) = job.left()
    assert manifest.closed_by == "error"
    assert sum("profiling of toy stops here" in record.getMessage() for record in caplog.records) == 1
