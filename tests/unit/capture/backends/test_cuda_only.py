"""What needs CUDA and cannot run here: driven against stand-ins of torch.cuda, and refused for real on the CPU."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture import backends  # noqa: E402
from verl_profiler_conf.capture.arming import Arming  # noqa: E402
from verl_profiler_conf.capture.backends import make_profiler  # noqa: E402
from verl_profiler_conf.capture.backends.cudart import CudartProfiler  # noqa: E402
from verl_profiler_conf.capture.backends.memory import MemoryProfiler  # noqa: E402
from verl_profiler_conf.capture.form import Source  # noqa: E402
from verl_profiler_conf.core.errors import UnavailableError  # noqa: E402
from verl_profiler_conf.core.settings import Settings  # noqa: E402

NAME = "response_tokens[0:4) iter=0 reqs=1"


class FakeCuda:
    """torch.cuda as far as the two profilers use it; `log` has the calls in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.metadata = "the job's"
        self.entries: list[dict[str, Any]] = []
        self.memory = SimpleNamespace(
            _record_memory_history=self._history,
            _snapshot=self._snapshot,
            _set_memory_metadata=self._set_metadata,
            _get_memory_metadata=lambda: self.metadata,
        )
        self.nvtx = SimpleNamespace(range=self._range)

    def is_available(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def cudart(self) -> Any:
        def call(name: str) -> Any:
            return lambda: self.log.append(name) or 0

        return SimpleNamespace(cudaProfilerStart=call("cudaProfilerStart"), cudaProfilerStop=call("cudaProfilerStop"))

    def check_error(self, status: int) -> None:
        assert status == 0

    def allocate(self) -> None:
        self.entries.append({"action": "alloc", "size": 8, "user_metadata": self.metadata})

    def _history(self, enabled: str | None = "all", **options: object) -> None:
        self.log.append(f"history {enabled}")
        self.entries = []

    def _snapshot(self) -> dict[str, Any]:
        self.log.append("snapshot")
        return {"segments": [], "device_traces": [list(self.entries)]}

    def _set_metadata(self, text: str) -> None:
        self.metadata = text

    def _range(self, message: str) -> Any:
        self.log.append(f"range {message.format()}")
        return torch.autograd.profiler.record_function("unused")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


class TestMemoryOnAFakeCuda:
    def test_the_snapshot_is_taken_before_the_history_ends(self, cuda: FakeCuda, tmp_path: Path) -> None:
        profiler = MemoryProfiler("cuda")
        profiler.start()
        cuda.allocate()
        written = profiler.stop().write(tmp_path / "t", {})
        assert cuda.log == ["synchronize", "history all", "synchronize", "snapshot", "history None"]
        assert written.path == tmp_path / "t.pickle"
        assert (written.device_events, written.note) == (1, None)
        assert written.bytes == written.path.stat().st_size
        assert pickle.loads(written.path.read_bytes())["device_traces"][0][0]["size"] == 8  # noqa: S301  (our own)

    def test_allocations_bear_the_iterations_name(self, cuda: FakeCuda, tmp_path: Path) -> None:
        profiler = MemoryProfiler("cuda")
        profiler.start()
        with profiler.annotate(NAME):
            cuda.allocate()
        cuda.allocate()
        written = profiler.stop().write(tmp_path / "t", {NAME: "shorter"})
        assert written.path is not None
        (entries,) = pickle.loads(written.path.read_bytes())["device_traces"]  # noqa: S301  (our own)
        assert [entry["user_metadata"] for entry in entries] == ["shorter", "the job's"]

    def test_nothing_is_named_while_not_recording(self, cuda: FakeCuda) -> None:
        with MemoryProfiler("cuda").annotate(NAME):
            assert cuda.metadata == "the job's"

    def test_an_empty_history_is_said(self, cuda: FakeCuda, tmp_path: Path) -> None:
        profiler = MemoryProfiler("cuda")
        profiler.start()
        assert "no memory was allocated" in (profiler.stop().write(tmp_path / "t", {}).note or "")

    def test_a_history_that_the_job_records_itself(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
        profiler = MemoryProfiler("cuda")
        assert "already being recorded" in (profiler.busy() or "")
        profiler.start()
        assert profiler.busy() is None

    def test_discarded(self, cuda: FakeCuda) -> None:
        profiler = MemoryProfiler("cuda")
        profiler.discard()
        profiler.start()
        profiler.discard()
        assert cuda.log == ["synchronize", "history all", "history None"]

    def test_never_over_an_older_one(self, cuda: FakeCuda, tmp_path: Path) -> None:
        (tmp_path / "t.pickle").write_text("old")
        profiler = MemoryProfiler("cuda")
        profiler.start()
        with pytest.raises(FileExistsError):
            profiler.stop().write(tmp_path / "t", {})
        assert (tmp_path / "t.pickle").read_text() == "old"


class TestPrivatePartsOfTorchThatAreMissingOnAFakeCuda:
    @pytest.mark.parametrize("name", ["_record_memory_history", "_snapshot"])
    def test_without_a_history_the_option_is_refused(self, name: str, cuda: FakeCuda) -> None:
        delattr(cuda.memory, name)
        with pytest.raises(UnavailableError, match="cannot record its history"):
            MemoryProfiler("cuda")

    @pytest.mark.parametrize("name", ["_get_memory_metadata", "_set_memory_metadata"])
    def test_without_metadata_the_snapshot_has_no_names_and_says_so(
        self, name: str, cuda: FakeCuda, tmp_path: Path
    ) -> None:
        delattr(cuda.memory, name)
        profiler = MemoryProfiler("cuda")
        profiler.start()
        with profiler.annotate(NAME):
            cuda.allocate()
        written = profiler.stop().write(tmp_path / "t", {})
        assert written.device_events == 1
        assert "does not tell iterations apart" in (written.note or "")

    def test_without_the_question_whether_a_history_is_recorded(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(torch._C, "_cuda_isHistoryEnabled", raising=False)
        assert MemoryProfiler("cuda").busy() is None


class TestNsysOnAFakeCuda:
    def test_started_and_stopped_with_the_queue_drained(self, cuda: FakeCuda) -> None:
        profiler = CudartProfiler("cuda")
        profiler.start()
        profiler.stop()
        assert cuda.log == ["synchronize", "cudaProfilerStart", "synchronize", "cudaProfilerStop"]

    def test_iterations_are_nvtx_ranges(self, cuda: FakeCuda) -> None:
        profiler = CudartProfiler("cuda")
        with profiler.annotate(NAME):
            pass
        profiler.start()
        with profiler.annotate(NAME):
            pass
        with profiler.annotate("with {braces}"):
            pass
        assert [entry for entry in cuda.log if entry.startswith("range")] == [f"range {NAME}", "range with {braces}"]

    @pytest.mark.parametrize("under_nsys", [True, False])
    def test_leaves_no_file_and_says_where_the_trace_is(
        self, cuda: FakeCuda, under_nsys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
        if under_nsys:
            monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        profiler = CudartProfiler("cuda")
        profiler.start()
        written = profiler.stop().write(tmp_path / "t", {NAME: "shorter"})
        assert (written.path, written.bytes) == (None, 0)
        assert "1 ranges in it" in (written.note or "")
        assert ("nothing was recorded" in (written.note or "")) is not under_nsys
        assert list(tmp_path.iterdir()) == []

    def test_discarded(self, cuda: FakeCuda) -> None:
        profiler = CudartProfiler("cuda")
        profiler.discard()
        assert cuda.log == []
        profiler.start()
        profiler.discard()
        assert cuda.log[-1] == "cudaProfilerStop"


class TestRocmOnAFakeCuda:
    """ROCm's torch answers to `cuda`."""

    @pytest.mark.parametrize(
        ("option", "why"), [("torch_memory", "not supported on ROCm"), ("nsys_window", "built for ROCm")]
    )
    def test_refused_with_a_reason(
        self, option: str, why: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.2.4")
        with pytest.raises(UnavailableError, match=why) as caught:
            make_profiler(Settings.from_mapping({"profiler": option}), "cuda")
        assert "\n" not in str(caught.value)
        assert "use profiler=torch_window" in str(caught.value)


class TestTheHostAloneOnAFakeGpu:
    """contents: [cpu] where there is a GPU."""

    @pytest.mark.parametrize(
        ("contents", "release", "is_told"),
        [(["cpu"], "2.13.0", True), (["cpu"], "2.12.1", False), ([], "2.13.0", False)],
    )
    def test_what_it_can_do_to_later_profiles_is_told(
        self, contents: list[str], release: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch, "__version__", release)
        profiler: Any = make_profiler(Settings.from_mapping({"contents": contents}), "cuda")
        profiler._options["activities"] = [torch.profiler.ProfilerActivity.CPU]
        profiler.start()
        torch.sin(torch.ones(3))
        note = profiler.stop().write(tmp_path / "t", {}).note or ""
        assert ("can leave all later ones, the engine's own too, without device events" in note) is is_told


class TestXpuWithFakeDetection:
    @pytest.fixture(autouse=True)
    def _an_intel_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "has_xpu", lambda: True)

    def test_recorded_with_its_own_activity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        activity = torch.profiler.ProfilerActivity
        monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {activity.CPU, activity.XPU})
        profiler: Any = make_profiler(Settings.from_mapping({}), "cpu")
        assert profiler._options["activities"] == [activity.CPU, activity.XPU]
        assert profiler.records_device

    def test_the_manifest_names_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        activity = torch.profiler.ProfilerActivity
        monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {activity.CPU, activity.XPU})
        monkeypatch.setattr("verl_profiler_conf.capture.arming.detect_device", lambda _: "cpu")
        arming = Arming(Settings.from_mapping({}), Source("vllm", "0.32.0", 0))
        arming.device_profiler()
        assert arming.form.device == "xpu"

    def test_never_a_silent_trace_of_the_host(self) -> None:
        with pytest.raises(UnavailableError, match="cannot record it"):
            make_profiler(Settings.from_mapping({}), "cpu")

    @pytest.mark.parametrize("settings", [{"device": "cpu"}, {"contents": ["cpu"]}])
    def test_unless_that_was_asked_for(self, settings: dict[str, Any]) -> None:
        profiler: Any = make_profiler(Settings.from_mapping(settings), "cpu")
        assert profiler._options["activities"] == [torch.profiler.ProfilerActivity.CPU]
        assert not profiler.records_device


class TestChoice:
    """By option and device, on this machine without an accelerator."""

    @pytest.mark.parametrize(
        ("option", "device", "why"),
        [
            ("torch_memory", "cpu", "use profiler=torch_window with contents"),
            ("nsys_window", "cpu", "needs an NVIDIA GPU"),
            ("nsys_window", "npu", "needs an NVIDIA GPU"),
            ("npu_window", "cpu", "use profiler=torch_window"),
            ("torch_window", "npu", "torch_npu cannot be imported"),
        ],
    )
    def test_refused_in_one_line_with_what_to_do(self, option: str, device: str, why: str) -> None:
        with pytest.raises(UnavailableError, match=why) as caught:
            make_profiler(Settings.from_mapping({"profiler": option}), device)
        assert "\n" not in str(caught.value)

    def test_cpu(self) -> None:
        profiler = make_profiler(Settings.from_mapping({}), "cpu")
        assert (profiler.name, profiler.suffix) == ("torch", ".pt.trace.json.gz")

    def test_fake_cuda(self, cuda: FakeCuda) -> None:
        chosen = {
            option: make_profiler(Settings.from_mapping({"profiler": option}), "cuda").name
            for option in ("torch_window", "torch_memory", "nsys_window")
        }
        assert chosen == {"torch_window": "torch", "torch_memory": "memory", "nsys_window": "cudart"}
