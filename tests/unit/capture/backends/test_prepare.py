"""torch's profiler prepared some iterations ahead, on the CPU; and which GPUs are waited for, on a stand-in of CUDA."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends import cuda_devices, pending  # noqa: E402
from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler, running_profiler  # noqa: E402

CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each profiler that torch prepares."""
    calls: list[int] = []
    original = torch.autograd.profiler._prepare_profiler

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.autograd.profiler, "_prepare_profiler", counted)
    return calls


def names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def end(profiler: TorchProfiler, folder: Path) -> list[str]:
    written = profiler.stop().write(folder / "t", {})
    assert written.path is not None
    return names(written.path)


class TestPreparedAhead:
    def test_what_runs_before_the_start_is_not_recorded(self, prepared: list[int], tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu")
        profiler.prepare()
        profiler.prepare()
        assert profiler.busy() is None
        torch.sin(torch.ones(3))
        profiler.start()
        torch.cos(torch.ones(3))
        found = end(profiler, tmp_path)
        assert "aten::cos" in found
        assert "aten::sin" not in found
        assert len(prepared) == 1

    def test_torch_is_left_as_it_was(self, prepared: list[int], tmp_path: Path) -> None:
        before = torch.autograd.profiler._prepare_profiler
        profiler = TorchProfiler("cpu")
        profiler.prepare()
        assert torch.autograd.profiler._prepare_profiler is not before
        profiler.start()
        end(profiler, tmp_path)
        assert torch.autograd.profiler._prepare_profiler is before

    def test_a_profiler_of_the_job_in_between_takes_the_prepared_state(
        self, prepared: list[int], tmp_path: Path
    ) -> None:
        profiler = TorchProfiler("cpu")
        profiler.prepare()
        with torch.profiler.profile(activities=CPU) as other:
            torch.tan(torch.ones(3))
        assert "aten::tan" in {event.key for event in other.key_averages()}
        profiler.start()
        torch.cos(torch.ones(3))
        assert "aten::cos" in end(profiler, tmp_path)
        assert len(prepared) == 3  # ours, the job's, and ours again

    def test_discarded_before_it_starts(self, prepared: list[int], tmp_path: Path) -> None:
        before = torch.autograd.profiler._prepare_profiler
        profiler = TorchProfiler("cpu")
        profiler.prepare()
        profiler.discard()
        profiler.discard()
        assert running_profiler() is None
        assert torch.autograd.profiler._prepare_profiler is before
        with torch.profiler.profile(activities=CPU) as other:
            torch.tan(torch.ones(3))
        assert "aten::tan" in {event.key for event in other.key_averages()}

    def test_a_pending_recording_is_exported_first(self, tmp_path: Path) -> None:
        profiler = TorchProfiler("cpu", save_path=str(tmp_path))
        profiler.start()
        torch.sin(torch.ones(3))
        recording = profiler.stop()
        profiler.prepare()
        assert len(list(tmp_path.glob(".kineto-*.json"))) == 1
        profiler.discard()
        written = recording.write(tmp_path / "t", {})
        assert "aten::sin" in names(written.path or tmp_path)

    def test_where_torch_cannot_be_watched_it_is_prepared_at_the_start(
        self, prepared: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pending, "watch", lambda: False)
        profiler = TorchProfiler("cpu")
        profiler.prepare()
        assert prepared == []
        profiler.start()
        torch.cos(torch.ones(3))
        assert "aten::cos" in end(profiler, tmp_path)

    def test_a_failing_preparation_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.autograd.profiler._prepare_profiler
        profiler = TorchProfiler("cpu")
        with monkeypatch.context() as patch:
            patch.setattr(torch.profiler.profile, "prepare_trace", lambda _: (_ for _ in ()).throw(RuntimeError("no")))
            with pytest.raises(RuntimeError, match="no"):
                profiler.prepare()
        assert torch.autograd.profiler._prepare_profiler is before


class FakeCuda:
    """torch.cuda of a process with contexts on some of four GPUs."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.synchronized: list[int] = []
        self._initialized = initialized

    def is_initialized(self) -> bool:
        return self._initialized

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def current_device(self) -> int:
        return 0

    def synchronize(self, index: int) -> None:
        self.synchronized.append(index)


class TestWhichGpusAreWaitedForOnAFakeCuda:
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        fake = FakeCuda()
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in (1, 3), raising=False)
        return fake

    def test_those_that_the_process_has_a_context_on(self, cuda: FakeCuda) -> None:
        cuda_devices.synchronize()
        assert cuda.synchronized == [1, 3]

    def test_without_the_private_question_the_current_one(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext")
        cuda_devices.synchronize()
        assert cuda.synchronized == [0]

    def test_none_before_cuda_is_initialised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeCuda(initialized=False)
        monkeypatch.setattr(torch, "cuda", fake)
        cuda_devices.synchronize()
        cuda_devices.warm_up()
        assert fake.synchronized == []

    def test_the_warm_up_launches_on_each_and_waits(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        launched: list[str] = []

        def zeros(_: int, device: str) -> Any:
            return SimpleNamespace(add_=lambda _: launched.append(device))

        monkeypatch.setattr(torch, "zeros", zeros)
        cuda_devices.warm_up()
        assert launched == ["cuda:1"] * 8 + ["cuda:3"] * 8
        assert cuda.synchronized == [1, 3]

    def test_a_failing_warm_up_is_no_failure(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int, device: str) -> Any:
            raise RuntimeError(f"out of memory on {device}")

        monkeypatch.setattr(torch, "zeros", full)
        cuda_devices.warm_up()
        assert cuda.synchronized == []

    def test_a_capture_warms_up_unless_it_was_prepared_ahead(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warmed: list[bool] = []
        monkeypatch.setattr(cuda_devices, "warm_up", lambda: warmed.append(True))
        profiler = TorchProfiler("cuda")
        profiler._options["activities"] = CPU  # what this machine can record
        for ahead in (False, True):
            if ahead:
                profiler.prepare()
            profiler.start()
            profiler.discard()
            assert warmed == [True]
        assert cuda.synchronized == [1, 3] * 4
