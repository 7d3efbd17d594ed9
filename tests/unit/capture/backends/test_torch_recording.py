"""What becomes of a finished recording of torch's profiler: exported in time, on any disk, into any folder; counted."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_trace import MadeTrace
from waiting import wait_until

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends import (  # noqa: E402
    backlog,
    engine_idle,
    pending,
    raw_trace,
    torch_recording,
    unlocked,
)
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler  # noqa: E402
from verl_profiler_conf.capture.backends.torch_recording import TorchRecording  # noqa: E402
from verl_profiler_conf.capture.backends.unlocked import NativeResult  # noqa: E402

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the export without the lock is for Linux")
CPU = [torch.profiler.ProfilerActivity.CPU]
TRACE = "t.pt.trace.json.gz"


def names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def record(folder: Path) -> TorchRecording:
    profiler = TorchProfiler("cpu", save_path=str(folder))
    profiler.start()
    torch.sin(torch.ones(3))
    return profiler.stop()


def raw_files(folder: Path) -> int:
    return len(list(folder.glob(".kineto-*.json")))


class TestBeforeAnotherProfilerIsPrepared:
    """Times of device events are converted when a trace is exported, by what the last prepared profiler left."""

    @pytest.fixture
    def recording(self, tmp_path: Path) -> Iterator[TorchRecording]:
        recording = record(tmp_path)
        assert not raw_files(tmp_path)
        yield recording
        recording.drop()

    def test_by_the_next_capture(self, recording: TorchRecording, tmp_path: Path) -> None:
        other = TorchProfiler("cpu")
        other.start()
        assert raw_files(tmp_path) == 1
        other.discard()

    def test_by_a_profiler_of_the_job(self, recording: TorchRecording, tmp_path: Path) -> None:
        with torch.profiler.profile(activities=CPU):
            assert raw_files(tmp_path) == 1
        recording.write(tmp_path / "t", {})
        assert "aten::sin" in names(tmp_path / TRACE)
        assert [entry.name for entry in tmp_path.iterdir()] == [TRACE]

    def test_by_one_with_a_schedule_that_warms_up(self, recording: TorchRecording, tmp_path: Path) -> None:
        schedule = torch.profiler.schedule(wait=0, warmup=2, active=1)
        with torch.profiler.profile(activities=CPU, schedule=schedule):
            assert raw_files(tmp_path) == 1

    def test_by_the_older_interface(self, recording: TorchRecording, tmp_path: Path) -> None:
        with torch.autograd.profiler.profile(use_kineto=True):
            assert raw_files(tmp_path) == 1

    def test_in_another_thread(self, recording: TorchRecording, tmp_path: Path) -> None:
        seen: list[int] = []

        def profile() -> None:
            with torch.profiler.profile(activities=CPU):
                seen.append(raw_files(tmp_path))

        thread = threading.Thread(target=profile)
        thread.start()
        thread.join()
        assert seen == [1]

    def test_it_waits_for_an_export_that_is_under_way(
        self, recording: TorchRecording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exporting, asked, go = threading.Event(), threading.Event(), threading.Event()
        order: list[str] = []
        export, save = TorchRecording._export, TorchRecording.save

        def slow_export(self: TorchRecording, folder: Path) -> Any:
            exporting.set()
            assert go.wait(30)
            raw = export(self, folder)
            order.append("exported")
            return raw

        def noted_save(self: TorchRecording) -> None:  # the one that the other profiler asks for
            asked.set()
            save(self)

        def profile() -> None:
            with torch.profiler.profile(activities=CPU):
                order.append("prepared")

        monkeypatch.setattr(TorchRecording, "_export", slow_export)
        monkeypatch.setattr(TorchRecording, "save", noted_save)
        threads = [
            threading.Thread(target=recording.write, args=(tmp_path / "t", {})),
            threading.Thread(target=profile),
        ]
        threads[0].start()
        assert exporting.wait(30)
        threads[1].start()
        assert asked.wait(30)
        go.set()
        for thread in threads:
            thread.join(30)
        assert order == ["exported", "prepared"]

    def test_a_failing_export_does_not_harm_the_other_profiler(
        self, recording: TorchRecording, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(recording, "_folder", Path("/dev/null/nowhere"))
        with torch.profiler.profile(activities=CPU) as other:
            torch.cos(torch.ones(3))
        assert "could not be exported before another profiler was prepared" in caplog.text
        assert "aten::cos" in {event.key for event in other.key_averages()}

    def test_torch_is_left_as_it_was(self, tmp_path: Path) -> None:
        original = torch.autograd.profiler._prepare_profiler
        recording = record(tmp_path)
        assert torch.autograd.profiler._prepare_profiler is not original
        recording.write(tmp_path / "t", {})
        assert torch.autograd.profiler._prepare_profiler is original

    def test_what_somebody_else_put_there_meanwhile_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.autograd.profiler, "_prepare_profiler", torch.autograd.profiler._prepare_profiler)
        recording = record(tmp_path)
        inner = torch.autograd.profiler._prepare_profiler

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        torch.autograd.profiler._prepare_profiler = wrapped
        recording.write(tmp_path / "t", {})
        assert torch.autograd.profiler._prepare_profiler is wrapped
        with torch.profiler.profile(activities=CPU):
            pass

    def test_a_recording_that_nobody_holds_is_forgotten(self, tmp_path: Path) -> None:
        record(tmp_path)
        with torch.profiler.profile(activities=CPU):
            assert not raw_files(tmp_path)

    def test_without_the_function_that_is_watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pending.export_all()
        monkeypatch.delattr(torch.autograd.profiler, "_prepare_profiler")
        assert not pending.watch()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_fork_has_none(self, recording: TorchRecording) -> None:
        hooked = torch.autograd.profiler._prepare_profiler
        child = os.fork()
        if child == 0:
            is_clean = not pending._guard.recordings and torch.autograd.profiler._prepare_profiler is not hooked
            os._exit(0 if is_clean else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.autograd.profiler._prepare_profiler is hooked


class TestWhereTorchsOwnExportIsUsed:
    """It holds Python's lock for as long as it takes, so it waits for an idle engine."""

    @pytest.fixture
    def recording(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchRecording]:
        monkeypatch.setattr(unlocked, "RELEASES", frozenset())
        yield record(tmp_path)
        engine_idle.engine_is_idle()

    def test_it_waits_for_an_idle_engine(
        self, recording: TorchRecording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting = threading.Event()

        def wait() -> bool:
            waiting.set()
            return engine_idle.wait_until_idle(300)

        monkeypatch.setattr(torch_recording, "wait_until_idle", wait)
        engine_idle.engine_runs()
        writer = threading.Thread(target=recording.write, args=(tmp_path / "t", {}))
        writer.start()
        assert waiting.wait(30)
        assert list(tmp_path.iterdir()) == []
        engine_idle.engine_is_idle()
        writer.join(30)
        assert "aten::sin" in names(tmp_path / TRACE)

    def test_it_does_not_wait_for_ever(
        self, recording: TorchRecording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch_recording, "wait_until_idle", lambda: engine_idle.wait_until_idle(0.01))
        engine_idle.engine_runs()
        recording.write(tmp_path / "t", {})
        assert "aten::sin" in names(tmp_path / TRACE)

    def test_another_profiler_does_not_wait_for_it(self, recording: TorchRecording, tmp_path: Path) -> None:
        engine_idle.engine_runs()
        with torch.profiler.profile(activities=CPU):
            assert raw_files(tmp_path) == 1
        recording.write(tmp_path / "t", {})  # waits for nothing: it is exported already
        assert "aten::sin" in names(tmp_path / TRACE)


class TestFoldersWithAnyName:
    @pytest.mark.parametrize("native", [True, False])
    @pytest.mark.parametrize("name", [b'quo"te', b"back\\slash", b"new\nline", b"tab\t", b"no utf8 \xff", b"%2", b":"])
    def test_the_trace_is_whole_and_says_its_name(
        self, name: bytes, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not native:
            monkeypatch.setattr(NativeResult, "of", classmethod(lambda *_: None))
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        record(folder).write(folder / "t", {})
        with gzip.open(folder / TRACE) as file:
            assert json.load(file)["traceName"] == str(folder / TRACE)
        assert [entry.name for entry in folder.iterdir()] == [TRACE]

    def test_a_range_of_the_job_with_quotes_in_its_name(self, tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu")
        profiler.start()
        with torch.profiler.record_function('say "hi"'):
            torch.sin(torch.ones(3))
        written = profiler.stop().write(tmp_path / "t", {})
        assert written.note is None
        assert {'say "hi"', "say 'hi'"} & set(names(tmp_path / TRACE))  # torch 2.14 makes them single ones


class TestTooMuchWaitsToBePacked:
    @pytest.fixture(autouse=True)
    def _tight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backlog, "LIMIT", 1)

    def test_the_next_export_waits_until_the_writer_has_caught_up(self, tmp_path: Path) -> None:
        first, second = record(tmp_path), record(tmp_path)
        assert raw_files(tmp_path) == 1  # the first, by the start of the second
        engine_idle.engine_runs()
        saving = threading.Thread(target=second.save, daemon=True)
        saving.start()
        wait_until(lambda: engine_idle._is_idle, "the export waits")
        assert raw_files(tmp_path) == 1
        first.write(tmp_path / "t", {})
        saving.join(60)
        assert raw_files(tmp_path) == 1
        second.write(tmp_path / "u", {})
        assert backlog.backlog.bytes == 0
        assert "aten::sin" in names(tmp_path / "u.pt.trace.json.gz")
        engine_idle.engine_is_idle()

    def test_the_writer_itself_waits_for_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backlog.Backlog, "wait", lambda _: pytest.fail("the writer waits for itself"))
        backlog.backlog.add("another", 1 << 40)
        try:
            assert record(tmp_path).write(tmp_path / "t", {}).bytes
        finally:
            backlog.backlog.remove("another")

    def test_a_writer_that_waits_for_an_idle_engine_goes_on_while_the_engine_waits_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TorchRecording, "_native", lambda _: None)
        engine_idle.engine_runs()
        waiting, next_ = record(tmp_path), record(tmp_path)
        waited = threading.Thread(target=engine_idle.wait_until_idle, args=(600,), daemon=True)
        waited.start()
        packing = threading.Thread(target=lambda: (waited.join(), waiting.write(tmp_path / "t", {})), daemon=True)
        packing.start()
        next_.save()
        packing.join(60)
        assert names(tmp_path / TRACE)
        next_.drop()
        assert not engine_idle._is_idle
        engine_idle.engine_is_idle()


@linux
class TestWithoutRoomForTheRawTrace:
    @pytest.fixture(autouse=True)
    def _full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(raw_trace, "ROOM", 1 << 80)
        monkeypatch.setattr(unlocked, "RELEASES", frozenset({unlocked._torch_release()}))

    def test_it_is_compressed_while_it_is_exported(self, tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu", save_path=str(tmp_path))
        profiler.start()
        with profiler.annotate("response_tokens[0:4) iter=0 reqs=1"):
            for _ in range(5000):
                torch.ones(3) + 1
        recording = profiler.stop()
        recording.save()
        assert list(tmp_path.iterdir()) == []
        recording.write(tmp_path / "t", {"response_tokens[0:4) iter=0 reqs=1": "response_tokens[0:2) iter=0 reqs=1"})
        found = names(tmp_path / TRACE)
        assert found.count("aten::add") == 5000
        assert found.count("response_tokens[0:2) iter=0 reqs=1") == 1
        assert [entry.name for entry in tmp_path.iterdir()] == [TRACE]

    def test_the_packed_trace_has_room_where_the_raw_one_has_none(self, tmp_path: Path) -> None:
        script = """
import resource, sys
from pathlib import Path
import torch
from verl_profiler_conf.capture.backends import raw_trace, unlocked
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
raw_trace.ROOM = 1 << 80
unlocked.RELEASES = {unlocked._torch_release()}
profiler = TorchProfiler("cpu")
profiler.start()
for _ in range(2000): torch.ones(3) + 1
recording = profiler.stop()
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # the raw trace has more
print(recording.write(Path(sys.argv[1]) / "t", {}).bytes)
"""
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
        assert 300_000 < int(done.stdout) < 1_000_000  # eleven times that, raw
        assert names(tmp_path / TRACE).count("aten::add") == 2000

    def test_it_can_be_written_later_when_the_disk_is_full_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        recording = record(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                recording.write(tmp_path / "t", {})
        recording.write(tmp_path / "t", {})
        assert "aten::sin" in names(tmp_path / TRACE)

    def test_an_export_that_writes_nothing_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NativeResult, "save", lambda *_: None)
        recording = record(tmp_path)
        with pytest.raises(OSError, match="no whole trace"):
            recording.write(tmp_path / "t", {})


class TestCountsOfIterations:
    def test_operators_of_each_iteration(self, tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu")
        profiler.start()
        for index in range(3):
            with profiler.annotate(f"response_tokens[{index}:{index + 1}) iter={index + 40} reqs=1"):
                for _ in range(index):
                    torch.sin(torch.zeros(()))
        written = profiler.stop().write(tmp_path / "t", {})
        with gzip.open(tmp_path / TRACE) as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        expected = {
            int(r["name"].split("iter=")[1].split()[0]): sum(
                e["cat"] == "cpu_op" and r["ts"] <= e["ts"] <= r["ts"] + r["dur"] for e in events
            )
            for r in events
            if r["name"].startswith("response_tokens")
        }
        assert {index: counts.operators for index, counts in written.iterations.items()} == expected
        assert expected[40] == 0 < expected[41] < expected[42]
        assert "no operator was recorded in 1 of 3 iterations (40)" in (written.note or "")

    def test_a_forward_in_another_thread_is_told(self, tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu")
        profiler.start()
        with profiler.annotate("response_tokens[0:1) iter=0 reqs=1"):
            thread = threading.Thread(target=lambda: torch.sin(torch.ones(3)))
            thread.start()
            thread.join()
        written = profiler.stop().write(tmp_path / "t", {})
        assert "their forward ran in another thread" in (written.note or "")


class TestWhatATraceOfAPretendedGpuSays:
    """The traces are made up: this machine may have no GPU."""

    @pytest.fixture
    def trace(self) -> MadeTrace:
        trace = MadeTrace()
        for index in range(3):
            trace.iteration(index)
        return trace

    def _written(self, trace: MadeTrace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        def export(self: TorchRecording, folder: Path) -> Any:
            file = folder / "raw.json"
            file.write_text(trace.text())
            return raw_trace.RawFile(file, trace.name)

        monkeypatch.setattr(TorchRecording, "_export", export)
        profiler = TorchProfiler("cpu")
        profiler.records_device = True
        profiler.start()
        return profiler.stop().write(folder / "t", {})

    def test_nothing_to_say(self, trace: MadeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written = self._written(trace, tmp_path, monkeypatch)
        assert (written.note, written.device_events) == (None, 6)
        assert [counts.kernels for counts in written.iterations.values()] == [2, 2, 2]

    def test_times_outside(self, trace: MadeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trace.launch("cudaLaunchKernel", delay=-1e9)
        note = self._written(trace, tmp_path, monkeypatch).note
        assert "1 of 7 device events lie outside the time of the recording" in note

    def test_an_iteration_without_device_work(
        self, trace: MadeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trace.iteration(3, kernels=0)
        note = self._written(trace, tmp_path, monkeypatch).note
        assert "no device work was recorded in 1 of 4 iterations (3)" in note

    def test_a_full_buffer(self, trace: MadeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_recording, "_FULL_BUFFER_EVENTS", 6)
        trace.iteration(3, kernels=0)
        trace.iteration(4, kernels=0)
        note = self._written(trace, tmp_path, monkeypatch).note
        assert "in 2 of 5 iterations (3, 4): Kineto's device buffer (128 MB) was full" in note

    def test_lost_records(self, trace: MadeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = [event for event in trace._device if '"cat": "kernel"' in event]
        trace._device = [event for event in trace._device if event not in kernels[1:]]
        note = self._written(trace, tmp_path, monkeypatch).note
        assert "5 of 6 kernel launches have no kernel in the trace" in note

    def test_a_trace_that_is_no_json(self, trace: MadeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trace._host[0] = trace._host[0].replace('"External id"', '"broken \\x"')
        assert "not valid JSON" in self._written(trace, tmp_path, monkeypatch).note


@linux
class TestReleasesOfTorchForTheExportWithoutTheLock:
    def _of(self) -> NativeResult | None:
        with torch.profiler.profile(activities=CPU) as profile:
            torch.ones(3) + 1
        return NativeResult.of(profile.profiler.kineto_results)

    def test_a_release_that_is_not_in_the_table_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unlocked, "RELEASES", frozenset({"2.0.0"}))
        assert self._of() is None

    @pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0+cu129", "2.13.0"])
    def test_every_build_of_a_release_counts(self, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        assert unlocked._torch_release() == "2.13.0"
