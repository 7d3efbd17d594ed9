"""torch's profiler on the CPU, for real: what is in a trace, and what happens to it when things go wrong."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends import torch_profiler as module  # noqa: E402
from verl_profiler_conf.capture.backends import torch_recording, unlocked  # noqa: E402
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler, running_profiler  # noqa: E402
from verl_profiler_conf.capture.backends.unlocked import NativeResult  # noqa: E402
from verl_profiler_conf.core.errors import UnavailableError  # noqa: E402

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the export without the lock is for Linux")


@pytest.fixture
def profiler() -> TorchProfiler:
    return TorchProfiler("cpu")


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.load(file)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def names(path: Path) -> list[str]:
    return [event["name"] for event in read(path)]


def capture(profiler: TorchProfiler, path: Path, **renames: str) -> Path:
    profiler.start()
    with profiler.annotate("response_tokens[0:1) iter=0 reqs=1"):
        torch.ones(3) + 1
    written = profiler.stop().write(path, renames)
    assert written.path is not None
    return written.path


class TestWhatIsInIt:
    def test_exactly_what_ran_between_start_and_stop(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        value = torch.ones(3)
        torch.sin(value)
        profiler.start()
        torch.cos(value)
        torch.cos(value)
        recording = profiler.stop()
        torch.tan(value)
        found = names(recording.write(tmp_path / "t", {}).path or tmp_path)
        assert found.count("aten::cos") == 2
        assert not {"aten::sin", "aten::tan"} & set(found)

    def test_each_range_holds_its_operators(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        value = torch.ones(3)
        profiler.start()
        for index, call in enumerate((torch.sin, torch.cos, torch.tan)):
            with profiler.annotate(f"response_tokens[{index}:{index + 1}) iter={index} reqs=1"):
                call(value)
        events = read(profiler.stop().write(tmp_path / "t", {}).path or tmp_path)
        ranges = {e["name"]: e for e in events if e["name"].startswith("response_tokens")}
        assert len(ranges) == 3
        for index, name in enumerate(("aten::sin", "aten::cos", "aten::tan")):
            around = ranges[f"response_tokens[{index}:{index + 1}) iter={index} reqs=1"]
            (operator,) = (e for e in events if e["name"] == name)
            assert around["ts"] <= operator["ts"]
            assert operator["ts"] + operator["dur"] <= around["ts"] + around["dur"]
            assert around["cat"] == "user_annotation"

    def test_again_and_again(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        for index, call in enumerate((torch.sin, torch.cos)):
            profiler.start()
            call(torch.ones(3))
            profiler.stop().write(tmp_path / f"t{index}", {})
        assert "aten::sin" not in names(tmp_path / "t1.pt.trace.json.gz")
        assert "aten::cos" in names(tmp_path / "t1.pt.trace.json.gz")

    def test_contents(self, tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu", ["cpu", "shapes", "stack", "memory"])
        profiler.start()
        torch.ones(3, 5) @ torch.ones(5, 2)
        path = profiler.stop().write(tmp_path / "t", {}).path
        assert path is not None
        (product,) = (event for event in read(path) if event["name"] == "aten::mm")
        assert product["args"]["Input Dims"] == [[3, 5], [5, 2]]
        assert any(event["cat"] == "python_function" for event in read(path))
        with gzip.open(path, "rt") as file:
            assert "[memory]" in file.read()

    def test_without_contents_neither_shapes_nor_stacks(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        events = read(capture(profiler, tmp_path / "t"))
        assert not any("Input Dims" in event.get("args", {}) for event in events)
        assert not any(event["cat"] == "python_function" for event in events)

    def test_annotating_costs_nothing_when_not_recording(self, profiler: TorchProfiler) -> None:
        assert profiler.annotate("a") is profiler.annotate("b")

    def test_discarded(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        profiler.start()
        profiler.discard()
        profiler.discard()
        assert profiler.busy() is None
        assert "aten::add" in names(capture(profiler, tmp_path / "t"))


class TestTheFile:
    def test_named_and_whole(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        path = capture(profiler, tmp_path / "t")
        assert [entry.name for entry in tmp_path.iterdir()] == ["t.pt.trace.json.gz"]
        with gzip.open(path) as file:
            assert json.load(file)["traceName"] == str(path)

    def test_says_its_size(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        profiler.start()
        written = profiler.stop().write(tmp_path / "t", {})
        assert written.path is not None
        assert (written.bytes, written.device_events, written.note) == (written.path.stat().st_size, None, None)

    def test_ranges_renamed(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        planned = [f"response_tokens[{i}:{i + 5}) iter={i} reqs=1" for i in range(50)]
        profiler.start()
        for name in planned:
            with profiler.annotate(name):
                torch.ones(3) + 1
        renames = {name: name.replace(":", ":1", 1) for name in planned[::2]}
        path = profiler.stop().write(tmp_path / "t", renames).path
        assert path is not None
        found = [name for name in names(path) if name.startswith("response_tokens")]
        assert found == [renames.get(name, name) for name in planned]

    def test_never_over_an_older_one(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        (tmp_path / "t.pt.trace.json.gz").write_text("old")
        profiler.start()
        recording = profiler.stop()
        with pytest.raises(FileExistsError):
            recording.write(tmp_path / "t", {})
        assert (tmp_path / "t.pt.trace.json.gz").read_text() == "old"

    def test_not_lost_where_the_first_name_was_taken(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        (tmp_path / "t.pt.trace.json.gz").write_text("old")
        profiler.start()
        torch.sin(torch.ones(3))
        recording = profiler.stop()
        with pytest.raises(FileExistsError):
            recording.write(tmp_path / "t", {})
        assert "aten::sin" in names(recording.write(tmp_path / "u", {}).path or tmp_path)

    def test_a_folder_that_cannot_be(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        profiler.start()
        torch.sin(torch.ones(3))
        recording = profiler.stop()
        with pytest.raises(OSError, match=r"file"):
            recording.write(tmp_path / "file" / "t", {})
        assert "aten::sin" in names(recording.write(tmp_path / "t", {}).path or tmp_path)

    def test_written_on_another_thread(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        profiler.start()
        torch.sin(torch.ones(3))
        recording = profiler.stop()
        thread = threading.Thread(target=recording.write, args=(tmp_path / "t", {}))
        thread.start()
        thread.join()
        assert "aten::sin" in names(tmp_path / "t.pt.trace.json.gz")

    @linux
    def test_no_room_leaves_nothing(self, tmp_path: Path) -> None:
        script = """
import resource, sys
from pathlib import Path
import torch
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
profiler = TorchProfiler("cpu")
profiler.start()
for _ in range(500): torch.ones(3) + 1
recording = profiler.stop()
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # writing on fails as on a full disk
try:
    recording.write(Path(sys.argv[1]) / "t", {})
except OSError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
        assert "is there room" in done.stdout
        assert list(tmp_path.iterdir()) == []

    def test_killed_while_writing_leaves_no_half_file(self, tmp_path: Path) -> None:
        script = """
import os, signal, sys, zlib
from pathlib import Path
import torch
from verl_profiler_conf.capture.backends import tracefile
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
tracefile._CHUNK = 512
whole = tracefile._compress
class Sink:
    def __init__(self, file): self.file, self.left = file, 2
    def write(self, data):
        self.file.write(data); self.file.flush(); self.left -= 1
        if not self.left: os.kill(os.getpid(), signal.SIGKILL)
tracefile._compress = lambda source, sink, *more: whole(source, Sink(sink), *more)
profiler = TorchProfiler("cpu")
profiler.start()
for _ in range(100): torch.ones(3) + 1
profiler.stop().write(Path(sys.argv[1]) / "t", {})
"""
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "t.pt.trace.json.gz").exists()
        assert all(entry.name.startswith(".") for entry in tmp_path.iterdir())


class TestOthers:
    def test_another_profiler_on_this_thread(self, profiler: TorchProfiler) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert "another torch profiler" in (profiler.busy() or "")
        assert profiler.busy() is None

    def test_another_profiler_on_another_thread(self, profiler: TorchProfiler) -> None:
        begun, end = threading.Event(), threading.Event()

        def other() -> None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                begun.set()
                end.wait(30)

        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(30)
        try:
            assert "another torch profiler" in (profiler.busy() or "")
        finally:
            end.set()
            thread.join()
        assert profiler.busy() is None

    def test_asking_imports_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "torch")
        assert running_profiler() is None
        assert "torch" not in sys.modules

    def test_only_the_thread_that_began_can_end(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        profiler.start()
        torch.sin(torch.ones(3))
        failures: list[Exception] = []

        def stop() -> None:
            try:
                profiler.stop()
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=stop)
        thread.start()
        thread.join()
        assert "by the thread that began it" in str(failures[0])
        assert "aten::sin" in names(profiler.stop().write(tmp_path / "t", {}).path or tmp_path)

    def test_ended_by_somebody_else(self, profiler: TorchProfiler, tmp_path: Path) -> None:
        profiler.start()
        torch._C._autograd._disable_profiler()
        with pytest.raises(RuntimeError, match=r"another profiler .* ended this recording|not running"):
            profiler.stop()
        profiler.start()
        torch._C._autograd._disable_profiler()
        profiler.discard()
        assert "aten::add" in names(capture(profiler, tmp_path / "t"))

    def test_stop_without_start(self, profiler: TorchProfiler) -> None:
        with pytest.raises(RuntimeError, match="no recording"):
            profiler.stop()


class TestPrivatePartsOfTorchThatAreMissing:
    """Each private attribute of torch that is read here is taken away once."""

    def test_without_the_experimental_config_torch_makes_its_tables_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {}
        with monkeypatch.context() as patch:
            patch.delattr(torch._C._profiler, "_ExperimentalConfig")
            assert not module._ask_for_trace_only(options)
            TorchProfiler("cpu")
        assert options == {}

    def test_without_trace_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def older(**options: bool) -> object:
            raise TypeError("an older torch takes no trace_only")

        with monkeypatch.context() as patch:
            patch.setattr(torch._C._profiler, "_ExperimentalConfig", older)
            profiler = TorchProfiler("cpu")
        assert not profiler._trace_only
        assert "aten::add" in names(capture(profiler, tmp_path / "t"))

    def test_without_the_flag_of_the_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch._C._autograd, "_profiler_enabled")
        assert running_profiler() is None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert "another torch profiler" in (running_profiler() or "")

    def test_without_the_flag_of_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), monkeypatch.context() as patch:
            patch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
            assert "another torch profiler" in (running_profiler() or "")
        with monkeypatch.context() as patch:
            patch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
            assert running_profiler() is None

    def test_without_the_result(self, profiler: TorchProfiler) -> None:
        profiler.start()
        recording = profiler.stop()
        assert not recording.is_empty
        recording._profiler.profiler.kineto_results = None
        assert recording.is_empty
        recording.drop()

    def test_without_the_start_of_the_trace(self, profiler: TorchProfiler) -> None:
        profiler.start()
        recording = profiler.stop()

        class OlderResult:
            """Like torch's, without `trace_start_ns`."""

        recording._profiler.profiler.kineto_results = OlderResult()
        assert not recording.is_empty
        recording.drop()

    @linux
    @pytest.mark.parametrize("name", ["_TYPE_INFO", "_SAVE", "_CONSTRUCT", "_DESTROY"])
    def test_without_a_symbol_torch_saves_itself(
        self, name: str, profiler: TorchProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unlocked, name, "_ZN5torch7removedEv")
        unlocked._symbols.cache_clear()
        try:
            assert unlocked._symbols() is None
            assert "aten::add" in names(capture(profiler, tmp_path / "t"))
        finally:
            unlocked._symbols.cache_clear()

    @linux
    def test_without_the_exchange_protocol(self) -> None:
        class OlderResult:
            """Like torch's, made by a pybind11 that has no `_pybind11_conduit_v1_`."""

        assert NativeResult.of(OlderResult()) is None


class TestWithoutAGpu:
    def test_cuda_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UnavailableError, match="torch sees no GPU"):
            TorchProfiler("cuda")

    def test_only_the_gpu_asked_for(self) -> None:
        with pytest.raises(UnavailableError, match="leaves nothing to record"):
            TorchProfiler("cpu", ["cuda"])


class TestNoDeviceEventsWithAPretendedGpu:
    @pytest.fixture
    def pretended(self, monkeypatch: pytest.MonkeyPatch) -> TorchProfiler:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        profiler = TorchProfiler("cuda")
        profiler._options["activities"] = [torch.profiler.ProfilerActivity.CPU]  # what this machine can record
        return profiler

    def _note(self, profiler: TorchProfiler, folder: Path) -> str:
        profiler.start()
        torch.sin(torch.ones(3))
        written = profiler.stop().write(folder / "t", {})
        assert written.device_events == 0
        return written.note or ""

    def test_is_said_with_the_known_causes(self, pretended: TorchProfiler, tmp_path: Path) -> None:
        note = self._note(pretended, tmp_path)
        assert "no device event" in note
        assert "CUPTI" in note

    def test_names_the_variable_that_is_set(
        self, pretended: TorchProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/injected.so")
        assert "NVTX_INJECTION64_PATH=/opt/injected.so is set" in self._note(pretended, tmp_path)

    def test_not_said_where_only_the_cpu_was_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        profiler = TorchProfiler("cuda", ["cpu"])
        profiler.start()
        torch.sin(torch.ones(3))
        written = profiler.stop().write(tmp_path / "t", {})
        assert written.device_events is None
        assert "no device event" not in (written.note or "")

    def test_a_failed_kernel_does_not_leave_the_recording_on(
        self, pretended: TorchProfiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretended.start()

        def fail() -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(pretended, "_synchronize", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            pretended.stop()
        assert running_profiler() is None

    def test_names_a_torch_without_kineto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
        assert "without Kineto" in torch_recording.no_device_events()


@linux
class TestWithoutTheLock:
    @pytest.fixture(autouse=True)
    def _this_release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that `make test-torch` shows whether another release can be named in the table."""
        monkeypatch.setattr(unlocked, "RELEASES", frozenset({unlocked._torch_release()}))

    def test_this_torch_says_where_its_result_is(self) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3) + 1
        assert NativeResult.of(profile.profiler.kineto_results) is not None

    def test_another_object_is_refused(self) -> None:
        assert NativeResult.of(object()) is None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3) + 1
        event = profile.profiler.kineto_results.events()[0]
        assert hasattr(event, "_pybind11_conduit_v1_")
        assert NativeResult.of(event) is None
        assert NativeResult.of(type(event)) is None

    def test_an_unknown_abi_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unlocked, "_PLATFORM_ABI", b"another")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3) + 1
        assert NativeResult.of(profile.profiler.kineto_results) is None

    def test_the_ordinary_export_can_be_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VERL_PROFILER_CONF_LOCKED_EXPORT", "1")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3) + 1
        assert NativeResult.of(profile.profiler.kineto_results) is None

    def test_saved_once(self, tmp_path: Path) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3) + 1
        result = NativeResult.of(profile.profiler.kineto_results)
        assert result is not None
        result.save(tmp_path / "a.json")
        with pytest.raises(RuntimeError, match="once"):
            result.save(tmp_path / "b.json")

    def test_other_threads_run_python_meanwhile(self, tmp_path: Path) -> None:
        """The trace goes into a pipe that holds a small part of it. A thread of the same process has to read it out."""
        script = """
import json, os, threading
import torch
from verl_profiler_conf.capture.backends import unlocked
unlocked.RELEASES = {unlocked._torch_release()}
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    for _ in range(2_000): torch.ones(3) + 1
os.mkfifo("a.json.tmp")  # Kineto's name while it writes
save = unlocked.NativeResult.of(profile.profiler.kineto_results).save
threading.Thread(target=save, args=("a.json",), daemon=True).start()
with open("a.json.tmp") as pipe:
    print(len(json.load(pipe)["traceEvents"]))
"""
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
        assert int(done.stdout) > 4_000

    @pytest.mark.parametrize("contents", [(), ("stack", "shapes", "memory")])
    def test_the_same_trace_as_torch_writes(
        self, contents: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def shape(path: Path) -> list[tuple[str, str, Any]]:
            return [
                (e["name"], e["cat"], e.get("args", {}).get("Input Dims"))
                for e in read(path)
                if e["cat"] in ("cpu_op", "user_annotation")
            ]

        ours = capture(TorchProfiler("cpu", contents), tmp_path / "ours")
        monkeypatch.setattr(NativeResult, "of", classmethod(lambda *_: None))
        monkeypatch.setattr(module, "_ask_for_trace_only", lambda _: False)
        torchs = capture(TorchProfiler("cpu", contents), tmp_path / "torchs")
        assert shape(ours) == shape(torchs)
        assert shape(ours)

    def test_memory_is_given_back(self, tmp_path: Path) -> None:
        script = """
import os, sys
from pathlib import Path
import torch
from verl_profiler_conf.capture.backends import unlocked
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
unlocked.RELEASES = {unlocked._torch_release()}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
profiler, seen = TorchProfiler("cpu"), []
for index in range(6):
    profiler.start()
    for _ in range(20_000): torch.ones(3) + 1
    profiler.stop().write(Path(sys.argv[1]) / str(index), {})
    seen.append(resident())
print(seen[-1] - seen[1])
"""
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert float(done.stdout) < 40, "four more captures of 15 MB each must not add up"
